"""The engine against transformers itself: whole forward passes and its own generate()."""

import json
import shutil

import numpy as np
import pytest
import torch

from rtk.errors import EmbeddedServerError
from rtk.serve.engine import Engine, SamplingParams

PROMPT = [5, 77, 200, 13, 42, 99, 101]


def run(engine, **params):
    generation = engine.start(PROMPT, SamplingParams(**{"max_tokens": 12, "ignore_eos": True} | params))
    tokens = [engine.step(generation)]
    while tokens[-1].finish_reason is None:
        tokens.append(engine.step(generation))
    return generation, tokens


def test_greedy_tokens_are_those_of_transformers_generate(engine, reference):
    _, tokens = run(engine, temperature=0)
    expected = reference.generate(
        torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=256
    )
    assert [token.id for token in tokens] == expected[0, len(PROMPT) :].tolist()


def test_routes_are_those_of_one_whole_forward_pass(engine, reference):
    """The cached, step by step routes against softmax and top-k of the logits of one pass over all tokens."""
    generation, _ = run(engine, temperature=1.0, seed=4)
    routes = generation.routed_experts()
    tokens = PROMPT + generation.generated
    assert (routes.shape, routes.dtype) == ((len(tokens) - 1, 4, 2), np.uint8)
    with torch.no_grad():
        logits = reference(torch.tensor([tokens[:-1]]), output_router_logits=True).router_logits
    assert len(logits) == 2
    for layer, scores in zip((1, 3), logits, strict=True):
        expected = scores.softmax(-1).topk(2).indices.numpy()
        np.testing.assert_array_equal(routes[:, layer], expected)
    assert not routes[:, [0, 2]].any()
    assert len(np.unique(routes[:, [1, 3]])) > 4  # or equality would say little


def test_logprobs_are_those_of_one_whole_forward_pass(engine, reference):
    generation, tokens = run(engine, temperature=0.5, seed=1, logprobs=3)
    ids = PROMPT + generation.generated
    with torch.no_grad():
        logprobs = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
    for position, token in enumerate(tokens, start=len(PROMPT)):
        row = logprobs[position - 1]
        assert token.logprob == pytest.approx(row[token.id].item(), abs=1e-4)
        best = row.topk(3)
        assert [id_ for id_, _ in token.top] == best.indices.tolist()
        assert [value for _, value in token.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_a_seed_repeats_and_another_does_not(engine):
    first, again, other = (
        [token.id for token in run(engine, temperature=1.5, seed=seed)[1]] for seed in (1, 1, 2)
    )
    assert first == again != other


def test_sampling_follows_the_models_distribution(engine, reference):
    """Each filter leaves the tokens that it should, drawn in the proportions that it should."""
    with torch.no_grad():
        logits = reference(torch.tensor([PROMPT])).logits[0, -1]
    draws = 800
    for params, allowed in (
        ({"top_k": 3}, logits.topk(3).indices.tolist()),
        ({"top_p": 1e-6}, [int(logits.argmax())]),
    ):
        expected = (logits[allowed] / 0.8).softmax(-1)
        seen = torch.zeros(257)
        for seed in range(draws):
            _, (token,) = run(engine, max_tokens=1, temperature=0.8, seed=seed, **params)
            seen[token.id] += 1
        assert seen[allowed].sum() == draws
        # Five standard deviations of a share of 800 draws are below 0.09.
        np.testing.assert_allclose(seen[allowed] / draws, expected, atol=0.09)


def test_stops_at_the_models_end_and_at_given_tokens(engine):
    _, free = run(engine, temperature=0)
    third = free[2].id
    stopping = next(i for i, token in enumerate(free) if token.id == third)
    _, tokens = run(engine, temperature=0, stop_token_ids=frozenset([third]))
    assert [token.id for token in tokens] == [token.id for token in free[: stopping + 1]]
    assert tokens[-1].finish_reason == "stop"
    _, tokens = run(engine, temperature=0, stop_token_ids=frozenset([third]), min_tokens=8)
    assert len(tokens) >= 8
    assert third not in [token.id for token in tokens[:8]]


def test_a_folder_that_holds_no_moe_model_is_named(tmp_path, model_folder):
    with pytest.raises(EmbeddedServerError, match=r"cannot serve .*cannot read the model config"):
        Engine(tmp_path)
    shutil.copytree(model_folder, tmp_path / "dense")
    config = json.loads((model_folder / "config.json").read_text())
    config = {
        key: value for key, value in config.items() if "num_experts" not in key and "num_local" not in key
    }
    (tmp_path / "dense" / "config.json").write_text(json.dumps(config))
    with pytest.raises(EmbeddedServerError, match="Mixture-of-Experts"):
        Engine(tmp_path / "dense")


def test_a_length_that_the_model_does_not_have(model_folder):
    with pytest.raises(EmbeddedServerError, match=r"max_model_len is 129; this model takes 1\.\.128"):
        Engine(model_folder, max_model_len=129)
