import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rtk import ModelLayout, RouteTrace
from rtk.errors import ShardError
from rtk.replay import Batch, LocalTokens, Shard, expand
from rtk.replay.layouts.expand import padding_experts, padding_rule


def test_selects_the_stages_moe_layers_and_widens_them(trace):
    # Layers 0 and 2 are dense, so stage 1 (layers 3 and 4 of Megatron's count) has the router of layer 4 alone.
    expanded = expand(trace, Shard(trace.layout, 2, 1))
    assert expanded.layer_numbers == (4,)
    (tensor,) = expanded.tensors
    assert tensor.dtype == np.int32
    assert tensor.flags.c_contiguous
    assert tensor.tolist() == [[2, 3], [3, 1], [2, 0], [1, 2]]


def test_one_stage_holds_everything_in_order(trace):
    expanded = expand(trace, Shard(trace.layout))
    assert expanded.layer_numbers == (2, 4)
    assert expanded.tensors[0].tolist() == [[0, 1], [1, 0], [0, 1], [3, 0]]


def test_ids_past_255_survive(trace):
    layout = dataclasses.replace(trace.layout, num_experts=512)
    routes = trace.routed_experts.astype(np.uint16)
    routes[:, 1] += 300
    wide = dataclasses.replace(trace, layout=layout, routed_experts=routes)
    assert expand(wide, Shard(layout)).tensors[0].max() == 303


def test_a_shard_of_another_model_is_refused(trace):
    other = dataclasses.replace(trace.layout, num_layers=8)
    with pytest.raises(ShardError, match=r"num_layers=8.*num_layers=4"):
        expand(trace, Shard(other))


def random_traces(layout: ModelLayout, lengths, dtype=np.uint8, seed: int = 0) -> list[RouteTrace]:
    """Traces with distinct random experts in MoE layers and zeros in dense ones."""
    random = np.random.default_rng(seed)
    traces = []
    for rows in lengths:
        routes = np.zeros((rows, layout.num_layers, layout.top_k), dtype)
        for layer in layout.moe_layers:
            order = np.argsort(random.random((rows, layout.num_experts)), axis=1)
            routes[:, layer] = order[:, : layout.top_k]
        traces.append(RouteTrace(np.arange(rows + 1), ("x",) * (rows + 1), 1, routes, layout))
    return traces


SIX = ModelLayout(num_layers=6, moe_layers=(0, 2, 3, 5), num_experts=12, top_k=3)


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    side=st.sampled_from(["left", "right", "packed"]),
    last_token=st.booleans(),
    pipeline=st.sampled_from([(1, 1), (2, 1), (3, 1), (3, 2)]),
    order=st.sampled_from(["zigzag", "contiguous"]),
    expert_size=st.sampled_from([1, 2, 3, 4, 6, 12]),
)
def test_each_row_holds_its_own_tokens_routes(lengths, side, last_token, pipeline, order, expert_size):
    """Row by row and by name, against the vectorised code."""
    traces = random_traces(SIX, lengths)
    job = Shard(
        SIX, pipeline[0], virtual_size=pipeline[1], context_size=2, context_order=order, tensor_size=2,
        sequence_parallel=True, expert_size=expert_size,
    )  # fmt: skip
    if side == "packed":
        batch = Batch.packed(traces, align=8, last_token=last_token)
    else:
        batch = Batch.padded(traces, align=8, side=side, last_token=last_token)
    for shard in job.every_rank():
        local = batch.local(shard)
        expanded = expand(traces, shard, batch=batch)
        assert expanded.layer_numbers == shard.router_layer_numbers
        filler = iter(padding_experts(len(local.row), shard).tolist())
        for index, (sample, row) in enumerate(zip(local.sample.tolist(), local.row.tolist(), strict=True)):
            routed = sample >= 0 and row < lengths[sample]
            assert expanded.padding_mask[index] == (not routed)
            padded = None if routed else next(filler)
            for number, tensor in zip(expanded.layer_numbers, expanded.tensors, strict=True):
                wanted = traces[sample].routed_experts[row, number - 1].tolist() if routed else padded
                assert tensor[index].tolist() == wanted
                assert tensor.dtype == np.int32


def test_padding_worked_out_by_hand():
    layout = ModelLayout(num_layers=1, moe_layers=(0,), num_experts=8, top_k=3)
    # Ranks 0 and 1 hold experts 0..3 and 4..7: the slots take 0 4 1 5 2 6 3 7 0 ...
    assert padding_experts(3, Shard(layout, expert_size=2)).tolist() == [[0, 4, 1], [5, 2, 6], [3, 7, 0]]
    assert padding_experts(2, Shard(layout, expert_size=2, expert_rank=1)).tolist() == [[4, 1, 5], [2, 6, 3]]
    assert padding_experts(3, Shard(layout)).tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 0]]
    assert padding_experts(0, Shard(layout)).shape == (0, 3)
    assert padding_rule(Shard(layout, expert_size=2, expert_rank=1)) == (
        "3 distinct experts a row, each slot from the next of 2 ranks of 4 experts, beginning with rank 1; an equal "
        "share for each rank, give or take one slot"
    )
    assert "going round all 8" in padding_rule(Shard(layout))


@settings(deadline=None)
@given(st.data())
def test_no_rank_gets_more_padding_than_its_share(data):
    ranks = data.draw(st.integers(1, 16), "ranks")
    experts = ranks * data.draw(st.integers(1, 16), "experts a rank")
    top_k = data.draw(st.integers(1, min(experts, 12)), "top_k")
    rows = data.draw(st.integers(0, 60), "rows")
    layout = ModelLayout(num_layers=1, moe_layers=(0,), num_experts=experts, top_k=top_k)
    everywhere = np.zeros(ranks, int)
    for rank in range(ranks):
        ids = padding_experts(rows, Shard(layout, expert_size=ranks, expert_rank=rank))
        assert ids.min(initial=0) >= 0
        assert ids.max(initial=0) < experts
        assert all(len(set(row)) == top_k for row in ids.tolist())
        # Megatron's rank r holds the r-th run of experts.
        load = np.bincount(ids.ravel() // (experts // ranks), minlength=ranks)
        assert load.max() <= -(-rows * top_k // ranks)
        everywhere += load
    # With as many padding rows on each rank, what all of them send is even to the last slot.
    assert everywhere.tolist() == [rows * top_k] * ranks


def test_mtp_layers_get_their_own_routes_or_none():
    layout = ModelLayout(num_layers=4, moe_layers=(1, 3), num_experts=12, top_k=3)
    traces = random_traces(layout, [3, 2])
    shard = Shard(layout, 2, 1, mtp_layers=2)
    mtp = [np.arange(3 * 2 * 3, dtype=np.uint8).reshape(3, 2, 3) % 12, np.full((2, 2, 3), 7, np.uint8)]
    batch = Batch.packed(traces, align=4)
    expanded = expand(traces, shard, batch=batch, mtp_routes=mtp)
    assert (expanded.layer_numbers, expanded.mtp_numbers) == ((4,), (1, 2))
    for depth in (1, 2):
        tensor = expanded.mtp_tensors[depth - 1]
        assert tensor.dtype == np.int32
        assert tensor[:3].tolist() == mtp[0][:, depth - 1].tolist()
        assert tensor[4:6].tolist() == [[7, 7, 7]] * 2
        assert tensor[[3, 6, 7]].tolist() == padding_experts(3, shard).tolist()
    assert expand(traces, shard, batch=batch).mtp_numbers == ()
    # Nothing of them stands on a stage that holds no MTP layer.
    assert expand(traces, Shard(layout, 2, 0, mtp_layers=2), mtp_routes=mtp).mtp_tensors == ()
    with pytest.raises(ShardError, match=r"mtp_routes are .*\[3, 2, 3\]"):
        expand(traces, shard, mtp_routes=[mtp[0][:, :1], mtp[1]])
    with pytest.raises(ShardError, match="mtp_layers=0"):
        expand(traces, Shard(layout), mtp_routes=mtp)


class Elsewhere:
    """A trainer's own placement, with a mistake in it."""

    def __init__(self, sample, row) -> None:
        self.tokens = LocalTokens(np.array(sample, np.int32), np.array(row, np.int32))

    def local(self, shard):
        return self.tokens


@pytest.mark.parametrize(("sample", "row"), [([0, 1], [0, 0]), ([0, 0], [0, 4]), ([-1, 0], [0, 0])])
def test_a_batch_of_other_traces_is_refused(sample, row):
    with pytest.raises(ShardError, match="tokens that the 1 traces do not have"):
        expand(random_traces(SIX, [3]), Shard(SIX), batch=Elsewhere(sample, row))


def test_ids_that_int32_cannot_hold_are_not_wrapped():
    (trace,) = random_traces(SIX, [3], dtype=np.int64)
    trace.routed_experts[1, 2, 0] = 2**31
    with pytest.raises(ShardError, match=r"layer 3 has ids .*\.\.2147483648"):
        expand(trace, Shard(SIX))
    trace.routed_experts[1, 2, 0] = -5  # wrong, but int32: what the check is for
    assert expand(trace, Shard(SIX)).tensors[1][1, 0] == -5
