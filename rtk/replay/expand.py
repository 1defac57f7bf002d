"""From a trace's compact ids to the one tensor a router that a trainer installs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rtk.errors import ShardError
from rtk.replay.batch import Batch, Placement
from rtk.replay.shard import Shard
from rtk.trace import RouteTrace
from rtk.usage import as_traces


@dataclass(frozen=True)
class ExpandedRoutes:
    """Target routes for the routers of one shard.

    Attributes:
        tensors: one int32 array `[rows, top_k]` a local router, in the order in which Megatron builds
            the routers, as `RouterReplay.set_replay_data` takes them.
        layer_numbers: the Megatron layer number (1-based, global) of each.
        padding_mask: bool `[rows]`, True for padding, which belongs into no load statistics.
    """

    tensors: tuple[npt.NDArray[np.int32], ...]
    layer_numbers: tuple[int, ...]
    padding_mask: npt.NDArray[np.bool_]


def expand(
    traces: RouteTrace | Iterable[RouteTrace], shard: Shard, *, batch: Placement | None = None
) -> ExpandedRoutes:
    """Select the shard's own MoE layers from traces and widen them, and only them, to int32.

    Without a batch, rows are the traces' rows, one trace after the other: for a sampled sequence
    `len(trace.token_ids) - 1` of them, the inputs `token_ids[:-1]` of a next-token loss.

    Layers are found by their global layer number, not by an offset into the list of MoE layers, which
    would be right only where all dense layers come first (the fault of verl #5452).

    Args:
        traces: one trace, or those of one microbatch.
        shard: whose routers the tensors are for.
        batch: how the traces become the model's input. Its padding rows get the experts of
            `padding_experts`, in their order.

    Returns:
        An ExpandedRoutes without any tensor where the stage holds dense layers only.

    Raises:
        ShardError: the shard is of another model than a trace, or does not divide the batch.
    """
    several = as_traces(traces)
    for trace in several:
        if shard.layout != trace.layout:
            raise ShardError(
                f"the shard is of a model with {shard.layout}, the trace of one with {trace.layout}"
            )
    here = (batch or Batch.packed(several)).local(shard)
    padding = here.padding_mask
    filler = padding_experts(int(padding.sum()), shard)
    numbers = shard.router_layer_numbers
    tensors = []
    for number in numbers:
        tensor = np.empty((len(padding), shard.layout.top_k), dtype=np.int32)
        tensor[padding] = filler
        for index, trace in enumerate(several):
            rows = here.sample == index
            tensor[rows] = trace.routed_experts[here.row[rows], number - 1]
        tensors.append(tensor)
    return ExpandedRoutes(tensors=tuple(tensors), layer_numbers=numbers, padding_mask=padding)


def padding_experts(rows: int, shard: Shard) -> npt.NDArray[np.int32]:
    """Distinct experts for padding rows, dealt out to the expert-parallel ranks in turn.

    Megatron gives rank r the experts from r * E / size on. Dealt slot by slot, experts 0, E/size, 2E/size, ...
    and then 1, E/size + 1, ..., every rank gets an equal share of the slots, give or take one. (All padding on
    the first experts ran one rank out of memory: miles #2697, slime #2308, prime-rl #3350, verl #7524.)

    Returns:
        int32 `[rows, top_k]`.
    """
    experts, ranks = shard.layout.num_experts, shard.expert_size
    dealt = np.arange(experts, dtype=np.int32).reshape(ranks, experts // ranks).T.ravel()
    slots = np.arange(rows * shard.layout.top_k) % experts
    return dealt[slots].reshape(rows, shard.layout.top_k)
