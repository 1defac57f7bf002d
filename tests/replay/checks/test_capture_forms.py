"""Forms of a wrong capture that look like one another: each with the name that the others must not get."""

import dataclasses

import numpy as np
import pytest

from rtk import ModelLayout
from rtk.errors import ShardError
from rtk.replay import Batch, Shard, check
from rtk.replay.faults.simulated_model import simulate

SHAPES = [(8, 1, 64, 6), (12, 0, 128, 8), (6, 1, 16, 4), (10, 2, 384, 8)]


@pytest.fixture(params=[(shape, seed) for shape in SHAPES for seed in (21, 22)], ids=str)
def trace(request):
    (layers, dense, experts, top_k), seed = request.param
    layout = ModelLayout(layers, tuple(range(dense, layers)), experts, top_k)
    return simulate(layout, [(60, 120)], np.random.default_rng(seed))[0][0]


def told(trace, change):
    routes = trace.routed_experts.astype(np.int32)
    change(routes[:, trace.layout.moe_layers[0] :])
    return check(dataclasses.replace(trace, routed_experts=routes), Shard(trace.layout))


def test_a_fused_shared_expert_is_a_constant_slot(trace):
    report = told(trace, lambda r: r.__setitem__((..., -1), trace.layout.num_experts))
    assert report.fault == "constant slot", report
    assert f"always {trace.layout.num_experts}" in report.diagnosis


def test_two_slots_of_one_id_are_constant_slots(trace):
    report = told(trace, lambda r: r.__setitem__((..., slice(-2, None)), trace.layout.num_experts - 1))
    assert report.fault == "constant slot", report


@pytest.mark.parametrize("first", [0, 1])
def test_minus_one_is_a_sentinel(trace, first):
    report = told(trace, lambda r: r.__setitem__((slice(70, 90), slice(None), slice(first, None)), -1))
    assert report.fault == "sentinel ids", report


def test_slots_from_the_third_on_are_a_cut_top_k(trace):
    report = told(trace, lambda r: r.__setitem__((..., slice(2, None)), 0))
    assert report.fault == "slots not captured", report
    assert "slots from 2 on" in report.diagnosis


def test_every_second_row_is_named_with_its_pattern(trace):
    report = told(trace, lambda r: r.__setitem__(slice(1, None, 2), 0))
    assert report.fault == "not captured"
    assert "of every 2 rows those at [0]" in report.diagnosis


def test_first_layers_without_routes_may_be_dense(trace):
    report = told(trace, lambda r: r.__setitem__((slice(None), slice(0, 2)), 0))
    assert report.fault == "unknown"
    assert "the layout may be wrong" in report.diagnosis


def test_last_layers_without_routes_are_a_stage(trace):
    report = told(trace, lambda r: r.__setitem__((slice(None), slice(-3, None)), 0))
    assert report.fault == "not captured"
    assert "one pipeline stage" in report.diagnosis


def test_routes_of_layer_i_for_router_i_are_shifted_layers(trace):
    if not trace.layout.dense_layers:
        pytest.skip("needs a dense layer")
    shard = Shard(trace.layout)
    tensors = [trace.routed_experts[:, i] for i in range(len(shard.router_layer_numbers))]
    report = check(trace, shard, tensors=tensors)
    assert report.fault == "shifted layers", report


def test_the_smallest_dtype_that_fits_is_no_wrap():
    layout = ModelLayout(2, (0, 1), 384, 2)
    routes = np.array([[[3, 200], [9, 250]], [[7, 40], [80, 1]], [[5, 9], [8, 255]]], np.uint8)
    few, _ = simulate(layout, [(2, 2)], np.random.default_rng(0))
    assert check(dataclasses.replace(few[0], routed_experts=routes), Shard(layout)).ok


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_top_1_of_few_rows_may_be_expert_0(rows):
    layout = ModelLayout(4, (1, 2, 3), 8, 1)
    few = simulate(layout, [(1, rows)], np.random.default_rng(1))[0][0]
    assert check(dataclasses.replace(few, routed_experts=np.zeros_like(few.routed_experts)), Shard(layout)).ok


def test_what_cannot_be_used_is_refused(trace):
    shard = Shard(trace.layout)
    with pytest.raises(ShardError, match="2 sequences for 1 traces"):
        check(trace, shard, batch=Batch.packed([trace, trace]))
    with pytest.raises(ShardError, match="tensors is a mapping"):
        check(trace, shard, tensors={2: trace.routed_experts[:, 1]})
    with pytest.raises(ShardError, match="layout is a dict"):
        Shard(trace.layout.to_dict())
