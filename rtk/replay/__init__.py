"""Bring a rollout's routes to a Megatron shard's routers, and check that they line up.

Rollout routing replay (R3, arXiv 2510.11370) makes the trainer's routers use the experts that the
rollout's routers chose. `expand` prepares the tensors, `check` says whether they fit the shard, and
`verify` tries them on real stages, in processes of their own. `session` replays them in a training loop.
Live megatron-core modules are met in `session` and `rtk.replay.megatron` alone, which import torch and
megatron-core.
"""

import importlib
from typing import TYPE_CHECKING, Any

from rtk.replay._verify import StageResult, verify
from rtk.replay.batch import Batch, LocalTokens, alignment
from rtk.replay.check import check
from rtk.replay.expand import ExpandedRoutes, expand
from rtk.replay.report import Agreement, Finding, Hypothesis, ReplayReport
from rtk.replay.shard import Shard

if TYPE_CHECKING:
    from rtk.replay._session import session

__all__ = [
    "Agreement",
    "Batch",
    "ExpandedRoutes",
    "Finding",
    "Hypothesis",
    "LocalTokens",
    "ReplayReport",
    "Shard",
    "StageResult",
    "alignment",
    "check",
    "expand",
    "session",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "session":
        return importlib.import_module("rtk.replay._session").session
    raise AttributeError(f"module 'rtk.replay' has no attribute {name!r}")
