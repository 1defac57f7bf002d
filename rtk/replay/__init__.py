"""Bring a rollout's routes to a Megatron shard's routers, and check that they line up.

Rollout routing replay (R3, arXiv 2510.11370) makes the trainer's routers use the experts that the
rollout's routers chose. `expand` prepares the tensors, `check` says whether they fit the shard, and
`verify` tries them on real stages, in processes of their own. Live megatron-core modules are met in
`rtk.replay.megatron` alone, which imports torch and megatron-core.
"""

from rtk.replay._verify import StageResult, verify
from rtk.replay.check import check
from rtk.replay.expand import ExpandedRoutes, expand
from rtk.replay.report import Agreement, Finding, Hypothesis, ReplayReport
from rtk.replay.shard import Shard

__all__ = [
    "Agreement",
    "ExpandedRoutes",
    "Finding",
    "Hypothesis",
    "ReplayReport",
    "Shard",
    "StageResult",
    "check",
    "expand",
    "verify",
]
