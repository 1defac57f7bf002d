"""Two engines' traces of the same tokens, pair by pair."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rtk.errors import TraceError
from rtk.layout.model_layout import ModelLayout
from rtk.trace.route_trace import RouteTrace
from rtk.usage.selection import as_traces

if TYPE_CHECKING:
    pass


def common_rows(
    a: RouteTrace | Iterable[RouteTrace], b: RouteTrace | Iterable[RouteTrace]
) -> tuple[list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]], ModelLayout]:
    """For each pair of traces the routes of their common rows, MoE layers only."""
    left, right = as_traces(a), as_traces(b)
    if len(left) != len(right):
        raise TraceError(f"{len(left)} traces cannot be compared with {len(right)}")
    layout = left[0].layout
    moe: Sequence[int] = layout.moe_layers
    pairs = [_of_pair(x, y, number) for number, (x, y) in enumerate(zip(left, right, strict=True))]
    return [(x[:, moe], y[:, moe]) for x, y in pairs], layout


def overlap(first: npt.NDArray[np.int32], second: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
    """float `[tokens, layers]`: the share of the first's experts that the second chose too."""
    # Slot by slot, since all pairs of slots of a long trace at once are top-k times as large as its routes.
    found = [(first[..., [slot]] == second).any(axis=-1) for slot in range(first.shape[-1])]
    return np.asarray(np.mean(found, axis=0))


def _of_pair(
    x: RouteTrace, y: RouteTrace, number: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    if x.layout != y.layout:
        raise TraceError(f"pair {number}: the traces are of different models: {x.layout} and {y.layout}")
    # One of the two may have forwarded its last token as well.
    rows = min(x.rows, y.rows)
    if abs(x.rows - y.rows) > 1 or not np.array_equal(x.token_ids[:rows], y.token_ids[:rows]):
        raise TraceError(
            f"pair {number}: the traces hold different tokens, so their routes are not comparable"
        )
    return x.routed_experts[:rows].astype(np.int32), y.routed_experts[:rows].astype(np.int32)
