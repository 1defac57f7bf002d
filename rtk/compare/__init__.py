"""How far two engines, or two runs, route the same tokens alike, and how far their probabilities differ."""

from rtk.compare.agreement import agreement
from rtk.compare.logprobs import LogprobGap, logprob_gap
from rtk.compare.mismatch import Mismatch, by_position, mismatch
from rtk.compare.saturation import router_saturation

__all__ = [
    "LogprobGap",
    "Mismatch",
    "agreement",
    "by_position",
    "logprob_gap",
    "mismatch",
    "router_saturation",
]
