"""A Hugging Face Qwen3-MoE checkpoint, laid out as megatron-core's GPTModel wants it.

The names on the left are megatron-core 0.16's with its local (not Transformer Engine) layers; those on
the right are transformers'. The tensor parallel size is 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from safetensors import safe_open

from rtk.errors import ShardError

_PLAIN = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
_TOP = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
}
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc([12])\.weight")


def load(model: GPTModel, folder: Path, *, groups: int, head_dim: int, tied: bool) -> None:
    """Fill a model chunk with its part of the checkpoint.

    Args:
        model: a GPTModel, of one pipeline stage and one expert-parallel rank.
        folder: holds model.safetensors.
        groups: key-value heads (query groups).
        head_dim: size of an attention head.
        tied: whether the output layer is the embedding.

    Raises:
        ShardError: there is no model.safetensors, a parameter has no tensor in it or one of another shape,
            or it holds tensors that no parameter took and that are no other rank's.
    """
    file = folder / "model.safetensors"
    if not file.is_file():
        raise ShardError(f"there is no {file}; a checkpoint in several files has to be saved as one first")
    numbers = {index: layer.layer_number for index, layer in enumerate(model.decoder.layers)}
    local, experts = _local_experts(model), model.config.num_moe_experts
    used: set[str] = set()
    with safe_open(file, framework="pt") as checkpoint:
        names = set(checkpoint.keys())

        def take(name: str) -> torch.Tensor:
            if name not in names:
                raise ShardError(f"{folder} has no tensor {name}, which this pipeline stage needs")
            used.add(name)
            tensor: torch.Tensor = checkpoint.get_tensor(name)
            return tensor

        for name, parameter in model.named_parameters():
            tensor = _tensor(name, numbers, local.start, take, groups, head_dim, tied)
            if tensor.shape != parameter.shape:
                raise ShardError(
                    f"{name} is {list(parameter.shape)}, the checkpoint's part is {list(tensor.shape)}"
                )
            with torch.no_grad():
                parameter.copy_(tensor)
    every = range(1, model.config.num_layers + 1)
    others = set(every) - set(numbers.values())
    left = sorted(name for name in names - used if not _is_elsewhere(name, others, local, experts, tied))
    if left:
        raise ShardError(f"no parameter took {', '.join(left[:5])}, {len(left)} tensors in all, of {file}")


def _local_experts(model: torch.nn.Module) -> range:
    """Which of the model's experts are on this expert-parallel rank."""
    for module in model.modules():
        if isinstance(module, MoELayer):
            return range(module.local_expert_indices[0], module.local_expert_indices[-1] + 1)
    return range(0)  # all layers are dense


def _is_elsewhere(name: str, other_layers: set[int], local: range, experts: int, tied: bool) -> bool:
    """Whether a tensor that this rank did not take is one that another rank of the model takes."""
    if layer := re.match(r"model\.layers\.(\d+)\.", name):
        expert = re.match(r"mlp\.experts\.(\d+)\.", name[layer.end() :])
        other_expert = expert is not None and int(expert[1]) < experts and int(expert[1]) not in local
        return other_expert or int(layer[1]) + 1 in other_layers
    return name in _TOP.values() or (name == "lm_head.weight" and not tied)


def _tensor(
    name: str,
    numbers: dict[int, int],
    first_expert: int,
    take: Callable[[str], torch.Tensor],
    groups: int,
    head_dim: int,
    tied: bool,
) -> torch.Tensor:
    if name in _TOP:
        return take(_TOP[name])
    if name == "output_layer.weight":
        return take("model.embed_tokens.weight" if tied else "lm_head.weight")
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    if not match:
        raise ShardError(f"the parameter {name} has no counterpart in a Qwen3-MoE checkpoint")
    # Layers of a stage count from 0 again; the checkpoint's count is the global one.
    prefix, rest = f"model.layers.{numbers[int(match[1])] - 1}.", match[2]
    if rest in _PLAIN:
        return take(prefix + _PLAIN[rest])
    if rest == "self_attention.linear_qkv.weight":
        parts = [take(f"{prefix}self_attn.{part}_proj.weight") for part in "qkv"]
        for part, tensor in zip("qkv", parts, strict=True):
            if tensor.shape[0] % (groups * head_dim):
                raise ShardError(
                    f"{prefix}self_attn.{part}_proj.weight is {list(tensor.shape)}, whose rows do not divide into "
                    f"{groups} groups of heads of size {head_dim}"
                )
        # Megatron keeps each group's queries, key and value side by side.
        grouped = [part.view(groups, -1, head_dim, part.shape[-1]) for part in parts]
        return torch.cat(grouped, dim=1).flatten(0, 2)
    if rest == "mlp.linear_fc1.weight":
        return _gate_and_up(prefix + "mlp.", take)
    if expert := _EXPERT.fullmatch(rest):
        # So do the experts of an expert-parallel rank.
        source = f"{prefix}mlp.experts.{first_expert + int(expert[1])}."
        return _gate_and_up(source, take) if expert[2] == "1" else take(source + "down_proj.weight")
    raise ShardError(f"the parameter {name} has no counterpart in a Qwen3-MoE checkpoint")


def _gate_and_up(prefix: str, take: Callable[[str], torch.Tensor]) -> torch.Tensor:
    return torch.cat([take(f"{prefix}gate_proj.weight"), take(f"{prefix}up_proj.weight")])
