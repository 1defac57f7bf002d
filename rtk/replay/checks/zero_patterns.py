"""Which rows and layers of a trace are zero, in words, and what makes such a pattern."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rtk.layout.model_layout import ModelLayout
from rtk.trace.route_trace import RouteTrace

_ENOUGH_ROWS = 16
_PERIODS = (2, 4, 8, 16)


def empty_layers(traces: Sequence[RouteTrace], layout: ModelLayout) -> list[int]:
    """Megatron numbers of the MoE layers that are zero in every row of every trace."""
    return [
        layer + 1
        for layer in layout.moe_layers
        if not any(trace.routed_experts[:, layer].any() for trace in traces)
    ]


def may_be_dense(empty: Sequence[int], layout: ModelLayout) -> bool:
    """Whether the empty layers are the model's first MoE layers, and fewer than half of them.

    Dense layers stand first in most models, so that a layout without them looks like this. So does a first
    pipeline stage that was not captured: the routes alone do not tell the two apart.
    """
    first = [layer + 1 for layer in layout.moe_layers[: len(empty)]]
    return bool(empty) and list(empty) == first and 2 * len(empty) < len(layout.moe_layers)


def of_layers(empty: Sequence[int], layout: ModelLayout) -> str:
    """A clause on whole layers of zeros, where they are some and not all; otherwise ""."""
    moe = [layer + 1 for layer in layout.moe_layers]
    if not empty or len(empty) == len(moe):
        return ""
    listed = "[" + ", ".join(map(str, empty)) + "]"
    start = moe.index(empty[0])
    if len(empty) > 1 and moe[start : start + len(empty)] == list(empty):
        return f"; layers {listed} are zero in every row and no other is, as where one pipeline stage is not gathered"
    return (
        f"; layers {listed} are zero in every row and no other is, as where their kernels bypass the capture"
    )


def of_rows(zero: npt.NDArray[np.bool_]) -> str:
    """A clause on rows of zeros that come again in even steps; otherwise "".

    Args:
        zero: bool `[rows]`.
    """
    if len(zero) < _ENOUGH_ROWS or zero.all():
        return ""
    for period in _PERIODS:
        table = zero[: len(zero) // period * period].reshape(-1, period)
        if len(table) > 1 and (table == table[0]).all() and table[0].any():
            kept = np.flatnonzero(~table[0]).tolist()
            return (
                f"; of every {period} rows those at {kept} have routes and the others none, as where one of {period} "
                "tensor-parallel ranks is captured"
            )
    return ""
