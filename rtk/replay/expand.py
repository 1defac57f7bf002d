"""From a trace's compact ids to the one tensor a router that a trainer installs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rtk.errors import ShardError
from rtk.replay.shard import Shard
from rtk.trace import RouteTrace


@dataclass(frozen=True)
class ExpandedRoutes:
    """Target routes for the routers of one shard.

    Attributes:
        tensors: one int32 array `[tokens, top_k]` a local router, in the order in which Megatron builds
            the routers, as `RouterReplay.set_replay_data` takes them.
        layer_numbers: the Megatron layer number (1-based, global) of each.
    """

    tensors: tuple[npt.NDArray[np.int32], ...]
    layer_numbers: tuple[int, ...]


def expand(trace: RouteTrace, shard: Shard) -> ExpandedRoutes:
    """Select the shard's own MoE layers from a trace and widen them, and only them, to int32.

    Rows are the trace's rows, so `tokens` is `len(trace.token_ids) - 1` for a sampled sequence: the
    inputs `token_ids[:-1]` of a next-token loss, each of which has its routes.

    Layers are found by their global layer number, not by an offset into the list of MoE layers, which
    would be right only where all dense layers come first (the fault of verl #5452).

    Returns:
        An ExpandedRoutes without any tensor where the stage holds dense layers only.

    Raises:
        ShardError: the shard is of another model than the trace.
    """
    if shard.layout != trace.layout:
        raise ShardError(f"the shard is of a model with {shard.layout}, the trace of one with {trace.layout}")
    numbers = shard.router_layer_numbers
    tensors = tuple(np.ascontiguousarray(trace.routed_experts[:, n - 1], dtype=np.int32) for n in numbers)
    return ExpandedRoutes(tensors=tensors, layer_numbers=numbers)
