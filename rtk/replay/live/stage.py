"""One pipeline rank of a Qwen3-MoE model in megatron-core, on gloo, for checks and not for training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_config import TransformerConfig

from rtk.errors import ShardError
from rtk.layout.model_layout import ModelLayout
from rtk.replay.live import hf_weights

# What a Qwen3-MoE config may say that this builder does not build, with the values that it does.
_ONLY = {
    "attention_bias": (None, False),
    "hidden_act": ("silu",),
    "norm_topk_prob": (True, False),
    "rope_scaling": (None,),
    "use_sliding_window": (None, False),
}


class Stage:
    """A pipeline rank's part of the model with its weights, float32; every rank makes its own.

    Sizes and ranks are those of megatron-core's `parallel_state`.

    Args:
        folder: a Qwen3-MoE model folder with config.json and model.safetensors.

    Attributes:
        chunks: megatron-core's GPTModel, or several where the pipeline is virtual.

    Raises:
        ShardError: the model is of another kind, or its weights do not fit.
    """

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if config.get("model_type") != "qwen3_moe":
            raise ShardError(
                f"{folder} is a {config.get('model_type')!r} model; only qwen3_moe can be built here"
            )
        for name, allowed in _ONLY.items():
            if config.get(name) not in allowed:
                raise ShardError(f"{folder} has {name}={config.get(name)!r}, which is not built here")
        self._hidden_size = config["hidden_size"]
        virtual_size = parallel_state.get_virtual_pipeline_model_parallel_world_size()
        megatron_config = _megatron_config(config, ModelLayout.from_config(config), virtual_size)
        self.chunks = [
            _chunk(megatron_config, config, stage if virtual_size else None)
            for stage in range(virtual_size or 1)
        ]
        for chunk in self.chunks:
            hf_weights.load(
                chunk,
                folder,
                groups=config["num_key_value_heads"],
                head_dim=config["head_dim"],
                tied=config["tie_word_embeddings"],
            )

    @torch.no_grad()
    def forward(self, token_ids: torch.Tensor) -> torch.Tensor | None:
        """Forward one sequence through the whole pipeline; every stage calls this with the same tokens.

        Ranks of one expert-parallel group exchange tokens, so theirs must be equally many.

        Args:
            token_ids: int64 `[tokens]`.

        Returns:
            logits `[tokens, vocabulary]` on the last stage, None on the others.
        """
        tokens = len(token_ids)
        positions = torch.arange(tokens)
        future = positions[None, :] > positions[:, None]
        for chunk in self.chunks:
            if not chunk.pre_process:
                hidden = torch.empty(tokens, 1, self._hidden_size)
                dist.recv(hidden, src=parallel_state.get_pipeline_model_parallel_prev_rank())
                chunk.set_input_tensor(hidden)
            output = chunk(token_ids[None], positions[None], future[None, None])
            if chunk.post_process:
                logits: torch.Tensor = output[0]
                return logits
            dist.send(output.contiguous(), dst=parallel_state.get_pipeline_model_parallel_next_rank())
        return None


def _chunk(megatron_config: TransformerConfig, config: dict[str, Any], vp_stage: int | None) -> GPTModel:
    place = {"ignore_virtual": False, "vp_stage": vp_stage}
    return GPTModel(
        config=megatron_config,
        transformer_layer_spec=get_gpt_decoder_block_spec(
            megatron_config, use_transformer_engine=False, vp_stage=vp_stage
        ),
        vocab_size=config["vocab_size"],
        max_sequence_length=config["max_position_embeddings"],
        pre_process=parallel_state.is_pipeline_first_stage(**place),
        post_process=parallel_state.is_pipeline_last_stage(**place),
        # Tied weights are loaded twice instead: sharing them between stages goes through CUDA.
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=_rope_theta(config),
        parallel_output=False,
        vp_stage=vp_stage,
    ).eval()


def _megatron_config(
    config: dict[str, Any], layout: ModelLayout, virtual_size: int | None
) -> TransformerConfig:
    return TransformerConfig(
        num_layers=layout.num_layers,
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=config["num_attention_heads"],
        num_query_groups=config["num_key_value_heads"],
        kv_channels=config["head_dim"],
        qk_layernorm=True,
        normalization="RMSNorm",
        layernorm_epsilon=config["rms_norm_eps"],
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        num_moe_experts=layout.num_experts,
        moe_router_topk=layout.top_k,
        moe_ffn_hidden_size=config["moe_intermediate_size"],
        moe_layer_freq=[int(layer in layout.moe_layers) for layer in range(layout.num_layers)],
        # Softmax over the chosen experts alone is softmax over all of them, renormalised.
        moe_router_pre_softmax=not config["norm_topk_prob"],
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather",  # the other ones want CUDA
        moe_enable_routing_replay=True,
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        virtual_pipeline_model_parallel_size=virtual_size,
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        pipeline_dtype=torch.float32,
        params_dtype=torch.float32,
        use_cpu_initialization=True,
        # The fused kernels are CUDA's.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )


def _rope_theta(config: dict[str, Any]) -> float:
    # transformers 5 keeps it one level down; older configs on top.
    parameters = config.get("rope_parameters")
    theta = parameters.get("rope_theta") if isinstance(parameters, dict) else config.get("rope_theta")
    if isinstance(parameters, dict) and parameters.get("rope_type", "default") != "default":
        raise ShardError(f"RoPE of type {parameters['rope_type']!r} is not built here")
    if not isinstance(theta, int | float):
        raise ShardError("the config names no rope_theta")
    return float(theta)
