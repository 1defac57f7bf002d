import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rtk import ModelLayout, usage
from rtk.errors import TraceError
from rtk.usage import pairs
from tests.usage.conftest import random_trace


def test_coactivation_by_hand(trace):
    # Layer 1 has the rows 01, 10, 01, 30: expert 0 four times, three of them with 1 and one with 3.
    table = usage.coactivation(trace, 1)
    assert table.loc[0].tolist() == [1, 3 / 4, 0, 1 / 4]
    assert table.loc[1].tolist() == [1, 1, 0, 0]
    assert table.loc[2].isna().all()
    assert table.loc[3].tolist() == [1, 0, 0, 1]
    assert (table.index.name, table.columns.name) == ("expert", "with_expert")


def test_transitions_by_hand(trace):
    # Expert 1 of layer 1 has the first three rows, whose experts in layer 3 are 23, 31, 20.
    table = usage.transitions(trace, 1)
    assert table.loc[1].tolist() == pytest.approx([1 / 6, 1 / 6, 2 / 6, 2 / 6])
    # Expert 3 has the last row alone: 12.
    assert table.loc[3].tolist() == [0, 1 / 2, 1 / 2, 0]
    assert table.loc[2].isna().all()
    assert (table.index.name, table.columns.name) == ("expert", "next_expert")


def test_pairs_agree_with_products_of_one_hot_matrices(random_traces):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    traces = random_traces(4)

    def one_hot(layer):
        ids = torch.from_numpy(np.concatenate([t.routed_experts[:, layer] for t in traces]).astype(np.int64))
        return torch.nn.functional.one_hot(ids, 11).sum(1).double()

    first, second = one_hot(0), one_hot(4)
    together = (first.T @ first) / first.sum(0)[:, None]
    np.testing.assert_allclose(usage.coactivation(traces, 0), together)
    onward = (first.T @ second) / (3 * first.sum(0)[:, None])
    np.testing.assert_allclose(usage.transitions(traces, 0, 4), onward)


def test_the_next_layer_is_the_next_with_a_router(random_traces):
    traces = random_traces(2)
    assert usage.transitions(traces, 0).equals(usage.transitions(traces, 0, 2))


def test_a_span_counts_its_own_tokens_alone(trace):
    # The only generated token with routes has 30, and 12 in layer 3.
    assert usage.coactivation(trace, 1, span="generated").loc[3].tolist() == [1, 0, 0, 1]
    assert usage.transitions(trace, 1, span="generated").loc[0].tolist() == [0, 1 / 2, 1 / 2, 0]


def test_what_is_no_layer_is_named(trace):
    with pytest.raises(TraceError, match=r"layers \[0\]: the model's MoE layers are \[1, 3\]"):
        usage.coactivation(trace, 0)
    with pytest.raises(TraceError, match="no MoE layer after layer 3; name next_layer"):
        usage.transitions(trace, 3)
    with pytest.raises(TraceError, match=r"layers \[2\]"):
        usage.transitions(trace, 1, 2)
    with pytest.raises(TraceError, match=r"layers \[2\]"):
        usage.transitions(trace, 2)


def test_a_token_with_one_expert_twice_is_refused(trace):
    routes = trace.routed_experts.copy()
    routes[2, 1] = [3, 3]
    with pytest.raises(TraceError, match="layer 1: a token names an expert twice"):
        usage.coactivation(dataclasses.replace(trace, routed_experts=routes), 1)


def test_pieces_add_up_to_the_whole(random_traces, monkeypatch):
    traces = random_traces(3)
    whole = usage.transitions(traces, 0)
    monkeypatch.setattr(pairs, "_PAIRS_AT_ONCE", 9 * 4)  # four rows at once
    assert usage.transitions(traces, 0).equals(whole)


@settings(max_examples=40, deadline=None)
@given(experts=st.integers(2, 9), data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_pairs_conserve_counts(experts, data, seed):
    layout = ModelLayout(3, (0, 2), experts, data.draw(st.integers(1, experts)))
    traces = [
        random_trace(np.random.default_rng(seed + i), layout, data.draw(st.integers(2, 20)), 1)
        for i in range(2)
    ]
    tokens = sum(trace.rows for trace in traces)
    load = usage.counts(traces)
    within = pairs._pair_counts(traces, 0, 0, "all")
    assert np.array_equal(within, within.T)
    assert np.array_equal(within.diagonal(), load[0])
    assert within.sum() == tokens * layout.top_k**2
    across = pairs._pair_counts(traces, 0, 2, "all")
    assert np.array_equal(across.sum(axis=1), load[0] * layout.top_k)
    assert np.array_equal(across.sum(axis=0), load[1] * layout.top_k)
    rows = usage.transitions(traces, 0).dropna()
    np.testing.assert_allclose(rows.sum(axis=1), 1)
    assert len(rows) == np.count_nonzero(load[0])
