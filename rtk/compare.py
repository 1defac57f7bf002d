"""How far two engines, or two runs, route the same tokens alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rtk.errors import TraceError
from rtk.trace import RouteTrace
from rtk.usage import as_traces

if TYPE_CHECKING:
    import pandas as pd


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

    left, right = as_traces(a), as_traces(b)
    if len(left) != len(right):
        raise TraceError(f"{len(left)} traces cannot be compared with {len(right)}")
    layout = left[0].layout
    pairs = [_common_rows(x, y, number) for number, (x, y) in enumerate(zip(left, right, strict=True))]
    first = np.concatenate([x for x, _ in pairs])[:, layout.moe_layers]
    second = np.concatenate([y for _, y in pairs])[:, layout.moe_layers]
    shared = (first[..., :, None] == second[..., None, :]).any(axis=-1).mean(axis=-1)
    return pd.DataFrame(
        {
            "tokens": len(first),
            "same_experts": (np.sort(first, axis=-1) == np.sort(second, axis=-1)).all(axis=-1).mean(axis=0),
            "overlap": shared.mean(axis=0),
            "same_order": (first == second).all(axis=-1).mean(axis=0),
        },
        index=pd.Index(layout.moe_layers, name="layer"),
    )


def _common_rows(
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
