"""What live megatron-core modules say about themselves: their shard, and whether they can replay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig

from rtk.errors import ShardError
from rtk.layout.model_layout import ModelLayout
from rtk.replay.layouts.shard import Shard

# CUDA graph scopes that hold the router; without any scope a whole layer is captured.
_GRAPHED = {"full_iteration", "moe", "moe_router", "moe_preprocess"}


def read(chunks: Sequence[torch.nn.Module], layout: ModelLayout | None) -> Shard:
    """See `rtk.replay.megatron.shard_of`."""
    if not chunks:
        raise ShardError("an empty list of model chunks is no shard")
    config = _config(chunks[0])
    virtual = config.virtual_pipeline_model_parallel_size or 1
    if len(chunks) != virtual:
        raise ShardError(
            f"there are {len(chunks)} model chunks while virtual_pipeline_model_parallel_size is {virtual}: give "
            "the whole list of chunks, as Megatron's get_model returns it"
        )
    layout = layout or _layout(config)
    ranks = {
        name: _rank(chunks[0], group, size)
        for name, group, size in (
            ("pipeline", "pp", config.pipeline_model_parallel_size),
            ("tensor", "tp", config.tensor_model_parallel_size),
            ("context", "cp", config.context_parallel_size),
            ("expert", "ep", config.expert_model_parallel_size),
        )
    }
    shard = Shard(
        layout,
        pipeline_size=config.pipeline_model_parallel_size,
        pipeline_rank=ranks["pipeline"],
        virtual_size=virtual,
        num_layers_in_first_pipeline_stage=config.num_layers_in_first_pipeline_stage,
        num_layers_in_last_pipeline_stage=config.num_layers_in_last_pipeline_stage,
        account_for_embedding_in_pipeline_split=config.account_for_embedding_in_pipeline_split,
        account_for_loss_in_pipeline_split=config.account_for_loss_in_pipeline_split,
        pipeline_layout=_pipeline_layout(config),
        mtp_layers=config.mtp_num_layers or 0,
        tensor_size=config.tensor_model_parallel_size,
        tensor_rank=ranks["tensor"],
        sequence_parallel=config.sequence_parallel,
        context_size=config.context_parallel_size,
        context_rank=ranks["context"],
        expert_size=config.expert_model_parallel_size,
        expert_rank=ranks["expert"],
    )
    _compare(shard, chunks)
    return shard


def ignores_replay(router: TopKRouter) -> str | None:
    """Why a router that has a RouterReplay would not send tokens where that says; None if it would.

    Each of these is silent in megatron-core 0.16.1.
    """
    config = router.config
    if config.moe_router_fusion:
        return "moe_router_fusion=True chooses experts in a kernel that never asks it; turn the fusion off"
    if router.routing_type == "sinkhorn":
        return (
            "moe_router_load_balancing_type='sinkhorn' chooses experts without asking it; use another "
            "load balancing type"
        )
    if config.moe_expert_capacity_factor is not None:
        return (
            f"moe_expert_capacity_factor={config.moe_expert_capacity_factor} drops tokens from the replayed "
            "experts; set it to None"
        )
    if getattr(config, "cuda_graph_impl", "none") != "none":
        scopes = {getattr(scope, "name", scope) for scope in config.cuda_graph_scope}
        if not scopes or scopes & _GRAPHED:
            return (
                f"cuda_graph_impl={config.cuda_graph_impl!r} captures the router with the routes of one "
                "microbatch; leave the router out of cuda_graph_scope"
            )
    return None


def mtp_layers(chunk: torch.nn.Module) -> Iterator[tuple[int, torch.nn.Module]]:
    """The chunk's MTP layers, each with its depth (1-based)."""
    for module in chunk.modules():
        if isinstance(module, MultiTokenPredictionLayer):
            yield module.layer_number, module


def _config(chunk: torch.nn.Module) -> TransformerConfig:
    for module in chunk.modules():
        if isinstance(config := getattr(module, "config", None), TransformerConfig):
            return config
    raise ShardError(f"{type(chunk).__name__} holds no megatron-core module with a TransformerConfig")


def _layout(config: TransformerConfig) -> ModelLayout:
    if not config.num_moe_experts:
        raise ShardError("num_moe_experts is not set: this is no MoE model")
    return ModelLayout.from_megatron(
        num_layers=config.num_layers,
        num_experts=config.num_moe_experts,
        moe_router_topk=config.moe_router_topk,
        moe_layer_freq=config.moe_layer_freq,
    )


def _rank(chunk: torch.nn.Module, group: str, size: int) -> int:
    """The rank in a group of the modules' own, or in the process-wide one of `parallel_state`."""
    for module in chunk.modules():
        own = getattr(getattr(module, "pg_collection", None), group, None)
        if own is not None:
            if own.size() != size:
                raise ShardError(
                    f"the {group} process group has {own.size()} ranks while the config says {size}"
                )
            return int(own.rank())
    rank: dict[str, Any] = {
        "pp": parallel_state.get_pipeline_model_parallel_rank,
        "tp": parallel_state.get_tensor_model_parallel_rank,
        "cp": parallel_state.get_context_parallel_rank,
        "ep": parallel_state.get_expert_model_parallel_rank,
    }
    return int(rank[group]())


def _pipeline_layout(config: TransformerConfig) -> str | None:
    """Megatron's pipeline_model_parallel_layout as a string; a list of lists is spelt as one."""
    layout = config.pipeline_model_parallel_layout
    if layout is None:
        return None
    letters = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    # Its own grid is [pipeline rank][virtual rank]; the string goes through all ranks, chunk by chunk.
    return "|".join(
        "".join(letters[kind.name] for kind in layout.layout[rank][virtual])
        for virtual in range(layout.virtual_pipeline_model_parallel_size)
        for rank in range(layout.pipeline_model_parallel_size)
    )


def _compare(shard: Shard, chunks: Sequence[torch.nn.Module]) -> None:
    """Whether the modules hold the layers and routers that the shard says."""
    for index, (chunk, expected) in enumerate(zip(chunks, shard.chunks, strict=True)):
        live = tuple(
            layer.layer_number
            for block in chunk.modules()
            if isinstance(block, TransformerBlock)
            for layer in block.layers
        )
        if live != expected:
            raise ShardError(
                f"chunk {index} holds layers {list(live)} while its config and ranks ({shard}) put layers "
                f"{list(expected)} there: are the chunks in the order of their vp_stage?"
            )
    inside_mtp = {router for chunk in chunks for _, layer in mtp_layers(chunk) for router in _routers(layer)}
    backbone = [router for chunk in chunks for router in _routers(chunk) if router not in inside_mtp]
    numbers = tuple(router.layer_number for router in backbone)
    if numbers != shard.router_layer_numbers:
        raise ShardError(
            f"the modules have routers in layers {list(numbers)}, the layout says {list(shard.router_layer_numbers)}: "
            "moe_layer_freq or the layout is that of another model"
        )
    for router in backbone:
        if (router.config.num_moe_experts, router.topk) != (shard.layout.num_experts, shard.layout.top_k):
            raise ShardError(
                f"the router of layer {router.layer_number} chooses {router.topk} of {router.config.num_moe_experts} "
                f"experts, the layout says {shard.layout.top_k} of {shard.layout.num_experts}"
            )
    depths = tuple(depth for chunk in chunks for depth, layer in mtp_layers(chunk) if any(_routers(layer)))
    if depths != shard.mtp_router_numbers:
        raise ShardError(
            f"the modules have MTP routers at depths {list(depths)}, the layout says {list(shard.mtp_router_numbers)}"
        )


def _routers(module: torch.nn.Module) -> Iterator[TopKRouter]:
    return (inner for inner in module.modules() if isinstance(inner, TopKRouter))
