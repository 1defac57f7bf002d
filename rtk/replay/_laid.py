"""Layouts of microbatches that faulty programs use, and `rtk.replay.Batch` has no reason to offer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rtk.replay.shard import Shard
from rtk.trace import RouteTrace

Index = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Laid:
    """A microbatch, row by row; it answers `local` as `rtk.replay.Batch` does.

    Attributes:
        sample, row: int32 `[rows]`, the trace and the row of it that stand there, -1 for padding.
        length: rows of one sequence of a padded batch, else all rows.
    """

    sample: Index
    row: Index
    length: int

    @property
    def padding_mask(self) -> npt.NDArray[np.bool_]:
        """bool `[rows]`, True for padding."""
        return np.asarray(self.row < 0)

    @classmethod
    def padded(
        cls,
        traces: Sequence[RouteTrace],
        *,
        length: int | None = None,
        multiple: int = 1,
        side: Literal["left", "right"] = "right",
    ) -> Laid:
        """`[length, batch]`, flattened, each sequence padded on one side."""
        length = length or -(-max(trace.rows for trace in traces) // multiple) * multiple
        return cls._columns(
            traces, length, [0 if side == "right" else length - trace.rows for trace in traces]
        )

    @classmethod
    def meeting(cls, traces: Sequence[RouteTrace]) -> Laid:
        """`[length, batch]`, flattened: prompts padded on the left, completions on the right, so that they meet."""
        column = max(trace.prompt_tokens for trace in traces)
        starts = [column - trace.prompt_tokens for trace in traces]
        length = max(start + trace.rows for start, trace in zip(starts, traces, strict=True))
        return cls._columns(traces, length, starts)

    @classmethod
    def packed(cls, traces: Sequence[RouteTrace], *, multiple: int, length: int | None = None) -> Laid:
        """One sequence after the other, each padded to a multiple."""
        samples, rows = [], []
        for number, trace in enumerate(traces):
            gap = -trace.rows % multiple
            samples.append(np.r_[np.full(trace.rows, number), np.full(gap, -1)])
            rows.append(np.r_[np.arange(trace.rows), np.full(gap, -1)])
        sample, row = np.concatenate(samples), np.concatenate(rows)
        rest = np.full((length or len(row)) - len(row), -1)
        return cls(
            np.r_[sample, rest].astype(np.int32), np.r_[row, rest].astype(np.int32), len(row) + len(rest)
        )

    @classmethod
    def _columns(cls, traces: Sequence[RouteTrace], length: int, starts: Sequence[int]) -> Laid:
        sample = np.full((length, len(traces)), -1, np.int32)
        row = sample.copy()
        for column, (trace, start) in enumerate(zip(traces, starts, strict=True)):
            sample[start : start + trace.rows, column] = column
            row[start : start + trace.rows, column] = np.arange(trace.rows)
        return cls(sample.ravel(), row.ravel(), length)

    def local(self, shard: Shard) -> Laid:
        """The rows of one context-parallel rank: slices of the length, for all sequences of the batch."""
        size, rank = shard.context_size, shard.context_rank
        width = len(self.row) // self.length
        positions = np.arange(self.length)
        if size > 1:
            chunks = np.split(positions, 2 * size)
            own = (rank, 2 * size - 1 - rank) if shard.context_order == "zigzag" else (2 * rank, 2 * rank + 1)
            positions = np.concatenate([chunks[c] for c in own])
        flat = (positions[:, None] * width + np.arange(width)).ravel()
        return Laid(self.sample[flat], self.row[flat], len(positions))

    def expanded(self, traces: Sequence[RouteTrace], shard: Shard) -> list[npt.NDArray[Any]]:
        """One int32 `[rows, top_k]` a router of the shard; padding rows go round all experts in turn."""
        here = self.local(shard)
        top_k, experts = shard.layout.top_k, shard.layout.num_experts
        padding = np.flatnonzero(here.padding_mask)
        tensors = []
        for number in shard.router_layer_numbers:
            tensor = np.zeros((len(here.row), top_k), np.int32)
            for index, trace in enumerate(traces):
                rows = here.sample == index
                tensor[rows] = trace.routed_experts[here.row[rows], number - 1]
            turn = np.arange(len(padding))[:, None] * top_k + np.arange(top_k)
            tensor[padding] = turn % experts
            tensors.append(tensor)
        return tensors
