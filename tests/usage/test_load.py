import dataclasses
import math

import matplotlib
import numpy as np
import pytest

from rtk import usage
from rtk.errors import TraceError

matplotlib.use("Agg")

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
    from rtk import ModelLayout, RouteTrace

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
    assert (first["busiest"], first["unused"]) == (0, 1)
    # shares 1/2, 3/8, 1/8
    entropy = 0.5 * 1 + 3 / 8 * math.log2(8 / 3) + 1 / 8 * 3
    assert first["entropy_bits"] == pytest.approx(entropy)
    assert first["evenness"] == pytest.approx(entropy / 2)


def test_table_agrees_with_scipys_entropy(trace):
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    for row, load in zip(usage.table(trace).itertuples(), (LAYER_1, LAYER_3), strict=True):
        assert row.entropy_bits == pytest.approx(stats.entropy(load, base=2))


def test_an_empty_span_has_no_ratios(trace):
    table = usage.table(trace, tokens=slice(0, 0))
    assert table["assignments"].tolist() == [0, 0]
    assert table[["entropy_bits", "evenness", "max_over_mean"]].isna().all(axis=None)


def test_heatmap_shows_the_models_layer_numbers_and_loads(trace):
    ax = usage.heatmap(trace, title="two layers")
    assert [label.get_text() for label in ax.get_yticklabels()] == ["1", "3"]
    drawn = np.asarray(ax.collections[0].get_array()).reshape(2, 4)
    np.testing.assert_allclose(drawn, [[2, 1.5, 0, 0.5], [0.5, 1, 1.5, 1]])
    assert ax.get_title() == "two layers"


def test_heatmap_of_one_layer(trace):
    ax = usage.heatmap(trace, layers=[3])
    assert [label.get_text() for label in ax.get_yticklabels()] == ["3"]
    with pytest.raises(TraceError, match=r"\[2\].*MoE layers are \[1, 3\]"):
        usage.heatmap(trace, layers=[2])


def test_bad_input_is_named(trace):
    with pytest.raises(TraceError, match="no traces"):
        usage.counts([])
    with pytest.raises(TraceError, match=r"holds one in \.trace"):
        usage.counts([trace.token_ids])
    with pytest.raises(TraceError, match="span is 'answer'"):
        usage.counts(trace, span="answer")
    other = dataclasses.replace(trace, layout=dataclasses.replace(trace.layout, num_experts=8))
    with pytest.raises(TraceError, match="different models"):
        usage.counts([trace, other])
    physical = trace.routed_experts.copy()
    physical[2, 3, 1] = 9
    with pytest.raises(TraceError, match=r"layer 3 .* 1\.\.9 for 4 experts"):
        usage.counts(dataclasses.replace(trace, routed_experts=physical))


def test_heatmaps_share_one_colour_scale(trace):
    figure = usage.heatmaps({"both": [trace], "generated only": [trace, trace], "third": [trace]})
    drawn = [ax for ax in figure.axes if ax.collections and ax.get_title()]
    assert [ax.get_title() for ax in drawn] == [
        "both (1 prompts)",
        "generated only (2 prompts)",
        "third (1 prompts)",
    ]
    assert {ax.collections[0].get_clim() for ax in drawn} == {(0, 2.0)}
