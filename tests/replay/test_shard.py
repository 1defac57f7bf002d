import pytest

from rtk import ModelLayout
from rtk.errors import ShardError
from rtk.replay import Shard

EIGHT = ModelLayout(num_layers=8, moe_layers=(1, 2, 3, 4, 5, 6, 7), num_experts=16, top_k=2)


def test_layer_numbers_as_read_off_real_megatron_shards():
    # megatron-core 0.16.1, 4 layers with layer 0 dense, PP=2: [2] and [3, 4]; see tests/replay/test_megatron.py.
    four = ModelLayout(num_layers=4, moe_layers=(1, 2, 3), num_experts=16, top_k=2)
    assert Shard(four, 2, 0).router_layer_numbers == (2,)
    assert Shard(four, 2, 1).router_layer_numbers == (3, 4)


def test_stages_cover_each_layer_once():
    numbers = [n for rank in range(4) for n in Shard(EIGHT, 4, rank).layer_numbers]
    assert numbers == list(range(1, 9))


def test_a_stage_may_be_all_dense():
    layout = ModelLayout(num_layers=4, moe_layers=(2, 3), num_experts=4, top_k=1)
    assert Shard(layout, 2, 0).router_layer_numbers == ()


@pytest.mark.parametrize(
    ("size", "rank", "named"),
    [
        (3, 0, "8 layers do not divide"),
        (2, 2, r"ranks are 0\.\.1"),
        (2, -1, "does not exist"),
        (0, 0, "at least 1"),
    ],
)
def test_impossible_stages_are_refused(size, rank, named):
    with pytest.raises(ShardError, match=named):
        Shard(EIGHT, size, rank)
