import base64
import json
from pathlib import Path

import numpy as np
import pytest

from rtk import ModelLayout
from rtk.client.servers.fields import only
from rtk.client.servers.openai_routes import Chat, Completions
from rtk.client.servers.sglang import SglangChat, SglangCompletions, SglangGenerate
from rtk.client.servers.vllm import VllmGenerate
from rtk.errors import PayloadError

FIXTURES = Path(__file__).parents[2] / "fixtures"
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
    choice = only(form.choices(payload))
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
    assert body == {
        "prompt": [1, 2], "max_tokens": 3, "logprobs": 0, "return_token_ids": True, "return_weight_versions": True,
    }  # fmt: skip


def test_several_real_choices_are_refused(completions):
    with pytest.raises(PayloadError, match="2 choices"):
        only(Completions().choices(json.loads(completions["completions_n2"]["text"])))


def test_the_two_parts_of_vllm_0_21_are_joined():
    payload = {
        "prompt_routed_experts": [[[0, 1]], [[2, 3]]],
        "choices": [{"token_ids": [8, 9], "routed_experts": [[[4, 5]]]}],
    }
    form = VllmGenerate()
    routes = form.routed_experts(payload, only(form.choices(payload)))
    assert routes.tolist() == [[[0, 1]], [[2, 3]], [[4, 5]]]
    payload["choices"][0] |= {"token_ids": [8], "routed_experts": None}
    assert form.routed_experts(payload, only(form.choices(payload))).tolist() == [[[0, 1]], [[2, 3]]]


def test_an_sglang_answer():
    form = SglangGenerate(LAYOUT)
    meta = only(form.choices(SGLANG))
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
        SglangGenerate(None).choices({"choices": []})


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


@pytest.fixture
def more():
    """Real answers of vLLM 0.30 to chats, n = 2, start offsets and prompt logprobs."""
    return json.loads((FIXTURES / "vllm_0_30_forms.json").read_text())


def test_a_real_chat(more):
    payload = json.loads(more["chat"]["text"])
    form, choice = Chat(), only(payload["choices"])
    assert form.chunk(choice).token_ids == [199, 33, 2682, 261]
    # What /tokenize made of the same messages.
    assert form.prompt_token_ids(payload, choice) == json.loads(more["tokenize_chat"]["text"])["tokens"]
    assert form.routed_experts(payload, choice).shape == (5 + 4 - 1, 8, 2)
    top = form.top_logprobs(choice)
    assert [list(entry) for entry in top] == [[199, 3], [33, 35], [2682, 1074], [261, 288]]
    assert top[0][3] == -2.798464059829712


def test_a_chat_asks_in_openais_names():
    messages = [{"role": "user", "content": "Hi"}]
    body = Chat().body(messages, {"max_tokens": 3, "logprobs": 2}, routed_experts=True, start=4)
    assert body == {
        "messages": messages, "max_tokens": 3, "logprobs": True, "top_logprobs": 2, "return_token_ids": True, "return_weight_versions": True,
        "return_tokens_as_token_ids": True, "routed_experts_prompt_start": 4,
    }  # fmt: skip


def test_real_alternatives_are_the_same_on_both_routes(more, completions):
    payload = json.loads(completions["completions"]["text"])
    top = Completions().top_logprobs(only(payload["choices"]))
    # Greedy, so each token generated is its most probable one; the values are those that the server sent.
    assert top[0] == {82: -2.979142665863037, 68: -3.166642665863037}
    assert [max(entry, key=entry.get) for entry in top] == [82, 278, 83, 12]
    native = json.loads(more["generate_prompt_logprobs"]["text"])
    assert VllmGenerate().top_logprobs(only(native["choices"])) == top[:2]


def test_real_prompt_logprobs(more):
    payload = json.loads(more["generate_prompt_logprobs"]["text"])
    found = VllmGenerate().prompt_logprobs(payload, only(payload["choices"]))
    assert found == [
        {},
        {200: -22.064401626586914, 8: -2.0019009113311768},
        {901: -7.891770362854004, 12: -2.774583101272583},
        {33: -9.081781387329102, 330: -3.0036566257476807},
    ]


def test_what_is_not_finite_is_floored_everywhere():
    choice = {
        "logprobs": {"content": [{"top_logprobs": [{"token": "token_id:3", "logprob": float("-inf")}]}]}
    }
    assert VllmGenerate().top_logprobs(choice) == [{3: -9999.0}]
    payload = {"prompt_logprobs": [None, {"3": {"logprob": None}}]}
    assert VllmGenerate().prompt_logprobs(payload, {}) == [{}, {3: -9999.0}]


@pytest.mark.parametrize("token", ["the", "token_id:x", "token_id:", 7, None])
def test_a_token_that_is_not_named_by_its_id_is_refused(token):
    choice = {"logprobs": {"content": [{"top_logprobs": [{"token": token, "logprob": -1.0}]}]}}
    with pytest.raises(PayloadError, match="token_id:"):
        VllmGenerate().top_logprobs(choice)


def test_sglangs_alternatives_prompt_and_stop():
    """By hand from SGLang's documentation of `/generate` with logprob_start_len=0."""
    meta = {
        "finish_reason": {"type": "stop", "matched": "\n"},
        "output_token_logprobs": [[-0.5, 11, None]],
        "output_top_logprobs": [[[-0.25, 12, None], [-0.5, 11, None]]],
        "input_token_logprobs": [[None, 5, None], [-3.0, 6, None]],
        "input_top_logprobs": [None, [[-1.0, 7, None]]],
    }
    form = SglangGenerate(LAYOUT)
    assert form.top_logprobs(meta) == [{11: -0.5, 12: -0.25}]
    assert form.prompt_logprobs({}, meta) == [{}, {6: -3.0, 7: -1.0}]
    assert form.stop_match(meta) == "\n"
    body = form.body([1], {"prompt_logprobs": 1}, routed_experts=True, start=3)
    assert (body["logprob_start_len"], body["top_logprobs_num"], body["routed_experts_start_len"]) == (
        0,
        1,
        3,
    )


@pytest.mark.parametrize("form", [SglangCompletions, SglangChat])
def test_routes_in_sgl_ext_are_shaped_by_the_layout(form):
    encoded = SGLANG["meta_info"]["routed_experts"]
    choice = {"index": 0, "sgl_ext": {"routed_experts": encoded}}
    assert form(LAYOUT).routed_experts({}, choice).tolist() == SGLANG_ROUTES
    assert form(LAYOUT).routed_experts({}, {"sgl_ext": None}) is None
    with pytest.raises(PayloadError, match="the model's layout is needed"):
        form(None).routed_experts({}, choice)
    with pytest.raises(PayloadError, match="no whole number of rows"):
        form(LAYOUT).routed_experts({}, {"sgl_ext": {"routed_experts": encoded[:-4]}})


@pytest.mark.parametrize("form", [SglangCompletions, SglangChat])
def test_routes_in_sglext_of_the_response(form):
    """SGLang 0.5.23 (entrypoints/openai/protocol.py): `sglext` at the level of the response, when it was asked for."""
    encoded = SGLANG["meta_info"]["routed_experts"]
    payload = {"choices": [{"index": 0}], "sglext": {"routed_experts": encoded}}
    assert form(LAYOUT).routed_experts(payload, payload["choices"][0]).tolist() == SGLANG_ROUTES
    asked = form(LAYOUT).body([], {}, routed_experts=True, start=2)
    assert asked["return_routed_experts"] is True
    assert asked["routed_experts_start_len"] == 2
    assert "routed_experts_prompt_start" not in asked
    assert "return_routed_experts" not in form(None).body([], {}, routed_experts=False)
