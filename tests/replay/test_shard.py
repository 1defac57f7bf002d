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


def test_virtual_chunks_as_read_off_real_megatron_shards():
    # megatron-core 0.16.1, 8 layers with layer 0 dense, PP=2, VPP=2.
    assert Shard(EIGHT, 2, 0, virtual_size=2).chunks == ((1, 2), (5, 6))
    assert Shard(EIGHT, 2, 0, virtual_size=2).router_layer_numbers == (2, 5, 6)
    assert Shard(EIGHT, 2, 1, virtual_size=2).router_layer_numbers == (3, 4, 7, 8)


@pytest.mark.megatron
@pytest.mark.parametrize(("size", "virtual"), [(1, 1), (2, 1), (4, 1), (2, 2), (2, 3), (4, 2), (4, 6)])
def test_chunks_start_where_megatron_starts_them(size, virtual, monkeypatch):
    layer = pytest.importorskip("megatron.core.transformer.transformer_layer")
    block = pytest.importorskip("megatron.core.transformer.transformer_block")
    config_of = pytest.importorskip("megatron.core.transformer.transformer_config").TransformerConfig
    state = layer.parallel_state
    config = config_of(
        num_layers=48,
        hidden_size=8,
        num_attention_heads=2,
        pipeline_model_parallel_size=size,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        pipeline_dtype="float32",
    )
    layout = ModelLayout(num_layers=48, moe_layers=(5, 20), num_experts=4, top_k=1)
    monkeypatch.setattr(state, "get_pipeline_model_parallel_world_size", lambda: size)
    for rank in range(size):
        monkeypatch.setattr(state, "get_pipeline_model_parallel_rank", lambda rank=rank: rank)
        for number, chunk in enumerate(Shard(layout, size, rank, virtual_size=virtual).chunks):
            stage = number if virtual > 1 else None
            assert chunk[0] - 1 == layer.get_transformer_layer_offset(config, vp_stage=stage, pp_rank=rank)
            assert len(chunk) == block.get_num_layers_to_build(config, vp_stage=stage, pp_rank=rank)


def test_chunks_that_do_not_divide_are_refused():
    with pytest.raises(ShardError, match="8 layers do not divide evenly over 2 pipeline stages of 3 virtual"):
        Shard(EIGHT, 2, 0, virtual_size=3)
    with pytest.raises(ShardError, match="virtual_size is 0"):
        Shard(EIGHT, virtual_size=0)


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
