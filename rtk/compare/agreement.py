"""How far two engines, or two runs, route the same tokens alike, and how far their probabilities differ.

The quantities are those by which R3 (Ma et al., arXiv 2510.11370) describes the mismatch of rollout and training:
routers that choose other experts, tokens with at least one such router, and the KL divergence and extreme ratios of
token probabilities. docs/replay.md says which of the definitions could be read in the paper.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rtk.errors import TraceError
from rtk.extras import needs
from rtk.layout.model_layout import ModelLayout
from rtk.trace.plausible import same_experts
from rtk.trace.route_trace import RouteTrace
from rtk.usage import bootstrap
from rtk.usage.selection import as_traces, slots

if TYPE_CHECKING:
    import pandas as pd

# R3's F(tau) is drawn for these. SkyRL sends -9999.0 for a logprob that is missing or not finite.
_TAUS = (2.0, 5.0, 10.0)
_NO_LOGPROB = -9998.0


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

    pairs, layout = _pairs(a, b)
    first = np.concatenate([x for x, _ in pairs])
    second = np.concatenate([y for _, y in pairs])
    return pd.DataFrame(
        {
            "tokens": len(first),
            "same_experts": same_experts(first, second).mean(axis=0),
            "overlap": _overlap(first, second).mean(axis=0),
            "same_order": (first == second).all(axis=-1).mean(axis=0),
        },
        index=pd.Index(layout.moe_layers, name="layer"),
    )


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
    pairs, layout = _pairs(left, right)
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
        [_overlap(x[..., :width], y[..., :width]).sum(axis=0) for x, y in pairs], numbers
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


@dataclass(frozen=True)
class LogprobGap:
    """How far two engines' probabilities of the same generated tokens differ.

    With q the rollout's and p the trainer's probability of a token that the rollout sampled, and r = p / q, the
    estimators of KL(q || p) are Schulman's ("Approximating KL Divergence", 2020): k1 = -log r is unbiased and may be
    negative, k3 = r - 1 - log r is unbiased too, never negative, and varies less. Both hold for tokens sampled from q
    at temperature 1 without top-p or top-k, and with the logprobs of that distribution. Nats.

    Attributes:
        tokens: how many tokens were compared.
        left_out: tokens without a finite logprob on both sides (SkyRL's floor of -9999.0 counts as none).
        k1, k3: means over the tokens; NaN where there are none.
        mean_abs: mean of |log p - log q|.
        extreme: share of tokens with max(p / q, q / p) above 2, 5 and 10, R3's F(tau), by tau.
    """

    tokens: int
    left_out: int
    k1: float
    k3: float
    mean_abs: float
    extreme: dict[float, float]


@dataclass(frozen=True)
class Mismatch:
    """How far a trainer's routes are from a rollout's, over all tokens.

    A router is one MoE layer's choice for one token; it disagrees if its set of experts differs.

    Attributes:
        tokens: how many tokens were compared.
        routers: how many routers: tokens times MoE layers.
        routers_differ: share of routers that disagree (R3: about 10 % for Qwen3-30B-A3B).
        tokens_differ: share of tokens for which at least one layer disagrees (R3: 94 %).
        layers_differ: mean number of layers that disagree for a token (R3: about 6 of 48).
        overlap: mean share of the top-k experts that both sides chose.
        logprobs: of the generated tokens, where both sides have them, else None.
    """

    tokens: int
    routers: int
    routers_differ: float
    tokens_differ: float
    layers_differ: float
    overlap: float
    logprobs: LogprobGap | None

    def __str__(self) -> str:
        text = (
            f"{self.routers_differ:.2%} of {self.routers} routers disagree; {self.tokens_differ:.2%} of {self.tokens} "
            f"tokens differ in at least one layer, {self.layers_differ:.2f} layers a token; {self.overlap:.2%} of the "
            "experts are shared"
        )
        if self.logprobs is not None:
            text += (
                f"; KL of rollout to trainer {self.logprobs.k3:.2e} nats (k3, {self.logprobs.tokens} tokens; "
                f"k1 {self.logprobs.k1:.2e})"
            )
        return text


def mismatch(
    rollout: RouteTrace | Iterable[RouteTrace], trainer: RouteTrace | Iterable[RouteTrace]
) -> Mismatch:
    """Measure the mismatch of two engines on the same tokens with R3's quantities.

    Args:
        rollout: one trace, or several, of the engine that sampled the tokens.
        trainer: traces of the same tokens in the same order, from the other engine. Where every trace of both
            sides has logprobs, those are compared too.

    Raises:
        TraceError: as `agreement`, or nothing has routes on both sides.
    """
    left, right = as_traces(rollout), as_traces(trainer)
    pairs, _ = _pairs(left, right)
    same = np.concatenate([same_experts(x, y) for x, y in pairs])
    if not len(same):
        raise TraceError("no token has routes on both sides, so there is nothing to compare")
    gap = None
    if all(trace.logprobs is not None for trace in (*left, *right)):
        for number, (x, y) in enumerate(zip(left, right, strict=True)):
            if not np.array_equal(x.token_ids, y.token_ids) or x.prompt_tokens != y.prompt_tokens:
                raise TraceError(
                    f"pair {number}: the traces' generated tokens differ, so their logprobs do not compare"
                )
        gap = logprob_gap(
            np.concatenate([_logprobs(trace) for trace in left]),
            np.concatenate([_logprobs(trace) for trace in right]),
        )
    return Mismatch(
        tokens=len(same),
        routers=same.size,
        routers_differ=float((~same).mean()),
        tokens_differ=float((~same).any(axis=1).mean()),
        layers_differ=float((~same).sum(axis=1).mean()),
        overlap=float(np.concatenate([_overlap(x, y) for x, y in pairs]).mean()),
        logprobs=gap,
    )


@needs("pandas")
def by_position(
    a: RouteTrace | Iterable[RouteTrace], b: RouteTrace | Iterable[RouteTrace], *, spans: int = 16
) -> pd.DataFrame:
    """The mismatch of two engines along the sequence, all layers together.

    Args:
        a, b: as `agreement`.
        spans: the positions 0 .. longest sequence are cut into at most so many spans of nearly equal length.

    Returns:
        a DataFrame indexed by `start`, the first position of each span (0-based, counted in each sequence for
        itself), with the columns
        `tokens` (rows of all sequences that lie in it),
        `routers_differ` (share of routers that disagree),
        `tokens_differ` (share of tokens with at least one layer that disagrees) and
        `overlap` (mean share of the top-k experts that both chose).

    Raises:
        TraceError: as `agreement`; spans is below 1.
    """
    import pandas as pd

    if spans < 1:
        raise TraceError(f"spans is {spans}; at least one is needed")
    pairs, _ = _pairs(a, b)
    longest = max(len(x) for x, _ in pairs)
    edges = np.linspace(0, longest, min(spans, max(longest, 1)) + 1).astype(int)
    rows = []
    for start, stop in pairwise(edges.tolist()):
        first = np.concatenate([x[start:stop] for x, _ in pairs])
        second = np.concatenate([y[start:stop] for _, y in pairs])
        differ = ~same_experts(first, second)
        rows.append((len(first), differ.mean(), differ.any(axis=1).mean(), _overlap(first, second).mean()))
    return pd.DataFrame(
        rows,
        columns=["tokens", "routers_differ", "tokens_differ", "overlap"],
        index=pd.Index(edges[:-1], name="start"),
    )


def logprob_gap(rollout: npt.ArrayLike, trainer: npt.ArrayLike) -> LogprobGap:
    """Estimate the KL divergence of two engines from the logprobs of tokens that one of them sampled.

    Args:
        rollout: float `[tokens]`, natural log of the probability of each sampled token, of the engine that sampled it.
        trainer: the same tokens' logprobs from the other engine.

    Raises:
        TraceError: the two differ in shape.
    """
    log_q, log_p = np.asarray(rollout, np.float64), np.asarray(trainer, np.float64)
    if log_q.shape != log_p.shape or log_q.ndim != 1:
        raise TraceError(
            f"logprobs of shapes {list(log_q.shape)} and {list(log_p.shape)} are not of the same tokens"
        )
    known = np.isfinite(log_q) & np.isfinite(log_p) & (log_q > _NO_LOGPROB) & (log_p > _NO_LOGPROB)
    log_r = (log_p - log_q)[known]
    if not len(log_r):
        nan = float("nan")
        return LogprobGap(0, len(log_q), nan, nan, nan, dict.fromkeys(_TAUS, nan))
    return LogprobGap(
        tokens=len(log_r),
        left_out=len(log_q) - len(log_r),
        k1=float(-log_r.mean()),
        k3=float((np.expm1(log_r) - log_r).mean()),
        mean_abs=float(np.abs(log_r).mean()),
        extreme={tau: float((np.abs(log_r) > np.log(tau)).mean()) for tau in _TAUS},
    )


def _logprobs(trace: RouteTrace) -> npt.NDArray[np.float32]:
    assert trace.logprobs is not None  # the caller looked
    return trace.logprobs


def _pairs(
    a: RouteTrace | Iterable[RouteTrace], b: RouteTrace | Iterable[RouteTrace]
) -> tuple[list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]], ModelLayout]:
    """For each pair of traces the routes of their common rows, MoE layers only."""
    left, right = as_traces(a), as_traces(b)
    if len(left) != len(right):
        raise TraceError(f"{len(left)} traces cannot be compared with {len(right)}")
    layout = left[0].layout
    moe: Sequence[int] = layout.moe_layers
    pairs = [_common_rows(x, y, number) for number, (x, y) in enumerate(zip(left, right, strict=True))]
    return [(x[:, moe], y[:, moe]) for x, y in pairs], layout


def _overlap(first: npt.NDArray[np.int32], second: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
    """float `[tokens, layers]`: the share of the first's experts that the second chose too."""
    # Slot by slot, since all pairs of slots of a long trace at once are top-k times as large as its routes.
    found = [(first[..., [slot]] == second).any(axis=-1) for slot in range(first.shape[-1])]
    return np.asarray(np.mean(found, axis=0))


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
