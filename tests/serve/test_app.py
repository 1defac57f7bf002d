"""The server's answers, against those that a real vLLM 0.30 gave to the same requests."""

import asyncio
import base64
import io
import json

import numpy as np
import pytest
from aiohttp.test_utils import TestClient, TestServer

from rtk.serve.app import Service

GENERATE = "/inference/v1/generate"
IDS = [5, 6, 7, 8]


@pytest.fixture
def call(engine):
    """Sends one request to the server; returns its status and body, as JSON where it is."""

    def send(method, path, body=None, routed_experts=True):
        async def run():
            service = Service(engine, name="random-moe", root="/models/random", routed_experts=routed_experts)
            async with TestClient(TestServer(service.app())) as client:
                data = body if isinstance(body, bytes) else None
                response = await client.request(method, path, data=data, json=None if data else body)
                text = await response.text()
                try:
                    return response.status, json.loads(text)
                except ValueError:
                    return response.status, text

        return asyncio.run(run())

    return send


def events(text):
    blocks = text.strip().split("\n\n")
    assert blocks.pop() == "data: [DONE]"
    assert all(block.startswith("data: ") for block in blocks)
    return [json.loads(block[6:]) for block in blocks]


def fields(value):
    """The keys and types of an answer, whatever its values."""
    if isinstance(value, dict):
        return {key: fields(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [fields(value[0])] if value else []
    return type(value).__name__


def routes(choice):
    return np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])), allow_pickle=False)


def test_a_plain_answer_has_vllms_fields(call, vllm_answers):
    real = vllm_answers["plain"]
    status, answer = call("POST", GENERATE, real["request"])
    assert status == real["status"]
    assert fields(answer) == fields(json.loads(real["text"]))


def test_a_streamed_answer_has_vllms_events(call, vllm_answers):
    real = vllm_answers["streamed"]
    _, text = call("POST", GENERATE, real["request"])
    theirs, ours = events(real["text"]), events(text)
    assert list(map(fields, ours)) == list(map(fields, theirs))
    assert [event["choices"][0]["routed_experts"] is None for event in ours] == [True, True, False]


@pytest.mark.parametrize("name", ["unknown_model", "out_of_vocabulary"])
def test_errors_are_vllms_word_for_word(call, vllm_answers, name):
    real = vllm_answers[name]
    assert call("POST", GENERATE, real["request"]) == (real["status"], json.loads(real["text"]))


def test_stream_and_plain_answer_agree(call):
    params = {"max_tokens": 6, "temperature": 1.0, "seed": 3, "logprobs": 1}
    _, plain = call("POST", GENERATE, {"token_ids": IDS, "sampling_params": params})
    _, text = call("POST", GENERATE, {"token_ids": IDS, "sampling_params": params, "stream": True})
    choices = [event["choices"][0] for event in events(text)]
    choice = plain["choices"][0]
    assert [token for part in choices for token in part["token_ids"]] == choice["token_ids"]
    assert [entry for part in choices for entry in part["logprobs"]["content"]] == choice["logprobs"][
        "content"
    ]
    assert choices[-1]["routed_experts"] == choice["routed_experts"]
    assert choices[-1]["finish_reason"] == choice["finish_reason"] == "length"


def test_several_choices_each_carry_their_own_routes(call):
    params = {"max_tokens": 5, "temperature": 1.5, "seed": 3, "n": 3}
    _, answer = call("POST", GENERATE, {"token_ids": IDS, "sampling_params": params})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len({tuple(choice["token_ids"]) for choice in answer["choices"]}) == 3
    for choice in answer["choices"]:
        assert routes(choice).shape == (len(IDS) + len(choice["token_ids"]) - 1, 4, 2)
    assert answer["usage"]["completion_tokens"] == sum(len(c["token_ids"]) for c in answer["choices"])


def test_an_answer_is_cut_in_silence_at_the_models_length(call):
    body = {
        "token_ids": [5] * 126,
        "sampling_params": {"max_tokens": 20, "temperature": 0, "ignore_eos": True},
    }
    _, answer = call("POST", GENERATE, body)
    assert len(answer["choices"][0]["token_ids"]) == 2
    assert answer["choices"][0]["finish_reason"] == "length"


def test_without_the_flag_routes_are_null(call):
    body = {"token_ids": IDS, "sampling_params": {"max_tokens": 2}}
    assert call("POST", GENERATE, body, routed_experts=False)[1]["choices"][0]["routed_experts"] is None


def test_completion_forms_of_a_prompt(call):
    common = {"max_tokens": 3, "temperature": 0, "return_token_ids": True}
    _, tokens = call("POST", "/tokenize", {"prompt": "Hello"})
    answers = [
        call("POST", "/v1/completions", common | {"prompt": prompt})[1]["choices"]
        for prompt in ("Hello", ["Hello"], tokens["tokens"], [tokens["tokens"]])
    ]
    assert all(answer == answers[0] for answer in answers)
    assert answers[0][0]["prompt_token_ids"] == tokens["tokens"]
    assert routes(answers[0][0]).shape == (5 + 3 - 1, 4, 2)
    _, two = call("POST", "/v1/completions", common | {"prompt": ["Hello", "abc"]})
    assert [choice["index"] for choice in two["choices"]] == [0, 1]


def test_completion_starts_routes_where_it_is_told(call):
    body = {"prompt": list(range(64)), "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    _, whole = call("POST", "/v1/completions", body)
    _, part = call("POST", "/v1/completions", body | {"routed_experts_prompt_start": 60})
    # 64 prompt tokens, 4 generated, from row 60 on: 7 rows, as vLLM gives.
    assert routes(part["choices"][0]).shape[0] == 7
    np.testing.assert_array_equal(routes(part["choices"][0]), routes(whole["choices"][0])[60:])
    status, _ = call("POST", "/v1/completions", body | {"routed_experts_prompt_start": 65})
    assert status == 400


def test_completion_streams_the_text_it_gives_whole(call):
    body = {
        "prompt": "Hello",
        "max_tokens": 20,
        "temperature": 1.2,
        "seed": 8,
        "logprobs": 1,
        "ignore_eos": True,
    }
    _, whole = call("POST", "/v1/completions", body)
    _, text = call("POST", "/v1/completions", body | {"stream": True})
    parts = [event["choices"][0] for event in events(text)]
    assert "".join(part["text"] for part in parts) == whole["choices"][0]["text"]
    logprobs = [value for part in parts for value in part["logprobs"]["token_logprobs"]]
    assert logprobs == whole["choices"][0]["logprobs"]["token_logprobs"]


def test_a_stop_string_ends_the_text_before_it(call):
    body = {"prompt": "Hello", "max_tokens": 30, "temperature": 1.2, "seed": 8, "ignore_eos": True}
    text = call("POST", "/v1/completions", body)[1]["choices"][0]["text"]
    stop = text[6:8]
    choice = call("POST", "/v1/completions", body | {"stop": [stop]})[1]["choices"][0]
    assert choice["text"] == text[: text.find(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    _, streamed = call("POST", "/v1/completions", body | {"stop": stop, "stream": True})
    parts = [event["choices"][0] for event in events(streamed)]
    assert "".join(part["text"] for part in parts) == choice["text"]
    assert parts[-1]["finish_reason"] == "stop"


def test_tokenize_and_detokenize_are_inverse(call):
    _, answer = call("POST", "/tokenize", {"prompt": "Où ça ?", "return_token_strs": True})
    assert answer["count"] == len("Où ça ?".encode()) == len(answer["token_strs"])
    assert call("POST", "/detokenize", {"tokens": answer["tokens"]}) == (200, {"prompt": "Où ça ?"})


def test_models_name_the_root_that_clients_read_the_config_from(call):
    _, answer = call("GET", "/v1/models")
    (card,) = answer["data"]
    assert (card["id"], card["root"], card["max_model_len"]) == ("random-moe", "/models/random", 128)


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1, got 0."),
        ({"temperature": -1}, "temperature", "temperature must be non-negative, got -1.0."),
        ({"top_p": 2}, "top_p", "top_p must be in (0, 1], got 2.0."),
        ({"n": 2, "temperature": 0}, None, "n must be 1 when using greedy sampling, got 2."),
        ({"logprobs": 99}, "logprobs", "0..20"),
        ({"seed": 2**70}, "seed", "64-bit"),
        ({"max_tokens": "many"}, "max_tokens", "valid integer"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "does not support"),
        ({"stop": ["x"]}, "stop", "stop_token_ids"),
    ],
)
def test_settings_that_cannot_be_are_refused(call, change, param, words):
    body = {"token_ids": IDS, "sampling_params": {"max_tokens": 2} | change}
    status, answer = call("POST", GENERATE, body)
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, 400, param)
    assert words in answer["error"]["message"]


@pytest.mark.parametrize("body", [b"{bad", b"[]", b"", b"\xff\xfe"])
@pytest.mark.parametrize("path", [GENERATE, "/v1/completions", "/tokenize", "/detokenize"])
def test_bodies_that_are_no_objects_are_refused(call, path, body):
    status, answer = call("POST", path, body or b" ")
    assert status == 400
    assert answer["error"]["type"] == "Bad Request"


def test_other_paths_answer_as_vllm_does(call):
    assert call("GET", "/nope") == (404, {"detail": "Not Found"})
    assert call("GET", GENERATE) == (405, {"detail": "Method Not Allowed"})


def test_a_short_request_overtakes_a_long_one(engine):
    async def run():
        service = Service(engine, name="m", root="/m")
        async with TestClient(TestServer(service.app(), handler_cancellation=True)) as client:

            async def ask(tokens):
                params = {"max_tokens": tokens, "ignore_eos": True}
                response = await client.post(GENERATE, json={"token_ids": IDS, "sampling_params": params})
                return len((await response.json())["choices"][0]["token_ids"])

            long = asyncio.create_task(ask(120))
            assert await ask(2) == 2
            assert not long.done()
            assert await long == 120

    asyncio.run(run())


def test_a_client_that_goes_away_ends_its_generation(engine):
    steps = []

    class Counting:
        def __getattr__(self, name):
            return getattr(engine, name)

        def step(self, generation):
            steps.append(1)
            return engine.step(generation)

    async def run():
        service = Service(Counting(), name="m", root="/m")
        async with TestClient(TestServer(service.app(), handler_cancellation=True)) as client:
            params = {"max_tokens": 120, "ignore_eos": True}
            body = {"token_ids": IDS, "sampling_params": params, "stream": True}
            response = await client.post(GENERATE, json=body)
            await response.content.readany()
            response.close()
            seen = -1
            while len(steps) != seen:
                seen = len(steps)
                await asyncio.sleep(0.2)

    asyncio.run(run())
    assert 0 < len(steps) < 120
