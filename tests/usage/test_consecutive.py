import dataclasses
from itertools import pairwise

import pytest

from rtk import ModelLayout, usage
from rtk.errors import SmallSampleWarning


def test_repetition_by_hand(trace):
    # Layer 1 has 01, 10, 01, 30: first choices 0, 1, 0, 3 never repeat, any choice always does.
    # Layer 3 has 23, 31, 20, 12: first choices 2, 3, 2, 1; 3 is shared, then nothing, then 2.
    with pytest.warns(SmallSampleWarning, match="repetition: 1 distinct prompts are too few"):
        table = usage.repetition(trace)
    assert table.index.names == ["layer", "choice"]
    assert table["pairs"].tolist() == [3] * 4
    assert table["repetition"].to_dict() == {
        (1, "first"): 0,
        (1, "any"): 1,
        (3, "first"): 0,
        (3, "any"): 2 / 3,
    }
    assert not table["enough_prompts"].any()
    assert table[["low", "high"]].isna().all(axis=None)


def test_chance_is_mixtrals(trace):
    """The reference in table 5's caption: 1/8 = 12.5 %, and 1 - 6/8 * 5/7, about 46 %."""
    mixtral = dataclasses.replace(trace, layout=ModelLayout(4, (1, 3), num_experts=8, top_k=2))
    with pytest.warns(SmallSampleWarning):
        random = usage.repetition(mixtral)["random"]
    assert random.loc[1].to_dict() == pytest.approx({"first": 1 / 8, "any": 1 - 6 / 8 * 5 / 7})


def test_chance_is_the_hypergeometric_one(random_traces):
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    random = usage.repetition(random_traces(12))["random"]
    assert random.loc[(0, "any")] == pytest.approx(1 - stats.hypergeom.pmf(0, 11, 3, 3))


@pytest.mark.parametrize("span", ["all", "prompt", "generated"])
def test_repetition_agrees_with_a_plain_loop(random_traces, span):
    traces = random_traces(12)
    table = usage.repetition(traces, span=span)
    for layer in (0, 2, 4):
        pairs, first, anyhow = 0, 0, 0
        for trace in traces:
            begin, end = {
                "all": (0, trace.rows),
                "prompt": (0, trace.prompt_tokens),
                "generated": (trace.prompt_tokens, trace.rows),
            }[span]
            rows = trace.routed_experts[begin:end, layer].tolist()
            for before, after in pairwise(rows):
                pairs += 1
                first += before[0] == after[0]
                anyhow += bool(set(before) & set(after))
        assert table.loc[(layer, "first"), "pairs"] == pairs
        assert table.loc[(layer, "first"), "repetition"] == pytest.approx(first / pairs)
        assert table.loc[(layer, "any"), "repetition"] == pytest.approx(anyhow / pairs)
    assert (table["prompts"] == 12).all()
    assert table["enough_prompts"].all()
    assert (table["low"] < table["repetition"]).all()
    assert (table["repetition"] < table["high"]).all()


def test_a_token_alone_repeats_nothing(trace):
    with pytest.warns(SmallSampleWarning, match="0 distinct prompts"):
        table = usage.repetition(trace, span="generated")
    assert (table["pairs"] == 0).all()
    assert table["repetition"].isna().all()
