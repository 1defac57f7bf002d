"""Live megatron-core routers: read what a shard holds, install routes, record what routers choose.

Written against megatron-core 0.16.1, whose `TopKRouter` holds a `RouterReplay` when the config says
`moe_enable_routing_replay`. Importing this module needs torch and megatron-core.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from rtk.errors import ShardError
from rtk.extras import bringing
from rtk.layout.model_layout import ModelLayout
from rtk.replay.layouts.expand import ExpandedRoutes
from rtk.replay.layouts.shard import Shard

with bringing("megatron"):
    import torch
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    from rtk.replay.live import model_shard

Model = torch.nn.Module | Sequence[torch.nn.Module]

# Routers that a session or a recording steers: two of them would undo each other's actions.
_claimed: weakref.WeakSet[TopKRouter] = weakref.WeakSet()


def shard_of(model: Model, layout: ModelLayout | None = None) -> Shard:
    """Read off live modules which part of which model they are.

    Sizes come from the modules' own config, ranks from the process groups that they were built with, and
    layer numbers and top-k from each layer and router. What the resulting Shard says of its layers is then
    compared with what the modules say.

    Two things no module knows: whether the trainer cuts sequences zigzag or contiguous under context
    parallelism (Megatron's own way, zigzag, is assumed), and what a batch looks like.

    Args:
        model: a module, wrapped or not, or the list of all chunks of a virtual pipeline.
        layout: the whole model's layers and routers; read from the config's `num_layers`,
            `moe_layer_freq`, `num_moe_experts` and `moe_router_topk` where it is not given.

    Raises:
        ShardError: the modules contradict their config or the layout, chunks are missing, or the config
            says nothing about MoE layers.
        LayoutError: the config's numbers contradict each other.
    """
    return model_shard.read(chunks_of(model), layout)


def routing_groups(model: Model) -> tuple[int, int] | None:
    """Group-limited routing (DeepSeek-V3, arXiv 2412.19437): the number of groups into which the experts
    fall, and how many groups a token may use; None where all experts may be chosen together."""
    for router in routers(model):
        groups, used = router.config.moe_router_num_groups, router.config.moe_router_group_topk
        if groups and used:
            return int(groups), int(used)
    return None


def chunks_of(model: Model) -> list[torch.nn.Module]:
    """The model's chunks: itself, or each of the list of a virtual pipeline."""
    return [model] if isinstance(model, torch.nn.Module) else list(model)


def routers(model: Model) -> list[TopKRouter]:
    """The model's routers in the order in which Megatron built them, those of MTP layers too.

    Args:
        model: a module, wrapped or not, or the list of chunks of a virtual pipeline.
    """
    return [
        module for chunk in chunks_of(model) for module in chunk.modules() if isinstance(module, TopKRouter)
    ]


def router_layer_numbers(model: Model) -> tuple[int, ...]:
    """Megatron layer numbers (1-based, global) of the model's backbone routers, in order of construction."""
    depths = mtp_depths(model)
    return tuple(router.layer_number for router in routers(model) if router not in depths)


def mtp_depths(model: Model) -> dict[TopKRouter, int]:
    """The routers that stand in MTP layers, each with its depth (1-based).

    They are told by where they stand and not by their layer number: 0.16.1 counts on from the backbone's
    last layer, other versions start again from 1, and would make MTP layer 1 look like backbone layer 1.
    """
    return {
        router: depth
        for chunk in chunks_of(model)
        for depth, layer in model_shard.mtp_layers(chunk)
        for router in routers(layer)
    }


def install(expanded: ExpandedRoutes, model: Model) -> None:
    """Hand each router the routes of its own layer, for its next forward pass.

    The ids stay int32, which torch indexes with as it does with int64. Each router's own RouterReplay is
    set, not the flat list of all instances in the process, whose order says nothing about layers.

    Args:
        expanded: one tensor a router; see `rtk.replay.expand`.
        model: the shard's module or chunks.

    Raises:
        ShardError: the tensors are not those of the model's routers, or a router has no RouterReplay or
            ignores it. Nothing is installed then.
    """
    replays = {router: replay_of(router) for router in routers(model)}
    for router, ids in targets(expanded, model).items():
        replays[router].set_target_indices(on_device_of(router, ids))


def targets(expanded: ExpandedRoutes, model: Model) -> dict[TopKRouter, npt.NDArray[np.int32]]:
    """Each router's ids, int32 `[rows, top_k]`; routers of MTP layers have some only where routes are given.

    Raises:
        ShardError: the tensors are not those of the model's routers.
    """
    depths = mtp_depths(model)
    backbone = [router for router in routers(model) if router not in depths]
    live = tuple(router.layer_number for router in backbone)
    if live != expanded.layer_numbers:
        raise ShardError(
            f"the routes are for the routers of layers {list(expanded.layer_numbers)}, while this model's routers "
            f"are of layers {list(live)}: expand the trace for this shard's own pipeline rank and layout"
        )
    if len(expanded.tensors) != len(live):
        raise ShardError(
            f"there are {len(expanded.tensors)} tensors for the {len(live)} routers of layers {list(live)}: give "
            "one for each local MoE layer, and none for a dense layer"
        )
    ids = dict(zip(backbone, expanded.tensors, strict=True))
    if expanded.mtp_numbers:
        if tuple(depths.values()) != expanded.mtp_numbers:
            raise ShardError(
                f"the MTP routes are for depths {list(expanded.mtp_numbers)}, while this model has MTP routers at "
                f"depths {list(depths.values())}"
            )
        ids |= zip(depths, expanded.mtp_tensors, strict=True)
    return ids


def on_device_of(router: TopKRouter, ids: npt.NDArray[np.int32]) -> torch.Tensor:
    """A copy of the ids as an int32 tensor where the router is."""
    return torch.tensor(ids, dtype=torch.int32, device=router.weight.device)


@contextlib.contextmanager
def recording(model: Model) -> Iterator[dict[int, torch.Tensor]]:
    """Record what the routers choose in the forward passes of the block.

    Yields:
        a dict that after the block holds, by layer number, the int64 ids `[tokens, top_k]` of the last
        forward pass, in the shard's own token order. An MTP layer of depth d counts as layer
        `num_layers + d`.

    Raises:
        ShardError: a router has no RouterReplay or ignores it, is in a session already, or no forward pass
            reached it.
    """
    recorded: dict[int, torch.Tensor] = {}
    with _action(model, RouterReplayAction.RECORD) as replays:
        yield recorded
        depths = mtp_depths(model)
        for router, replay in replays.items():
            ids = replay.get_recorded_indices()
            if ids is None:
                raise ShardError(
                    f"the router of layer {router.layer_number} recorded nothing: no forward pass reached it"
                )
            mtp = router in depths
            recorded[router.config.num_layers + depths[router] if mtp else router.layer_number] = ids


@contextlib.contextmanager
def replaying(model: Model, expanded: ExpandedRoutes) -> Iterator[None]:
    """Make the forward passes of the block use the given routes; for training steps see `rtk.replay.session`.

    Raises:
        ShardError: as `install`.
    """
    with _action(model, RouterReplayAction.REPLAY_FORWARD):
        install(expanded, model)
        yield


@contextlib.contextmanager
def _action(model: Model, action: RouterReplayAction) -> Iterator[Mapping[TopKRouter, RouterReplay]]:
    """Set an action on every router; leave none of it behind, after an exception neither.

    Left-over actions or targets would steer the next forward pass in silence, and the list for the
    backward pass grows with every installed target that no recompute pops.
    """
    with claim(model) as replays:
        try:
            for replay in replays.values():
                clear(replay)
                replay.set_router_replay_action(action)
            yield replays
        finally:
            for replay in replays.values():
                clear(replay)


@contextlib.contextmanager
def claim(model: Model) -> Iterator[Mapping[TopKRouter, RouterReplay]]:
    """Keep a model's routers for one session or recording.

    Yields:
        each router's RouterReplay.

    Raises:
        ShardError: a router has no RouterReplay or ignores it, or is claimed already.
    """
    replays = {router: replay_of(router) for router in routers(model)}
    if taken := [router.layer_number for router in replays if router in _claimed]:
        raise ShardError(
            f"the routers of layers {taken} are in a replay session or a recording already, and sessions do not "
            "nest: end the other one first"
        )
    _claimed.update(replays)
    try:
        yield replays
    finally:
        _claimed.difference_update(replays)


def clear(replay: RouterReplay) -> None:
    """Take a router's action and all its ids away, the list for the backward pass included."""
    replay.clear_router_replay_action()
    replay.clear_indices()


def replay_of(router: TopKRouter) -> RouterReplay:
    """The router's RouterReplay.

    Raises:
        ShardError: it has none, or its configuration makes it ignore the one that it has.
    """
    replay = router.router_replay
    if replay is None:
        raise ShardError(
            f"the router of layer {router.layer_number} has no RouterReplay: build the model with "
            "moe_enable_routing_replay=True"
        )
    if why := model_shard.ignores_replay(router):
        raise ShardError(f"the router of layer {router.layer_number} would ignore its RouterReplay: {why}")
    return replay
