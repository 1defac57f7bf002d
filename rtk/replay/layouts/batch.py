"""Which token stands in each row of a shard's input: padded or packed sequences, cut over the shard's ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from rtk.errors import ShardError
from rtk.replay.layouts.shard import Shard
from rtk.trace.route_trace import RouteTrace

Index = npt.NDArray[np.int32]
_FP8_ROWS = {"delayed": 16, "tensorwise": 16, "mxfp8": 32, "blockwise": 16, "custom": 16}


@dataclass(frozen=True, eq=False)
class LocalTokens:
    """The rows that one shard's routers see, in their order.

    Attributes:
        sample: int32 `[rows]`, the trace of each row; -1 for padding.
        row: int32 `[rows]`, the row of that trace; -1 for padding. It may be `trace.rows`, one past the end,
            for a last token that the rollout sampled and never forwarded: a token without routes.
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
        last_token: bool = False,
    ) -> Batch:
        """A sequence a column, all padded to one length.

        Args:
            traces: the microbatch's sequences.
            side: where the padding stands.
            length: tokens of every sequence, a multiple of `align`; left out, the longest one's, rounded up.
            align: what the length is a multiple of; see `alignment`.
            last_token: whether the model's input holds each sequence whole. Left out, it ends where the
                routes end, `token_ids[:-1]` of a sampled sequence, as a next-token loss takes it. It matters
                most with padding on the left, where one token more moves all rows by one.

        Raises:
            ShardError: a sequence is longer than `length`, or there are none.
        """
        counts = _tokens(traces, last_token)
        wanted = _length(max(counts), length, align)
        if max(counts) > wanted:
            raise ShardError(
                f"trace {int(np.argmax(counts))} has {max(counts)} rows, more than length {wanted}"
            )
        if side not in ("left", "right"):
            raise ShardError(f"side is {side!r}; padding stands on the 'left' or on the 'right'")
        sample = np.full((len(counts), wanted), -1, np.int32)
        row = sample.copy()
        for number, count in enumerate(counts):
            start = 0 if side == "right" else wanted - count
            sample[number, start : start + count] = number
            row[number, start : start + count] = np.arange(count)
        return cls(sample, row, (wanted,))

    @classmethod
    def packed(
        cls,
        traces: Sequence[RouteTrace],
        *,
        align: int = 1,
        total_align: int = 1,
        length: int | None = None,
        last_token: bool = False,
    ) -> Batch:
        """All sequences in one column, each padded on the right (Megatron's THD format).

        Args:
            traces: the microbatch's sequences.
            align: each sequence is padded to a multiple of this; see `alignment`.
            total_align: what all of them together are a multiple of, as fp8 kernels want it. The last
                sequence's padding grows until it is so, as verl and NeMo RL do it.
            length: tokens of the whole pack, a multiple of both; pipeline stages may need it fixed.
            last_token: as in `padded`.

        Raises:
            ShardError: the sequences are longer than `length`, or there are none.
        """
        counts = _tokens(traces, last_token)
        pieces = [_up(count, align) for count in counts]
        # The last sequence has to stay a multiple of `align` when it grows.
        total = _length(sum(pieces), length, math.lcm(align, total_align))
        if total < sum(pieces):
            raise ShardError(
                f"the traces take {sum(pieces)} rows with their padding, more than length {total}"
            )
        pieces[-1] += total - sum(pieces)
        sample = np.full((1, total), -1, np.int32)
        row = sample.copy()
        start = 0
        for number, (count, piece) in enumerate(zip(counts, pieces, strict=True)):
            sample[0, start : start + count] = number
            row[0, start : start + count] = np.arange(count)
            start += piece
        return cls(sample, row, tuple(pieces))

    @property
    def cu_seqlens(self) -> Index:
        """int32 `[sequences + 1]`, where each sequence of a pack would begin without padding, and the end.

        What Megatron's PackedSeqParams calls `cu_seqlens_q`.
        """
        self._check_packed()
        return _cumulated(np.bincount(self.sample[self.sample >= 0], minlength=len(self.pieces)))

    @property
    def cu_seqlens_padded(self) -> Index:
        """int32 `[sequences + 1]`, where each sequence of a pack begins, and the end; `cu_seqlens_q_padded`."""
        self._check_packed()
        return _cumulated(self.pieces)

    def _check_packed(self) -> None:
        if len(self.sample) > 1:
            raise ShardError("a padded batch has no cu_seqlens; they are of sequences packed into one")

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


def alignment(shard: Shard, *, fp8: str | int | None = None) -> int:
    """The multiple to which sequences have to be padded for a shard.

    Zigzag context parallelism cuts each sequence into 2 * size pieces, contiguous into `size`; sequence
    parallelism cuts what a rank has left into as many runs as there are tensor-parallel ranks.

    Args:
        shard: what the sequences are cut for.
        fp8: Megatron's `fp8_recipe`, whose kernels want each rank's rows as a multiple of 16, of 32 for
            mxfp8 (megatron.core.fp8_utils.get_fp8_align_size); or the multiple itself, such as the 128 that
            NeMo RL takes for blockwise. Where it is the whole pack that has to divide and not each sequence,
            give the result to `Batch.packed` as `total_align`, and the result without fp8 as `align`.

    Raises:
        ShardError: there is no such recipe.
    """
    if isinstance(fp8, str):
        if fp8 not in _FP8_ROWS:
            raise ShardError(f"fp8 is {fp8!r}; Megatron's recipes are {', '.join(_FP8_ROWS)}")
        fp8 = _FP8_ROWS[fp8]
    parts = shard.context_size * (2 if shard.context_order == "zigzag" and shard.context_size > 1 else 1)
    return parts * (shard.tensor_size if shard.sequence_parallel else 1) * (1 if fp8 is None else fp8)


def _tokens(traces: Sequence[RouteTrace], last_token: bool) -> list[int]:
    if not traces:
        raise ShardError("a batch needs at least one trace")
    return [len(trace.token_ids) if last_token else trace.rows for trace in traces]


def _length(needed: int, length: int | None, align: int) -> int:
    if length is None:
        return _up(needed, align)
    if length % align:
        raise ShardError(f"length {length} is no multiple of {align}, which the alignment asks for")
    return length


def _up(count: int, multiple: int) -> int:
    if multiple < 1:
        raise ShardError(f"an alignment is {multiple}; it is at least 1")
    return -(-count // multiple) * multiple


def _cumulated(lengths: Iterable[int]) -> Index:
    return np.concatenate([[0], np.cumsum(list(lengths))]).astype(np.int32)
