"""Which token stands in each row of a shard's input, and which other orders are worth a try."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rtk.errors import ShardError
from rtk.replay.checks.two_sides import Order
from rtk.replay.layouts.batch import Placement
from rtk.replay.layouts.shard import Shard
from rtk.trace.route_trace import RouteTrace

Index = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of several traces, one after the other, and the rows of a shard.

    Attributes:
        token: int64 `[rows]`, the token in each row, -1 for padding or a token without routes.
        padding: bool `[rows]`.
        sample: int64 `[tokens]`, the trace of each token that has routes.
        prompt: bool `[tokens]`.
    """

    token: Index
    padding: npt.NDArray[np.bool_]
    sample: Index
    prompt: npt.NDArray[np.bool_]

    @property
    def prompt_rows(self) -> npt.NDArray[np.bool_]:
        """bool `[rows]`: rows of the prompt."""
        if not len(self.prompt):
            return np.zeros(len(self.token), bool)
        return np.asarray(self.prompt[np.maximum(self.token, 0)] & (self.token >= 0))


def tokens_of(traces: Sequence[RouteTrace], shard: Shard, batch: Placement | None) -> Tokens:
    """Number the tokens of all traces, and look up which of them each row of the shard holds."""
    sample = np.repeat(np.arange(len(traces)), [trace.rows for trace in traces])
    prompt = np.concatenate([np.arange(trace.rows) < trace.prompt_tokens for trace in traces])
    if batch is None:
        return Tokens(np.arange(len(sample)), np.zeros(len(sample), bool), sample, prompt)
    token, padding = _local(traces, shard, batch)
    return Tokens(token, padding, sample, prompt)


def other_orders(
    traces: Sequence[RouteTrace], shard: Shard, batch: Placement | None, token: Index
) -> Iterator[Order]:
    """Orders that a trainer may have used by mistake for these traces, on this shard."""
    if batch is None:
        return
    size = shard.context_size
    if size > 1:
        other: Literal["zigzag", "contiguous"] = "contiguous" if shard.context_order == "zigzag" else "zigzag"
        yield Order(
            "context-parallel order",
            f"tokens were cut over {size} context-parallel ranks {other}, while the model is cut {shard.context_order}",
            f"cut routes as the model's inputs are cut: {shard.context_order}",
            _local(traces, dataclasses.replace(shard, context_order=other), batch)[0],
        )
    whole_shard = dataclasses.replace(
        shard, context_size=1, context_rank=0, tensor_size=1, tensor_rank=0, sequence_parallel=False
    )
    whole, _ = _local(traces, whole_shard, batch)
    position = _positions(token, whole)

    def local(order: Index) -> Index:
        return np.where(position >= 0, order[np.maximum(position, 0)], -1)

    if (whole < 0).any():
        yield from _without_gaps(whole, local)
        yield from _other_side(traces, whole, local)


def _positions(token: Index, whole: Index) -> Index:
    """Where each row of the shard stands in the whole microbatch; -1 for padding of a shard with a part of it."""
    if np.array_equal(token, whole):
        return np.arange(len(whole))
    where = np.full(int(max(whole.max(initial=-1), token.max(initial=-1))) + 2, -1, np.int64)
    where[whole[whole >= 0]] = np.flatnonzero(whole >= 0)
    return where[token]  # the last element stands for padding


def _without_gaps(whole: Index, local: Any) -> Iterator[Order]:
    """Sequences laid end to end, although the model pads each of them."""
    joined = np.full(len(whole), -1, np.int64)
    real = whole[whole >= 0]
    if len(real) and (np.diff(real) == 1).all():  # not in [sequence, batch] order
        joined[: len(real)] = real
        first = int(np.argmax(whole < 0))
        if not (joined == whole).all() and first < len(real):
            yield Order(
                "packing padding",
                f"routes were joined without the padding that stands after each sequence (first at row {first})",
                "pad each sequence's routes as its tokens are padded (cu_seqlens_padded)",
                local(joined),
            )


def _other_side(traces: Sequence[RouteTrace], whole: Index, local: Any) -> Iterator[Order]:
    """Sequences padded at the other end, for a padded batch in [sequence, batch] order."""
    width = len(traces)
    if len(whole) % width:
        return
    table = whole.reshape(-1, width)
    owner = np.repeat(np.arange(width), [trace.rows for trace in traces])
    for column in range(width):
        held = table[:, column][table[:, column] >= 0]
        if not len(held) or (owner[held] != column).any() or (np.diff(held) != 1).any():
            return
    for side in ("left", "right"):
        moved = np.full_like(table, -1)
        steps = set()
        for column in range(width):
            held = table[:, column][table[:, column] >= 0]
            start = 0 if side == "right" else len(table) - len(held)
            moved[start : start + len(held), column] = held
            steps.add(abs(start - int(np.argmax(table[:, column] >= 0))))
        if (moved == table).all():
            continue
        if steps == {1}:
            yield Order(
                "off by one",
                "a sequence has one row of routes fewer than tokens, and the gap was left at its wrong end",
                "leave the gap at the last token, which was never forwarded, and not at the first",
                local(moved.reshape(-1)),
            )
        else:
            yield Order(
                "padding side",
                f"routes were padded on the {side}, while the tokens are not",
                "give routes the padding of their tokens, sequence by sequence and on the same side",
                local(moved.reshape(-1)),
            )


def _local(
    traces: Sequence[RouteTrace], shard: Shard, batch: Placement
) -> tuple[Index, npt.NDArray[np.bool_]]:
    here = batch.local(shard)
    if int(np.max(here.sample, initial=-1)) >= len(traces):
        raise ShardError(
            f"the batch has {int(np.max(here.sample)) + 1} sequences for {len(traces)} traces: make it of the same traces, "
            "in the same order"
        )
    rows = np.array([trace.rows for trace in traces])
    offsets = np.concatenate([[0], rows.cumsum()[:-1]])
    sample, row = np.asarray(here.sample, np.int64), np.asarray(here.row, np.int64)
    padding = np.asarray(here.padding_mask, bool)
    # A sampled sequence's last token was never forwarded by the rollout, so it has no routes to compare.
    known = ~padding & (row >= 0) & (row < rows[np.maximum(sample, 0)])
    return np.where(known, offsets[np.maximum(sample, 0)] + row, -1), padding
