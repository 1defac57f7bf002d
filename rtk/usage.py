"""How much each expert is used: counts, a table per layer, and a heat map.

A load is counted in assignments: a token that goes to top-k experts counts once for each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from rtk.errors import TraceError
from rtk.layout import ModelLayout
from rtk.trace import RouteTrace

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Span = Literal["all", "prompt", "generated"]


def counts(
    traces: RouteTrace | Iterable[RouteTrace], *, span: Span = "all", tokens: slice | None = None
) -> npt.NDArray[np.int64]:
    """Count assignments of tokens to experts.

    Args:
        traces: one trace, or several of the same model, whose counts are added up.
        span: "prompt" counts the prompt's tokens alone, "generated" those after it.
        tokens: further restricts each trace to these token positions, for example slice(10, 20).

    Returns:
        int64 `[MoE layers, experts]`; row i is the layer `layout.moe_layers[i]`. Each row sums to
        top_k times the tokens that were counted.

    Raises:
        TraceError: there is no trace, the traces are of different models, or an id is no expert's.
    """
    several = as_traces(traces)
    layout = several[0].layout
    total = np.zeros((len(layout.moe_layers), layout.num_experts), dtype=np.int64)
    for trace in several:
        chosen = trace.routed_experts[_rows(trace, span, tokens)][:, layout.moe_layers, :]
        if chosen.size and (chosen.min() < 0 or chosen.max() >= layout.num_experts):
            raise TraceError(
                f"a trace holds expert ids {chosen.min()}..{chosen.max()} for {layout.num_experts} experts; "
                "rtk.replay.check says where"
            )
        # One bincount for all layers: each layer's experts get a range of their own.
        offsets = np.arange(len(layout.moe_layers))[:, None] * layout.num_experts
        flat = (chosen.astype(np.int64) + offsets).ravel()
        total += np.bincount(flat, minlength=total.size).reshape(total.shape)
    return total


def table(
    traces: RouteTrace | Iterable[RouteTrace], *, span: Span = "all", tokens: slice | None = None
) -> pd.DataFrame:
    """Per MoE layer, how evenly its experts are used.

    Args:
        traces, span, tokens: as `counts`.

    Returns:
        a DataFrame indexed by layer (0-based), with the columns
        `assignments` (tokens times top-k),
        `entropy_bits` (Shannon entropy of the load, 0 for one expert to log2(experts) for an even load),
        `evenness` (that entropy over its maximum, 0 to 1),
        `max_over_mean` (largest load over the mean load, 1 when even),
        `busiest` (the expert with the largest load) and
        `unused` (how many experts got nothing). Where nothing was counted the ratios are NaN.

    Raises:
        TraceError: as `counts`.
    """
    import pandas as pd

    several = as_traces(traces)
    layout = several[0].layout
    load = counts(several, span=span, tokens=tokens)
    assignments = load.sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = load / assignments[:, None]
        entropy = -(share * np.log2(share, out=np.zeros_like(share), where=share > 0)).sum(axis=1)
    return pd.DataFrame(
        {
            "assignments": assignments,
            "entropy_bits": entropy,
            "evenness": entropy / np.log2(layout.num_experts) if layout.num_experts > 1 else np.nan,
            "max_over_mean": share.max(axis=1) * layout.num_experts,
            "busiest": load.argmax(axis=1),
            "unused": (load == 0).sum(axis=1),
        },
        index=pd.Index(layout.moe_layers, name="layer"),
    )


def heatmap(
    traces: RouteTrace | Iterable[RouteTrace],
    *,
    span: Span = "all",
    tokens: slice | None = None,
    layers: Sequence[int] | None = None,
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw the load of each expert, layer by layer, relative to an even load.

    Args:
        traces, span, tokens: as `counts`.
        layers: 0-based layers to show; all MoE layers where left out.
        title: the picture's title.
        ax: where to draw; a new figure where left out.

    Returns:
        the Axes, with one row a layer, labelled with the model's 0-based layer number.

    Raises:
        TraceError: as `counts`, or one of the layers is no MoE layer.
    """
    import matplotlib.pyplot as plt
    import seaborn as sns

    several = as_traces(traces)
    layout = several[0].layout
    shown = layout.moe_layers if layers is None else tuple(layers)
    relative = relative_load(counts(several, span=span, tokens=tokens))[_positions(layout, shown)]
    if ax is None:
        width = min(16.0, 3.0 + 0.35 * layout.num_experts)
        _, ax = plt.subplots(figsize=(width, 1.4 + 0.35 * len(shown)), layout="constrained")
    sns.heatmap(
        relative,
        ax=ax,
        cmap="cividis",  # reads the same with every common colour blindness
        vmin=0,
        vmax=None if np.isfinite(relative).any() else 1.0,  # seaborn cannot scale what is all NaN
        yticklabels=[str(layer) for layer in shown],
        xticklabels=max(1, layout.num_experts // 32),
        cbar_kws={"label": "load / even load"},
        linewidths=0.5 if layout.num_experts <= 64 else 0.0,
    )
    ax.set(xlabel="expert", ylabel="layer", title=title or "")
    ax.tick_params(axis="y", rotation=0)
    return ax


def heatmaps(groups: Mapping[str, Sequence[RouteTrace]]) -> Figure:
    """Draw one heat map a group, all on one colour scale, to compare domains or models.

    Args:
        groups: named sets of traces of one model, for example one a domain.

    Returns:
        a Figure of its own, not pyplot's current one; a notebook shows it, `savefig` writes it.

    Raises:
        TraceError: as `counts`.
    """
    from matplotlib.figure import Figure

    layout = next(iter(groups.values()))[0].layout
    peak = max(float(relative_load(counts(traces)).max()) for traces in groups.values())
    columns = 2 if len(groups) > 1 else 1
    lines = -(-len(groups) // columns)
    width = columns * min(14.0, 1.5 + 0.3 * layout.num_experts)
    height = lines * (1.1 + 0.3 * len(layout.moe_layers))
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    for ax, (name, traces) in zip(axes, groups.items(), strict=False):
        heatmap(traces, ax=ax, title=f"{name} ({len(traces)} prompts)")
        ax.collections[0].set_clim(0, peak)
    for ax in axes[len(groups) :]:
        ax.remove()
    return figure


def relative_load(load: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Counts as multiples of an even load: 1 everywhere when even; NaN in a layer without counts."""
    with np.errstate(invalid="ignore"):
        relative: npt.NDArray[np.float64] = load / load.mean(axis=1, keepdims=True)
    return relative


def as_traces(traces: RouteTrace | Iterable[RouteTrace]) -> list[RouteTrace]:
    """One or several traces as a list of at least one, all of the same model.

    Raises:
        TraceError: there is none, or they differ in their layout.
    """
    several = [traces] if isinstance(traces, RouteTrace) else list(traces)
    if not several:
        raise TraceError("there are no traces to count")
    for trace in several:
        if not isinstance(trace, RouteTrace):
            raise TraceError(
                f"a RouteTrace is expected, not a {type(trace).__name__}; a Sample holds one in .trace"
            )
        if trace.layout != several[0].layout:
            raise TraceError(f"the traces are of different models: {several[0].layout} and {trace.layout}")
    return several


def _rows(trace: RouteTrace, span: Span, tokens: slice | None) -> npt.NDArray[np.bool_]:
    rows = np.zeros(trace.rows, dtype=bool)
    rows[tokens if tokens is not None else slice(None)] = True
    if span == "prompt":
        rows[trace.prompt_tokens :] = False
    elif span == "generated":
        rows[: trace.prompt_tokens] = False
    elif span != "all":
        raise TraceError(f"span is {span!r}; it is 'all', 'prompt' or 'generated'")
    return rows


def _positions(layout: ModelLayout, layers: Sequence[Any]) -> list[int]:
    missing = [layer for layer in layers if layer not in layout.moe_layers]
    if missing or not layers:
        raise TraceError(f"layers {list(layers)}: the model's MoE layers are {list(layout.moe_layers)}")
    return [layout.moe_layers.index(layer) for layer in layers]
