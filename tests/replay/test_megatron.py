"""Real megatron-core modules: weights, routers, RECORD and REPLAY_FORWARD, against transformers."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

import rtk
from rtk import ModelLayout, RouteTrace, _shipped
from rtk.errors import LayoutError, ShardError
from rtk.replay import ExpandedRoutes, Shard, check, expand, verify

pytestmark = pytest.mark.megatron
torch = pytest.importorskip("torch", reason="needs rtk[megatron]")
pytest.importorskip("megatron.core", reason="needs rtk[megatron]")

TOKENS = [5, 77, 200, 13, 42, 99, 101, 8, 64, 17]


@pytest.fixture(scope="module")
def stage(model_folder, tmp_path_factory):
    """The random model as one whole stage, in this process."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from rtk.replay import _megatron_cpu
    from rtk.replay._megatron_stage import Stage

    rendezvous = tmp_path_factory.mktemp("gloo") / "rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous.as_uri(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    _megatron_cpu.apply()
    yield Stage(model_folder)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture
def layout(model_folder):
    return ModelLayout.from_config(model_folder)


def edited(source, target, *, drop=None, add=None, **config):
    """A copy of a model's folder without one tensor, with another of a given shape, or with other settings."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    weights = load_file(target / "model.safetensors")
    weights.pop(drop, None)
    save_file(
        weights | {name: torch.zeros(shape) for name, shape in (add or {}).items()},
        target / "model.safetensors",
    )
    settings = json.loads((target / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps(settings))
    return target


def trace_of(layout, routes, logprobs=None, prompt_tokens=4):
    return RouteTrace(TOKENS, ("x",) * len(TOKENS), prompt_tokens, routes, layout, logprobs)


def forward_with_routes(reference, layout, routes):
    """transformers' model made to use given experts: the router's hook swaps its indices and weights."""
    hooks = []
    for layer in layout.moe_layers:

        def swap(module, inputs, output, layer=layer):
            indices = torch.from_numpy(routes[:, layer].astype(np.int64))
            weights = output[0].softmax(-1).gather(1, indices)
            return output[0], weights / weights.sum(-1, keepdim=True), indices

        hooks.append(reference.model.layers[layer].mlp.gate.register_forward_hook(swap))
    with torch.no_grad():
        logits = reference(torch.tensor([TOKENS])).logits[0]
    for hook in hooks:
        hook.remove()
    return logits


def other_routes(layout):
    """Distinct experts, drawn without asking any router."""
    rng = np.random.default_rng(1)
    routes = np.zeros((len(TOKENS), layout.num_layers, layout.top_k), np.uint8)
    for row in routes:
        for layer in layout.moe_layers:
            row[layer] = rng.choice(layout.num_experts, layout.top_k, replace=False)
    return routes


def test_the_same_weights_give_the_same_logits_and_routes(stage, reference):
    from rtk.replay import megatron

    with megatron.recording(stage.model) as recorded:
        logits = stage.forward(torch.tensor(TOKENS))
    with torch.no_grad():
        expected = reference(torch.tensor([TOKENS]), output_router_logits=True)
    torch.testing.assert_close(logits, expected.logits[0], atol=1e-4, rtol=1e-4)
    assert list(recorded) == [2, 4]  # layers 1 and 3 of the checkpoint; 0 and 2 are dense
    for number, scores in zip(recorded, expected.router_logits, strict=True):
        assert torch.equal(recorded[number].sort(-1).values, scores.topk(2).indices.sort(-1).values)


def test_a_model_with_the_other_settings_gives_the_same_logits_and_routes(stage, tmp_path):
    """What the first model leaves open: router weights that are not renormalised, an output layer of its
    own, another RoPE base and epsilon, and norms whose weights are not all 1."""
    import transformers

    from rtk.replay import megatron
    from rtk.replay._megatron_stage import Stage

    torch.manual_seed(5)
    config = transformers.Qwen3MoeConfig(
        vocab_size=257, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=4,
        num_attention_heads=6, num_key_value_heads=2, head_dim=8, num_experts=8, num_experts_per_tok=3,
        norm_topk_prob=False, mlp_only_layers=[0], max_position_embeddings=128, tie_word_embeddings=False,
        rope_parameters={"rope_theta": 500.0, "rope_type": "default"}, rms_norm_eps=0.05,
        initializer_range=0.3,
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(tmp_path)
    other = Stage(tmp_path)
    with megatron.recording(other.model) as recorded:
        logits = other.forward(torch.tensor(TOKENS))
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS]), output_router_logits=True)
    torch.testing.assert_close(logits, expected.logits[0], atol=1e-4, rtol=1e-4)
    assert list(recorded) == [2, 3, 4]
    for number, scores in zip(recorded, expected.router_logits, strict=True):
        assert torch.equal(recorded[number].sort(-1).values, scores.topk(3).indices.sort(-1).values)


def test_its_own_routes_replayed_change_nothing(stage):
    from rtk.replay import megatron

    with megatron.recording(stage.model) as recorded:
        own = stage.forward(torch.tensor(TOKENS))
    tensors = tuple(r.int().numpy() for r in recorded.values())
    expanded = ExpandedRoutes(tensors, tuple(recorded), np.zeros(len(TOKENS), bool))
    with megatron.replaying(stage.model, expanded):
        assert torch.equal(stage.forward(torch.tensor(TOKENS)), own)


def test_installed_ids_are_int32_and_lead_where_int64_would(stage, layout):
    from rtk.replay import megatron

    expanded = expand(trace_of(layout, other_routes(layout)), Shard(layout))
    with megatron.replaying(stage.model, expanded):
        narrow = stage.forward(torch.tensor(TOKENS))
        for router in megatron.routers(stage.model):
            replay = router.router_replay
            assert replay.target_topk_idx.dtype == torch.int32
            replay.target_topk_idx = replay.target_topk_idx.long()
        assert torch.equal(stage.forward(torch.tensor(TOKENS)), narrow)


def test_replayed_routes_are_used(stage, reference, layout):
    from rtk.replay import megatron

    routes = other_routes(layout)
    expanded = expand(trace_of(layout, routes), Shard(layout))
    with megatron.replaying(stage.model, expanded):
        replayed = stage.forward(torch.tensor(TOKENS))
    own = stage.forward(torch.tensor(TOKENS))
    assert (replayed - own).abs().max() > 0.1
    torch.testing.assert_close(replayed, forward_with_routes(reference, layout, routes), atol=1e-4, rtol=1e-4)


def test_state_is_clean_afterwards_and_after_an_exception(stage, layout):
    from rtk.replay import megatron

    def is_clean():
        return all(
            replay.router_replay_action is None
            and replay.target_topk_idx is None
            and replay.recorded_topk_idx is None
            and replay.replay_backward_list == []
            for replay in (router.router_replay for router in megatron.routers(stage.model))
        )

    expanded = expand(trace_of(layout, other_routes(layout)), Shard(layout))
    with megatron.replaying(stage.model, expanded):
        assert not is_clean()
    assert is_clean()
    with pytest.raises(RuntimeError, match="out of memory"), megatron.replaying(stage.model, expanded):
        raise RuntimeError("out of memory")
    assert is_clean()
    with pytest.raises(ShardError, match="recorded nothing"), megatron.recording(stage.model):
        pass
    assert is_clean()


def test_routes_of_other_layers_are_not_installed(stage, layout):
    from rtk.replay import megatron

    expanded = expand(trace_of(layout, other_routes(layout)), Shard(layout))
    for wrong in (
        dataclasses.replace(expanded, layer_numbers=(1, 3)),
        ExpandedRoutes(expanded.tensors[:1], expanded.layer_numbers[:1], expanded.padding_mask),
    ):
        with pytest.raises(ShardError, match=r"this model's routers are of layers \[2, 4\]"):
            megatron.install(wrong, stage.model)
    with pytest.raises(ShardError, match=r"1 tensors for the 2 routers of layers \[2, 4\]"):
        megatron.install(dataclasses.replace(expanded, tensors=expanded.tensors[:1]), stage.model)
    assert all(router.router_replay.target_topk_idx is None for router in megatron.routers(stage.model))


def test_routers_of_wrapped_models_and_lists_of_chunks(stage, model_folder):
    from megatron.core.transformer.module import Float16Module

    from rtk.replay import megatron
    from rtk.replay._megatron_stage import Stage

    # One of its own: the wrapper turns what it holds to bfloat16.
    model = Stage(model_folder).model
    wrapped = Float16Module(dataclasses.replace(model.config, bf16=True), model)
    assert megatron.router_layer_numbers(wrapped) == megatron.router_layer_numbers([wrapped]) == (2, 4)
    layers = stage.model.decoder.layers
    assert megatron.router_layer_numbers([layers[2:], layers[:2]]) == (4, 2)


def test_a_router_without_replay_is_named(stage, monkeypatch):
    from rtk.replay import megatron

    monkeypatch.setattr(megatron.routers(stage.model)[1], "router_replay", None)
    with pytest.raises(ShardError, match=r"layer 4 has no RouterReplay.*moe_enable_routing_replay"):
        with megatron.recording(stage.model):
            pass


def test_without_megatron_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core.transformer.moe.router", None)
    monkeypatch.delitem(sys.modules, "rtk.replay.megatron", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'rtk\[megatron\]'"):
        import rtk.replay.megatron  # noqa: F401


def test_where_there_is_cuda_nothing_is_replaced(monkeypatch):
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils

    from rtk.replay import _megatron_cpu

    places = [
        (torch.cuda, "current_device"),
        (torch.cuda, "Stream"),
        (CudaRNGStatesTracker, "fork"),
    ]
    own = [object() for _ in places]
    for (where, name), thing in zip(places, own, strict=True):
        monkeypatch.setattr(where, name, thing)
    monkeypatch.delattr(moe_utils, "te_general_gemm", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    _megatron_cpu.apply()
    assert [getattr(where, name) for where, name in places] == own
    assert not hasattr(moe_utils, "te_general_gemm")


def test_two_stages_choose_and_replay_as_transformers_does(model_folder, reference, layout):
    """One trace with the routes that transformers chooses, and one with routes that no router chose; each
    with the logprobs that transformers gives under them. Only a replay of each layer's own routes, on both
    stages, reproduces the second's."""
    with torch.no_grad():
        output = reference(torch.tensor([TOKENS]), output_router_logits=True)
    chosen, drawn = other_routes(layout), other_routes(layout)
    for layer, scores in zip(layout.moe_layers, output.router_logits, strict=True):
        best = scores.topk(layout.top_k + 1)
        # The two implementations round differently; without this margin a tie could fall either way.
        assert (best.values[:, -2] - best.values[:, -1]).min() > 1e-4
        chosen[:, layer] = best.indices[:, : layout.top_k]
    logits = output.logits[0], forward_with_routes(reference, layout, drawn)
    traces = []
    for routes, scores in zip((chosen, drawn), logits, strict=True):
        generated = torch.tensor(TOKENS[4:])
        logprobs = scores[3:-1].log_softmax(-1).gather(1, generated[:, None])[:, 0].numpy()
        traces.append(trace_of(layout, routes, logprobs))
    first, last = verify(model_folder, traces, timeout_s=240)
    assert first.router_layer_numbers == (2,)
    assert last.router_layer_numbers == (4,)
    # All rows of the first trace, and of the second those that chance made the same.
    same = (np.sort(chosen) == np.sort(drawn)).all(-1)
    assert first.agreement == pytest.approx([(1 + same[:, 1].mean()) / 2])
    assert last.agreement == pytest.approx([(1 + same[:, 3].mean()) / 2])
    assert first.replay_honoured
    assert last.replay_honoured
    assert last.logprob_gap > 0.1
    assert last.logprob_gap_replayed < 1e-4
    assert first.logprob_gap is None


def test_the_tiny_models_rollout_lines_up_with_two_real_stages(embedded_server):
    with rtk.connect(embedded_server.url) as session:
        traces = [
            session.sample(texts[0], max_tokens=24, temperature=0.8, seed=1).trace
            for texts in _shipped.prompts().values()
        ]
    results = verify(embedded_server.model, traces, timeout_s=240)
    assert [result.router_layer_numbers for result in results] == [(2, 3, 4), (5, 6, 7, 8)]
    for result in results:
        shard = Shard(traces[0].layout, 2, result.pipeline_rank)
        assert result.replay_honoured
        # float32 on both sides: a near tie may fall the other way, and no more than that.
        assert min(result.agreement) > 0.97
        for trace in traces:
            assert check(trace, shard, layer_numbers=result.router_layer_numbers).ok
    assert results[-1].logprob_gap_replayed < 1e-3


GATE = "model.layers.1.mlp.gate.weight"
KEYS = "model.layers.3.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"drop": GATE}, f"no tensor {GATE}"),
        ({"add": {GATE: (7, 32)}}, r"router\.weight is \[8, 32\], the checkpoint's part is \[7, 32\]"),
        ({"add": {KEYS: (17, 32)}}, rf"{KEYS} is \[17, 32\]"),
        ({"add": {"model.layers.1.mlp.shared.weight": (1,)}}, r"took model\.layers\.1\.mlp\.shared\.weight"),
        ({"add": {"model.layers.4.input_layernorm.weight": (32,)}}, r"took model\.layers\.4"),
        ({"add": {"model.mystery": (1,)}}, r"took model\.mystery"),
        ({"add": {"lm_head.weight": (257, 32)}}, r"took lm_head\.weight"),  # the embedding is tied
        ({"model_type": "mixtral"}, "'mixtral' model; only qwen3_moe"),
    ],
)
def test_a_model_that_does_not_fit_is_named(stage, model_folder, tmp_path, change, says):
    from rtk.replay._megatron_stage import Stage

    with pytest.raises(ShardError, match=says):
        Stage(edited(model_folder, tmp_path / "edited", **change))


def test_a_checkpoint_in_several_files_is_refused(stage, model_folder, tmp_path):
    from rtk.replay._megatron_stage import Stage

    folder = edited(model_folder, tmp_path / "edited")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    with pytest.raises(ShardError, match=r"no .*model\.safetensors; a checkpoint in several files"):
        Stage(folder)


@pytest.fixture
def children(monkeypatch):
    """The stages that `verify` starts, and what to run in place of one: `{rank: python code}`."""
    started, instead = [], {}
    start = subprocess.Popen

    def popen(command, **options):
        if command[-1] in instead:
            command = [sys.executable, "-c", instead[command[-1]]]
        started.append(start(command, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    yield instead
    assert len(started) == 2
    assert all(child.returncode is not None for child in started), "a stage outlived verify"


def test_what_a_stage_cannot_do_comes_back_in_its_words(children, model_folder, layout, tmp_path):
    broken = edited(model_folder, tmp_path / "edited", drop="model.norm.weight")
    with pytest.raises(ShardError, match=r"^pipeline stage 1: .*no tensor model\.norm\.weight"):
        verify(broken, [trace_of(layout, other_routes(layout))], timeout_s=240)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_stage_that_crashed_is_quoted_and_not_the_one_that_waits_for_it(
    children, model_folder, layout, rank
):
    children[rank] = "raise OSError('no space left')"
    with pytest.raises(
        ShardError, match=rf"(?s)^pipeline stage {rank} failed \(exit status 1\).*no space left$"
    ):
        verify(model_folder, [trace_of(layout, other_routes(layout))], timeout_s=240)


def test_a_killed_stage_is_named(children, model_folder, layout):
    children["1"] = "import os; os.kill(os.getpid(), 9)"
    with pytest.raises(ShardError, match=r"^pipeline stage 1 failed \(exit status -9\)"):
        verify(model_folder, [trace_of(layout, other_routes(layout))], timeout_s=240)


def test_a_stage_that_hangs_is_given_up(children, model_folder, layout):
    children["0"] = children["1"] = "import time; time.sleep(600)"
    with pytest.raises(ShardError, match="within 1 s"):
        verify(model_folder, [trace_of(layout, other_routes(layout))], timeout_s=1)


def test_nonsense_is_refused_before_anything_starts(model_folder, layout, tmp_path):
    trace = trace_of(layout, other_routes(layout))
    with pytest.raises(ShardError, match="no traces"):
        verify(model_folder, [])
    with pytest.raises(ShardError, match="4 layers do not divide"):
        verify(model_folder, [trace], pipeline_size=3)
    with pytest.raises(LayoutError, match=r"cannot read the model config .*nowhere"):
        verify(tmp_path / "nowhere", [trace])
    shifted = dataclasses.replace(trace, layout=dataclasses.replace(layout, moe_layers=(0, 2)))
    with pytest.raises(ShardError, match=r"trace 1 is of a model with .*moe_layers=\(0, 2\)"):
        verify(model_folder, [trace, shifted])
