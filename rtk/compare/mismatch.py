"""How far a trainer's routes are from a rollout's, in one set of figures and along the sequence.

The quantities are those by which R3 (Ma et al., arXiv 2510.11370) describes the mismatch of rollout and training:
routers that choose other experts, tokens with at least one such router, and the KL divergence and extreme ratios of
token probabilities. docs/replay.md says which of the definitions could be read in the paper.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rtk.compare.logprobs import LogprobGap, logprob_gap
from rtk.compare.pairs import common_rows, overlap
from rtk.errors import TraceError
from rtk.extras import needs
from rtk.trace.plausible import same_experts
from rtk.trace.route_trace import RouteTrace
from rtk.usage.selection import as_traces

if TYPE_CHECKING:
    import pandas as pd


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
    pairs, _ = common_rows(left, right)
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
        overlap=float(np.concatenate([overlap(x, y) for x, y in pairs]).mean()),
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
    pairs, _ = common_rows(a, b)
    longest = max(len(x) for x, _ in pairs)
    edges = np.linspace(0, longest, min(spans, max(longest, 1)) + 1).astype(int)
    rows = []
    for start, stop in pairwise(edges.tolist()):
        first = np.concatenate([x[start:stop] for x, _ in pairs])
        second = np.concatenate([y[start:stop] for _, y in pairs])
        differ = ~same_experts(first, second)
        rows.append((len(first), differ.mean(), differ.any(axis=1).mean(), overlap(first, second).mean()))
    return pd.DataFrame(
        rows,
        columns=["tokens", "routers_differ", "tokens_differ", "overlap"],
        index=pd.Index(edges[:-1], name="start"),
    )


def _logprobs(trace: RouteTrace) -> npt.NDArray[np.float32]:
    assert trace.logprobs is not None  # the caller looked
    return trace.logprobs
