import dataclasses
import math
import warnings

import numpy as np
import pytest

from rtk import ModelLayout, RouteTrace, usage
from rtk.errors import SmallSampleWarning, TraceError

# Counted by hand from the routes of the trace fixture.
LAYER_1 = [4, 3, 0, 1]
LAYER_3 = [1, 2, 3, 2]


def test_counts_by_hand(trace):
    assert usage.counts(trace).tolist() == [LAYER_1, LAYER_3]
    assert usage.counts([trace, trace]).tolist() == [[8, 6, 0, 2], [2, 4, 6, 4]]


def test_spans_split_at_the_prompts_end(trace):
    assert usage.counts(trace, span="prompt").tolist() == [[3, 3, 0, 0], [1, 1, 2, 2]]
    assert usage.counts(trace, span="generated").tolist() == [[1, 0, 0, 1], [0, 1, 1, 0]]


def test_tokens_restrict_further(trace):
    assert usage.counts(trace, tokens=slice(1, 2)).tolist() == [[1, 1, 0, 0], [0, 1, 0, 1]]
    assert usage.counts(trace, span="prompt", tokens=slice(3, None)).sum() == 0


def test_counts_agree_with_a_plain_loop():
    rng = np.random.default_rng(0)
    layout = ModelLayout(num_layers=6, moe_layers=(0, 2, 5), num_experts=300, top_k=3)
    routes = np.zeros((49, 6, 3), np.uint16)
    for row in routes:
        for layer in layout.moe_layers:
            row[layer] = rng.choice(300, 3, replace=False)
    trace = RouteTrace(np.arange(50), ("x",) * 50, 20, routes, layout)
    expected = np.zeros((3, 300), int)
    for row in routes.tolist():
        for i, layer in enumerate(layout.moe_layers):
            for expert in row[layer]:
                expected[i, expert] += 1
    np.testing.assert_array_equal(usage.counts(trace), expected)


def test_table_by_hand(trace):
    table = usage.table(trace)
    assert table.index.tolist() == [1, 3]
    assert table.index.name == "layer"
    first = table.loc[1]
    assert first["assignments"] == 8
    assert first["max_over_mean"] == pytest.approx(4 / 2)
    assert first["max_vio"] == pytest.approx((4 - 2) / 2)
    # |x_i - x_j| over the pairs of 4, 3, 0, 1: 1 + 4 + 3 + 3 + 2 + 1 = 14, each twice.
    assert first["gini"] == pytest.approx(28 / (2 * 16 * 2))
    # Deviations 2, 1, -2, -1 from the mean of 2.
    assert first["cv"] == pytest.approx(math.sqrt(10 / 4) / 2)
    assert (first["busiest"], first["unused"]) == (0, 1)
    # shares 1/2, 3/8, 1/8
    entropy = 0.5 * 1 + 3 / 8 * math.log2(8 / 3) + 1 / 8 * 3
    assert first["entropy_bits"] == pytest.approx(entropy)
    assert first["evenness"] == pytest.approx(entropy / 2)


def test_table_agrees_with_scipy_and_with_the_double_sum(random_traces):
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    traces = random_traces(3)
    for row, load in zip(usage.table(traces).itertuples(), usage.counts(traces).tolist(), strict=True):
        assert row.entropy_bits == pytest.approx(stats.entropy(load, base=2))
        assert row.cv == pytest.approx(stats.variation(load))
        mean = sum(load) / len(load)
        apart = sum(abs(x - y) for x in load for y in load)
        assert row.gini == pytest.approx(apart / (2 * len(load) ** 2 * mean))
        assert row.max_vio == pytest.approx((max(load) - mean) / mean)


def test_one_expert_with_everything_is_as_uneven_as_it_gets(layout):
    routes = np.zeros((5, 4, 1), np.uint8)
    alone = dataclasses.replace(layout, top_k=1)
    table = usage.table(RouteTrace(np.arange(6), ("x",) * 6, 3, routes, alone))
    # Four experts, one has all: gini 1 - 1/4; loads 4, 0, 0, 0 in means, so the deviation is sqrt(3).
    for column, value in {"entropy_bits": 0, "gini": 3 / 4, "cv": math.sqrt(3), "max_vio": 3}.items():
        assert table[column].tolist() == pytest.approx([value, value])


def test_an_empty_span_has_no_ratios(trace):
    table = usage.table(trace, tokens=slice(0, 0))
    assert table["assignments"].tolist() == [0, 0]
    assert table[["entropy_bits", "evenness", "gini", "cv", "max_over_mean", "max_vio"]].isna().all(axis=None)


def test_experts_by_hand(trace):
    with pytest.warns(SmallSampleWarning, match=r"^4 tokens .* leave 0\.25 of 4 experts"):
        experts = usage.experts(trace)  # 4 (1 - 2/4)^4 = 0.25
    assert experts.index.names == ["layer", "expert"]
    assert experts["assignments"].tolist() == LAYER_1 + LAYER_3
    assert experts.loc[1, "load"].tolist() == [2, 1.5, 0, 0.5]
    assert experts.loc[1, "unused"].tolist() == [False, False, True, False]
    assert experts.loc[1, "overloaded"].tolist() == [True, True, False, False]
    with pytest.warns(SmallSampleWarning):
        assert usage.experts(trace, capacity_factor=1.5).loc[1, "overloaded"].tolist() == [True] + [False] * 3


def test_tokens_enough_to_call_an_expert_unused(trace):
    # 4 (1/2)^8 = 0.016
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        usage.experts([trace, trace])


def test_no_tokens_are_no_load(trace):
    prompt_only = dataclasses.replace(trace, prompt_tokens=5, logprobs=None)
    with pytest.warns(SmallSampleWarning, match="^0 tokens"):
        experts = usage.experts(prompt_only, span="generated")
    assert experts["load"].isna().all()
    assert not experts["overloaded"].any()


def test_a_capacity_of_nothing_is_refused(trace):
    with pytest.raises(TraceError, match="capacity_factor is 0"):
        usage.experts(trace, capacity_factor=0)
