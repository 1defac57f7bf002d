import numpy as np
import pytest

from rtk import ModelLayout, RouteTrace
from rtk.errors import ShardError
from rtk.replay import Batch, Shard, alignment, expand
from rtk.replay.expand import padding_experts

LAYOUT = ModelLayout(num_layers=2, moe_layers=(1,), num_experts=16, top_k=2)


def of_rows(rows: int) -> RouteTrace:
    """A trace whose row r has the experts 2r and 2r + 1."""
    routes = np.zeros((rows, 2, 2), np.uint8)
    routes[:, 1] = np.arange(2 * rows).reshape(rows, 2) % 16
    return RouteTrace(np.arange(rows + 1), ("x",) * (rows + 1), 1, routes, LAYOUT)


def places(local) -> list[tuple[int, int]]:
    return list(zip(local.sample.tolist(), local.row.tolist(), strict=True))


PAD = (-1, -1)


@pytest.mark.parametrize(
    ("side", "second"), [("right", [(1, 0), (1, 1), PAD]), ("left", [PAD, (1, 0), (1, 1)])]
)
def test_padded_sequences_stand_sequence_first(side, second):
    local = Batch.padded([of_rows(3), of_rows(2)], side=side).local(Shard(LAYOUT))
    first = [(0, 0), (0, 1), (0, 2)]
    assert places(local) == [place for pair in zip(first, second, strict=True) for place in pair]
    assert local.padding_mask.tolist() == [place == PAD for place in places(local)]


def test_packed_sequences_are_cut_one_by_one():
    batch = Batch.packed([of_rows(3), of_rows(5)], align=4)
    assert batch.pieces == (4, 8)
    ranks = [Shard(LAYOUT, context_size=2, context_rank=rank) for rank in range(2)]
    # Zigzag: chunks 0 and 3 of four for rank 0, chunks 1 and 2 for rank 1, of each sequence.
    assert places(batch.local(ranks[0])) == [(0, 0), PAD, (1, 0), (1, 1), PAD, PAD]
    assert places(batch.local(ranks[1])) == [(0, 1), (0, 2), (1, 2), (1, 3), (1, 4), PAD]
    whole = Shard(LAYOUT, context_size=2, context_rank=1, context_order="contiguous")
    assert places(batch.local(whole)) == [(0, 2), PAD, (1, 4), PAD, PAD, PAD]


def test_sequence_parallel_ranks_get_runs_of_the_context_parallel_part():
    batch = Batch.padded([of_rows(8)])
    cut = {"context_size": 2, "tensor_size": 2, "sequence_parallel": True}
    rows = [
        batch.local(Shard(LAYOUT, context_rank=c, tensor_rank=t, **cut)).row.tolist()
        for c in range(2)
        for t in range(2)
    ]
    assert rows == [[0, 1], [6, 7], [2, 3], [4, 5]]
    no_sequence_parallel = Shard(LAYOUT, context_size=2, tensor_size=2, tensor_rank=1)
    assert batch.local(no_sequence_parallel).row.tolist() == [0, 1, 6, 7]


@pytest.mark.megatron
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_the_zigzag_cut_is_megatrons(size, seed, monkeypatch):
    torch = pytest.importorskip("torch")
    utils = pytest.importorskip("megatron.core.utils")
    state = utils.parallel_state
    rng = np.random.default_rng(seed)
    traces = [of_rows(int(n)) for n in rng.integers(1, 40, size=3)]
    batch = Batch.padded(traces, align=2 * size)
    tokens = torch.from_numpy(batch.row.astype(np.int64))
    monkeypatch.setattr(state, "get_context_parallel_world_size", lambda: size)
    # Megatron moves its index to the GPU; here it stays where it is.
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, **_: self)
    for rank in range(size):
        monkeypatch.setattr(state, "get_context_parallel_rank", lambda rank=rank: rank)
        theirs = utils.get_batch_on_this_cp_rank({"tokens": tokens.clone()})["tokens"]
        ours = batch.local(Shard(LAYOUT, context_size=size, context_rank=rank)).row
        np.testing.assert_array_equal(ours, theirs.numpy().T.ravel())


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("tensor", "context"), [(1, 1), (2, 1), (1, 2), (4, 2), (3, 4)])
@pytest.mark.parametrize("kernel", [1, 16])
def test_what_is_aligned_divides_over_all_ranks(sequence_parallel, tensor, context, kernel):
    shard = Shard(LAYOUT, tensor_size=tensor, context_size=context, sequence_parallel=sequence_parallel)
    batch = Batch.packed([of_rows(5), of_rows(37)], align=alignment(shard, kernel=kernel))
    seen = []
    for c in range(context):
        for t in range(tensor if sequence_parallel else 1):
            rank = Shard(
                LAYOUT,
                tensor_size=tensor,
                tensor_rank=t,
                context_size=context,
                context_rank=c,
                sequence_parallel=sequence_parallel,
            )
            local = batch.local(rank)
            assert len(local.row) % kernel == 0
            seen += [place for place in places(local) if place != PAD]
    assert sorted(seen) == [(0, r) for r in range(5)] + [(1, r) for r in range(37)]


def test_lengths_that_do_not_divide_are_named():
    with pytest.raises(ShardError, match=r"sequence 0 has 5 tokens .* multiple of 4"):
        Batch.packed([of_rows(5)]).local(Shard(LAYOUT, context_size=2))
    with pytest.raises(ShardError, match="5 tokens do not divide over 2 tensor-parallel ranks"):
        Batch.packed([of_rows(5)]).local(Shard(LAYOUT, tensor_size=2, sequence_parallel=True))
    with pytest.raises(ShardError, match="trace 1 has 4 rows, more than length 3"):
        Batch.padded([of_rows(2), of_rows(4)], length=3)
    with pytest.raises(ShardError, match="at least one trace"):
        Batch.packed([])


def test_expansion_follows_the_batch():
    batch = Batch.padded([of_rows(3), of_rows(2)], side="left")
    expanded = expand([of_rows(3), of_rows(2)], Shard(LAYOUT), batch=batch)
    (tensor,) = expanded.tensors
    # [sequence, batch]: (0,0) pad (0,1) (1,0) (0,2) (1,1)
    assert tensor[[0, 2, 3, 4, 5]].tolist() == [[0, 1], [2, 3], [0, 1], [4, 5], [2, 3]]
    assert expanded.padding_mask.tolist() == [False, True, False, False, False, False]
    assert tensor.dtype == np.int32


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("top_k", [1, 2, 8])
@pytest.mark.parametrize("rows", [0, 1, 7, 100])
def test_padding_is_spread_over_expert_parallel_ranks(ranks, top_k, rows):
    layout = ModelLayout(num_layers=1, moe_layers=(0,), num_experts=16, top_k=top_k)
    experts = padding_experts(rows, Shard(layout, expert_size=ranks))
    assert experts.shape == (rows, top_k)
    assert all(len(set(row)) == top_k for row in experts.tolist())
    load = np.bincount(experts.ravel() // (16 // ranks), minlength=ranks)
    assert load.max() - load.min() <= 1


def test_ranks_that_do_not_exist_are_named():
    with pytest.raises(ShardError, match="context_rank 2 does not exist"):
        Shard(LAYOUT, context_size=2, context_rank=2)
    with pytest.raises(ShardError, match="tensor_size is 0"):
        Shard(LAYOUT, tensor_size=0)
    with pytest.raises(ShardError, match="context_order is 'zig'"):
        Shard(LAYOUT, context_order="zig")
    with pytest.raises(ShardError, match="16 experts do not divide evenly over 3"):
        Shard(LAYOUT, expert_size=3)
