"""How often two engines choose the same experts for the same tokens, layer by layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from rtk.compare.pairs import common_rows, overlap
from rtk.extras import needs
from rtk.trace.plausible import same_experts
from rtk.trace.route_trace import RouteTrace

if TYPE_CHECKING:
    import pandas as pd


@needs("pandas")
def agreement(a: RouteTrace | Iterable[RouteTrace], b: RouteTrace | Iterable[RouteTrace]) -> pd.DataFrame:
    """Compare the routes of the same tokens, layer by layer.

    R3 (arXiv 2510.11370) measures the mismatch of rollout and training as the share of routers, one a
    token and layer, that choose another set of experts; `same_experts` is one minus that share.

    Args:
        a: one trace, or several.
        b: traces of the same tokens in the same order, from the other engine.

    Returns:
        a DataFrame indexed by layer (0-based, MoE layers only), with the columns
        `tokens` (rows that were compared),
        `same_experts` (share of rows whose sets of experts are equal),
        `overlap` (mean share of the top-k experts that both chose) and
        `same_order` (share of rows that are equal slot by slot, scores in the same order too).

    Raises:
        TraceError: the traces differ in number, layout or tokens, so that nothing can be compared.
    """
    import pandas as pd

    pairs, layout = common_rows(a, b)
    first = np.concatenate([x for x, _ in pairs])
    second = np.concatenate([y for _, y in pairs])
    return pd.DataFrame(
        {
            "tokens": len(first),
            "same_experts": same_experts(first, second).mean(axis=0),
            "overlap": overlap(first, second).mean(axis=0),
            "same_order": (first == second).all(axis=-1).mean(axis=0),
        },
        index=pd.Index(layout.moe_layers, name="layer"),
    )
