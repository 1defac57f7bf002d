"""What a layout file may say, and the reports that come of it. tests/test_cli.py runs the command."""

import json

import numpy as np
import pytest

from rtk import ModelLayout, save_traces
from rtk.errors import LayoutError, LayoutFileError, RtkError, ShardError
from rtk.replay import Batch, Shard, expand
from rtk.replay.checks.layout_file import LayoutFile, as_json, as_text
from tests.replay.layouts.test_expand import random_traces

LAYOUT = ModelLayout(num_layers=4, moe_layers=(1, 2, 3), num_experts=16, top_k=2)


@pytest.fixture
def read(tmp_path):
    def read(text: str) -> LayoutFile:
        path = tmp_path / "layout.yaml"
        path.write_text(text)
        return LayoutFile.read(path)

    return read


def names(reports) -> list[str]:
    return [str(report.shard) for _, report in reports]


def test_an_empty_file_is_one_rank_of_the_traces_own_model(read):
    ((number, report),) = read("").reports(random_traces(LAYOUT, [5]))
    assert number is None
    assert report.ok
    assert report.shard == Shard(LAYOUT)


def test_every_rank_is_checked_unless_one_is_named(read):
    job = "shard: {pipeline_size: 2, context_size: 2, tensor_size: 2, sequence_parallel: true"
    traces = random_traces(LAYOUT, [16])
    all_ranks = list(read(job + "}").reports(traces))
    assert len(all_ranks) == 8
    assert all(report.ok for _, report in all_ranks)
    stage = list(read(job + ", pipeline_rank: 1}").reports(traces))
    assert names(stage) == names(all_ranks)[4:]
    one = list(read(job + ", pipeline_rank: 1, context_rank: 0, tensor_rank: 1}").reports(traces))
    assert names(one) == [names(all_ranks)[5]]
    # Without sequence parallelism a tensor rank changes nothing, and is one rank all the same.
    named = read("shard: {tensor_size: 2, tensor_rank: 1, pipeline_size: 2}")
    assert [s.tensor_rank for s in named.shards(traces)] == [1, 1]


def test_each_trace_is_a_microbatch_of_its_own_unless_there_is_a_batch(read):
    traces = random_traces(LAYOUT, [5, 7])
    alone = list(read("shard: {context_size: 2, context_rank: 1}").reports(traces))
    # 5 and 7 rows are both padded to a multiple of 4, and cut in two.
    assert [(number, report.agreement.same.shape[1]) for number, report in alone] == [(0, 4), (1, 4)]
    together = list(
        read("{shard: {context_size: 2, context_rank: 1}, batch: {kind: packed}}").reports(traces)
    )
    assert [(number, report.agreement.same.shape[1]) for number, report in together] == [(None, 8)]
    fp8 = read("batch: {kind: packed, fp8: mxfp8}")
    assert next(fp8.reports(traces))[1].agreement.same.shape[1] == 32
    padded = read("batch: {kind: padded, side: left, length: 10, last_token: true}")
    assert next(padded.reports(traces))[1].agreement.same.shape[1] == 20


def test_tensors_of_a_rank_are_looked_up_by_its_name(read, tmp_path):
    traces = random_traces(LAYOUT, [5, 7])
    batch = Batch.padded(traces, side="left")
    for rank in range(2):
        tensors = expand(traces, Shard(LAYOUT, 2, rank), batch=batch).tensors
        # The second stage is off by a layer, as in verl #5452.
        np.savez(tmp_path / f"stage-{rank}.npz", *(tensors if rank == 0 else tensors[::-1]))
    job = (
        "{shard: {pipeline_size: 2}, batch: {kind: padded, side: left}, tensors: 'stage-{pipeline_rank}.npz'}"
    )
    reports = list(read(job).reports(traces))
    assert [report.ok for _, report in reports] == [True, False]
    printed = as_text(reports)
    assert printed.startswith("pipeline stage 0 of 2: lined up (1 routers")
    assert "pipeline stage 1 of 2: NOT lined up (routes of that layer)\n  ok" in printed
    assert printed.endswith("1 of 2 lined up")
    parsed = json.loads(as_json(reports))
    assert parsed["ok"] is False
    assert [report["trace"] for report in parsed["reports"]] == [None, None]
    assert [report["ok"] for report in parsed["reports"]] == [True, False]
    # The side in the file counts: with the other one, tensors and traces do not meet.
    assert not next(read(job.replace("left", "right")).reports(traces))[1].ok


def test_layer_numbers_may_stand_beside_the_tensors(read, tmp_path):
    traces = random_traces(LAYOUT, [5])
    tensors = expand(traces, Shard(LAYOUT, 2, 1)).tensors
    job = "{shard: {pipeline_size: 2, pipeline_rank: 1}, tensors: t.npz}"
    np.savez(tmp_path / "t.npz", *tensors, layer_numbers=[3, 4])
    assert next(read(job).reports(traces))[1].ok
    np.savez(tmp_path / "t.npz", *tensors, layer_numbers=[2, 3])
    assert not next(read(job).reports(traces))[1].ok


def test_recorded_and_reference_are_compared(read, tmp_path):
    traces = random_traces(LAYOUT, [64])
    np.savez(tmp_path / "recorded.npz", **{str(n): traces[0].routed_experts[:, n - 1] for n in (2, 3, 4)})
    save_traces(traces, tmp_path / "other.zip")
    checks = [f.check for f in next(read("recorded: recorded.npz").reports(traces))[1].findings]
    assert "agreement with the record" in checks
    report = next(read("{reference: other.zip, min_agreement: 0.95, groups: [4, 4]}").reports(traces))[1]
    assert {"agreement with the reference", "expert groups"} <= {f.check for f in report.findings}
    assert report.ok
    save_traces(random_traces(LAYOUT, [64], seed=1), tmp_path / "other.zip")
    assert not next(read("reference: other.zip").reports(traces))[1].ok


def test_the_model_in_the_file(read, tmp_path):
    by_hand = "model: {num_layers: 4, moe_layers: [1, 2, 3], num_experts: 16, top_k: 2}"
    pattern = "model: {num_layers: 4, moe_layer_freq: '[0]+[1]*3', num_experts: 16, top_k: 2}"
    config = {
        "num_hidden_layers": 4, "mlp_only_layers": [0], "num_experts": 16, "num_experts_per_tok": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert [read(text).model for text in (by_hand, pattern, "model: config.json")] == [LAYOUT] * 3
    other = read(pattern.replace("16", "32"))
    with pytest.raises(ShardError, match="the shard is of a model with"):
        list(other.reports(random_traces(LAYOUT, [5])))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("shards: {}", "the file has no key 'shards'; it knows model, shard, batch"),
        ("shard: {pipeline_model_parallel_size: 2}", "has no key 'pipeline_model_parallel_size'; it knows pipeline_size"),
        ("shard: {layout: x}", "shard has no key 'layout'"),
        ("batch: {kind: packed, side: left}", "a packed batch has no key 'side'; it knows kind, length, align, fp8"),
        ("batch: {kind: thd}", "kind of batch is 'thd'; it is one of padded, packed"),
        ("batch: {align: 8}", "kind of batch is None"),
        ("model: {num_layers: 4, num_experts: 4, top_k: 1, moe: 3}", "model has no key 'moe'"),
        ("model: {num_layers: 4, num_experts: 4}", "model needs top_k"),
        (
            "model: {num_layers: 2, num_experts: 4, top_k: 1, moe_layers: [1], moe_layer_freq: 1}",
            "both moe_layers and moe_layer_freq",
        ),
        ("model: {num_layers: 2, num_experts: 4, top_k: 1, moe_layers: ['1']}", "layers are whole numbers"),
        ("shard: {pipeline_size: two}", "pipeline_size of shard is 'two', which is no whole number"),
        ("shard: {pipeline_size: true}", "pipeline_size of shard is True"),
        ("shard: {sequence_parallel: 1}", "sequence_parallel of shard is 1, which is no true or false"),
        ("shard: {context_order: zag}", "context_order of shard is 'zag', which is no 'zigzag' or 'contiguous'"),
        ("shard: 3", "shard of the file is 3, which is no mapping"),
        ("[1, 2]", "it holds keys and values"),
        ("shard: {", "is not YAML"),
        ("shard: !!python/object/apply:os.getcwd []", "is not YAML"),
    ],
)  # fmt: skip
def test_what_a_file_may_not_say(read, text, named):
    with pytest.raises(LayoutFileError, match=named) as raised:
        read(text)
    assert "layout.yaml" in str(raised.value)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("shard: {pipeline_size: 3}", "4 layers do not divide evenly over 3"),
        ("tensors: t.npz", "tensors and recorded are of one microbatch, and there are 2 traces"),
        ("{batch: {kind: packed}, shard: {pipeline_size: 2}, tensors: t.npz}", "tensors are of one rank, and 2 are"),
        ("{batch: {kind: packed}, tensors: missing.npz}", "missing.npz is no readable .npz file"),
        ("{batch: {kind: packed}, tensors: layout.yaml}", "layout.yaml is no readable .npz file"),
        ("{batch: {kind: packed}, tensors: 't-{rank}.npz'}", r"\['rank'\]; it may hold pipeline_rank, context_rank"),
        ("{batch: {kind: packed}, tensors: 't-{.npz'}", "cannot read the file name 't-{.npz'"),
        ("{batch: {kind: packed}, recorded: named.npz}", "recorded names its arrays by layer number"),
        ("{batch: {kind: packed}, recorded: strange.npz}", r"recorded holds layers \[9\]"),
        ("reference: one.zip", "reference holds 1 traces, the trace file 2"),
        ("batch: {kind: padded, length: 6}", "trace 1 has 7 rows, more than length 6"),
        ("groups: [3, 1]", "16 experts do not divide into 3 groups"),
    ],
)  # fmt: skip
def test_what_does_not_belong_together(read, tmp_path, text, named):
    traces = random_traces(LAYOUT, [5, 7])
    np.savez(tmp_path / "named.npz", layer_2=np.zeros((12, 2), int))
    np.savez(tmp_path / "strange.npz", **{"9": np.zeros((12, 2), int)})
    save_traces(traces[:1], tmp_path / "one.zip")
    with pytest.raises(RtkError, match=named):
        list(read(text).reports(traces))


def test_files_that_are_not_there(read, tmp_path):
    with pytest.raises(LayoutFileError, match="cannot read the layout file"):
        LayoutFile.read(tmp_path / "missing.yaml")
    with pytest.raises(LayoutFileError, match="no trace to check"):
        list(read("").reports([]))
    with pytest.raises(LayoutError, match=r"missing\.json"):
        read("model: missing.json")
