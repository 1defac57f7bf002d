"""How much of the final checkpoint's routing an earlier one has already."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rtk.compare.pairs import common_rows, overlap
from rtk.errors import TraceError
from rtk.extras import needs
from rtk.trace.route_trace import RouteTrace
from rtk.usage import bootstrap
from rtk.usage.selection import as_traces, slots

if TYPE_CHECKING:
    import pandas as pd


@needs("pandas")
def router_saturation(
    early: RouteTrace | Iterable[RouteTrace],
    final: RouteTrace | Iterable[RouteTrace],
    *,
    top_k: int | None = None,
    resamples: int = 1000,
    seed: int = 0,
) -> pd.DataFrame:
    """How much of the final checkpoint's routing an earlier checkpoint has already, layer by layer.

    OLMoE (Muennighoff et al., arXiv 2409.02060), eq. 5: the mean over tokens of |E(t) and E(T)| / k, the share of a
    token's k experts that both checkpoints choose. Two routers that choose at random have k / E. The paper looks at
    all k and at k = 1.

    Args:
        early: one trace, or several, of the earlier checkpoint.
        final: traces of the same tokens in the same order, from the final checkpoint. To get them, let both
            checkpoints forward the same texts; what one has sampled, the other has to be given as a prompt.
        top_k: looks at the first so many slots alone, which hold the highest scores; all where left out.
        resamples, seed: of the bootstrap over prompts.

    Returns:
        a DataFrame indexed by layer (0-based, MoE layers only), with the columns
        `tokens` (rows that were compared),
        `saturation` (0 to 1),
        `low`, `high` (its 95 % interval over prompts),
        `prompts` (distinct prompts) and
        `enough_prompts` (whether they are at least 10; if not, low and high are NaN and `SmallSampleWarning` is
        issued).

    Raises:
        TraceError: as `agreement`, top_k is out of range, or nothing has routes on both sides.
    """
    import pandas as pd

    left, right = as_traces(early), as_traces(final)
    pairs, layout = common_rows(left, right)
    width = slots(layout, top_k)
    # Where one checkpoint was given what the other had sampled, only the other knows which part was the prompt.
    numbers = bootstrap.prompt_numbers(
        min(pair, key=lambda trace: trace.prompt_tokens) for pair in zip(left, right, strict=True)
    )
    tokens = bootstrap.by_prompt([len(x) for x, _ in pairs], numbers)
    prompts = bootstrap.counted(tokens)
    if not prompts:
        raise TraceError("no token has routes on both sides, so there is nothing to compare")
    bootstrap.warn_if_few(prompts, "router_saturation")
    shared = bootstrap.by_prompt(
        [overlap(x[..., :width], y[..., :width]).sum(axis=0) for x, y in pairs], numbers
    )
    low, high = bootstrap.interval(shared, tokens, bootstrap.draws(len(tokens), resamples, seed))
    return pd.DataFrame(
        {
            "tokens": int(tokens.sum()),
            "saturation": bootstrap.ratio(shared, tokens),
            "low": low,
            "high": high,
            "prompts": prompts,
            "enough_prompts": bootstrap.enough(prompts),
        },
        index=pd.Index(layout.moe_layers, name="layer"),
    )
