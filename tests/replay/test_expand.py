import dataclasses

import numpy as np
import pytest

from rtk.errors import ShardError
from rtk.replay import Shard, expand


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
