"""How much each expert is used, and how evenly."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rtk.errors import SmallSampleWarning, TraceError
from rtk.extras import needs
from rtk.trace.route_trace import RouteTrace
from rtk.usage.selection import Span, as_traces, layer_counts, rows_of

if TYPE_CHECKING:
    import pandas as pd

Counts = npt.NDArray[np.int64]

# An expert counts as unused where an even router would leave fewer than so many experts of a layer unused by chance.
_UNUSED_BY_CHANCE = 0.05


def counts(
    traces: RouteTrace | Iterable[RouteTrace], *, span: Span = "all", tokens: slice | None = None
) -> Counts:
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
    rows = [rows_of(trace, span, tokens) for trace in several]
    return np.array(
        [layer_counts(several, layer, rows).sum(axis=0) for layer in several[0].layout.moe_layers]
    )


@needs("pandas")
def table(
    traces: RouteTrace | Iterable[RouteTrace], *, span: Span = "all", tokens: slice | None = None
) -> pd.DataFrame:
    """Per MoE layer, how evenly its experts are used.

    With x_i the load of expert i of E and m the mean load:

    Args:
        traces, span, tokens: as `counts`.

    Returns:
        a DataFrame indexed by layer (0-based), with the columns
        `assignments` (tokens times top-k),
        `entropy_bits` (Shannon entropy of the load, 0 for one expert to log2(E) for an even load),
        `evenness` (that entropy over its maximum, 0 to 1),
        `gini` (Gini coefficient, the sum over all i, j of |x_i - x_j| over 2 E^2 m: 0 when even, 1 - 1/E where one
        expert gets all),
        `cv` (coefficient of variation, the standard deviation with E in the denominator over m; its square is the
        balance loss of Shazeer et al., arXiv 1701.06538),
        `max_over_mean` (largest load over m, 1 when even),
        `max_vio` (MaxVio, (max x_i - m) / m, eq. 4 of Wang et al., arXiv 2408.15664: 0 when even. The paper reports
        the mean over the layers: of a large sample as MaxVio_global, of a training batch as MaxVio_batch),
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
    relative = relative_load(load)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = load / assignments[:, None]
        entropy = -(share * np.log2(share, out=np.zeros_like(share), where=share > 0)).sum(axis=1)
    return pd.DataFrame(
        {
            "assignments": assignments,
            "entropy_bits": entropy,
            "evenness": entropy / np.log2(layout.num_experts) if layout.num_experts > 1 else np.nan,
            "gini": _gini(relative),
            "cv": relative.std(axis=1),
            "max_over_mean": relative.max(axis=1),
            "max_vio": relative.max(axis=1) - 1,
            "busiest": load.argmax(axis=1),
            "unused": (load == 0).sum(axis=1),
        },
        index=pd.Index(layout.moe_layers, name="layer"),
    )


@needs("pandas")
def experts(
    traces: RouteTrace | Iterable[RouteTrace], *, span: Span = "all", capacity_factor: float = 1.25
) -> pd.DataFrame:
    """Per expert, its load, and whether it is unused or overloaded.

    An expert is overloaded where its load exceeds its capacity: `capacity_factor` times the even load, beyond which
    GShard (arXiv 2006.16668) and the Switch Transformer (arXiv 2101.03961, which tries 1.0, 1.25 and 2.0) drop
    tokens. With E experts, top-k and N tokens, a router that chose at random would still leave
    E (1 - k/E)^N experts of a layer unused; where that is above 0.05, `SmallSampleWarning` says so, and nothing
    follows from an expert without tokens.

    Args:
        traces, span: as `counts`.
        capacity_factor: above 0.

    Returns:
        a DataFrame indexed by layer (0-based) and expert, with the columns
        `assignments`, `load` (over the even load, 1 when even; NaN where nothing was counted), `unused` and
        `overloaded` (both bool).

    Raises:
        TraceError: as `counts`, or the capacity factor is not above 0.
    """
    import pandas as pd

    if not capacity_factor > 0:
        raise TraceError(f"capacity_factor is {capacity_factor}; it is above 0, and 1 is an even load")
    several = as_traces(traces)
    layout = several[0].layout
    load = counts(several, span=span)
    _warn_of_chance(int(load[0].sum()) // layout.top_k, layout.num_experts, layout.top_k)
    relative = relative_load(load)
    labels = [layout.moe_layers, range(layout.num_experts)]
    return pd.DataFrame(
        {
            "assignments": load.ravel(),
            "load": relative.ravel(),
            "unused": load.ravel() == 0,
            "overloaded": relative.ravel() > capacity_factor,
        },
        index=pd.MultiIndex.from_product(labels, names=["layer", "expert"]),
    )


def relative_load(load: Counts) -> npt.NDArray[np.float64]:
    """Counts as multiples of an even load: 1 everywhere when even; NaN in a layer without counts."""
    with np.errstate(invalid="ignore"):
        relative: npt.NDArray[np.float64] = load / load.mean(axis=1, keepdims=True)
    return relative


def _gini(relative: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The coefficient of each row, whose mean is 1, by rank: equal to the double sum, without its E x E terms."""
    size = relative.shape[1]
    weights = (2 * np.arange(1, size + 1) - size - 1) / size**2
    return np.asarray(np.sort(relative, axis=1) @ weights)


def _warn_of_chance(tokens: int, num_experts: int, top_k: int) -> None:
    by_chance = num_experts * (1 - top_k / num_experts) ** tokens
    if by_chance > _UNUSED_BY_CHANCE:
        warnings.warn(
            f"{tokens} tokens are too few to call an expert unused: a router that chose at random would leave "
            f"{by_chance:.2g} of {num_experts} experts without tokens in each layer",
            SmallSampleWarning,
            stacklevel=3,
        )
