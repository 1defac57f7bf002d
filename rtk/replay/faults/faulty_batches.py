"""Layouts of microbatches that faulty programs use, and `rtk.replay.Batch` has no reason to offer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rtk.replay.layouts.batch import Batch
from rtk.trace.route_trace import RouteTrace


def meeting(traces: Sequence[RouteTrace]) -> Batch:
    """A sequence a column: prompts padded on the left, completions on the right, so that they meet."""
    column = max(trace.prompt_tokens for trace in traces)
    starts = [column - trace.prompt_tokens for trace in traces]
    length = max(start + trace.rows for start, trace in zip(starts, traces, strict=True))
    sample = np.full((len(traces), length), -1, np.int32)
    row = sample.copy()
    for number, (trace, start) in enumerate(zip(traces, starts, strict=True)):
        sample[number, start : start + trace.rows] = number
        row[number, start : start + trace.rows] = np.arange(trace.rows)
    return Batch(sample, row, (length,))


def joined(traces: Sequence[RouteTrace], length: int) -> Batch:
    """One sequence after the other without padding between them, and all of it at the end."""
    packed = Batch.packed(traces)
    gap = ((0, 0), (0, length - packed.row.shape[1]))
    sample, row = (np.pad(place, gap, constant_values=-1) for place in (packed.sample, packed.row))
    return Batch(sample, row, (length,))
