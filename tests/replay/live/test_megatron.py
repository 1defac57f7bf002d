"""Real megatron-core modules: weights, routers, RECORD and REPLAY_FORWARD, against transformers."""

from __future__ import annotations

import dataclasses
import importlib
import json
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from rtk import ModelLayout, RouteTrace, save_traces
from rtk.errors import LayoutError, ShardError
from rtk.replay import ExpandedRoutes, Shard, check, expand, faults, verify
from rtk.serve import shipped
from tests.replay import engines

pytestmark = pytest.mark.megatron
torch = pytest.importorskip("torch", reason="needs moe-rtk[megatron]")
pytest.importorskip("megatron.core", reason="needs moe-rtk[megatron]")

TOKENS = [5, 77, 200, 13, 42, 99, 101, 8, 64, 17]


@pytest.fixture(scope="module")
def stage(gloo, model_folder):
    """The random model as one whole stage, in this process."""
    from rtk.replay.live.stage import Stage

    return Stage(model_folder)


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

    with megatron.recording(stage.chunks) as recorded:
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
    from rtk.replay.live.stage import Stage

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
    with megatron.recording(other.chunks) as recorded:
        logits = other.forward(torch.tensor(TOKENS))
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS]), output_router_logits=True)
    torch.testing.assert_close(logits, expected.logits[0], atol=1e-4, rtol=1e-4)
    assert list(recorded) == [2, 3, 4]
    for number, scores in zip(recorded, expected.router_logits, strict=True):
        assert torch.equal(recorded[number].sort(-1).values, scores.topk(3).indices.sort(-1).values)


def test_its_own_routes_replayed_change_nothing(stage):
    from rtk.replay import megatron

    with megatron.recording(stage.chunks) as recorded:
        own = stage.forward(torch.tensor(TOKENS))
    tensors = tuple(r.int().numpy() for r in recorded.values())
    expanded = ExpandedRoutes(tensors, tuple(recorded), np.zeros(len(TOKENS), bool))
    with megatron.replaying(stage.chunks, expanded):
        assert torch.equal(stage.forward(torch.tensor(TOKENS)), own)


def test_installed_ids_are_int32_and_lead_where_int64_would(stage, layout):
    from rtk.replay import megatron

    expanded = expand(trace_of(layout, other_routes(layout)), Shard(layout))
    with megatron.replaying(stage.chunks, expanded):
        narrow = stage.forward(torch.tensor(TOKENS))
        for router in megatron.routers(stage.chunks):
            replay = router.router_replay
            assert replay.target_topk_idx.dtype == torch.int32
            replay.target_topk_idx = replay.target_topk_idx.long()
        assert torch.equal(stage.forward(torch.tensor(TOKENS)), narrow)


def test_replayed_routes_are_used(stage, reference, layout):
    from rtk.replay import megatron

    routes = other_routes(layout)
    expanded = expand(trace_of(layout, routes), Shard(layout))
    with megatron.replaying(stage.chunks, expanded):
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
            for replay in (router.router_replay for router in megatron.routers(stage.chunks))
        )

    expanded = expand(trace_of(layout, other_routes(layout)), Shard(layout))
    with megatron.replaying(stage.chunks, expanded):
        assert not is_clean()
    assert is_clean()
    with pytest.raises(RuntimeError, match="out of memory"), megatron.replaying(stage.chunks, expanded):
        raise RuntimeError("out of memory")
    assert is_clean()
    with pytest.raises(ShardError, match="recorded nothing"), megatron.recording(stage.chunks):
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
            megatron.install(wrong, stage.chunks)
    with pytest.raises(ShardError, match=r"1 tensors for the 2 routers of layers \[2, 4\]"):
        megatron.install(dataclasses.replace(expanded, tensors=expanded.tensors[:1]), stage.chunks)
    assert all(router.router_replay.target_topk_idx is None for router in megatron.routers(stage.chunks))


def test_routers_of_wrapped_models_and_lists_of_chunks(stage, model_folder):
    from megatron.core.transformer.module import Float16Module

    from rtk.replay import megatron
    from rtk.replay.live.stage import Stage

    # One of its own: the wrapper turns what it holds to bfloat16.
    model = Stage(model_folder).chunks[0]
    wrapped = Float16Module(dataclasses.replace(model.config, bf16=True), model)
    assert megatron.router_layer_numbers(wrapped) == megatron.router_layer_numbers([wrapped]) == (2, 4)
    layers = stage.chunks[0].decoder.layers
    assert megatron.router_layer_numbers([layers[2:], layers[:2]]) == (4, 2)


def test_a_router_without_replay_is_named(stage, monkeypatch):
    from rtk.replay import megatron

    monkeypatch.setattr(megatron.routers(stage.chunks)[1], "router_replay", None)
    with pytest.raises(ShardError, match=r"layer 4 has no RouterReplay.*moe_enable_routing_replay"):
        with megatron.recording(stage.chunks):
            pass


def test_without_megatron_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core.transformer.moe.router", None)
    monkeypatch.delitem(sys.modules, "rtk.replay.live.megatron", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'moe-rtk\[megatron\]'"):
        importlib.import_module("rtk.replay.live.megatron")


def test_where_there_is_cuda_nothing_is_replaced(monkeypatch):
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils

    from rtk.replay.live import cpu_stand_ins

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
    cpu_stand_ins.apply()
    assert [getattr(where, name) for where, name in places] == own
    assert not hasattr(moe_utils, "te_general_gemm")


# PP, VPP, EP, and the layer numbers of each pipeline rank's routers, where layers 2 and 4 of 4 have one.
LAYOUTS = {
    "PP=2": (2, 1, 1, [(2,), (4,)]),
    "PP=2 VPP=2": (2, 2, 1, [(), (2, 4)]),
    "EP=2": (1, 1, 2, [(2, 4)]),
    "PP=2 EP=2": (2, 1, 2, [(2,), (4,)]),
}


@pytest.mark.parametrize(("pipeline", "virtual", "expert", "numbers"), LAYOUTS.values(), ids=LAYOUTS)
def test_real_ranks_choose_and_replay_as_transformers_does(
    model_folder, reference, layout, pipeline, virtual, expert, numbers
):
    """Traces with the routes that transformers chooses, and with routes that no router chose; each with the
    logprobs that transformers gives under them. Only a replay of each layer's own routes, on all ranks,
    reproduces the drawn ones'."""
    with torch.no_grad():
        output = reference(torch.tensor([TOKENS]), output_router_logits=True)
    chosen, drawn = other_routes(layout), other_routes(layout)
    for layer, scores in zip(layout.moe_layers, output.router_logits, strict=True):
        best = scores.topk(layout.top_k + 1)
        # The two implementations round differently; without this margin a tie could fall either way.
        assert (best.values[:, -2] - best.values[:, -1]).min() > 1e-4
        chosen[:, layer] = best.indices[:, : layout.top_k]
    # The third trace is shorter, so that the ranks of an expert-parallel group have to pad one of theirs.
    logprobs = []
    for scores in (output.logits[0], forward_with_routes(reference, layout, drawn)):
        generated = torch.tensor(TOKENS[4:])
        logprobs.append(scores[3:-1].log_softmax(-1).gather(1, generated[:, None])[:, 0].numpy())
    logprobs[0][2] = -9999.0
    whole = [trace_of(layout, chosen, logprobs[0]), trace_of(layout, drawn, logprobs[1])]
    short = RouteTrace(TOKENS[:7], ("x",) * 7, 4, drawn[:7], layout, logprobs[1][:3])
    traces = [*whole, whole[1], short, whole[1]]

    results = verify(
        model_folder,
        traces,
        pipeline_size=pipeline,
        virtual_size=virtual,
        expert_size=expert,
        timeout_s=240,
    )
    assert [(each.pipeline_rank, each.expert_rank) for each in results] == [
        (rank, other) for rank in range(pipeline) for other in range(expert)
    ]
    same = (np.sort(chosen) == np.sort(drawn)).all(-1)
    for result in results:
        assert result.router_layer_numbers == numbers[result.pipeline_rank]
        assert result.replay_honoured
        own = traces[result.expert_rank :: expert]
        # All rows of the first trace, and of the others those that chance made the same.
        for number, agreement in zip(result.router_layer_numbers, result.agreement, strict=True):
            rows = [same[: each.rows, number - 1] | (each is whole[0]) for each in own]
            assert agreement == pytest.approx(np.concatenate(rows).mean())
        assert result.floored == (result.pipeline_rank == pipeline - 1 and result.expert_rank == 0)
        if result.pipeline_rank == pipeline - 1:
            assert result.logprob_gap > 0.1
            assert result.logprob_gap_replayed < 1e-4
        else:
            assert result.logprob_gap is None


def test_the_check_on_a_rollout_and_a_trainer_that_differ(url, gloo):
    """The embedded server, and vLLM in bfloat16, against Megatron in float32: no alarm where nothing is wrong, and
    each fault of the catalogue by its name."""
    rollout = engines.rollout(url)
    trainer = engines.by_megatron(rollout)
    for trace, own in zip(rollout, trainer, strict=True):
        shard = Shard(trace.layout)
        recorded = {number: own.routed_experts[:, number - 1] for number in shard.router_layer_numbers}
        for report in (check(trace, shard, recorded=recorded), check(own, shard, reference=trace)):
            assert report.ok, report
    rng, named = np.random.default_rng(0), set()
    for i in range(len(rollout)):
        both = [i, (i + 5) % len(rollout)]
        for fault in faults.catalogue():
            try:
                specimen = fault.inject(
                    [rollout[j] for j in both], rng=rng, engine=[trainer[j] for j in both]
                )
            except ShardError:
                continue
            report = specimen.check()
            assert report.fault == fault.diagnosis, report
            named.add(fault.name)
    # The tiny model has too few experts for the two faults of uint8.
    assert len(named) == len(faults.catalogue()) - 2


def test_the_tiny_models_rollout_lines_up_with_real_ranks(session, capsys):
    """Routes of the embedded server, and of vLLM in bfloat16, in every layout that runs without a GPU."""
    traces = [
        session.sample(texts[0], max_tokens=24, temperature=0.8, seed=1).trace
        for texts in shipped.prompts().values()
    ]
    for pipeline, virtual, expert in [(2, 1, 1), (2, 2, 1), (1, 1, 2)]:
        results = verify(
            shipped.find("tiny_moe"),
            traces,
            pipeline_size=pipeline,
            virtual_size=virtual,
            expert_size=expert,
            timeout_s=240,
        )
        for result in results:
            with capsys.disabled():
                print(
                    f"\nPP={pipeline} VPP={virtual} EP={expert}, rollout by {session.server_version}: {result}"
                )
            assert result.replay_honoured
            assert min(result.agreement) > 0.9
            shard = Shard(traces[0].layout, pipeline, result.pipeline_rank, virtual_size=virtual)
            for trace in traces:
                assert check(trace, shard, layer_numbers=result.router_layer_numbers).ok
        covered = {number for result in results for number in result.router_layer_numbers}
        assert covered == set(range(2, 9))


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
    from rtk.replay.live.stage import Stage

    with pytest.raises(ShardError, match=says):
        Stage(edited(model_folder, tmp_path / "edited", **change))


def test_a_checkpoint_in_several_files_is_refused(stage, model_folder, tmp_path):
    from rtk.replay.live.stage import Stage

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
    with pytest.raises(ShardError, match=r"^rank 1: .*no tensor model\.norm\.weight"):
        verify(broken, [trace_of(layout, other_routes(layout))], timeout_s=240)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_stage_that_crashed_is_quoted_and_not_the_one_that_waits_for_it(
    children, model_folder, layout, rank
):
    children[rank] = "raise OSError('no space left')"
    with pytest.raises(ShardError, match=rf"(?s)^rank {rank} failed \(exit status 1\).*no space left$"):
        verify(model_folder, [trace_of(layout, other_routes(layout))], timeout_s=240)


def test_a_killed_stage_is_named(children, model_folder, layout):
    children["1"] = "import os; os.kill(os.getpid(), 9)"
    with pytest.raises(ShardError, match=r"^rank 1 failed \(exit status -9\)"):
        verify(model_folder, [trace_of(layout, other_routes(layout))], timeout_s=240)


def test_a_stage_that_hangs_is_given_up(children, model_folder, layout):
    children["0"] = children["1"] = "import time; time.sleep(600)"
    with pytest.raises(ShardError, match="within 1 s"):
        verify(model_folder, [trace_of(layout, other_routes(layout))], timeout_s=1)


def test_ranks_end_well_after_their_answer(model_folder, layout, monkeypatch):
    started, start = [], subprocess.Popen

    def popen(command, **options):
        started.append(start(command, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    verify(model_folder, [trace_of(layout, other_routes(layout))], timeout_s=240)
    assert [child.returncode for child in started] == [0, 0]


def test_ranks_leave_when_their_parent_is_killed(model_folder, layout, tmp_path):
    """One rank waits for another that never comes; its parent gets no chance to say goodbye."""
    save_traces([trace_of(layout, other_routes(layout))], tmp_path / "traces.zip")
    script = textwrap.dedent(
        f"""
        import subprocess, sys
        from rtk import load_traces
        from rtk.replay import verify

        start = subprocess.Popen

        def popen(command, **options):
            if command[-1] == "1":
                command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
            child = start(command, **options)
            print(child.pid, flush=True)
            return child

        subprocess.Popen = popen
        verify({str(model_folder)!r}, load_traces({str(tmp_path / "traces.zip")!r}), timeout_s=240)
        """
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        ranks = [int(parent.stdout.readline()) for _ in range(2)]
        assert all(is_running(rank) for rank in ranks)
    finally:
        parent.kill()
        parent.communicate(timeout=10)
    deadline = time.monotonic() + 60
    while any(is_running(rank) for rank in ranks):
        assert time.monotonic() < deadline, "a rank outlived its parent"
        time.sleep(0.1)


def is_running(pid):
    """A process that ended may stay in the table until somebody asks for its status."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


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
    routes = trace.routed_experts.copy()
    routes[3, 1, 0] = 8
    with pytest.raises(ShardError, match=r"trace 1, row 3, layer 2: expert 8 of 8 does not exist"):
        verify(model_folder, [trace, dataclasses.replace(trace, routed_experts=routes)])
    tokens = trace.token_ids.copy()
    tokens[5] = 257
    with pytest.raises(
        ShardError, match=r"trace 0, position 5: token 257 is out of the vocabulary of 257 tokens"
    ):
        verify(model_folder, [dataclasses.replace(trace, token_ids=tokens)])
    with pytest.raises(ShardError, match="virtual"):
        verify(model_folder, [trace], pipeline_size=1, virtual_size=2)
    with pytest.raises(ShardError, match="8 experts do not divide"):
        verify(model_folder, [trace], expert_size=3)
    with pytest.raises(ShardError, match="1 traces are too few for 2 expert-parallel ranks"):
        verify(model_folder, [trace], expert_size=2)
