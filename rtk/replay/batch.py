"""Which token stands in each row of a shard's input: padded or packed sequences, cut over the shard's ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from rtk.errors import ShardError
from rtk.replay.shard import Shard
from rtk.trace import RouteTrace

Index = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class LocalTokens:
    """The rows that one shard's routers see, in their order.

    Attributes:
        sample: int32 `[rows]`, the trace of each row; -1 for padding.
        row: int32 `[rows]`, the row of that trace; -1 for padding.
    """

    sample: Index
    row: Index

    @property
    def padding_mask(self) -> npt.NDArray[np.bool_]:
        """bool `[rows]`, True for padding."""
        return np.asarray(self.row < 0)


class Placement(Protocol):
    """A microbatch that knows where its tokens stand on a shard: a `Batch`, or a class of a trainer's own."""

    def local(self, shard: Shard) -> LocalTokens:
        """The shard's rows."""


@dataclass(frozen=True, eq=False)
class Batch:
    """One microbatch's tokens before they are cut over ranks; made by `padded` or `packed`.

    Attributes:
        sample, row: int32 `[columns, length]`, the trace and the row of it at each place, -1 for padding.
        pieces: lengths into which a column falls for context parallelism: the whole column of a padded batch,
            each padded sequence of a packed one.
    """

    sample: Index
    row: Index
    pieces: tuple[int, ...]

    @classmethod
    def padded(
        cls,
        traces: Sequence[RouteTrace],
        *,
        side: Literal["left", "right"] = "right",
        length: int | None = None,
        align: int = 1,
    ) -> Batch:
        """A sequence a column, all padded to one length.

        Args:
            traces: the microbatch's sequences, each with `trace.rows` tokens.
            side: where the padding stands.
            length: tokens of every sequence; the longest one's where left out.
            align: the length is rounded up to a multiple of this; see `alignment`.

        Raises:
            ShardError: a sequence is longer than `length`, or there are none.
        """
        rows = _rows(traces)
        wanted = _up(max(rows) if length is None else length, align)
        if max(rows) > wanted:
            raise ShardError(f"trace {int(np.argmax(rows))} has {max(rows)} rows, more than length {wanted}")
        sample = np.full((len(rows), wanted), -1, np.int32)
        row = sample.copy()
        for number, count in enumerate(rows):
            start = 0 if side == "right" else wanted - count
            sample[number, start : start + count] = number
            row[number, start : start + count] = np.arange(count)
        return cls(sample, row, (wanted,))

    @classmethod
    def packed(cls, traces: Sequence[RouteTrace], *, align: int = 1) -> Batch:
        """All sequences in one column, each padded on the right to a multiple of `align` (Megatron's THD format).

        `cu_seqlens` of Megatron's PackedSeqParams are the sums of the traces' rows, `cu_seqlens_padded` those of
        `pieces`.
        """
        rows = _rows(traces)
        pieces = tuple(_up(count, align) for count in rows)
        sample = np.full((1, sum(pieces)), -1, np.int32)
        row = sample.copy()
        start = 0
        for number, (count, piece) in enumerate(zip(rows, pieces, strict=True)):
            sample[0, start : start + count] = number
            row[0, start : start + count] = np.arange(count)
            start += piece
        return cls(sample, row, pieces)

    def local(self, shard: Shard) -> LocalTokens:
        """The rows of one rank, flattened as routers flatten Megatron's `[sequence, batch, hidden]`.

        Context parallelism cuts first, piece by piece: "zigzag" gives rank r the chunks r and 2 * size - 1 - r of
        2 * size, as megatron.core.utils.get_batch_on_this_cp_rank does, "contiguous" the r-th of `size`.
        Sequence parallelism then gives each tensor-parallel rank a run of what is left.

        Raises:
            ShardError: a length does not divide; pad to a multiple of `alignment(shard)`.
        """
        places = self._context_places(shard)
        if shard.sequence_parallel and shard.tensor_size > 1:
            width, rest = divmod(len(places), shard.tensor_size)
            if rest:
                raise ShardError(
                    f"{len(places)} tokens do not divide over {shard.tensor_size} tensor-parallel ranks: pad to a "
                    f"multiple of {alignment(shard)}"
                )
            places = places[shard.tensor_rank * width : (shard.tensor_rank + 1) * width]
        return LocalTokens(self.sample[:, places].T.ravel(), self.row[:, places].T.ravel())

    def _context_places(self, shard: Shard) -> npt.NDArray[np.int64]:
        size, rank = shard.context_size, shard.context_rank
        if size == 1:
            return np.arange(sum(self.pieces))
        zigzag = shard.context_order == "zigzag"
        count = 2 * size if zigzag else size
        own = (rank, count - 1 - rank) if zigzag else (rank,)
        parts, start = [], 0
        for number, piece in enumerate(self.pieces):
            if piece % count:
                raise ShardError(
                    f"sequence {number} has {piece} tokens with its padding, which do not divide into {count} chunks "
                    f"for context parallelism: pad to a multiple of {alignment(shard)}"
                )
            width = piece // count
            parts += [np.arange(start + c * width, start + (c + 1) * width) for c in own]
            start += piece
        return np.concatenate(parts)


def alignment(shard: Shard, *, kernel: int = 1) -> int:
    """The multiple to which sequences have to be padded for a shard.

    Tensor parallelism with sequence parallelism needs a multiple of its size in each context-parallel part, and
    zigzag context parallelism two parts a rank.

    Args:
        shard: what the sequences are cut for.
        kernel: a multiple that each rank's part must have for its kernels; Transformer Engine's fp8 wants 16.
    """
    parts = shard.context_size * (2 if shard.context_order == "zigzag" and shard.context_size > 1 else 1)
    tensor = shard.tensor_size if shard.sequence_parallel else 1
    return parts * math.lcm(tensor, kernel * tensor)


def _rows(traces: Sequence[RouteTrace]) -> list[int]:
    if not traces:
        raise ShardError("a batch needs at least one trace")
    return [trace.rows for trace in traces]


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
