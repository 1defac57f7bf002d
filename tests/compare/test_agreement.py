import dataclasses

import numpy as np
import pytest

from rtk import ModelLayout, RouteTrace, compare
from rtk.errors import SmallSampleWarning, TraceError


def test_agreement_by_hand(trace):
    routes = trace.routed_experts.copy()
    routes[0, 1] = [1, 0]  # the same experts, in the other order
    routes[1, 1] = [1, 2]  # one of two shared
    routes[3, 3] = [0, 3]  # none shared
    table = compare.agreement(trace, dataclasses.replace(trace, routed_experts=routes))
    assert table.index.tolist() == [1, 3]
    assert table["tokens"].tolist() == [4, 4]
    assert table["same_experts"].tolist() == [0.75, 0.75]
    assert table["overlap"].tolist() == [3.5 / 4, 0.75]
    assert table["same_order"].tolist() == [0.5, 0.75]


def test_a_row_more_is_left_out(trace):
    whole = np.concatenate([trace.routed_experts, trace.routed_experts[:1]])
    table = compare.agreement(trace, dataclasses.replace(trace, routed_experts=whole))
    assert table["tokens"].tolist() == [4, 4]
    assert (table["same_order"] == 1).all()


def test_several_traces_are_pooled(trace):
    other = dataclasses.replace(trace, routed_experts=(trace.routed_experts + 1) % 4)
    table = compare.agreement([trace, trace], [trace, other])
    assert table["tokens"].tolist() == [8, 8]
    assert (table["same_order"] == 0.5).all()


def test_what_cannot_be_compared_is_refused(trace):
    with pytest.raises(TraceError, match="2 traces cannot be compared with 1"):
        compare.agreement([trace, trace], trace)
    with pytest.raises(TraceError, match="pair 0: the traces hold different tokens"):
        compare.agreement(trace, dataclasses.replace(trace, token_ids=trace.token_ids + 1))
    other = dataclasses.replace(trace, layout=dataclasses.replace(trace.layout, num_experts=8))
    with pytest.raises(TraceError, match="different models"):
        compare.agreement(trace, other)


def test_router_saturation_by_hand(trace):
    routes = trace.routed_experts.copy()
    routes[0, 1] = [1, 0]  # both shared, the first choice not
    routes[1, 1] = [1, 2]  # one of two shared, and the first choice
    routes[3, 3] = [0, 3]  # none shared
    final = dataclasses.replace(trace, routed_experts=routes)
    with pytest.warns(SmallSampleWarning, match="router_saturation: 1 distinct prompts"):
        table = compare.router_saturation(trace, final)
    assert table["saturation"].to_dict() == {1: 3.5 / 4, 3: 3 / 4}
    assert table["tokens"].tolist() == [4, 4]
    assert not table["enough_prompts"].any()
    with pytest.warns(SmallSampleWarning):
        first = compare.router_saturation(trace, final, top_k=1)
    assert first["saturation"].to_dict() == {1: 3 / 4, 3: 3 / 4}


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_router_saturation_agrees_with_sets(top_k):
    """OLMoE's eq. 5 as it is written, a set of experts a token."""
    rng = np.random.default_rng(0)
    layout = ModelLayout(num_layers=3, moe_layers=(0, 2), num_experts=6, top_k=3)
    early, final = [], []
    for prompt in range(12):
        tokens = np.full(int(rng.integers(5, 20)), prompt)
        for side in (early, final):
            routes = rng.random((len(tokens), 3, 6)).argsort(axis=-1)[..., :3]
            side.append(RouteTrace(tokens, ("x",) * len(tokens), 2, routes, layout))
    table = compare.router_saturation(early, final, top_k=top_k)
    for layer in (0, 2):
        shared = [
            len(set(a[layer, :top_k].tolist()) & set(b[layer, :top_k].tolist())) / top_k
            for x, y in zip(early, final, strict=True)
            for a, b in zip(x.routed_experts, y.routed_experts, strict=True)
        ]
        assert table.loc[layer, "saturation"] == pytest.approx(sum(shared) / len(shared))
    if top_k == 3:
        assert table["saturation"].tolist() == pytest.approx(
            compare.agreement(early, final)["overlap"].tolist()
        )
    assert ((table["low"] < table["saturation"]) & (table["saturation"] < table["high"])).all()
    assert table["enough_prompts"].all()


def test_samples_of_one_prompt_stay_one_prompt_when_forwarded_whole(trace):
    """Eleven samples of one prompt; the other checkpoint was given prompt and sample as its prompt."""
    sampled = [dataclasses.replace(trace, token_ids=np.array([11, 12, 13, 20 + i, 15])) for i in range(11)]
    forwarded = [dataclasses.replace(each, prompt_tokens=5, logprobs=None) for each in sampled]
    for early, final in ((sampled, forwarded), (forwarded, sampled)):
        with pytest.warns(SmallSampleWarning, match="1 distinct prompts"):
            assert (compare.router_saturation(early, final)["prompts"] == 1).all()


def test_router_saturation_of_other_tokens_or_slots_is_refused(trace):
    with pytest.raises(TraceError, match="different tokens"):
        compare.router_saturation(trace, dataclasses.replace(trace, token_ids=trace.token_ids + 1))
    with pytest.raises(TraceError, match="top_k is 3"):
        compare.router_saturation(trace, trace, top_k=3)


def test_mismatch_by_hand(trace):
    """Four tokens on two MoE layers: three of eight routers differ, on two of four tokens."""
    routes = trace.routed_experts.copy()
    routes[0, 1] = [1, 0]  # the same experts, in the other order
    routes[1, 1] = [1, 2]  # one of two shared
    routes[3, 3] = [0, 3]  # none shared
    routes[3, 1] = [1, 2]  # none shared
    other = dataclasses.replace(trace, routed_experts=routes, logprobs=np.array([-1.0, -1.25]))
    found = compare.mismatch(trace, other)
    assert (found.tokens, found.routers) == (4, 8)
    assert found.routers_differ == 3 / 8
    assert found.tokens_differ == 2 / 4
    assert found.layers_differ == 3 / 4
    assert found.overlap == (5 * 1 + 0.5 + 0 + 0) / 8
    assert found.logprobs.tokens == 2
    assert found.logprobs.k1 == pytest.approx(0.25)  # (-0.5 - -1.0, 0) / 2
    assert found.logprobs.k3 == pytest.approx((np.exp(-0.5) - 1 + 0.5) / 2)
    assert "37.50% of 8 routers disagree" in str(found)
    assert "k3, 2 tokens" in str(found)


def test_mismatch_against_plain_sets():
    """An independent count with Python sets, over random routes of a larger model."""
    rng = np.random.default_rng(2)
    layout = ModelLayout(num_layers=5, moe_layers=(0, 2, 4), num_experts=6, top_k=3)

    def routes():
        made = np.zeros((50, 5, 3), np.uint8)
        made[:, list(layout.moe_layers)] = np.argsort(rng.random((50, 3, 6)), axis=-1)[..., :3]
        return made

    a, b = (RouteTrace(np.arange(51), ("x",) * 51, 9, routes(), layout) for _ in range(2))
    differing = [
        [
            set(a.routed_experts[t, n].tolist()) != set(b.routed_experts[t, n].tolist())
            for n in layout.moe_layers
        ]
        for t in range(50)
    ]
    shared = [
        len(set(a.routed_experts[t, n].tolist()) & set(b.routed_experts[t, n].tolist())) / 3
        for t in range(50)
        for n in layout.moe_layers
    ]
    found = compare.mismatch(a, b)
    assert found.routers_differ == pytest.approx(sum(map(sum, differing)) / 150)
    assert found.tokens_differ == pytest.approx(sum(map(any, differing)) / 50)
    assert found.overlap == pytest.approx(sum(shared) / 150)
    assert found.logprobs is None
    table = compare.by_position([a, a], [b, b], spans=5)
    assert table.index.tolist() == [0, 10, 20, 30, 40]
    assert table["tokens"].tolist() == [20] * 5
    assert table["tokens_differ"].tolist() == pytest.approx(
        [sum(map(any, differing[s : s + 10])) / 10 for s in range(0, 50, 10)]
    )
    assert table["routers_differ"].mean() == pytest.approx(found.routers_differ)
    assert table["overlap"].mean() == pytest.approx(found.overlap)


def test_kl_estimators_converge_on_the_true_divergence():
    """Sampled from q, k1 and k3 must come to KL(q || p), which for six tokens is a sum, and not to KL(p || q)."""
    rng = np.random.default_rng(4)
    q, p = np.array([0.5, 0.2, 0.1, 0.1, 0.05, 0.05]), np.array([0.2, 0.2, 0.19, 0.19, 0.11, 0.11])
    true, reverse = float((q * np.log(q / p)).sum()), float((p * np.log(p / q)).sum())
    drawn = rng.choice(6, 400_000, p=q)
    gap = compare.logprob_gap(np.log(q[drawn]), np.log(p[drawn]))
    assert gap.k1 == pytest.approx(true, rel=0.01)
    assert gap.k3 == pytest.approx(true, rel=0.01)
    assert abs(true - reverse) > 0.05 * true
    assert gap.extreme[2.0] == pytest.approx(0.6, abs=0.01)  # all but those of 0.2 and 0.1
    assert gap.extreme[5.0] == 0


def test_logprobs_that_are_missing_are_counted_and_left_out():
    gap = compare.logprob_gap([-1.0, -9999.0, float("nan"), -2.0], [-1.0, -1.0, -1.0, float("-inf")])
    assert (gap.tokens, gap.left_out, gap.k1, gap.mean_abs) == (1, 3, 0.0, 0.0)
    none = compare.logprob_gap([], [])
    assert np.isnan(none.k3)


def test_metrics_refuse_what_they_cannot_compare(trace):
    with pytest.raises(TraceError, match=r"shapes \[2\] and \[3\]"):
        compare.logprob_gap([0, 0], [0, 0, 0])
    with pytest.raises(TraceError, match="spans is 0"):
        compare.by_position(trace, trace, spans=0)
    with pytest.raises(TraceError, match="generated tokens differ"):
        ids = trace.token_ids.copy()
        ids[-1] += 1
        compare.mismatch(trace, dataclasses.replace(trace, token_ids=ids))


def test_mismatch_of_real_engines_against_torch():
    """float32 against bfloat16 of the tiny model; KL also from whole distributions, as torch computes it."""
    torch = pytest.importorskip("torch")
    from tests.replay import engines

    rollout, trainer = engines.traces("float32"), engines.traces("bfloat16")
    found = compare.mismatch(rollout, trainer)
    assert 0 < found.routers_differ < 0.02
    assert found.routers_differ < found.tokens_differ < 7 * found.routers_differ + 1e-9
    exact = []
    with torch.no_grad():
        for prompt, ids in engines.texts():
            q, p = (
                engines.load(d)(torch.tensor([ids[:-1]])).logits[0, prompt - 1 :].float().log_softmax(-1)
                for d in ("float32", "bfloat16")
            )
            exact.append(torch.nn.functional.kl_div(p, q, log_target=True, reduction="none").sum(-1))
    exact = float(torch.cat(exact).mean())
    # Thousands of tokens at a KL of about 1e-3: the estimators scatter, k3 by less than k1.
    assert found.logprobs.k3 == pytest.approx(exact, rel=0.5)
    assert abs(found.logprobs.k1) < 20 * exact
