"""Layers of a shard, worked out by hand; tests/replay/test_shard_against_megatron.py asks megatron-core itself."""

import dataclasses
import pickle

import numpy as np
import pytest

from rtk import ModelLayout
from rtk.errors import ShardError
from rtk.replay import Shard

EIGHT = ModelLayout(num_layers=8, moe_layers=(1, 2, 3, 4, 5, 6, 7), num_experts=16, top_k=2)


def of(num_layers: int, **settings) -> Shard:
    return Shard(ModelLayout(num_layers, tuple(range(num_layers)), 16, 2), **settings)


def chunks_of_each_rank(shard: Shard) -> list[list[list[int]]]:
    ranks = [dataclasses.replace(shard, pipeline_rank=rank) for rank in range(shard.pipeline_size)]
    return [[list(chunk) for chunk in rank.chunks] for rank in ranks]


def test_layer_numbers_as_read_off_real_megatron_shards():
    # megatron-core 0.16.1, 4 layers with layer 0 dense, PP=2: [2] and [3, 4]; see tests/replay/test_megatron.py.
    four = ModelLayout(num_layers=4, moe_layers=(1, 2, 3), num_experts=16, top_k=2)
    assert Shard(four, 2, 0).router_layer_numbers == (2,)
    assert Shard(four, 2, 1).router_layer_numbers == (3, 4)


def test_virtual_chunks_as_read_off_real_megatron_shards():
    # megatron-core 0.16.1, 8 layers with layer 0 dense, PP=2, VPP=2.
    assert Shard(EIGHT, 2, 0, virtual_size=2).chunks == ((1, 2), (5, 6))
    assert Shard(EIGHT, 2, 0, virtual_size=2).router_layer_numbers == (2, 5, 6)
    assert Shard(EIGHT, 2, 1, virtual_size=2).router_layer_numbers == (3, 4, 7, 8)


def test_dense_layers_may_stand_anywhere():
    layout = ModelLayout(num_layers=8, moe_layers=(0, 3, 4, 7), num_experts=4, top_k=1)
    assert [Shard(layout, 4, rank).router_layer_numbers for rank in range(4)] == [(1,), (4,), (5,), (8,)]
    assert Shard(layout, 2, 0, virtual_size=2).router_layer_numbers == (1, 5)


@pytest.mark.parametrize(
    ("num_layers", "settings", "expected"),
    [
        # What is left is divided evenly over the stages between.
        (
            10,
            {"pipeline_size": 4, "num_layers_in_first_pipeline_stage": 3, "num_layers_in_last_pipeline_stage": 1},
            [[[1, 2, 3]], [[4, 5, 6]], [[7, 8, 9]], [[10]]],
        ),
        (7, {"pipeline_size": 3, "num_layers_in_last_pipeline_stage": 1}, [[[1, 2, 3]], [[4, 5, 6]], [[7]]]),
        # With virtual stages the number is of all chunks of that rank together.
        (
            10,
            {"pipeline_size": 3, "virtual_size": 2, "num_layers_in_first_pipeline_stage": 2},
            [[[1], [6]], [[2, 3], [7, 8]], [[4, 5], [9, 10]]],
        ),
        # The embedding takes the place of a layer in the first chunk, the loss in the last.
        (
            6,
            {
                "pipeline_size": 2,
                "virtual_size": 2,
                "account_for_embedding_in_pipeline_split": True,
                "account_for_loss_in_pipeline_split": True,
            },
            [[[1], [4, 5]], [[2, 3], [6]]],
        ),
        (3, {"pipeline_size": 2, "account_for_loss_in_pipeline_split": True}, [[[1, 2]], [[3]]]),
        # Ett | tt / t | mL, on two ranks of two chunks.
        (
            5,
            {"pipeline_size": 2, "pipeline_layout": "Ett|tt|t|mL", "mtp_layers": 1},
            [[[1, 2], [5]], [[3, 4], []]],
        ),
    ],
)  # fmt: skip
def test_uneven_pipelines(num_layers, settings, expected):
    assert chunks_of_each_rank(of(num_layers, **settings)) == expected


def test_a_layout_string_says_how_many_virtual_stages_there_are():
    shard = of(61, pipeline_size=8, pipeline_layout="Et*3|(tt|)*29,m|L", mtp_layers=1)
    assert shard.virtual_size == 4
    assert shard.chunks == ((1, 2, 3), (18, 19), (34, 35), (50, 51))
    assert dataclasses.replace(shard, pipeline_rank=7).chunks == ((16, 17), (32, 33), (48, 49), ())
    assert dataclasses.replace(shard, pipeline_rank=6).mtp_router_numbers == (1,)
    assert pickle.loads(pickle.dumps(shard)) == shard


def test_mtp_layers_stand_on_the_last_stage_and_are_like_the_last_layer():
    shard = of(4, pipeline_size=2, mtp_layers=2)
    assert shard.mtp_router_numbers == ()
    last = dataclasses.replace(shard, pipeline_rank=1)
    assert last.mtp_router_numbers == (1, 2)
    assert last.router_layer_numbers == (3, 4)  # no backbone layer is called after an MTP depth
    dense_end = ModelLayout(num_layers=4, moe_layers=(0, 1), num_experts=4, top_k=1)
    assert Shard(dense_end, mtp_layers=1).mtp_router_numbers == ()


def test_stages_cover_each_layer_once():
    numbers = [n for rank in range(4) for n in Shard(EIGHT, 4, rank).layer_numbers]
    assert numbers == list(range(1, 9))


def test_a_stage_may_be_all_dense():
    layout = ModelLayout(num_layers=4, moe_layers=(2, 3), num_experts=4, top_k=1)
    assert Shard(layout, 2, 0).router_layer_numbers == ()


def test_every_rank_that_sees_other_layers_or_tokens():
    job = of(4, pipeline_size=2, context_size=2, tensor_size=2, expert_size=4, sequence_parallel=True)
    ranks = [(s.pipeline_rank, s.context_rank, s.tensor_rank, s.expert_rank) for s in job.every_rank()]
    assert ranks == [(p, c, t, 0) for p in range(2) for c in range(2) for t in range(2)]
    # Without sequence parallelism, tensor-parallel ranks see the same tokens.
    assert len(list(dataclasses.replace(job, sequence_parallel=False).every_rank())) == 4


def test_names():
    assert str(Shard(EIGHT, 2, 1)) == "pipeline stage 1 of 2"
    shard = Shard(EIGHT, 2, 1, context_size=4, context_rank=3, expert_size=2)
    assert str(shard) == "pipeline stage 1 of 2, context rank 3 of 4, expert rank 0 of 2"
    assert repr(shard) == (
        f"Shard(layout={EIGHT!r}, pipeline_size=2, pipeline_rank=1, context_size=4, context_rank=3, expert_size=2)"
    )
    assert eval(repr(shard)) == shard


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"pipeline_size": 3}, "8 layers do not divide evenly over 3 pipeline stages"),
        ({"pipeline_size": 2, "virtual_size": 3}, "over 2 pipeline stages of 3 virtual chunks each"),
        ({"pipeline_size": 2, "pipeline_rank": 2}, r"ranks are 0\.\.1"),
        ({"pipeline_size": 2, "pipeline_rank": -1}, "does not exist"),
        ({"pipeline_size": 0}, "at least 1"),
        ({"virtual_size": 0}, "virtual_size is 0"),
        ({"virtual_size": 2}, "virtual stages need a pipeline"),
        ({"mtp_layers": -1}, "mtp_layers is -1"),
        ({"context_size": 2, "context_rank": 2}, "context_rank 2 does not exist"),
        ({"tensor_size": 0}, "tensor_size is 0"),
        ({"context_order": "zig"}, "context_order is 'zig'"),
        ({"expert_size": 3}, "16 experts do not divide evenly over 3"),
        (
            {"pipeline_size": 2, "account_for_loss_in_pipeline_split": True},
            "8 layers and the loss do not divide",
        ),
        (
            {"num_layers_in_first_pipeline_stage": 8},
            "need a pipeline_size of 2",
        ),
        ({"pipeline_size": 2, "num_layers_in_first_pipeline_stage": 0}, "stage is 0"),
        ({"pipeline_size": 4, "num_layers_in_first_pipeline_stage": 4}, "4 are left for the 3 other"),
        ({"pipeline_size": 2, "num_layers_in_first_pipeline_stage": 8}, "0 are left for the 1 other"),
        (
            {"pipeline_size": 2, "virtual_size": 2, "num_layers_in_first_pipeline_stage": 3},
            "3 layers of pipeline stage 0 do not divide over virtual_size 2",
        ),
        (
            {
                "pipeline_size": 2,
                "virtual_size": 2,
                "num_layers_in_first_pipeline_stage": 6,
                "num_layers_in_last_pipeline_stage": 2,
            },
            "divides by zero",
        ),
        (
            {
                "pipeline_size": 2,
                "num_layers_in_first_pipeline_stage": 5,
                "account_for_loss_in_pipeline_split": True,
            },
            "exclude each other",
        ),
        (
            {"pipeline_layout": "Et*8L", "num_layers_in_first_pipeline_stage": 5},
            "pipeline_layout says all",
        ),
        ({"pipeline_size": 2, "virtual_size": 3, "pipeline_layout": "Et*4|t*4L"}, "has 2 stages"),
    ],
)  # fmt: skip
def test_impossible_shards_are_refused(settings, named):
    with pytest.raises(ShardError, match=named):
        Shard(EIGHT, **settings)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("Et*4|x|t*4L", "cannot read 'x'"),
        ("Et*4|((t|)*2)*2L", "cannot read '[()]'"),
        ("Et*4|t*4|L", "3 stages, which do not divide over 2"),
        ("t*4|t*4L", "start with the embedding"),
        ("Et*4E|t*4L", "hold it once"),
        ("Et*4|t*4", "end with the loss"),
        ("Et*4L|t*4L", "hold it once"),
        ("Et*4|t*3L", "7 transformer layers t, the model 8"),
        ("Et*4|t*4mL", "1 MTP layers m, while mtp_layers is 2"),
        ("Et*4|t*3mmtL", "after an MTP layer"),
        ("Et*4|t*4|m|mL", "over several stages"),
        ("Et*8|mm|t*0|L", "before the last virtual stage"),
    ],
)
def test_layout_strings_that_megatron_would_not_take(text, named):
    with pytest.raises(ShardError, match=named):
        Shard(EIGHT, pipeline_size=2, pipeline_layout=text, mtp_layers=2 if "m" in text else 0)


@pytest.mark.parametrize("value", ["2", 2.0, None])
def test_sizes_are_whole_numbers(value):
    with pytest.raises(ShardError, match=f"pipeline_size is {value!r}; it is a whole number"):
        of(4, pipeline_size=value)


def test_numpys_whole_numbers_are_taken():
    assert of(4, pipeline_size=np.int64(2)) == of(4, pipeline_size=2)
