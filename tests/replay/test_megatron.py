"""Real megatron-core modules: weights, routers, RECORD and REPLAY_FORWARD, against transformers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import rtk
from rtk import ModelLayout, RouteTrace, _shipped
from rtk.errors import ShardError
from rtk.replay import ExpandedRoutes, Shard, check, expand
from rtk.replay.verify import verify

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
        ExpandedRoutes(expanded.tensors[:1], expanded.layer_numbers[:1]),
    ):
        with pytest.raises(ShardError, match=r"this model's routers are of layers \[2, 4\]"):
            megatron.install(wrong, stage.model)


def test_routers_of_a_list_of_chunks(stage):
    from rtk.replay import megatron

    assert (
        megatron.router_layer_numbers([stage.model]) == megatron.router_layer_numbers(stage.model) == (2, 4)
    )


def test_two_stages_use_a_traces_routes_in_the_right_layers(model_folder, reference, layout):
    """Routes that no router chose, with the logprobs that transformers gives under them: only a replay of
    each layer's own routes, on both stages, reproduces those."""
    routes = other_routes(layout)
    logits = forward_with_routes(reference, layout, routes)
    generated = torch.tensor(TOKENS[4:])
    logprobs = logits[3:-1].log_softmax(-1).gather(1, generated[:, None])[:, 0].numpy()
    first, last = verify(model_folder, [trace_of(layout, routes, logprobs)], timeout_s=240)
    assert first.router_layer_numbers == (2,)
    assert last.router_layer_numbers == (4,)
    assert first.replay_honoured
    assert last.replay_honoured
    assert max(first.agreement + last.agreement) < 0.7
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
    for result in results:
        shard = Shard(traces[0].layout, 2, result.pipeline_rank)
        assert result.replay_honoured
        # float32 on both sides: a near tie may fall the other way, and no more than that.
        assert min(result.agreement) > 0.97
        for trace in traces:
            assert check(trace, shard, layer_numbers=result.router_layer_numbers).ok
    assert results[-1].logprob_gap_replayed < 1e-3


def test_a_model_that_does_not_fit_is_named(tmp_path, model_folder, layout):
    import json
    import shutil

    from safetensors.torch import load_file, save_file

    trace = trace_of(layout, other_routes(layout))
    broken = tmp_path / "broken"
    shutil.copytree(model_folder, broken)
    weights = load_file(broken / "model.safetensors")
    del weights["model.layers.1.mlp.gate.weight"]
    save_file(weights, broken / "model.safetensors")
    with pytest.raises(ShardError, match=r"stage 0: .*no tensor model\.layers\.1\.mlp\.gate\.weight"):
        verify(broken, [trace], timeout_s=240)

    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"model_type": "mixtral"}))
    with pytest.raises(ShardError, match="'mixtral' model; only qwen3_moe"):
        verify(broken, [trace], timeout_s=240)


def test_nonsense_is_refused_before_anything_starts(model_folder, layout):
    with pytest.raises(ShardError, match="no traces"):
        verify(model_folder, [])
    with pytest.raises(ShardError, match="4 layers do not divide"):
        verify(model_folder, [trace_of(layout, other_routes(layout))], pipeline_size=3)


def test_time_is_limited(model_folder, layout):
    with pytest.raises(ShardError, match="within 0 s"):
        verify(model_folder, [trace_of(layout, other_routes(layout))], timeout_s=0.1)
