"""How far two engines, or two runs, route the same tokens alike, and how far their probabilities differ."""

from rtk.compare.agreement import (
    LogprobGap,
    Mismatch,
    agreement,
    by_position,
    logprob_gap,
    mismatch,
    router_saturation,
)

__all__ = [
    "LogprobGap",
    "Mismatch",
    "agreement",
    "by_position",
    "logprob_gap",
    "mismatch",
    "router_saturation",
]
