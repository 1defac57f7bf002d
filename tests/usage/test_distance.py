import dataclasses

import numpy as np
import pytest

from rtk import ModelLayout, RouteTrace, usage
from rtk.errors import SmallSampleWarning, TraceError

LAYOUT = ModelLayout(num_layers=2, moe_layers=(1,), num_experts=8, top_k=1)


def drawn_trace(rng: np.random.Generator, share: np.ndarray) -> RouteTrace:
    """Ten prompt tokens and ten generated ones, whose experts have shares of their own around the given ones."""
    own = rng.dirichlet(share * 20)
    routes = np.zeros((20, 2, 1), np.uint8)
    routes[:, 1, 0] = rng.choice(8, 20, p=own)
    return RouteTrace(rng.integers(0, 1000, 20), ("x",) * 20, 10, routes, LAYOUT)


def test_prompt_and_generated_by_hand(trace):
    # Layer 1: 3, 3, 0, 0 of 6 against 1, 0, 0, 1 of 2. Layer 3: 1, 1, 2, 2 of 6 against 0, 1, 1, 0 of 2.
    with pytest.warns(SmallSampleWarning, match="prompt_vs_generated: 1 distinct prompts"):
        table = usage.prompt_vs_generated(trace)
    assert table.index.name == "layer"
    assert table.loc[1, "distance"] == pytest.approx((0 + 1 / 2 + 0 + 1 / 2) / 2)
    assert table.loc[3, "distance"] == pytest.approx((1 / 6 + 1 / 3 + 1 / 6 + 1 / 3) / 2)
    assert table["prompt_tokens"].tolist() == [3, 3]
    assert table["generated_tokens"].tolist() == [1, 1]
    assert not table["enough_prompts"].any()
    assert table[["noise", "noise_high"]].isna().all(axis=None)


def test_distance_is_scipys_cityblock(random_traces):
    distance = pytest.importorskip("scipy.spatial.distance", reason="scipy is not installed")
    a, b = random_traces(11, seed=1), random_traces(12, seed=2)
    table = usage.load_distance(a, b)
    for row, p, q in zip(table.itertuples(), usage.counts(a), usage.counts(b), strict=True):
        assert row.distance == pytest.approx(distance.cityblock(p / p.sum(), q / q.sum()) / 2)
    assert table["tokens_a"].iloc[0] == sum(trace.rows for trace in a)
    assert table["tokens_b"].iloc[0] == sum(trace.rows for trace in b)
    assert (table["prompts"] == 11).all()


def test_a_set_is_nowhere_from_itself(random_traces):
    """The same prompts on both sides are drawn together, so there is no noise either."""
    traces = random_traces(10)
    table = usage.load_distance(traces, traces)
    assert (table[["distance", "noise", "noise_high"]] == 0).all(axis=None)


def test_noise_tells_a_difference_from_none():
    """Where nothing differs the distance exceeds noise_high about as often as it says; where much does, always."""
    rng = np.random.default_rng(5)
    even, uneven = np.full(8, 1 / 8), np.array([0.3, 0.2, 0.1, 0.1, 0.1, 0.1, 0.05, 0.05])

    def exceeds(share: np.ndarray) -> bool:
        a = [drawn_trace(rng, even) for _ in range(20)]
        b = [drawn_trace(rng, share) for _ in range(25)]
        row = usage.load_distance(a, b, resamples=200).loc[1]
        return bool(row["distance"] > row["noise_high"])

    assert np.mean([exceeds(even) for _ in range(200)]) < 0.12
    assert np.mean([exceeds(uneven) for _ in range(20)]) == 1


def test_a_constant_shift_between_prompt_and_generated_is_found_within_prompts():
    """Prompts differ widely, and the generated half of each differs a little from its own prompt in the same way."""
    rng = np.random.default_rng(6)
    traces = []
    for _ in range(20):
        trace = drawn_trace(rng, np.full(8, 1 / 8) * 0.2)
        routes = trace.routed_experts.copy()
        routes[10:, 1] = routes[:10, 1]
        routes[10:12, 1] = 7
        traces.append(dataclasses.replace(trace, routed_experts=routes))
    paired = usage.prompt_vs_generated(traces).loc[1]
    assert paired["distance"] > paired["noise_high"]
    # Halves of different prompts are compared as strangers, and the shift is lost among them.
    apart = usage.load_distance(
        [_half(trace, slice(0, 10)) for trace in traces[:10]],
        [_half(trace, slice(10, 20)) for trace in traces[10:]],
    ).loc[1]
    assert apart["noise"] > 2 * paired["noise"]


def _half(trace: RouteTrace, rows: slice) -> RouteTrace:
    return RouteTrace(trace.token_ids[rows], ("x",) * 10, 10, trace.routed_experts[rows], LAYOUT)


def test_a_side_without_tokens_is_refused(trace):
    prompt_only = dataclasses.replace(trace, prompt_tokens=5, logprobs=None)
    with pytest.raises(TraceError, match="no tokens with routes"):
        usage.prompt_vs_generated(prompt_only)


def test_two_models_are_refused(trace, random_traces):
    with pytest.raises(TraceError, match="different models"):
        usage.load_distance(trace, random_traces(1))
