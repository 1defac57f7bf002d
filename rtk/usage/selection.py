"""Which traces, rows, layers and slots an analysis looks at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rtk.errors import TraceError
from rtk.layout.model_layout import ModelLayout
from rtk.trace.route_trace import RouteTrace

Span = Literal["all", "prompt", "generated"]
Rows = npt.NDArray[np.bool_]
Ids = npt.NDArray[np.int64]


def as_traces(traces: RouteTrace | Iterable[RouteTrace]) -> list[RouteTrace]:
    """One or several traces as a list of at least one, all of the same model.

    Raises:
        TraceError: there is none, or they differ in their layout.
    """
    several = [traces] if isinstance(traces, RouteTrace) else list(traces)
    if not several:
        raise TraceError("no traces were given")
    for trace in several:
        if not isinstance(trace, RouteTrace):
            raise TraceError(
                f"a RouteTrace is expected, not a {type(trace).__name__}; a Sample holds one in .trace"
            )
        if trace.layout != several[0].layout:
            raise TraceError(f"the traces are of different models: {several[0].layout} and {trace.layout}")
    return several


def as_groups(groups: Mapping[str, RouteTrace | Iterable[RouteTrace]]) -> dict[str, list[RouteTrace]]:
    """Named groups of traces, all of the same model.

    Raises:
        TraceError: groups is no mapping of at least one name, a group is empty, or they differ in their layout.
    """
    if not isinstance(groups, Mapping):
        raise TraceError(
            f'groups is a {type(groups).__name__}; it maps names to traces, {{"code": codes, "prose": proses}}'
        )
    several = {name: as_traces(traces) for name, traces in groups.items()}
    as_traces([trace for traces in several.values() for trace in traces])
    return several


def rows_of(trace: RouteTrace, span: Span, tokens: slice | None = None) -> Rows:
    """bool `[rows]`: the rows of the span, and of these the token positions that are asked for."""
    rows = np.zeros(trace.rows, dtype=bool)
    rows[tokens if tokens is not None else slice(None)] = True
    if span == "prompt":
        rows[trace.prompt_tokens :] = False
    elif span == "generated":
        rows[: trace.prompt_tokens] = False
    elif span != "all":
        raise TraceError(f"span is {span!r}; it is 'all', 'prompt' or 'generated'")
    return rows


def chosen(trace: RouteTrace, layer: int, rows: Rows) -> Ids:
    """The expert ids of some rows in one layer, int64 `[rows, top_k]`.

    One layer at a time, because a long trace of a large model does not fit into memory as int64.

    Raises:
        TraceError: an id is no expert's.
    """
    ids: Ids = trace.routed_experts[rows, layer].astype(np.int64)
    if ids.size and (ids.min() < 0 or ids.max() >= trace.layout.num_experts):
        raise TraceError(
            f"layer {layer} of a trace holds expert ids {ids.min()}..{ids.max()} for {trace.layout.num_experts} "
            "experts; rtk.replay.check says where"
        )
    return ids


def layer_counts(
    traces: Sequence[RouteTrace], layer: int, rows: Sequence[Rows], top_k: int | None = None
) -> Ids:
    """Assignments of each trace's rows to the experts of one layer, int64 `[traces, experts]`.

    Args:
        traces, rows: as many of each.
        layer: 0-based.
        top_k: counts the first so many slots alone.

    Raises:
        TraceError: as `chosen`.
    """
    experts = traces[0].layout.num_experts
    return np.array(
        [
            np.bincount(chosen(trace, layer, here)[:, :top_k].ravel(), minlength=experts)
            for trace, here in zip(traces, rows, strict=True)
        ]
    )


def layer_numbers(layout: ModelLayout, layers: Sequence[Any] | None) -> tuple[int, ...]:
    """The layers that are asked for, or all MoE layers.

    Raises:
        TraceError: none is asked for, or one of them is no MoE layer.
    """
    if layers is None:
        return layout.moe_layers
    missing = [layer for layer in layers if layer not in layout.moe_layers]
    if missing or not len(layers):
        raise TraceError(f"layers {list(layers)}: the model's MoE layers are {list(layout.moe_layers)}")
    return tuple(int(layer) for layer in layers)


def slots(layout: ModelLayout, top_k: int | None) -> int:
    """How many slots of each row count: all of them, or the first few, which hold the highest scores.

    Raises:
        TraceError: the router has no so many slots.
    """
    if top_k is None:
        return layout.top_k
    if not 1 <= top_k <= layout.top_k:
        raise TraceError(
            f"top_k is {top_k}; the model's routers pick {layout.top_k}, so it lies in 1..{layout.top_k}"
        )
    return top_k
