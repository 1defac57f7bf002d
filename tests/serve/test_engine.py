"""The engine against transformers itself: whole forward passes and its own generate()."""

import json
import shutil

import numpy as np
import pytest
import torch
import transformers

from rtk.errors import EmbeddedServerError
from rtk.serve.engine import Engine, SamplingParams, _choose

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


def test_prompt_logprobs_are_those_of_one_whole_forward_pass(engine, reference):
    generation, _ = run(engine, temperature=0, max_tokens=1, prompt_logprobs=2)
    with torch.no_grad():
        logprobs = reference(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    assert [score.id for score in generation.prompt_logprobs] == PROMPT[1:]
    for row, score in zip(logprobs, generation.prompt_logprobs, strict=False):
        assert score.logprob == pytest.approx(row[score.id].item(), abs=1e-4)
        assert score.rank == 1 + int((row.argsort(descending=True) == score.id).nonzero())
        assert [id_ for id_, _ in score.top] == row.topk(2).indices.tolist()
    assert run(engine, temperature=0, max_tokens=1)[0].prompt_logprobs is None


def test_a_seed_repeats_and_another_does_not(engine):
    first, again, other = (
        [token.id for token in run(engine, temperature=1.5, seed=seed)[1]] for seed in (1, 1, 2)
    )
    assert first == again != other


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0.5, 0.25, 0.15, 0.1]),
        ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
        # 0.5 is less than 0.6, so the second token still belongs to the smallest set that holds it.
        ({"top_p": 0.6}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 0.5}, [1, 0, 0, 0]),
        ({"top_p": 1e-6}, [1, 0, 0, 0]),
        # Of the three best, 0.5/0.9 and 0.25/0.9 are collected before 0.85 is reached: top_p comes second.
        ({"top_k": 3, "top_p": 0.85}, [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0]),
        ({"temperature": 0.5}, [0.25 / 0.345, 0.0625 / 0.345, 0.0225 / 0.345, 0.01 / 0.345]),
    ],
)
def test_each_filter_leaves_the_tokens_that_it_should(params, expected):
    """Shares of 4000 draws against shares worked out by hand; five standard deviations are below 0.04."""
    order = [2, 0, 3, 1]  # the tokens from the most to the least probable one
    logits = torch.empty(4)
    logits[order] = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()
    random = torch.Generator().manual_seed(1)
    settings = SamplingParams(**{"max_tokens": 1} | params)
    seen = np.bincount([_choose(logits, settings, random) for _ in range(4000)], minlength=4)[order]
    np.testing.assert_allclose(seen / 4000, expected, atol=0.04)
    assert not seen[np.array(expected) == 0].any()


def test_tokens_are_drawn_from_the_models_distribution(engine, reference):
    with torch.no_grad():
        logits = reference(torch.tensor([PROMPT])).logits[0, -1]
    allowed = logits.topk(3).indices.tolist()
    drawn = [run(engine, max_tokens=1, temperature=0.8, seed=seed, top_k=3)[1][0].id for seed in range(300)]
    seen = np.bincount(drawn, minlength=257)[allowed]
    assert seen.sum() == 300
    # Five standard deviations of a share of 300 draws are below 0.15.
    np.testing.assert_allclose(seen / 300, (logits[allowed] / 0.8).softmax(-1), atol=0.15)


def test_stops_at_the_models_end_and_at_given_tokens(engine):
    _, free = run(engine, temperature=0)
    third = free[2].id
    stopping = next(i for i, token in enumerate(free) if token.id == third)
    _, tokens = run(engine, temperature=0, stop_token_ids=frozenset([third]))
    assert [token.id for token in tokens] == [token.id for token in free[: stopping + 1]]
    assert (tokens[-1].finish_reason, tokens[-1].stop_reason) == ("stop", third)
    _, tokens = run(engine, temperature=0, stop_token_ids=frozenset([third]), min_tokens=8)
    assert len(tokens) >= 8
    assert third not in [token.id for token in tokens[:8]]


def test_stops_at_every_end_that_the_generation_config_names(engine, model_folder, tmp_path):
    _, free = run(engine, temperature=0, max_tokens=1)
    shutil.copytree(model_folder, tmp_path / "chat")
    config = tmp_path / "chat" / "generation_config.json"
    ends = [256, free[0].id]
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": ends}))
    chat = Engine(tmp_path / "chat")
    _, tokens = run(chat, temperature=0, ignore_eos=False)
    assert [(token.id, token.finish_reason, token.stop_reason) for token in tokens] == [
        (free[0].id, "stop", None)
    ]
    assert len(run(chat, temperature=0)[1]) == 12


def test_a_router_that_reports_no_expert_ids_is_refused_at_the_start(model_folder, tmp_path):
    """Llama 4's routers return scores and logits, and choose no experts of their own."""
    shutil.copytree(model_folder, tmp_path / "llama4", ignore=shutil.ignore_patterns("*.safetensors"))
    config = transformers.Llama4TextConfig(
        vocab_size=257, hidden_size=32, intermediate_size=16, intermediate_size_mlp=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=1,
        interleave_moe_layer_step=1, max_position_embeddings=128, bos_token_id=256, eos_token_id=256, pad_token_id=256,
    )  # fmt: skip
    transformers.Llama4ForCausalLM(config).save_pretrained(tmp_path / "llama4")
    with pytest.raises(
        EmbeddedServerError, match=r"router of layer 0 .* does not report the ids of 1 experts"
    ):
        Engine(tmp_path / "llama4")


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
