"""How far the loads of two sets of tokens are apart, and how much of that the choice of prompts explains."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rtk.errors import TraceError
from rtk.extras import needs
from rtk.trace.route_trace import RouteTrace
from rtk.usage import bootstrap
from rtk.usage.selection import Span, as_traces, layer_counts, rows_of

if TYPE_CHECKING:
    import pandas as pd


@needs("pandas")
def load_distance(
    a: RouteTrace | Iterable[RouteTrace],
    b: RouteTrace | Iterable[RouteTrace],
    *,
    span: Span = "all",
    resamples: int = 1000,
    seed: int = 0,
) -> pd.DataFrame:
    """How far the loads of two sets of traces are apart, layer by layer, for example of two domains.

    With p_i and q_i the shares of the assignments that expert i gets in a and in b, the distance is the total
    variation, half the sum of |p_i - q_i|: the share of assignments that would have to move. It is never negative, so
    two samples of the very same kind of text are apart too. How far, the bootstrap says: prompts are drawn anew, and
    half the sum of |(p*_i - q*_i) - (p_i - q_i)| is the distance that the draw alone makes. Only a distance above
    `noise_high` says that the two differ.

    Args:
        a, b: one trace or several each, of the same model. A prompt that both have is drawn for both.
        span: as `counts`.
        resamples, seed: of the bootstrap over prompts.

    Returns:
        a DataFrame indexed by layer (0-based), with the columns
        `tokens_a`, `tokens_b`,
        `distance` (0 where the loads are the same, 1 where no expert has tokens of both),
        `noise` (mean distance that the draw of prompts makes),
        `noise_high` (its 95th percentile),
        `prompts` (distinct prompts with tokens in a or in b, whichever has fewer) and
        `enough_prompts` (whether they are at least 10; if not, the noise is NaN and `SmallSampleWarning` is issued).

    Raises:
        TraceError: as `counts`, the two are of different models, or one of them has no tokens.
    """
    frame = _distance(as_traces(a), as_traces(b), (span, span), resamples, seed)
    bootstrap.warn_if_few(int(frame["prompts"].iloc[0]), "load_distance")
    return frame.rename(columns={"first": "tokens_a", "second": "tokens_b"})


@needs("pandas")
def prompt_vs_generated(
    traces: RouteTrace | Iterable[RouteTrace], *, resamples: int = 1000, seed: int = 0
) -> pd.DataFrame:
    """How far the load of the prompts' tokens is from that of the generated ones, layer by layer.

    Args:
        traces: as `counts`.
        resamples, seed: of the bootstrap over prompts.

    Returns:
        a DataFrame as that of `load_distance`, with `prompt_tokens` and `generated_tokens` for the counts. The last
        sampled token has no routes, and is not counted.

    Raises:
        TraceError: as `counts`, or there are no generated tokens with routes.
    """
    several = as_traces(traces)
    frame = _distance(several, several, ("prompt", "generated"), resamples, seed)
    bootstrap.warn_if_few(int(frame["prompts"].iloc[0]), "prompt_vs_generated")
    return frame.rename(columns={"first": "prompt_tokens", "second": "generated_tokens"})


def _distance(
    a: Sequence[RouteTrace], b: Sequence[RouteTrace], spans: tuple[Span, Span], resamples: int, seed: int
) -> pd.DataFrame:
    import pandas as pd

    both = as_traces([*a, *b])
    layout = both[0].layout
    numbers = bootstrap.prompt_numbers(both)
    rows = [rows_of(trace, spans[0]) for trace in a] + [rows_of(trace, spans[1]) for trace in b]
    in_a = np.arange(len(both)) < len(a)
    tokens = [bootstrap.by_prompt([here.sum() for here in rows] * side, numbers) for side in (in_a, ~in_a)]
    if not tokens[0].any() or not tokens[1].any():
        raise TraceError("one of the two sides has no tokens with routes, so there is nothing to compare")
    prompts = min(map(bootstrap.counted, tokens))
    drawn = bootstrap.draws(len(tokens[0]), resamples, seed)
    records = []
    for layer in layout.moe_layers:
        load = layer_counts(both, layer, rows)
        parts = [bootstrap.by_prompt(load * side[:, None], numbers) for side in (in_a, ~in_a)]
        wholes = [part.sum(axis=1) for part in parts]
        apart = bootstrap.ratio(parts[0], wholes[0]) - bootstrap.ratio(parts[1], wholes[1])
        noise = noise_high = np.nan
        if bootstrap.enough(prompts):
            moved = bootstrap.ratio(parts[0], wholes[0], drawn) - bootstrap.ratio(parts[1], wholes[1], drawn)
            by_draw = np.abs(moved - apart).sum(axis=1) / 2
            noise, noise_high = np.nanmean(by_draw), np.nanquantile(by_draw, bootstrap.LEVEL)
        records.append((np.abs(apart).sum() / 2, noise, noise_high))
    index = pd.Index(layout.moe_layers, name="layer")
    frame = pd.DataFrame(records, index=index, columns=["distance", "noise", "noise_high"])
    frame.insert(0, "first", int(tokens[0].sum()))
    frame.insert(1, "second", int(tokens[1].sum()))
    return frame.assign(prompts=prompts, enough_prompts=bootstrap.enough(prompts))
