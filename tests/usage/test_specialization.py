import dataclasses
from collections import Counter, defaultdict

import numpy as np
import pytest

from rtk import ModelLayout, RouteTrace, usage
from rtk.errors import SmallSampleWarning, TraceError


def test_domains_by_hand(trace):
    # Layer 1 has 01, 10, 01, 30: of four tokens all go to 0, three to 1, none to 2, one to 3.
    half = dataclasses.replace(trace, prompt_tokens=2, logprobs=None)
    with pytest.warns(SmallSampleWarning) as caught:
        table = usage.domain_specialization({"cats": trace, "start": [half]}, span="prompt")
    assert [str(each.message).split(":")[0] for each in caught] == ["domain 'cats'", "domain 'start'"]
    assert table.index.names == ["domain", "layer", "expert"]
    assert table.loc[("cats", 1), "specialization"].tolist() == [1, 1, 0, 0]
    assert table.loc[("cats", 3), "specialization"].tolist() == pytest.approx([1 / 3, 1 / 3, 2 / 3, 2 / 3])
    assert table.loc[("start", 3), "specialization"].tolist() == [0, 1 / 2, 1 / 2, 1]
    assert table.loc["start", "tokens"].unique().tolist() == [2]
    assert not table["enough_prompts"].any()


def test_first_choices_alone(trace):
    with pytest.warns(SmallSampleWarning):
        table = usage.domain_specialization({"cats": trace}, top_k=1, layers=[1])
    assert table["specialization"].tolist() == [2 / 4, 1 / 4, 0, 1 / 4]


def test_domains_agree_with_a_plain_loop(random_traces):
    groups = {"a": random_traces(10, seed=1), "b": random_traces(14, seed=2)}
    table = usage.domain_specialization(groups)
    for name, traces in groups.items():
        for layer in (0, 2, 4):
            tokens = [row[layer].tolist() for trace in traces for row in trace.routed_experts]
            for expert in range(11):
                share = sum(expert in token for token in tokens) / len(tokens)
                assert table.loc[(name, layer, expert), "specialization"] == pytest.approx(share)
        assert (table.loc[name, "prompts"] == len(traces)).all()
    np.testing.assert_allclose(table.groupby(["domain", "layer"])["specialization"].sum(), 3)
    assert ((table["low"] <= table["specialization"]) & (table["specialization"] <= table["high"])).all()
    assert table["enough_prompts"].all()


def test_samples_of_one_prompt_are_one_prompt(random_traces):
    once = random_traces(10)
    often = [trace for trace in once for _ in range(5)]
    table = usage.domain_specialization({"once": once, "often": often})
    np.testing.assert_allclose(table.loc["once", ["low", "high"]], table.loc["often", ["low", "high"]])
    assert (table["prompts"] == 10).all()


def test_a_domain_without_tokens_is_nan_and_told_of(trace):
    prompt_only = dataclasses.replace(trace, prompt_tokens=5, logprobs=None)
    with pytest.warns(SmallSampleWarning, match="domain 'cats': 0 distinct prompts"):
        table = usage.domain_specialization({"cats": prompt_only}, span="generated")
    assert table["specialization"].isna().all()


def test_domains_of_nothing_and_of_two_models_are_refused(trace, random_traces):
    with pytest.raises(TraceError, match="no traces"):
        usage.domain_specialization({})
    with pytest.raises(TraceError, match="different models"):
        usage.domain_specialization({"a": trace, "b": random_traces(1)})


def test_vocabulary_by_hand(trace):
    """Token 11 twice, with first choices 0 and 0 in layer 1, 2 and 2 in layer 3; 12 and 14 once."""
    words = dataclasses.replace(trace, token_ids=np.array([11, 12, 11, 14, 15]))
    table = usage.vocabulary_specialization(words, min_count=1)
    assert table.index.names == ["layer", "token_id"]
    assert table.loc[1].index.tolist() == [11, 12, 14]
    assert table.loc[(1, 11)].tolist() == ["The", 2, 0, 1.0]
    assert table.loc[(1, 14)].tolist() == [" sat", 1, 3, 1.0]
    assert table.loc[(3, 11), "expert"] == 2
    assert usage.vocabulary_specialization(words, min_count=2).index.tolist() == [(1, 11), (3, 11)]


def test_vocabulary_of_the_next_token_by_hand(trace):
    # Before the two 12s stand rows 0 and 1 of layer 1, whose first choices are 0 and 1: the lower id wins.
    words = dataclasses.replace(trace, token_ids=np.array([11, 12, 12, 14, 15]))
    table = usage.vocabulary_specialization(words, token="next", min_count=1)
    assert table.loc[(1, 12)].tolist() == [" cat", 2, 0, 0.5]
    assert table.loc[1].index.tolist() == [12, 14, 15]


def test_the_last_token_of_a_whole_sequence_has_no_next_one(trace):
    routes = np.concatenate([trace.routed_experts, trace.routed_experts[:1]])
    whole = dataclasses.replace(trace, routed_experts=routes)
    table = usage.vocabulary_specialization(whole, token="next", min_count=1)
    assert table.loc[1, "count"].tolist() == [1, 1, 1, 1]
    assert usage.vocabulary_specialization(whole, min_count=1).loc[1, "count"].sum() == 5


@pytest.mark.parametrize("token", ["input", "next"])
@pytest.mark.parametrize("top_k", [1, 3])
def test_vocabulary_agrees_with_counters(random_traces, token, top_k):
    traces = random_traces(8)
    table = usage.vocabulary_specialization(traces, token=token, top_k=top_k, span="generated")
    for layer in (0, 2, 4):
        goes_to, occurs = defaultdict(Counter), Counter()
        for trace in traces:
            for position in range(trace.prompt_tokens, trace.rows):
                number = int(trace.token_ids[position + (token == "next")])
                occurs[number] += 1
                goes_to[number].update(trace.routed_experts[position, layer, :top_k].tolist())
        expected = {}
        for number in sorted(occurs):
            if occurs[number] >= 10:
                expert = min(goes_to[number], key=lambda e: (-goes_to[number][e], e))
                expected[number] = (occurs[number], expert, goes_to[number][expert] / occurs[number])
        here = table.loc[layer]
        assert expected
        assert here.index.tolist() == list(expected)
        for number, (count, expert, share) in expected.items():
            assert here.loc[number].tolist()[1:] == [count, expert, pytest.approx(share)]


def test_words_that_are_too_rare_are_told_of(trace):
    with pytest.warns(SmallSampleWarning, match="none of 4 token ids occurs 10 times"):
        table = usage.vocabulary_specialization(trace)
    assert table.empty
    assert table.index.names == ["layer", "token_id"]


def test_what_is_no_kind_of_token_is_named(trace):
    with pytest.raises(TraceError, match="token is 'output'"):
        usage.vocabulary_specialization(trace, token="output")
    with pytest.raises(TraceError, match="min_count 0"):
        usage.vocabulary_specialization(trace, min_count=0)


def test_groups_are_named():
    trace = RouteTrace([1, 2], ("x", "x"), 1, np.zeros((1, 1, 1), np.uint8), ModelLayout(1, (0,), 4, 1))
    for call in (usage.domain_specialization, usage.heatmaps):
        with pytest.raises(TraceError, match="groups is a RouteTrace; it maps names to traces"):
            call(trace)
        with pytest.raises(TraceError, match="no traces were given"):
            call({})
