import dataclasses
import inspect
from collections.abc import Sequence
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rtk import ModelLayout, RouteTrace
from rtk.errors import ShardError
from rtk.replay import Batch, Shard, alignment

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


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("tensor", "context"), [(1, 1), (2, 1), (1, 2), (4, 2), (3, 4)])
@pytest.mark.parametrize("kernel", [1, 16])
def test_what_is_aligned_divides_over_all_ranks(sequence_parallel, tensor, context, kernel):
    shard = Shard(LAYOUT, tensor_size=tensor, context_size=context, sequence_parallel=sequence_parallel)
    batch = Batch.packed([of_rows(5), of_rows(37)], align=alignment(shard, fp8=kernel))
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
    with pytest.raises(ShardError, match="length 10 is no multiple of 4"):
        Batch.padded([of_rows(2)], length=10, align=4)
    with pytest.raises(ShardError, match="take 8 rows with their padding, more than length 4"):
        Batch.packed([of_rows(2), of_rows(3)], align=4, length=4)
    with pytest.raises(ShardError, match="side is 'top'"):
        Batch.padded([of_rows(2)], side="top")
    with pytest.raises(ShardError, match="an alignment is 0"):
        Batch.packed([of_rows(2)], align=0)


def test_cumulated_lengths_of_a_pack():
    batch = Batch.packed([of_rows(3), of_rows(5), of_rows(4)], align=4)
    assert batch.cu_seqlens.tolist() == [0, 3, 8, 12]
    assert batch.cu_seqlens_padded.tolist() == [0, 4, 12, 16]
    assert batch.cu_seqlens.dtype == batch.cu_seqlens_padded.dtype == np.int32
    with pytest.raises(ShardError, match="a padded batch has no cu_seqlens"):
        _ = Batch.padded([of_rows(2), of_rows(2)]).cu_seqlens


def test_a_pack_grows_at_the_end_of_its_last_sequence():
    traces = [of_rows(3), of_rows(5)]
    assert Batch.packed(traces, align=4, total_align=16).pieces == (4, 12)
    assert Batch.packed(traces, align=4, length=20).pieces == (4, 16)
    assert Batch.packed(traces, align=6, total_align=4).pieces == (6, 6)
    # 12 is enough for the total, 18 for neither: the last sequence stays a multiple of 6 as well.
    assert Batch.packed([of_rows(3), of_rows(7)], align=6, total_align=4).pieces == (6, 18)


def test_a_pack_can_be_cut_as_one_sequence():
    batch = Batch.packed([of_rows(3), of_rows(5)])
    whole = dataclasses.replace(batch, pieces=(8,))
    assert whole.local(Shard(LAYOUT, context_size=2)).row.tolist() == [0, 1, 3, 4]
    assert whole.local(Shard(LAYOUT, context_size=2, context_rank=1)).row.tolist() == [2, 0, 1, 2]


def test_the_last_token_of_a_sampled_sequence_has_no_routes():
    # Three rows, four tokens: with padding on the left one more token moves all rows.
    left = Batch.padded([of_rows(3), of_rows(1)], side="left", last_token=True)
    assert left.row.tolist() == [[0, 1, 2, 3], [-1, -1, 0, 1]]
    assert Batch.padded([of_rows(3), of_rows(1)], side="left").row.tolist() == [[0, 1, 2], [-1, -1, 0]]
    assert left.local(Shard(LAYOUT)).padding_mask.sum() == 2
    # It can also make a sequence spill over into the next multiple.
    assert Batch.packed([of_rows(4)], align=4).pieces == (4,)
    assert Batch.packed([of_rows(4)], align=4, last_token=True).pieces == (8,)
    whole = dataclasses.replace(of_rows(4), token_ids=np.arange(4), token_text=("x",) * 4)
    assert Batch.packed([whole], align=4, last_token=True).pieces == (4,)


def cut(traces: Sequence[RouteTrace], batch: Batch, order: str, tensor: int, context: int) -> list:
    job = Shard(LAYOUT, tensor_size=tensor, context_size=context, context_order=order, sequence_parallel=True)
    return [batch.local(shard) for shard in job.every_rank()]


lengths = st.lists(st.integers(0, 40), min_size=1, max_size=6)
sizes = st.integers(1, 4)


@settings(deadline=None)
@given(lengths=lengths, order=st.sampled_from(["zigzag", "contiguous"]), tensor=sizes, context=sizes)
def test_all_ranks_together_hold_each_row_once(lengths, order, tensor, context):
    traces = [of_rows(rows) for rows in lengths]
    align = alignment(
        Shard(LAYOUT, tensor_size=tensor, context_size=context, context_order=order, sequence_parallel=True)
    )
    for batch in (
        Batch.padded(traces, align=align),
        Batch.padded(traces, side="left", align=align, last_token=True),
        Batch.packed(traces, align=align, total_align=16),
    ):
        seen = [place for rank in cut(traces, batch, order, tensor, context) for place in places(rank)]
        whole = places(batch.local(Shard(LAYOUT)))
        assert sorted(seen) == sorted(whole)
        expected = [(i, r) for i, rows in enumerate(lengths) for r in range(rows)]
        assert [place for place in sorted(seen) if place != PAD and place[1] < lengths[place[0]]] == expected


def thd_rank_of_transformer_engine(cu_seqlens_padded: Sequence[int], size: int, rank: int) -> list[int]:
    """Places of one rank's tokens, as transformer_engine's thd_get_partitioned_indices works them out.

    It runs on CUDA alone, so its per-token rule is written out: local token t lies in the sequence that begins
    at or before t when all beginnings are divided by the size; of that sequence's local tokens, the first half
    is moved by `rank` halves, the second by `2 * (size - 1) - rank`.
    """
    local = [begin // size for begin in cu_seqlens_padded]
    found = []
    for t in range(local[-1]):
        sequence = max(i for i in range(len(local) - 1) if local[i] <= t and local[i] < local[i + 1])
        half = (local[sequence + 1] - local[sequence]) // 2
        inside = t - local[sequence]
        halves = rank if inside < half else 2 * (size - 1) - rank
        found.append(local[sequence] * size + inside + half * halves)
    return found


@settings(deadline=None)
@given(lengths=lengths, size=st.integers(2, 5))
def test_packed_sequences_are_cut_as_transformer_engine_cuts_them(lengths, size):
    batch = Batch.packed([of_rows(rows) for rows in lengths], align=2 * size)
    for rank in range(size):
        local = batch.local(Shard(LAYOUT, context_size=size, context_rank=rank))
        theirs = thd_rank_of_transformer_engine(batch.cu_seqlens_padded.tolist(), size, rank)
        assert local.sample.tolist() == batch.sample[0, theirs].tolist()
        assert local.row.tolist() == batch.row[0, theirs].tolist()


class Group:
    """What megatron-core asks of a process group when it cuts a tensor."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


@pytest.mark.megatron
@settings(deadline=None)
@given(lengths=lengths, tensor=sizes, context=sizes, side=st.sampled_from(["left", "right"]))
def test_a_padded_batch_is_cut_as_megatron_cuts_it(lengths, tensor, context, side):
    """get_batch_on_this_cp_rank, then Megatron's [sequence, batch] order, then scatter to the TP ranks."""
    torch = pytest.importorskip("torch")
    utils = pytest.importorskip("megatron.core.utils")
    from megatron.core.tensor_parallel.mappings import _split_along_first_dim

    job = Shard(LAYOUT, tensor_size=tensor, context_size=context, sequence_parallel=True)
    batch = Batch.padded([of_rows(rows) for rows in lengths], side=side, align=alignment(job))
    places = torch.from_numpy(batch.sample.astype(np.int64) * 1000 + batch.row)
    # megatron-core 0.19 asks for one argument more, and torch for the group's size.
    cutter = inspect.signature(utils.get_batch_on_this_cp_rank)
    later = {"is_hybrid_cp": False} if "is_hybrid_cp" in cutter.parameters else {}
    for shard in job.every_rank():
        size, rank = (lambda group: group.size()), (lambda group: group.rank())
        with (
            mock.patch.multiple(utils, get_pg_size=size, get_pg_rank=rank),
            mock.patch.multiple(torch.distributed, get_world_size=size, get_rank=rank),
        ):
            group = Group(context, shard.context_rank)
            theirs = utils.get_batch_on_this_cp_rank({"tokens": places.clone()}, cp_group=group, **later)[
                "tokens"
            ]
        theirs = _split_along_first_dim(theirs.transpose(0, 1), Group(tensor, shard.tensor_rank))
        local = batch.local(shard)
        assert (local.sample * 1000 + local.row).tolist() == theirs.reshape(-1).tolist()


@pytest.mark.megatron
def test_fp8_sizes_are_megatrons():
    fp8_utils = pytest.importorskip("megatron.core.fp8_utils")
    from megatron.core.enums import Fp8Recipe

    job = Shard(LAYOUT, tensor_size=2, context_size=2, sequence_parallel=True)
    for recipe in Fp8Recipe:
        # Four pieces for context parallelism, each in two runs.
        assert alignment(job, fp8=recipe.value) == 8 * fp8_utils.get_fp8_align_size(recipe)


def test_fp8_may_be_a_number_and_no_other_word():
    assert alignment(Shard(LAYOUT), fp8=128) == 128
    with pytest.raises(ShardError, match="fp8 is 'e4m3'; Megatron's recipes are delayed"):
        alignment(Shard(LAYOUT), fp8="e4m3")
