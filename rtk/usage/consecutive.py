"""How often consecutive tokens go to the same expert."""

from __future__ import annotations

from collections.abc import Iterable
from math import comb
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rtk.extras import needs
from rtk.trace.route_trace import RouteTrace
from rtk.usage import bootstrap
from rtk.usage.selection import Span, as_traces, chosen, rows_of

if TYPE_CHECKING:
    import pandas as pd


@needs("pandas")
def repetition(
    traces: RouteTrace | Iterable[RouteTrace], *, span: Span = "all", resamples: int = 1000, seed: int = 0
) -> pd.DataFrame:
    """How often a token goes to the same expert as the token before it.

    Mixtral (Jiang et al., arXiv 2401.04088), table 5, which has two counts of it: the first choice of token i and of
    token i + 1 are the same expert, or any expert is among the top-k of both (for Mixtral's top-2, "first or second
    choice"). For a router that chooses at random the paper expects 1/E and 1 - C(E - k, k) / C(E, k), which are
    12.5 % and 46 % for Mixtral. An uneven load alone repeats more often than that.

    Args:
        traces, span: as `counts`; pairs lie within one trace and one span.
        resamples, seed: of the bootstrap over prompts.

    Returns:
        a DataFrame indexed by layer (0-based) and `choice` ("first" or "any"), with the columns
        `pairs` (of consecutive tokens),
        `repetition` (the share of pairs),
        `low`, `high` (its 95 % interval over prompts),
        `random` (what a router that chooses at random would have),
        `prompts` (distinct prompts with a pair) and
        `enough_prompts` (whether they are at least 10; if not, low and high are NaN and `SmallSampleWarning` is
        issued).

    Raises:
        TraceError: as `counts`.
    """
    import pandas as pd

    several = as_traces(traces)
    layout = several[0].layout
    numbers = bootstrap.prompt_numbers(several)
    rows = [rows_of(trace, span) for trace in several]
    pairs = bootstrap.by_prompt([max(0, int(here.sum()) - 1) for here in rows], numbers)
    prompts = bootstrap.counted(pairs)
    bootstrap.warn_if_few(prompts, "repetition")
    drawn = bootstrap.draws(len(pairs), resamples, seed)
    experts, top_k = layout.num_experts, layout.top_k
    random = (1 / experts, 1 - comb(experts - top_k, top_k) / comb(experts, top_k))
    records = []
    for layer in layout.moe_layers:
        ids = [chosen(trace, layer, here) for trace, here in zip(several, rows, strict=True)]
        repeated = bootstrap.by_prompt([_repeated(each) for each in ids], numbers)
        share = bootstrap.ratio(repeated, pairs)
        low, high = bootstrap.interval(repeated, pairs, drawn)
        records += [(pairs.sum(), *values) for values in zip(share, low, high, random, strict=True)]
    index = pd.MultiIndex.from_product([layout.moe_layers, ["first", "any"]], names=["layer", "choice"])
    frame = pd.DataFrame(records, index=index, columns=["pairs", "repetition", "low", "high", "random"])
    return frame.astype({"pairs": np.int64}).assign(prompts=prompts, enough_prompts=bootstrap.enough(prompts))


def _repeated(ids: npt.NDArray[np.int64]) -> tuple[int, int]:
    """How many rows repeat the first choice, and any choice, of the row before."""
    before, after = ids[:-1], ids[1:]
    any_choice = (before[:, :, None] == after[:, None, :]).any(axis=(1, 2))
    return int((before[:, 0] == after[:, 0]).sum()), int(any_choice.sum())
