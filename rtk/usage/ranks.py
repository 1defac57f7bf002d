"""What each expert-parallel rank would have to do, simulated from the routes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from rtk.errors import ShardError
from rtk.extras import needs
from rtk.trace.route_trace import RouteTrace
from rtk.usage.selection import Span, as_traces, chosen, rows_of

if TYPE_CHECKING:
    import pandas as pd


@needs("pandas")
def rank_load(
    traces: RouteTrace | Iterable[RouteTrace], expert_size: int, *, span: Span = "all"
) -> pd.DataFrame:
    """The load of each rank, if the traces were one batch of an expert-parallel model.

    Rank r of `expert_size` (EP) holds the experts from r * E / EP on, as in Megatron and in vLLM's default placement;
    replicas of experts (EPLB) are not simulated. A layer is as slow as its busiest rank, and each batch has its own,
    so give the traces of one microbatch: over a large sample the loads even out.

    Args:
        traces, span: as `counts`.
        expert_size: expert-parallel size, a divisor of the number of experts.

    Returns:
        a DataFrame indexed by layer (0-based) and rank, with the columns
        `assignments` (token-expert pairs that the rank computes),
        `load` (these over the mean of the ranks, 1 when even; NaN where nothing was counted) and
        `tokens` (tokens with at least one expert on the rank: what a dispatcher sends that sends a token once a
        rank, such as DeepEP).

    Raises:
        TraceError: as `counts`.
        ShardError: the experts do not divide evenly over the ranks.
    """
    import pandas as pd

    several = as_traces(traces)
    layout = several[0].layout
    if expert_size < 1 or layout.num_experts % expert_size:
        raise ShardError(
            f"{layout.num_experts} experts do not divide evenly over {expert_size} expert-parallel ranks"
        )
    assignments = np.zeros((len(layout.moe_layers), expert_size), dtype=np.int64)
    tokens = np.zeros_like(assignments)
    for trace in several:
        rows = rows_of(trace, span)
        for position, layer in enumerate(layout.moe_layers):
            ranks = np.sort(chosen(trace, layer, rows) // (layout.num_experts // expert_size), axis=1)
            first_of_rank = np.ones(ranks.shape, dtype=bool)
            first_of_rank[:, 1:] = ranks[:, 1:] != ranks[:, :-1]
            assignments[position] += np.bincount(ranks.ravel(), minlength=expert_size)
            tokens[position] += np.bincount(ranks[first_of_rank], minlength=expert_size)
    with np.errstate(invalid="ignore"):
        load = assignments / assignments.mean(axis=1, keepdims=True)
    labels = [layout.moe_layers, range(expert_size)]
    return pd.DataFrame(
        {"assignments": assignments.ravel(), "load": load.ravel(), "tokens": tokens.ravel()},
        index=pd.MultiIndex.from_product(labels, names=["layer", "rank"]),
    )
