"""Shard's layers, chunk by chunk, against megatron-core's own functions, over many random layouts."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator

import numpy as np
import pytest

from rtk import ModelLayout
from rtk.errors import ShardError
from rtk.replay import Shard

pytest.importorskip("megatron.core", reason="needs moe-rtk[megatron]")
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_token_prediction import get_mtp_layer_offset
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

pytestmark = pytest.mark.megatron


@pytest.fixture(autouse=True)
def pipeline_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put back what the functions under test are told about a pipeline that does not run."""
    for name in (
        "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE",
        "_MPU_PIPELINE_MODEL_PARALLEL_RANK",
        "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE",
    ):
        monkeypatch.setattr(parallel_state, name, None)
    # Every configuration is logged with a stack trace where no process group is there.
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def megatron_config(shard_arguments: dict) -> TransformerConfig:
    layout: ModelLayout = shard_arguments["layout"]
    size = shard_arguments["pipeline_size"]
    virtual = shard_arguments.get("virtual_size", 1)
    return TransformerConfig(
        num_layers=layout.num_layers,
        hidden_size=8,
        num_attention_heads=1,
        num_moe_experts=layout.num_experts,
        moe_router_topk=layout.top_k,
        moe_ffn_hidden_size=8,
        add_bias_linear=False,
        moe_layer_freq=[int(layer in layout.moe_layers) for layer in range(layout.num_layers)],
        pipeline_model_parallel_size=size,
        pipeline_dtype=None if size == 1 else "float32",
        virtual_pipeline_model_parallel_size=None if virtual == 1 else virtual,
        pipeline_model_parallel_layout=shard_arguments.get("pipeline_layout"),
        mtp_num_layers=shard_arguments.get("mtp_layers") or None,
        **{
            name: shard_arguments[name]
            for name in (
                "num_layers_in_first_pipeline_stage",
                "num_layers_in_last_pipeline_stage",
                "account_for_embedding_in_pipeline_split",
                "account_for_loss_in_pipeline_split",
            )
            if name in shard_arguments
        },
    )


def is_moe(spec) -> bool:
    """0.16 holds the layer's class in a spec, later versions in a functools.partial."""
    mlp = spec.submodules.mlp
    return MoELayer in (getattr(mlp, "module", None), getattr(mlp, "func", None))


def built_by_megatron(config: TransformerConfig, rank: int) -> tuple[list[list[int]], list[int], list[int]]:
    """(layer numbers of each chunk, layer numbers of routers, MTP depths with a router) of one rank."""
    virtual = config.virtual_pipeline_model_parallel_size
    parallel_state.set_pipeline_model_parallel_world_size(config.pipeline_model_parallel_size)
    parallel_state.set_pipeline_model_parallel_rank(rank)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(virtual)
    chunks, routers, mtp = [], [], []
    for vp_stage in [None] if virtual is None else range(virtual):
        block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage)
        offset = get_transformer_layer_offset(config, vp_stage=vp_stage)
        numbers = [offset + local + 1 for local in range(len(block.layer_specs))]
        chunks.append(numbers)
        routers += [n for n, spec in zip(numbers, block.layer_specs, strict=True) if is_moe(spec)]
        if config.mtp_num_layers:
            # A stage without layers of its own takes the model's last one as the pattern.
            if not block.layer_specs:
                block.layer_specs = get_gpt_decoder_layer_specs(config, use_transformer_engine=False)[-1:]
            built = get_gpt_mtp_block_spec(config, block, use_transformer_engine=False, vp_stage=vp_stage)
            for local, spec in enumerate(built.layer_specs if built else []):
                if is_moe(mtp_transformer_layer(spec)):
                    mtp.append(local + 1 + get_mtp_layer_offset(config, vp_stage))
    return chunks, routers, mtp


def mtp_transformer_layer(spec):
    submodules = spec.submodules
    return getattr(submodules, "transformer_layer", None) or submodules.mtp_model_layer


def random_model(random: np.random.Generator, num_layers: int) -> ModelLayout:
    moe = np.flatnonzero(random.random(num_layers) < random.choice([0.3, 0.8, 1.0]))
    return ModelLayout(num_layers, tuple(moe) or (num_layers - 1,), num_experts=8, top_k=2)


def random_even(random: np.random.Generator) -> dict:
    size, virtual = int(random.integers(1, 6)), int(random.integers(1, 4))
    embedding, loss = (bool(flag) for flag in random.integers(0, 2, 2))
    num_layers = size * virtual * int(random.integers(1, 4)) - embedding - loss
    num_layers += int(random.random() < 0.15)  # now and then one that does not divide
    return {
        "layout": random_model(random, max(num_layers, 1)),
        "pipeline_size": size,
        "virtual_size": virtual if size > 1 else 1,
        "account_for_embedding_in_pipeline_split": embedding,
        "account_for_loss_in_pipeline_split": loss,
        "mtp_layers": int(random.integers(0, 3)),
    }


def random_uneven(random: np.random.Generator) -> dict:
    size, virtual = int(random.integers(2, 6)), int(random.integers(1, 4))
    ends = {}
    for name in ("first", "last"):
        if random.random() < 0.7:
            ends[f"num_layers_in_{name}_pipeline_stage"] = virtual * int(random.integers(1, 4))
    num_layers = sum(ends.values()) + (size - len(ends)) * virtual * int(random.integers(1, 3))
    num_layers += int(random.random() < 0.15)
    return {
        "layout": random_model(random, num_layers),
        "pipeline_size": size,
        "virtual_size": virtual,
        "mtp_layers": int(random.integers(0, 3)),
        **ends,
    }


def random_string(random: np.random.Generator) -> dict:
    """A random arrangement, written with commas and repeats at random."""
    size, virtual = int(random.integers(1, 5)), int(random.integers(1, 4))
    chunks = ["t" * int(count) for count in random.integers(0, 4, size * (virtual if size > 1 else 1))]
    mtp_layers = int(random.integers(0, 3))
    chunks[0] = "E" + chunks[0]
    at = -1 if random.random() < 0.5 else int(random.integers(-len(chunks), 0))
    chunks[at] += "m" * mtp_layers
    chunks[-1] += "L"
    num_layers = "".join(chunks).count("t")
    text = "|".join(chunks)
    if random.random() < 0.5:
        text = text.replace("ttt", "t*3,")
    if random.random() < 0.5:
        text = text.replace("|t|t", "(|t)*2").replace("|tt|tt|tt", ",(|t*2)*3")
    if random.random() < 0.1:
        text = text.replace("E", "") if random.random() < 0.5 else text + "t"
    return {
        "layout": random_model(random, max(num_layers, 1)),
        "pipeline_size": size,
        "pipeline_layout": text,
        "mtp_layers": mtp_layers,
    }


@pytest.mark.parametrize("kind", [random_even, random_uneven, random_string])
def test_the_layers_of_every_rank_are_those_that_megatron_builds(kind):
    random = np.random.default_rng(20260101)
    built = refused = 0
    for _ in range(300):
        arguments = kind(random)
        try:
            config = megatron_config(arguments)
            expected = [built_by_megatron(config, rank) for rank in range(arguments["pipeline_size"])]
        except (AssertionError, ValueError, ZeroDivisionError):
            refused += 1
            with pytest.raises(ShardError):
                Shard(**arguments)
            continue
        built += 1
        for rank, (chunks, routers, mtp) in enumerate(expected):
            shard = dataclasses.replace(Shard(**arguments), pipeline_rank=rank)
            assert [list(chunk) for chunk in shard.chunks] == chunks, (arguments, rank)
            assert list(shard.router_layer_numbers) == routers, (arguments, rank)
            assert list(shard.mtp_router_numbers) == mtp, (arguments, rank)
    # Neither side of the comparison may be empty, or it would prove nothing.
    assert built > 150, built
    assert refused > 5, refused


def test_layout_strings_are_read_as_megatron_reads_them():
    from rtk.replay.layouts import pipeline_layers

    names = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    random = np.random.default_rng(4)
    texts = ["Ettt|(tt|)*29,m|L", "E|(t|)*3,(t,t|)*2,L", "(E)*1t*10|*2tL", "Et*0|t,,t|m*2L"]
    for _ in range(200):
        parts = [
            str(random.choice(["t", "|", "t*2", "|*2", "(t|)*3", "(|t*2,)*2", "m*0", ","])) for _ in range(6)
        ]
        texts.append("E" + "".join(parts) + "L")
    for text in texts:
        rows = PipelineParallelLayerLayout.parse_str_to_list(text)
        assert pipeline_layers.parse(text) == ["".join(names[kind.name] for kind in row) for row in rows], (
            text
        )
