import base64
import json
from pathlib import Path

import numpy as np
import pytest

from rtk import ModelLayout
from rtk.errors import PayloadError
from rtk.wire.forms import Completions, SglangGenerate, VllmGenerate

FIXTURES = Path(__file__).parent.parent / "fixtures"
LAYOUT = ModelLayout(num_layers=2, moe_layers=(1,), num_experts=512, top_k=2)


@pytest.fixture
def completions():
    return json.loads((FIXTURES / "vllm_0_30_completions.json").read_text())


# As SGLang documents `/generate`: 3 prompt tokens, 2 generated, so 4 rows of 2 layers and top-2.
SGLANG_ROUTES = [[[0, 0], [1, 300]], [[0, 0], [2, 3]], [[0, 0], [5, 4]], [[0, 0], [7, 6]]]
SGLANG = {
    "text": " a b",
    "meta_info": {
        "id": "c2f1",
        "finish_reason": {"type": "length", "length": 2},
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "output_token_logprobs": [[-0.25, 11, None], [-1.5, 12, None]],
        "routed_experts": base64.b64encode(np.array(SGLANG_ROUTES, "<i4").tobytes()).decode(),
    },
}


def test_a_real_completion(completions):
    form = Completions()
    payload = json.loads(completions["completions"]["text"])
    choice = form.choice(payload)
    chunk = form.chunk(choice)
    assert chunk.token_ids == [82, 278, 83, 12]
    assert chunk.logprobs == [
        -2.979142665863037,
        -2.618708848953247,
        -2.3087949752807617,
        -2.6198503971099854,
    ]
    assert form.finish_reason(choice) == "length"
    assert form.request_id(payload) == payload["id"]
    routes = form.routed_experts(payload, choice)
    # 4 prompt and 4 generated tokens, 8 layers, top-2; the last row read off the end of the base64 text.
    assert (routes.shape, routes.dtype) == ((7, 8, 2), np.uint8)
    tail = base64.b64decode(choice["routed_experts"])[-16:]
    assert routes[-1].ravel().tolist() == list(tail)


def test_a_completion_asks_for_token_ids():
    body = Completions().body([1, 2], {"max_tokens": 3, "logprobs": 0}, routed_experts=True)
    assert body == {"prompt": [1, 2], "max_tokens": 3, "logprobs": 0, "return_token_ids": True}


def test_several_real_choices_are_refused(completions):
    with pytest.raises(PayloadError, match="2 choices"):
        Completions().choice(json.loads(completions["completions_n2"]["text"]))


def test_the_two_parts_of_vllm_0_21_are_joined():
    payload = {
        "prompt_routed_experts": [[[0, 1]], [[2, 3]]],
        "choices": [{"token_ids": [8, 9], "routed_experts": [[[4, 5]]]}],
    }
    form = VllmGenerate()
    routes = form.routed_experts(payload, form.choice(payload))
    assert routes.tolist() == [[[0, 1]], [[2, 3]], [[4, 5]]]
    payload["choices"][0] |= {"token_ids": [8], "routed_experts": None}
    assert form.routed_experts(payload, form.choice(payload)).tolist() == [[[0, 1]], [[2, 3]]]


def test_an_sglang_answer():
    form = SglangGenerate(LAYOUT)
    meta = form.choice(SGLANG)
    chunk = form.chunk(meta)
    assert (chunk.token_ids, chunk.logprobs) == ([11, 12], [-0.25, -1.5])
    assert form.finish_reason(meta) == "length"
    assert form.request_id(SGLANG) == "c2f1"
    assert form.routed_experts(SGLANG, meta).tolist() == SGLANG_ROUTES


def test_sglang_is_asked_by_its_own_names():
    params = {"max_tokens": 4, "temperature": 0.5, "seed": 3, "logprobs": 2, "stop": ["x"]}
    assert SglangGenerate(LAYOUT).body([1], params, routed_experts=True) == {
        "input_ids": [1],
        "sampling_params": {"max_new_tokens": 4, "temperature": 0.5, "sampling_seed": 3, "stop": ["x"]},
        "return_logprob": True,
        "top_logprobs_num": 2,
        "return_routed_experts": True,
    }


@pytest.mark.parametrize("entries", [None, [1], [[-0.5]], [[-0.5, "11"]]])
def test_malformed_sglang_tokens_are_refused(entries):
    with pytest.raises(PayloadError):
        SglangGenerate(None).chunk({"output_token_logprobs": entries})


def test_an_answer_of_another_kind_of_server_is_refused():
    with pytest.raises(PayloadError, match="no meta_info"):
        SglangGenerate(None).choice({"choices": []})


def test_logprobs_that_are_missing_or_not_finite_become_the_floor():
    values = [-0.25, float("-inf"), None, float("nan")]
    content = [{"logprob": value} for value in values] + [{}]
    chunk = VllmGenerate().chunk({"token_ids": [1, 2, 3, 4, 5], "logprobs": {"content": content}})
    assert chunk.logprobs == [-0.25, -9999.0, -9999.0, -9999.0, -9999.0]
    chunk = Completions().chunk({"token_ids": [1, 2, 3, 4], "logprobs": {"token_logprobs": values}})
    assert chunk.logprobs == [-0.25, -9999.0, -9999.0, -9999.0]


@pytest.mark.parametrize(
    "choice",
    [
        {},
        {"token_ids": ["1"]},
        {"token_ids": [True]},
        {"token_ids": [1, 2], "logprobs": {"content": [{"logprob": -1.0}]}},
        {"token_ids": [1], "logprobs": [-1.0]},
    ],
)
@pytest.mark.parametrize("form", [VllmGenerate(), Completions()])
def test_malformed_choices_are_refused(choice, form):
    with pytest.raises(PayloadError):
        form.chunk(choice)
