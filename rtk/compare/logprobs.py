"""How far two engines' probabilities of the same tokens differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rtk.errors import TraceError

if TYPE_CHECKING:
    pass

# R3's F(tau) is drawn for these. SkyRL sends -9999.0 for a logprob that is missing or not finite.
_TAUS = (2.0, 5.0, 10.0)
_NO_LOGPROB = -9998.0


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
