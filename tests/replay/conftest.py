"""Real megatron-core models, small and random, that the tests of live modules share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def gloo(tmp_path_factory):
    """This process as the only rank of a process group."""
    torch = pytest.importorskip("torch", reason="needs moe-rtk[megatron]")
    pytest.importorskip("megatron.core", reason="needs moe-rtk[megatron]")
    import torch.distributed as dist
    from megatron.core import parallel_state

    from rtk.replay.live import cpu_stand_ins

    torch.set_num_threads(1)
    rendezvous = tmp_path_factory.mktemp("gloo") / "rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous.as_uri(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    cpu_stand_ins.apply()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def megatron_config(**settings):
    """Four layers of which the first is dense, eight experts, top-2."""
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        **{
            "num_layers": 4,
            "hidden_size": 32,
            "ffn_hidden_size": 64,
            "num_attention_heads": 4,
            "normalization": "RMSNorm",
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "add_bias_linear": False,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "num_moe_experts": 8,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 16,
            "moe_layer_freq": [0, 1, 1, 1],
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather",
            "moe_enable_routing_replay": True,
            "params_dtype": torch.float32,
            "pipeline_dtype": torch.float32,
            "use_cpu_initialization": True,
            "bias_activation_fusion": False,
            "bias_dropout_fusion": False,
            "masked_softmax_fusion": False,
            "apply_rope_fusion": False,
            "persist_layer_norm": False,
        }
        | settings
    )


def megatron_model(*, seed=0, vp_stage=None, pp_rank=None, pg_collection=None, **settings):
    """A GPTModel, or one chunk of it, in training mode; the same seed gives the same weights."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec

    torch.manual_seed(seed)
    config = megatron_config(init_method_std=0.3, **settings)
    place = {"vp_stage": vp_stage, "pp_rank": pp_rank}
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, **place)
    mtp = None
    if config.mtp_num_layers:
        mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, **place)
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        mtp_block_spec=mtp,
        vocab_size=64,
        max_sequence_length=64,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    ).train()
