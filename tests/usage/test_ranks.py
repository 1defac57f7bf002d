import numpy as np
import pytest

from rtk import ModelLayout, usage
from rtk.errors import ShardError
from tests.usage.conftest import random_trace


def test_rank_load_by_hand(trace):
    # Rank 0 holds the experts 0 and 1, rank 1 the experts 2 and 3. Layer 1 has 01, 10, 01, 30, layer 3 has
    # 23, 31, 20, 12.
    load = usage.rank_load(trace, 2)
    assert load.index.tolist() == [(1, 0), (1, 1), (3, 0), (3, 1)]
    assert load.index.names == ["layer", "rank"]
    assert load["assignments"].tolist() == [7, 1, 3, 5]
    assert load["load"].tolist() == [7 / 4, 1 / 4, 3 / 4, 5 / 4]
    assert load["tokens"].tolist() == [4, 1, 3, 4]


def test_rank_load_agrees_with_sets_of_experts():
    layout = ModelLayout(num_layers=4, moe_layers=(1, 3), num_experts=12, top_k=3)
    traces = [random_trace(np.random.default_rng(seed), layout, 20, 7) for seed in range(3)]
    load = usage.rank_load(traces, 4, span="prompt")
    for layer in (1, 3):
        for rank in range(4):
            held = range(rank * 3, rank * 3 + 3)
            rows = [
                set(row[layer].tolist()) & set(held)
                for trace in traces
                for row in trace.routed_experts[: trace.prompt_tokens]
            ]
            assert load.loc[(layer, rank), "assignments"] == sum(map(len, rows))
            assert load.loc[(layer, rank), "tokens"] == sum(map(bool, rows))


def test_one_rank_a_model_and_one_expert_a_rank(trace):
    whole = usage.rank_load(trace, 1)
    assert whole["assignments"].tolist() == [8, 8]
    assert whole["tokens"].tolist() == [4, 4]
    single = usage.rank_load(trace, 4)
    assert single["assignments"].tolist() == usage.counts(trace).ravel().tolist()
    assert single["tokens"].equals(single["assignments"].rename("tokens"))


def test_ranks_that_do_not_divide_the_experts_are_refused(trace):
    with pytest.raises(ShardError, match="4 experts do not divide evenly over 3"):
        usage.rank_load(trace, 3)
    with pytest.raises(ShardError, match="over 0 expert-parallel ranks"):
        usage.rank_load(trace, 0)
