"""Which experts a domain, or a word, goes to: OLMoE's two kinds of specialization."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from rtk.errors import SmallSampleWarning, TraceError
from rtk.extras import needs
from rtk.trace.route_trace import RouteTrace
from rtk.usage import bootstrap
from rtk.usage.selection import (
    Rows,
    Span,
    as_groups,
    as_traces,
    chosen,
    layer_counts,
    layer_numbers,
    rows_of,
    slots,
)

if TYPE_CHECKING:
    import pandas as pd

Ids = npt.NDArray[np.int64]


@needs("pandas")
def domain_specialization(
    groups: Mapping[str, RouteTrace | Iterable[RouteTrace]],
    *,
    span: Span = "all",
    top_k: int | None = None,
    layers: Sequence[int] | None = None,
    resamples: int = 1000,
    seed: int = 0,
) -> pd.DataFrame:
    """The share of each domain's tokens that goes to each expert.

    OLMoE (Muennighoff et al., arXiv 2409.02060), eq. 7: N_{E,D} / N_D, with N_D the tokens of domain D and N_{E,D}
    those that have expert E among their top-k. A router that chooses at random has k / E. (The authors' notebook
    divides by all assignments, k N_D, so that a domain's shares sum to 1; the paper's formula and figure 22, whose
    line of chance is 8/64, sum to k, as here.)

    Args:
        groups: named traces of one model, for example one entry a domain.
        span: as `counts`.
        top_k: looks at the first so many slots alone, which hold the highest scores; all where left out.
        layers: 0-based layers; all MoE layers where left out.
        resamples, seed: of the bootstrap over prompts.

    Returns:
        a DataFrame indexed by domain, layer (0-based) and expert, with the columns
        `tokens` (N_D),
        `specialization` (NaN for a domain without tokens),
        `low`, `high` (its 95 % interval over the domain's prompts, for each expert by itself: of 100 experts about
        5 lie outside by chance),
        `prompts` (distinct prompts) and
        `enough_prompts` (whether they are at least 10; if not, low and high are NaN and `SmallSampleWarning` is
        issued).

    Raises:
        TraceError: as `counts`, there is no group, the groups are of different models, or top_k or a layer is none
            of the model's.
    """
    import pandas as pd

    several = as_groups(groups)
    layout = next(iter(several.values()))[0].layout
    shown, width = layer_numbers(layout, layers), slots(layout, top_k)
    frames = {}
    for name, traces in several.items():
        numbers = bootstrap.prompt_numbers(traces)
        rows = [rows_of(trace, span) for trace in traces]
        tokens = bootstrap.by_prompt([here.sum() for here in rows], numbers)
        prompts = bootstrap.counted(tokens)
        bootstrap.warn_if_few(prompts, f"domain {name!r}")
        drawn = bootstrap.draws(len(tokens), resamples, seed)
        parts = {}
        for layer in shown:
            part = bootstrap.by_prompt(layer_counts(traces, layer, rows, width), numbers)
            low, high = bootstrap.interval(part, tokens, drawn)
            parts[layer] = pd.DataFrame(
                {
                    "tokens": int(tokens.sum()),
                    "specialization": bootstrap.ratio(part, tokens),
                    "low": low,
                    "high": high,
                }
            )
        frames[name] = pd.concat(parts).assign(prompts=prompts, enough_prompts=bootstrap.enough(prompts))
    return pd.concat(frames, names=["domain", "layer", "expert"])


@needs("pandas")
def vocabulary_specialization(
    traces: RouteTrace | Iterable[RouteTrace],
    *,
    span: Span = "all",
    token: Literal["input", "next"] = "input",
    top_k: int = 1,
    min_count: int = 10,
    layers: Sequence[int] | None = None,
) -> pd.DataFrame:
    """For each token id, the expert that it goes to most often, and how often.

    OLMoE (Muennighoff et al., arXiv 2409.02060), eq. 8: N_{x,E} / N_x, with N_x how often token id x occurs and
    N_{x,E} how often it goes to expert E, for the expert with the largest share (the lowest id of several). Like the
    paper it looks at k = 1 unless told otherwise; for a larger k, N_x still counts occurrences, so that 100 % stays
    what the paper says it is: each occurrence goes to E. The paper's number for a layer is the mean over token ids,
    `frame.groupby("layer").specialization.mean()`. The authors' script takes that over ids of any count, which raises
    it (an id that occurs once has 100 %), and lists words that occur 10 times or more, as `min_count` does.

    Args:
        traces, span: as `counts`.
        token: which id x is: "input", the token whose routes are looked at, or "next", the one after it (the paper's
            ground-truth output; the token that the model ranked first is not in a trace).
        top_k: looks at the first so many slots.
        min_count: how often an id has to occur; at least 1.
        layers: 0-based layers; all MoE layers where left out.

    Returns:
        a DataFrame indexed by layer (0-based) and token_id, with the columns
        `text` (the token alone), `count` (N_x), `expert` and `specialization`. Where no id occurs `min_count` times it
        is empty, and `SmallSampleWarning` is issued.

    Raises:
        TraceError: as `counts`, or token, top_k, min_count or a layer is out of range.
    """
    import pandas as pd

    several = as_traces(traces)
    layout = several[0].layout
    shown, width = layer_numbers(layout, layers), slots(layout, top_k)
    if token not in ("input", "next") or min_count < 1:
        raise TraceError(
            f"token is {token!r} and min_count {min_count}; 'input' or 'next', and at least 1, are meant"
        )
    rows = [_with_token(rows_of(trace, span), trace, token) for trace in several]
    positions = [np.flatnonzero(here) + (token == "next") for here in rows]
    ids = np.concatenate([trace.token_ids[at] for trace, at in zip(several, positions, strict=True)])
    vocabulary, place, count = np.unique(ids, return_inverse=True, return_counts=True)
    kept = count >= min_count
    if not kept.any():
        warnings.warn(
            f"none of {len(vocabulary)} token ids occurs {min_count} times; sample more, or lower min_count",
            SmallSampleWarning,
            stacklevel=2,
        )
    text = _texts(several, positions)
    parts = {}
    for layer in shown:
        experts = np.concatenate(
            [chosen(trace, layer, here)[:, :width] for trace, here in zip(several, rows, strict=True)]
        )
        favourite, times = _favourites(place, experts, layout.num_experts)
        parts[layer] = pd.DataFrame(
            {
                "text": [text[number] for number in vocabulary[kept].tolist()],
                "count": count[kept],
                "expert": favourite[kept],
                "specialization": times[kept] / count[kept],
            },
            index=vocabulary[kept],
        )
    return pd.concat(parts, names=["layer", "token_id"])


def _with_token(rows: Rows, trace: RouteTrace, token: str) -> Rows:
    """The rows that have a token of that kind: a sequence that was forwarded whole ends in a row without a next one."""
    if token == "next" and trace.rows == len(trace.token_ids):
        rows[-1] = False
    return rows


def _texts(traces: Sequence[RouteTrace], positions: Sequence[Ids]) -> dict[int, str]:
    """How each token id reads where it occurs first."""
    text: dict[int, str] = {}
    for trace, at in zip(traces, positions, strict=True):
        for number, position in zip(trace.token_ids[at].tolist(), at.tolist(), strict=True):
            text.setdefault(number, trace.token_text[position])
    return text


def _favourites(place: Ids, experts: Ids, num_experts: int) -> tuple[Ids, Ids]:
    """For each token id the expert that it goes to most often and how often that is, int64 `[ids]` each.

    Args:
        place: `[tokens]`, the number of each token's id, from 0 without gaps.
        experts: `[tokens, slots]`.
    """
    # Only pairs that occur: a table of all ids by all experts would be mostly zeros, and large.
    pairs, times = np.unique((place[:, None] * num_experts + experts).ravel(), return_counts=True)
    ids, chosen_experts = np.divmod(pairs, num_experts)
    order = np.lexsort((chosen_experts, -times, ids))
    first = order[np.searchsorted(ids[order], np.arange(len(np.unique(ids))))]
    return chosen_experts[first], times[first]
