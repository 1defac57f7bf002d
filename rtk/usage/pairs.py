"""Which experts are chosen together, within a layer and from one layer to another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rtk.errors import TraceError
from rtk.extras import needs
from rtk.trace.route_trace import RouteTrace
from rtk.usage.selection import Span, as_traces, chosen, layer_counts, layer_numbers, rows_of

if TYPE_CHECKING:
    import pandas as pd

Counts = npt.NDArray[np.int64]

# Pairs that are counted at once: 64 MB of int64.
_PAIRS_AT_ONCE = 1 << 23


@needs("pandas")
def coactivation(
    traces: RouteTrace | Iterable[RouteTrace], layer: int, *, span: Span = "all"
) -> pd.DataFrame:
    """How often the experts of one layer are chosen together.

    OLMoE (Muennighoff et al., arXiv 2409.02060), eq. 6: co-activation of E_i and E_j is N_ij / N_i, with N_i the
    tokens that go to E_i and N_ij those that go to both. All pairs of a token's top-k experts count, as the
    definition says; the authors' own script counts only those next to each other in router order.

    Args:
        traces, span: as `counts`.
        layer: 0-based.

    Returns:
        a DataFrame `[experts, experts]` of shares, index `expert` (i), columns `with_expert` (j): 1 on the diagonal,
        and NaN in the row of an expert that no token goes to. Chosen at random, two experts would have
        (k - 1) / (E - 1).

    Raises:
        TraceError: as `counts`, the layer is no MoE layer, or a token names an expert twice.
    """
    import pandas as pd

    several = as_traces(traces)
    layer_numbers(several[0].layout, [layer])
    together = _pair_counts(several, layer, layer, span)
    alone = layer_counts(several, layer, [rows_of(trace, span) for trace in several]).sum(axis=0)
    if not np.array_equal(together.diagonal(), alone):
        raise TraceError(f"layer {layer}: a token names an expert twice; rtk.replay.check says where")
    labels = range(len(alone))
    return pd.DataFrame(
        _over(together, alone),
        index=pd.Index(labels, name="expert"),
        columns=pd.Index(labels, name="with_expert"),
    )


@needs("pandas")
def transitions(
    traces: RouteTrace | Iterable[RouteTrace],
    layer: int,
    next_layer: int | None = None,
    *,
    span: Span = "all",
) -> pd.DataFrame:
    """Where the tokens of each expert go in a later layer.

    P(E_j in `next_layer` | E_i in `layer`), the inter-layer expert affinity of ExFlow (Yao et al., arXiv 2401.08383),
    which is defined for top-1. With top-k it is N_ij / (k N_i): of the assignments that the tokens of E_i have in
    the next layer, the share that goes to E_j. OLMoE's appendix G (arXiv 2409.02060) looks at the same pairs.

    Args:
        traces, span: as `counts`.
        layer: 0-based.
        next_layer: 0-based; the next MoE layer where left out.

    Returns:
        a DataFrame `[experts, experts]` of shares, index `expert` (i, in `layer`), columns `next_expert` (j): each
        row sums to 1, and is NaN for an expert that no token goes to. Compare a row with the next layer's load:
        where they are alike, the one choice says nothing about the other.

    Raises:
        TraceError: as `counts`, a layer is no MoE layer, or there is none after the last.
    """
    import pandas as pd

    several = as_traces(traces)
    moe = several[0].layout.moe_layers
    layer_numbers(several[0].layout, [layer])
    if next_layer is None:
        if layer == moe[-1]:
            raise TraceError(f"there is no MoE layer after layer {layer}; name next_layer")
        next_layer = moe[moe.index(layer) + 1]
    layer_numbers(several[0].layout, [next_layer])
    pairs = _pair_counts(several, layer, next_layer, span)
    labels = range(len(pairs))
    return pd.DataFrame(
        _over(pairs, pairs.sum(axis=1)),
        index=pd.Index(labels, name="expert"),
        columns=pd.Index(labels, name="next_expert"),
    )


def _pair_counts(traces: Sequence[RouteTrace], layer: int, other: int, span: Span) -> Counts:
    """int64 `[experts, experts]`: how often a token has expert i in one layer and expert j in the other."""
    layout = traces[0].layout
    total = np.zeros(layout.num_experts**2, dtype=np.int64)
    step = max(1, _PAIRS_AT_ONCE // layout.top_k**2)
    for trace in traces:
        rows = rows_of(trace, span)
        first, second = chosen(trace, layer, rows), chosen(trace, other, rows)
        for start in range(0, len(first), step):
            here = slice(start, start + step)
            pairs = first[here, :, None] * layout.num_experts + second[here, None, :]
            total += np.bincount(pairs.ravel(), minlength=total.size)
    return total.reshape(layout.num_experts, layout.num_experts)


def _over(pairs: Counts, alone: Counts) -> npt.NDArray[np.float64]:
    with np.errstate(invalid="ignore"):
        return np.asarray(pairs / alone[:, None])
