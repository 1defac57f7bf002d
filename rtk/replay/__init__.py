"""Bring a rollout's routes to a Megatron shard's routers, and check that they line up.

Rollout routing replay (R3, arXiv 2510.11370) makes the trainer's routers use the experts that the
rollout's routers chose. `expand` prepares the tensors, `check` says whether they fit the shard, and
`verify` tries them on real stages, in processes of their own. `session` replays them in a training loop.
Live megatron-core modules are met in `session` and `rtk.replay.megatron` alone, which import torch and
megatron-core.
"""

import importlib
from typing import TYPE_CHECKING, Any

from rtk.replay.checks.check import check
from rtk.replay.checks.report import Agreement, Finding, Hypothesis, ReplayReport
from rtk.replay.layouts.batch import Batch, LocalTokens, alignment
from rtk.replay.layouts.expand import ExpandedRoutes, expand
from rtk.replay.layouts.shard import Shard
from rtk.replay.live.verification import StageResult, verify

if TYPE_CHECKING:
    from rtk.replay import faults
    from rtk.replay.live import megatron
    from rtk.replay.live.microbatches import session

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
    "faults",
    "megatron",
    "session",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "session":
        return importlib.import_module("rtk.replay.live.microbatches").session
    if name == "megatron":
        return importlib.import_module("rtk.replay.live.megatron")
    if name == "faults":
        return importlib.import_module("rtk.replay.faults")
    raise AttributeError(f"module 'rtk.replay' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
