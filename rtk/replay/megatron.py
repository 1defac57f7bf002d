"""Live megatron-core routers: read their layer numbers, install routes, record what they choose.

Written against megatron-core 0.16.1, whose `TopKRouter` holds a `RouterReplay` when the config says
`moe_enable_routing_replay`. Importing this module needs torch and megatron-core.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from rtk.errors import ShardError
from rtk.replay.expand import ExpandedRoutes

try:
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{error}: pip install 'rtk[megatron]'", name=error.name) from error

Model = torch.nn.Module | Sequence[torch.nn.Module]


def routers(model: Model) -> list[TopKRouter]:
    """The model's routers in the order in which Megatron built them.

    Args:
        model: a module, wrapped or not, or the list of chunks of a virtual pipeline.
    """
    chunks = [model] if isinstance(model, torch.nn.Module) else model
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)]


def router_layer_numbers(model: Model) -> tuple[int, ...]:
    """Megatron layer numbers (1-based, global) of the model's routers, in order of construction."""
    return tuple(router.layer_number for router in routers(model))


def install(expanded: ExpandedRoutes, model: Model) -> None:
    """Hand each router the routes of its own layer, for its next forward pass.

    The ids stay int32, which torch indexes with as it does with int64. Each router's own RouterReplay is
    set, not the flat list of all instances in the process, whose order says nothing about layers.

    Args:
        expanded: one tensor a router; see `rtk.replay.expand`.
        model: the shard's module or chunks.

    Raises:
        ShardError: the tensors are not those of the model's routers, or a router has no RouterReplay.
            Nothing is installed then.
    """
    live = router_layer_numbers(model)
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
    targets = [(_replay_of(router), router.weight.device) for router in routers(model)]
    for (replay, device), tensor in zip(targets, expanded.tensors, strict=True):
        replay.set_target_indices(torch.tensor(tensor, dtype=torch.int32, device=device))


@contextlib.contextmanager
def recording(model: Model) -> Iterator[dict[int, torch.Tensor]]:
    """Record what the routers choose in the forward passes of the block.

    Yields:
        a dict that after the block holds, by layer number, the int64 ids `[tokens, top_k]` of the last
        forward pass, in the shard's own token order.

    Raises:
        ShardError: a router has no RouterReplay, or no forward pass reached it.
    """
    recorded: dict[int, torch.Tensor] = {}
    with _action(model, RouterReplayAction.RECORD):
        yield recorded
        for router in routers(model):
            ids = _replay_of(router).get_recorded_indices()
            if ids is None:
                raise ShardError(
                    f"the router of layer {router.layer_number} recorded nothing: no forward pass reached it"
                )
            recorded[router.layer_number] = ids


@contextlib.contextmanager
def replaying(model: Model, expanded: ExpandedRoutes) -> Iterator[None]:
    """Make the forward passes of the block use the given routes.

    Raises:
        ShardError: as `install`.
    """
    with _action(model, RouterReplayAction.REPLAY_FORWARD):
        install(expanded, model)
        yield


@contextlib.contextmanager
def _action(model: Model, action: RouterReplayAction) -> Iterator[None]:
    """Set an action on every router; leave none of it behind, after an exception neither.

    Left-over actions or targets would steer the next forward pass in silence, and the list for the
    backward pass grows with every installed target that no recompute pops.
    """
    replays = [_replay_of(router) for router in routers(model)]
    try:
        for replay in replays:
            replay.clear_indices()
            replay.set_router_replay_action(action)
        yield
    finally:
        for replay in replays:
            replay.clear_router_replay_action()
            replay.clear_indices()


def _replay_of(router: TopKRouter) -> RouterReplay:
    replay = router.router_replay
    if replay is None:
        raise ShardError(
            f"the router of layer {router.layer_number} has no RouterReplay: build the model with "
            "moe_enable_routing_replay=True"
        )
    return replay
