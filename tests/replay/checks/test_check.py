import dataclasses

import numpy as np
import pytest

from rtk import ModelLayout, RouteTrace
from rtk.errors import ShardError, TraceError
from rtk.replay import Batch, Shard, check, expand

LAYOUT = ModelLayout(num_layers=8, moe_layers=(1, 2, 3, 4, 5, 6, 7), num_experts=16, top_k=2)
STAGE_0, STAGE_1 = Shard(LAYOUT, 2, 0), Shard(LAYOUT, 2, 1)


@pytest.fixture
def clean() -> RouteTrace:
    """Random routes of distinct experts, 30 rows."""
    rng = np.random.default_rng(5)
    routes = np.zeros((30, 8, 2), np.uint8)
    for row in routes:
        row[1:] = [rng.choice(16, 2, replace=False) for _ in range(7)]
    return RouteTrace(np.arange(31), ("x",) * 31, 10, routes, LAYOUT)


def damaged(trace: RouteTrace, change) -> RouteTrace:
    routes = trace.routed_experts.copy()
    change(routes)
    return dataclasses.replace(trace, routed_experts=routes)


def failures(report) -> dict[str, tuple[int | None, str]]:
    return {f.check: (f.layer_number, f.evidence) for f in report.findings if not f.passed}


@pytest.mark.parametrize("shard", [STAGE_0, STAGE_1, Shard(LAYOUT)])
def test_clean_routes_line_up(clean, shard):
    report = check(clean, shard)
    assert report.ok
    assert len(report.findings) == 9
    report.raise_for_faults()


def test_a_stage_without_routers_lines_up():
    layout = ModelLayout(num_layers=4, moe_layers=(2, 3), num_experts=4, top_k=2)
    routes = np.zeros((3, 4, 2), np.uint8)
    routes[:, 2:] = [0, 1]
    trace = RouteTrace(np.arange(4), ("x",) * 4, 2, routes, layout)
    assert check(trace, Shard(layout, 2, 0)).ok


def test_all_zero_capture(clean):
    broken = damaged(clean, lambda r: r.__setitem__((slice(None), slice(1, None)), 0))
    layer, evidence = failures(check(broken, STAGE_0))["not all zero"]
    assert layer == 2
    assert "30 of 30 rows" in evidence


def test_zero_prompt_rows_of_one_layer_are_located(clean):
    broken = damaged(clean, lambda r: r.__setitem__((slice(4, 10), 6), 0))
    assert check(broken, STAGE_0).ok
    found = failures(check(broken, STAGE_1))
    assert found.keys() == {"not all zero"}
    assert found["not all zero"][0] == 7
    assert "6 of 30 rows are all 0, from row 4" in found["not all zero"][1]


def test_top_1_may_use_expert_0_but_not_only(clean):
    layout = dataclasses.replace(LAYOUT, top_k=1)
    routes = clean.routed_experts[:, :, :1].copy()
    some = dataclasses.replace(clean, layout=layout, routed_experts=routes)
    assert (routes[:, 1:] == 0).any()  # or the next line would not test anything
    assert check(some, Shard(layout)).ok
    routes = routes.copy()
    routes[:, 3] = 0
    nothing = dataclasses.replace(clean, layout=layout, routed_experts=routes)
    assert failures(check(nothing, Shard(layout)))["not all zero"][0] == 4


def test_physical_expert_ids(clean):
    broken = damaged(clean, lambda r: r.__setitem__((7, 5, 1), 17))
    layer, evidence = failures(check(broken, STAGE_1))["expert range"]
    assert layer == 6
    assert "row 7: expert 17 of 16" in evidence


def test_repeated_experts(clean):
    broken = damaged(clean, lambda r: r.__setitem__((12, 2), [9, 9]))
    layer, evidence = failures(check(broken, STAGE_0))["distinct experts"]
    assert layer == 3
    assert "row 12: [9, 9]" in evidence


def test_routes_in_a_dense_layer(clean):
    broken = damaged(clean, lambda r: r.__setitem__(slice(None), np.roll(r, -1, axis=1)))
    layer, evidence = failures(check(broken, STAGE_0))["dense layers empty"]
    assert layer == 1
    assert "dense layer 1 has routes in 30 of 30 rows" in evidence


def test_offset_that_counts_dense_layers_too(clean):
    """verl #5452: stage 1 takes layers 6, 7, 8 and wraps, instead of 5 to 8."""
    shifted = [clean.routed_experts[:, n] for n in (5, 6, 7, 4)]
    layer, evidence = failures(check(clean, STAGE_1, tensors=shifted))["routes of that layer"]
    assert layer == 5
    assert "routes of layer 6" in evidence
    assert "+1 layers" in evidence


def test_tokens_in_another_order(clean):
    tensors = [t[::-1] for t in expand(clean, STAGE_1).tensors]
    _, evidence = failures(check(clean, STAGE_1, tensors=tensors))["routes of that layer"]
    assert "another order" in evidence


def test_live_routers_of_another_stage(clean):
    layer, evidence = failures(check(clean, STAGE_1, layer_numbers=[4, 5, 6, 7]))["layer numbers"]
    assert layer == 4
    assert "[4, 5, 6, 7]" in evidence
    assert "[5, 6, 7, 8]" in evidence


def test_a_tensor_for_the_dense_layer_too(clean):
    tensors = [clean.routed_experts[:, n] for n in range(4)]
    found = failures(check(clean, STAGE_0, tensors=tensors))
    assert found.keys() == {"router count"}
    assert "4 tensors for 3 routers" in found["router count"][1]


def test_forwarding_the_last_token_too(clean):
    _, evidence = failures(check(clean, STAGE_0, tokens=31))["token rows"]
    assert "[30, 2]" in evidence
    assert "token_ids[:-1]" in evidence


def test_float_tensors(clean):
    tensors = [t.astype(np.float32) for t in expand(clean, STAGE_0).tensors]
    assert "float32" in failures(check(clean, STAGE_0, tensors=tensors))["token rows"][1]


def test_the_report_reads_well(clean):
    broken = damaged(clean, lambda r: r.__setitem__((7, 5, 1), 17))
    report = check(broken, STAGE_1)
    assert report.summary == "pipeline stage 1 of 2: NOT lined up (expert range)"
    assert str(report).count("FAIL") == 1
    assert "<table>" in report._repr_html_()
    with pytest.raises(ShardError, match="expert 17 of 16"):
        report.raise_for_faults()


def joined(trace, shard):
    return {n: trace.routed_experts[:, n - 1] for n in shard.router_layer_numbers}


def test_slots_in_another_order_are_the_same_routes(clean):
    """A router's experts are a set: the scores are looked up by id, so their order changes nothing."""
    tensors = [t[:, ::-1] for t in expand(clean, STAGE_1).tensors]
    assert check(clean, STAGE_1, tensors=tensors).ok


def test_one_wrong_row_is_found(clean):
    tensors = [t.copy() for t in expand(clean, STAGE_1).tensors]
    tensors[2][17] = np.setdiff1d(np.arange(16), tensors[2][17])[:2]
    report = check(clean, STAGE_1, tensors=tensors)
    assert report.first_bad == (7, 17)
    assert report.fault == "unknown"


def test_group_limited_routing(clean):
    """Eight groups of two experts, of which a row uses one at most: the pairs (0, 1), (2, 3), ..."""
    rng = np.random.default_rng(0)
    first = rng.integers(8, size=(30, 8)) * 2
    routes = np.stack([first, first + 1], axis=-1).astype(np.uint8)
    routes[:, 0] = 0
    grouped = dataclasses.replace(clean, routed_experts=routes)
    assert check(grouped, STAGE_1, groups=(8, 1)).ok
    assert not check(clean, STAGE_1, groups=(8, 1)).ok
    broken = damaged(grouped, lambda r: r.__setitem__((9, 5), [3, 4]))
    assert check(broken, STAGE_1, groups=(8, 2)).ok
    layer, evidence = failures(check(broken, STAGE_1, groups=(8, 1)))["expert groups"]
    assert layer == 6
    assert "row 9: [3, 4] lie in 2 groups of 2" in evidence
    with pytest.raises(ShardError, match="do not divide into 5 groups"):
        check(clean, STAGE_1, groups=(5, 1))


@pytest.mark.parametrize(("rows", "fault"), [((0, 40), "prompt not captured"), ((52, 92), "stale rows")])
def test_with_top_1_zeros_may_be_real_unless_they_stand_still(rows, fault):
    """Expert 0 takes 60 % of all tokens here, so zeros alone prove nothing, and 40 of them in a row do."""
    layout = ModelLayout(num_layers=1, moe_layers=(0,), num_experts=4, top_k=1)
    routes = np.resize(np.array([0, 1, 0, 2, 0], np.uint8), (120, 1, 1))
    trace = RouteTrace(np.arange(121), ("x",) * 121, 40, routes, layout)
    assert check(trace, Shard(layout)).ok
    report = check(damaged(trace, lambda r: r.__setitem__(slice(*rows), 0)), Shard(layout))
    assert report.fault == fault
    assert report.first_bad == (1, rows[0])


def test_physical_ids_of_another_stages_layer_are_reason_to_doubt_ones_own(clean):
    broken = damaged(clean, lambda r: r.__setitem__((3, 6, 1), 17))
    assert check(broken, STAGE_1).first_bad == (7, 3)
    report = check(broken, STAGE_0)
    assert report.fault == "physical experts"
    assert report.first_bad is None
    assert "in layers [7], none of them this shard's" in report.diagnosis


def test_a_stuck_row_over_different_tokens(clean):
    broken = damaged(clean, lambda r: r.__setitem__(slice(12, 28), r[11]))
    report = check(broken, STAGE_0)
    assert report.fault == "stale rows"
    assert "rows 11..27 hold one and the same routes in all layers, over 17 different tokens" in str(report)


def test_one_token_again_and_again_may_have_one_route(clean):
    same = damaged(clean, lambda r: r.__setitem__(slice(12, 28), r[11]))
    tokens = clean.token_ids.copy()
    tokens[11:28] = 7
    assert check(dataclasses.replace(same, token_ids=tokens), STAGE_0).ok


def test_the_record_may_differ_a_little_and_not_a_lot(clean):
    record = {n: ids.copy() for n, ids in joined(clean, STAGE_1).items()}
    record[6][::10] = [0, 15]
    report = check(clean, STAGE_1, recorded=record)
    assert report.ok
    assert report.agreement.by_layer[1] == pytest.approx(0.9, abs=0.02)
    assert "lowest 90.0% at layer 6" in str(report)
    record[6][::2] = [0, 15]
    layer, evidence = failures(check(clean, STAGE_1, recorded=record))["agreement with the record"]
    assert layer == 6
    assert "of layers [6]" in evidence
    assert check(clean, STAGE_1, recorded=record, min_agreement=0.4).ok


def test_a_record_of_other_rows_or_layers(clean):
    with pytest.raises(ShardError, match=r"recorded\[5\] is .* \[29, 2\]"):
        check(clean, STAGE_1, recorded={n: ids[1:] for n, ids in joined(clean, STAGE_1).items()})
    with pytest.raises(ShardError, match="recorded holds layers"):
        check(clean, STAGE_1, recorded=joined(clean, STAGE_0))


def test_a_reference_of_other_tokens(clean):
    assert check(clean, STAGE_1, reference=clean).ok
    with pytest.raises(TraceError, match="reference trace 0 is of other tokens"):
        check(clean, STAGE_1, reference=dataclasses.replace(clean, token_ids=clean.token_ids[::-1]))
    with pytest.raises(TraceError, match="2 reference traces for 1"):
        check(clean, STAGE_1, reference=[clean, clean])
    whole = dataclasses.replace(
        clean, routed_experts=np.concatenate([clean.routed_experts, clean.routed_experts[:1]])
    )
    assert check(clean, STAGE_1, reference=whole).ok
    with pytest.raises(TraceError, match="has 30 rows, the trace 31"):
        check(whole, STAGE_1, reference=clean)


def test_routers_of_mtp_layers(clean):
    tensors = [*expand(clean, STAGE_1).tensors, clean.routed_experts[:, 0]]
    report = check(clean, STAGE_1, tensors=tensors, layer_numbers=[5, 6, 7, 8, 1])
    assert report.fault == "MTP layers"
    assert "numbered from 1 by themselves" in report.diagnosis


class TestMtpRoutes:
    """A model of 8 layers with two MTP layers, which count as layers 9 and 10."""

    SHARD = dataclasses.replace(STAGE_1, mtp_layers=2)

    @pytest.fixture
    def mtp(self):
        rng = np.random.default_rng(6)
        return np.array([[rng.choice(16, 2, replace=False) for _ in range(2)] for _ in range(30)])

    def test_routes_of_their_own_line_up(self, clean, mtp):
        report = check(clean, self.SHARD, mtp_routes=[mtp])
        assert report.ok, report
        assert report.agreement.layer_numbers == (5, 6, 7, 8, 9, 10)
        assert "MTP layers, counted on as [9, 10]" in report.findings[0].evidence
        tensors = [clean.routed_experts[:, layer] for layer in (4, 5, 6, 7)] + [mtp[:, 0], mtp[:, 1]]
        assert check(clean, self.SHARD, mtp_routes=[mtp], tensors=tensors).ok
        # The first stage holds no MTP layer.
        assert check(clean, dataclasses.replace(self.SHARD, pipeline_rank=0), mtp_routes=[mtp]).ok

    @pytest.mark.parametrize("taken", [1, 7])
    def test_routes_of_a_backbone_layer(self, clean, mtp, taken):
        wrong = [*expand(clean, STAGE_1).tensors, clean.routed_experts[:, taken], mtp[:, 1]]
        report = check(clean, self.SHARD, mtp_routes=[mtp], tensors=wrong)
        assert report.fault == "MTP layers"
        assert report.first_bad == (9, 0)
        assert f"layer 9 has the routes of layer {taken + 1}" in report.diagnosis

    def test_a_backbone_layer_that_is_shifted_is_not_blamed_on_mtp(self, clean, mtp):
        own = list(expand(clean, STAGE_1).tensors)
        wrong = [*own[1:], own[0], mtp[:, 0], mtp[:, 1]]
        assert check(clean, self.SHARD, mtp_routes=[mtp], tensors=wrong).fault == "shifted layers"

    def test_what_they_chose_themselves(self, clean, mtp):
        chosen = {number: clean.routed_experts[:, number - 1] for number in (5, 6, 7, 8)}
        assert check(clean, self.SHARD, mtp_routes=[mtp], recorded=chosen | {9: mtp[:, 0], 10: mtp[:, 1]}).ok
        report = check(clean, self.SHARD, mtp_routes=[mtp], recorded=chosen | {9: mtp[:, 1], 10: mtp[:, 0]})
        assert report.fault == "MTP layers"

    def test_the_backbone_alone_is_too_few(self, clean, mtp):
        found = failures(check(clean, self.SHARD, mtp_routes=[mtp], tensors=expand(clean, STAGE_1).tensors))
        assert "4 tensors for 6 routers" in found["router count"][1]
        with pytest.raises(ShardError, match="mtp_routes are"):
            check(clean, self.SHARD, mtp_routes=[mtp[:, :1]])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensors": [[[1, 2], [3]]]}, r"tensors\[0\] is no array"),
        ({"recorded": [1]}, "recorded is a list; it maps layer numbers"),
        ({"min_agreement": 75}, "min_agreement is 75; it is a share"),
        ({"groups": 4}, "groups=4; it is"),
    ],
)
def test_what_makes_no_sense_is_said(clean, options, words):
    with pytest.raises(ShardError, match=words):
        check(clean, STAGE_1, **options)


def test_a_batch_of_fewer_traces_is_refused(clean):
    with pytest.raises(ShardError, match="no token of trace 1 of 2"):
        check([clean, clean], STAGE_1, batch=Batch.packed([clean]))


@pytest.mark.parametrize("ids", [[2**40, 3], [-1, -1], [-1, 3], [300, 3]])
def test_ids_that_are_no_experts_are_a_finding(clean, ids):
    for tensors in ([np.full((30, 2), ids)] * 4, [t.copy() for t in expand(clean, STAGE_1).tensors]):
        if tensors[0][0].tolist() != ids:
            tensors[0].setflags(write=True)
            tensors[0] = tensors[0].astype(np.int64)
            tensors[0][-3:] = ids  # padding of a trainer's own, say
        report = check(clean, STAGE_1, tensors=tensors)
        assert failures(report)["expert range"][0] == 5
        report.to_json()


def test_nothing_to_check_is_said(clean):
    layout = ModelLayout(num_layers=1, moe_layers=(0,), num_experts=16, top_k=2)
    single = RouteTrace(np.arange(1), ("x",), 1, np.zeros((0, 1, 2), np.uint8), layout)
    with pytest.raises(TraceError, match="no row of routes"):
        check(single, Shard(layout))
    # Beside others it is no reason to stop.
    other = RouteTrace(np.arange(3), ("x",) * 3, 1, np.array([[[0, 1]], [[2, 3]]], np.uint8), layout)
    assert check([single, other], Shard(layout)).ok


def test_a_live_router_of_a_layer_that_the_model_does_not_have(clean):
    found = failures(check(clean, STAGE_1, layer_numbers=[5, 6, 7, 9]))
    assert found.keys() == {"layer numbers"}
    assert found["layer numbers"][0] == 9


def test_a_rank_that_sees_some_of_the_tokens_needs_no_batch():
    layout = ModelLayout(num_layers=1, moe_layers=(0,), num_experts=16, top_k=2)
    routes = np.arange(16, dtype=np.uint8).reshape(8, 1, 2)
    trace = RouteTrace(np.arange(9), ("x",) * 9, 1, routes, layout)
    cut = {"context_size": 2, "context_rank": 1, "tensor_size": 2, "sequence_parallel": True}
    report = check(trace, Shard(layout, **cut))
    assert report.ok
    # Rank 1 of the zigzag has rows 2 to 5, and its tensor rank 0 the first two of them.
    assert check(trace, Shard(layout, **cut), tensors=[routes[2:4, 0]]).ok
    assert not check(trace, Shard(layout, **cut), tensors=[routes[4:6, 0]]).ok
