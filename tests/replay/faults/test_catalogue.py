"""Every fault of the catalogue, over many shapes and on the tiny model's own routes: caught, and called by its name."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from rtk import ModelLayout
from rtk.errors import ShardError, TraceError
from rtk.replay import Batch, Shard, check, expand, faults
from rtk.replay.faults.faulty_batches import meeting
from rtk.replay.faults.simulated_model import other_engine, simulate
from tests.replay import engines

# (layers, MoE layers, experts, top-k), with dense layers first, last, scattered or nowhere.
SHAPES = [
    (4, (1, 2, 3), 8, 2),
    (2, (0, 1), 4, 1),
    (8, (0, 1, 2, 4, 5, 7), 64, 6),
    (6, (3, 4, 5), 128, 8),
    (6, (0, 1, 2, 3, 4), 16, 1),
    (12, tuple(range(1, 12, 2)), 60, 4),
    (4, (1, 2, 3), 256, 8),
    (4, (1, 2, 3), 320, 1),
    (4, (1, 3), 384, 10),
    (3, (2,), 512, 10),
]
LENGTHS = [[(40, 200)], [(64, 130), (30, 90)], [(37, 200), (90, 61), (51, 300)]]
FAULTS = {fault.name: fault for fault in faults.catalogue()}
# All of these were reported for software in use; the list must stay whole.
REPORTS = {
    "vllm #54730", "vllm #44116", "vllm #33013", "tpu-inference #3583", "vllm #35744", "tpu-inference #2965",
    "sglang #36404", "miles #3277", "ms-swift #9981", "verl #5452", "verl #7106", "NeMo RL #3903", "SkyRL #1908",
    "miles #1002", "verl #4986", "miles #2697", "slime #2308", "prime-rl #3350", "verl #7524", "strands-sglang #72",
    "tunix #2046", "twinkle #240",
}  # fmt: skip


def shapes() -> list:
    cases = []
    for number, (layers, moe, experts, top_k) in enumerate(SHAPES):
        for lengths in LENGTHS:
            layout = ModelLayout(layers, moe, experts, top_k)
            name = f"{layers}x{experts}top{top_k}-{len(lengths)}seq"
            cases.append(pytest.param(layout, lengths, number, id=name))
    return cases


@pytest.fixture(scope="module")
def made():
    """Traces of a shape on two engines, made once."""
    known = {}

    def make(layout, lengths, seed):
        key = (layout, tuple(lengths))
        if key not in known:
            rng = np.random.default_rng(seed)
            traces, runners_up = simulate(layout, lengths, rng)
            known[key] = traces, runners_up, other_engine(traces, runners_up, 0.03, rng)
        return known[key]

    return make


def test_the_catalogue_covers_every_report():
    assert {report for fault in faults.catalogue() for report in fault.reports} == REPORTS
    assert len(FAULTS) == len(faults.catalogue())


@pytest.mark.parametrize(("layout", "lengths", "seed"), shapes())
@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_caught_and_named(name, layout, lengths, seed, made):
    fault = FAULTS[name]
    traces, _, engine = made(layout, lengths, seed)
    try:
        specimen = fault.inject(traces, rng=np.random.default_rng(seed), engine=engine)
    except ShardError as error:
        pytest.skip(str(error))
    report = specimen.check()
    assert not report.ok
    if name == "physical experts, permuted" and traces[0].rows * layout.top_k < 4 * layout.num_experts:
        # Too few tokens use each expert for the map to be known; then it must say so and not guess.
        assert report.fault in (fault.diagnosis, "unknown")
        return
    assert report.fault == fault.diagnosis, report
    assert report.diagnosis.count(fault.diagnosis) >= 1
    report.to_json()
    report._repr_html_()


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_can_be_shown_somewhere(name, made):
    """Or all of its cases above would be skipped, and nobody would notice."""
    shown = 0
    for number, (layers, moe, experts, top_k) in enumerate(SHAPES):
        traces, _, _ = made(ModelLayout(layers, moe, experts, top_k), LENGTHS[2], number)
        try:
            FAULTS[name].inject(traces)
            shown += 1
        except ShardError as error:
            assert "it needs" in str(error)
    assert shown >= (3 if "uint8" in name or "dense" in name else 7)


@pytest.mark.parametrize(("layout", "lengths", "seed"), shapes())
def test_no_false_alarm(layout, lengths, seed, made):
    traces, runners_up, _ = made(layout, lengths, seed)
    shard = Shard(layout)
    assert check(traces[0], shard).ok
    for batch in (Batch.padded(traces, align=16), Batch.packed(traces, align=16), meeting(traces)):
        tensors = expand(traces, shard, batch=batch).tensors
        report = check(traces, shard, batch=batch, tensors=tensors)
        assert report.ok, report
    for share in (0.0, 0.01, 0.05, 0.1):
        other = other_engine(traces, runners_up, share, np.random.default_rng(seed))
        joined = {
            n: np.concatenate([t.routed_experts[:, n - 1] for t in other]) for n in shard.router_layer_numbers
        }
        report = check(traces, shard, recorded=joined)
        assert report.ok, report
        assert report.agreement.share == pytest.approx(1 - share, abs=0.05)
        assert check(traces, shard, reference=other).ok


def test_a_fault_needs_traces_that_can_show_it(made):
    traces, _, _ = made(ModelLayout(4, (1, 2, 3), 8, 2), LENGTHS[0], 0)
    with pytest.raises(ShardError, match="more than 256 experts"):
        FAULTS["uint8 on the wire"].inject(traces)
    with pytest.raises(ShardError, match="two sequences or more"):
        FAULTS["packed without padding"].inject(traces)


def test_turns_joined_twice_make_no_trace(made):
    """Report 16 in the form of a trace is refused before any check."""
    trace = made(ModelLayout(4, (1, 2, 3), 8, 2), LENGTHS[0], 0)[0][0]
    twice = np.concatenate([trace.routed_experts[:100], trace.routed_experts])
    with pytest.raises(TraceError, match="joined twice"):
        dataclasses.replace(trace, routed_experts=twice)


class TestRealEngines:
    """transformers in float32 against bfloat16: two engines that truly differ."""

    @pytest.fixture
    def pairs(self):
        pytest.importorskip("transformers", reason="needs moe-rtk[embedded]")
        return list(zip(engines.traces("float32"), engines.traces("bfloat16"), strict=True))

    def test_no_false_alarm(self, pairs):
        differing = 0
        for first, second in pairs:
            for a, b in ((first, second), (second, first)):
                report = check(a, Shard(a.layout), reference=b)
                assert report.ok, report
                differing += report.agreement.share < 1
        assert differing > 10  # or the engines would not differ, and this would test nothing
        whole = check([a for a, _ in pairs], Shard(pairs[0][0].layout), reference=[b for _, b in pairs])
        assert whole.ok
        assert 0.98 < whole.agreement.share < 1

    @pytest.mark.parametrize("name", FAULTS)
    def test_each_fault_is_named(self, name, pairs):
        rng = np.random.default_rng(0)
        tried = 0
        for i in range(len(pairs)):
            some = [pairs[i], pairs[(i + 5) % len(pairs)]]
            try:
                specimen = FAULTS[name].inject([a for a, _ in some], rng=rng, engine=[b for _, b in some])
            except ShardError:
                continue
            report = specimen.check()
            assert report.fault == FAULTS[name].diagnosis, report
            tried += 1
        if not tried:
            pytest.skip("the tiny model has 16 experts")

    @pytest.mark.parametrize(("noise", "least"), [(0.2, 0.9), (0.4, 1.0)])
    def test_a_span_under_truly_other_weights(self, pairs, noise, least):
        """Weights moved by a share of their own spread, not routes made up."""
        named = tried = 0
        for (first, second), moved in zip(pairs, engines.traces("float32", noise), strict=True):
            if first.rows < 64:
                continue
            routes = first.routed_experts.copy()
            span = slice(first.rows // 4, first.rows // 4 + first.rows // 3)
            routes[span] = moved.routed_experts[span]
            report = check(
                dataclasses.replace(first, routed_experts=routes), Shard(first.layout), reference=second
            )
            named += report.fault == "other weights"
            tried += 1
        assert tried > 10
        assert named >= least * tried


def test_the_documentation_lists_the_whole_catalogue():
    page = (Path(__file__).parents[3] / "docs" / "replay.md").read_text(encoding="utf-8")
    for fault in faults.catalogue():
        line = f"| {fault.name} | {', '.join(fault.reports)} | {fault.looks} | {fault.sees} | {fault.diagnosis} |"
        assert line in page


class TestWithBatch:
    """The same mistakes made with `rtk.replay.Batch`, whose layouts are tested against Megatron's, on every rank."""

    @pytest.fixture
    def traces(self, made):
        return made(ModelLayout(4, (1, 2, 3), 16, 2), [(37, 200), (90, 61), (51, 300)], 5)[0]

    @pytest.mark.parametrize("sequence_parallel", [False, True])
    @pytest.mark.parametrize("order", ["zigzag", "contiguous"])
    @pytest.mark.parametrize("make", [Batch.padded, Batch.packed])
    def test_clean_and_the_other_context_order(self, traces, make, order, sequence_parallel):
        batch = make(traces, align=16)
        other = "contiguous" if order == "zigzag" else "zigzag"
        told = 0
        for context_rank, tensor_rank in [(0, 0), (1, 1), (2, 0), (3, 1)]:
            shard = Shard(
                traces[0].layout, context_size=4, context_rank=context_rank, context_order=order,
                tensor_size=2, tensor_rank=tensor_rank, sequence_parallel=sequence_parallel,
            )  # fmt: skip
            assert check(traces, shard, batch=batch).ok
            wrong = expand(traces, dataclasses.replace(shard, context_order=other), batch=batch).tensors
            if np.array_equal(wrong, expand(traces, shard, batch=batch).tensors):
                continue  # a part that both orders give to this rank
            report = check(traces, shard, batch=batch, tensors=wrong)
            assert report.fault == "context-parallel order", report
            told += 1
        assert told >= 3

    def test_packed_without_alignment(self, traces):
        shard, batch = Shard(traces[0].layout), Batch.packed(traces, align=16)
        joined = expand(traces, shard, batch=Batch.packed(traces)).tensors
        filled = [np.concatenate([t, t[: batch.row.size - len(t)]]) for t in joined]
        report = check(traces, shard, batch=batch, tensors=filled)
        assert report.fault == "packing padding", report

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_padded_on_the_other_side(self, traces, side):
        shard, batch = Shard(traces[0].layout), Batch.padded(traces, side=side)
        other = Batch.padded(traces, side="left" if side == "right" else "right")
        assert check(traces, shard, batch=batch).ok
        report = check(traces, shard, batch=batch, tensors=expand(traces, shard, batch=other).tensors)
        assert report.fault == "padding side", report
