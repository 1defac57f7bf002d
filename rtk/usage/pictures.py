"""Pictures of the load: layers down, experts across."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rtk.extras import needs
from rtk.trace.route_trace import RouteTrace
from rtk.usage.load import counts, relative_load
from rtk.usage.selection import Span, as_groups, as_traces, layer_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@needs("seaborn")
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
    shown = layer_numbers(layout, layers)
    positions = [layout.moe_layers.index(layer) for layer in shown]
    relative = relative_load(counts(several, span=span, tokens=tokens))[positions]
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


@needs("seaborn")
def heatmaps(groups: Mapping[str, Sequence[RouteTrace]]) -> Figure:
    """Draw one heat map a group, all on one colour scale, to compare domains or models.

    Args:
        groups: named sets of traces of one model, for example one a domain.

    Returns:
        a Figure of its own, not pyplot's current one; a notebook shows it, `savefig` writes it.

    Raises:
        TraceError: as `counts`; or groups is no mapping, or of several models.
    """
    from matplotlib.figure import Figure

    several = as_groups(groups)
    layout = next(iter(several.values()))[0].layout
    peak = max(float(relative_load(counts(traces)).max()) for traces in several.values())
    columns = 2 if len(several) > 1 else 1
    lines = -(-len(several) // columns)
    width = columns * min(14.0, 1.5 + 0.3 * layout.num_experts)
    height = lines * (1.1 + 0.3 * len(layout.moe_layers))
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    for ax, (name, traces) in zip(axes, several.items(), strict=False):
        heatmap(traces, ax=ax, title=f"{name} ({len(traces)} prompts)")
        ax.collections[0].set_clim(0, peak)
    for ax in axes[len(several) :]:
        ax.remove()
    return figure
