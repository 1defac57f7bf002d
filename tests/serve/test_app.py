"""The server's answers, against those that a real vLLM 0.30 gave to the same requests."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import socket
from pathlib import Path

import numpy as np
import pytest
from aiohttp.test_utils import TestClient, TestServer

from rtk.errors import EmbeddedServerError
from rtk.serve.app import Service, _serve

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"
IDS = [5, 6, 7, 8]
CAPTURED = json.loads((Path(__file__).parent / "vllm_0_30_answers.json").read_text())["answers"]


def ask(engine, method, path, body=None, *, name="random-moe", routed_experts=True):
    """Send one request to a server of the engine; return its status and body, as JSON where it is."""

    async def run():
        service = Service(engine, name=name, root="/models/random", routed_experts=routed_experts)
        async with TestClient(TestServer(service.app())) as client:
            data = body if isinstance(body, bytes) else None
            response = await client.request(method, path, data=data, json=None if data else body)
            text = await response.text()
            try:
                return response.status, json.loads(text)
            except ValueError:
                return response.status, text

    return asyncio.run(run())


@pytest.fixture
def call(engine):
    """Asks a server of the random model."""
    return lambda *request, **options: ask(engine, *request, **options)


def events(text):
    blocks = text.strip().split("\n\n")
    assert blocks.pop() == "data: [DONE]"
    assert all(block.startswith("data: ") for block in blocks)
    return [json.loads(block[6:]) for block in blocks]


def routes(choice):
    return np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])), allow_pickle=False)


def form(value, key=None):
    """Keys, types and lengths of an answer, whatever its values: another model says other tokens."""
    if key == "routed_experts" and value is not None:
        array = routes({"routed_experts": value})
        return array.shape, array.dtype.str
    if isinstance(value, dict):
        if value and key in ("top_logprobs", "prompt_logprobs"):
            return form(next(iter(value.values())))  # keyed by the tokens
        return {name: form(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [form(inner, key) for inner in value]
    return type(value).__name__


def request_of(captured):
    """The request of a captured answer, its long prompts written out."""
    body = captured["body"]
    if not isinstance(body, dict):
        return body
    body = {
        key: [value["repeat"]] * value["times"] if isinstance(value, dict) and "repeat" in value else value
        for key, value in body.items()
    }
    # The untrained model of the captured answers never said its end; the trained one may.
    if captured["path"] == COMPLETIONS:
        body["ignore_eos"] = True
    if isinstance(body.get("sampling_params"), dict):
        body["sampling_params"] = {**body["sampling_params"], "ignore_eos": True}
    return body


def captured_name(captured):
    return f"{captured['path']}-{json.dumps(captured['body'])}"[:120]


@pytest.mark.parametrize("captured", [c for c in CAPTURED if c["status"] == 200], ids=captured_name)
def test_answers_have_the_form_of_vllms(tiny_engine, captured):
    status, ours = ask(
        tiny_engine, captured["method"], captured["path"], request_of(captured), name="tiny-moe"
    )
    assert status == 200
    theirs = captured["text"]
    if theirs.startswith("data:"):
        assert list(map(form, events(ours))) == list(map(form, events(theirs)))
        assert list(map(list, events(ours))) == list(map(list, events(theirs)))
    else:
        assert form(ours) == form(json.loads(theirs))
    if captured["path"] in ("/tokenize", "/detokenize"):
        assert ours == json.loads(theirs)


@pytest.mark.parametrize("captured", [c for c in CAPTURED if c["status"] != 200], ids=captured_name)
def test_errors_are_vllms(tiny_engine, captured):
    status, ours = ask(
        tiny_engine, captured["method"], captured["path"], request_of(captured), name="tiny-moe"
    )
    theirs = json.loads(captured["text"])
    if "validation error" in captured["text"]:
        # vLLM's own text is a dump of pydantic's; the place of the fault is what a user acts on.
        assert "validation error" in ours["error"].pop("message")
        del theirs["error"]["message"]
    assert (status, ours) == (captured["status"], theirs)


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
        call("POST", COMPLETIONS, common | {"prompt": prompt})[1]["choices"]
        for prompt in ("Hello", ["Hello"], tokens["tokens"], [tokens["tokens"]])
    ]
    assert all(answer == answers[0] for answer in answers)
    assert answers[0][0]["prompt_token_ids"] == tokens["tokens"]
    assert routes(answers[0][0]).shape == (5 + 3 - 1, 4, 2)
    _, two = call("POST", COMPLETIONS, common | {"prompt": ["Hello", "abc"]})
    assert [choice["index"] for choice in two["choices"]] == [0, 1]


def test_generate_starts_routes_where_it_is_told(call):
    params = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    _, whole = call("POST", GENERATE, {"token_ids": IDS, "sampling_params": params})
    params = params | {"routed_experts_prompt_start": 3}
    _, part = call("POST", GENERATE, {"token_ids": IDS, "sampling_params": params})
    np.testing.assert_array_equal(routes(part["choices"][0]), routes(whole["choices"][0])[3:])
    assert len(routes(part["choices"][0])) == 4


def test_completion_starts_routes_where_it_is_told(call):
    body = {"prompt": list(range(64)), "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    _, whole = call("POST", COMPLETIONS, body)
    _, part = call("POST", COMPLETIONS, body | {"routed_experts_prompt_start": 60})
    # 64 prompt tokens, 4 generated, from row 60 on: 7 rows, as vLLM gives.
    assert routes(part["choices"][0]).shape[0] == 7
    np.testing.assert_array_equal(routes(part["choices"][0]), routes(whole["choices"][0])[60:])


def test_completion_streams_the_text_it_gives_whole(call):
    body = {
        "prompt": "Hello",
        "max_tokens": 20,
        "temperature": 1.2,
        "seed": 8,
        "logprobs": 1,
        "ignore_eos": True,
    }
    _, whole = call("POST", COMPLETIONS, body)
    _, text = call("POST", COMPLETIONS, body | {"stream": True})
    parts = [event["choices"][0] for event in events(text)]
    assert "".join(part["text"] for part in parts) == whole["choices"][0]["text"]
    logprobs = [value for part in parts for value in part["logprobs"]["token_logprobs"]]
    assert logprobs == whole["choices"][0]["logprobs"]["token_logprobs"]


def test_a_stop_string_ends_the_text_before_it(call):
    body = {"prompt": "Hello", "max_tokens": 30, "temperature": 1.2, "seed": 8, "ignore_eos": True}
    text = call("POST", COMPLETIONS, body)[1]["choices"][0]["text"]
    stop = text[6:8]
    choice = call("POST", COMPLETIONS, body | {"stop": [stop]})[1]["choices"][0]
    assert choice["text"] == text[: text.find(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    _, streamed = call("POST", COMPLETIONS, body | {"stop": stop, "stream": True})
    parts = [event["choices"][0] for event in events(streamed)]
    assert "".join(part["text"] for part in parts) == choice["text"]
    assert parts[-1]["finish_reason"] == "stop"


def test_generate_stops_at_a_text_too(call):
    params = {"max_tokens": 30, "temperature": 1.2, "seed": 8, "ignore_eos": True}
    _, free = call("POST", GENERATE, {"token_ids": IDS, "sampling_params": params})
    tokens = free["choices"][0]["token_ids"]
    _, answer = call("POST", "/detokenize", {"tokens": tokens})
    stop = next(letter for letter in answer["prompt"][3:] if letter.isascii())
    _, stopped = call("POST", GENERATE, {"token_ids": IDS, "sampling_params": params | {"stop": stop}})
    choice = stopped["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["token_ids"] == tokens[: len(choice["token_ids"])] != tokens
    assert len(routes(choice)) == len(IDS) + len(choice["token_ids"]) - 1


def test_a_stop_token_is_named_and_has_no_text(call):
    body = {
        "prompt": "Hello",
        "max_tokens": 9,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    free = call("POST", COMPLETIONS, body)[1]["choices"][0]
    stop = free["token_ids"][-1]
    choice = call("POST", COMPLETIONS, body | {"stop_token_ids": [stop]})[1]["choices"][0]
    end = free["token_ids"].index(stop)
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["token_ids"] == free["token_ids"][: end + 1]
    assert choice["text"] == call("POST", "/detokenize", {"tokens": free["token_ids"][:end]})[1][
        "prompt"
    ].rstrip("\ufffd")


def test_an_echoed_prompt_has_the_logprobs_that_prompt_logprobs_gives(call):
    body = {"prompt": "Hello", "max_tokens": 2, "temperature": 0, "logprobs": 1, "ignore_eos": True}
    _, answer = call("POST", COMPLETIONS, body | {"echo": True})
    choice = answer["choices"][0]
    assert choice["text"].startswith("Hello")
    ids = call("POST", "/tokenize", {"prompt": "Hello"})[1]["tokens"]
    listed = [
        entry[str(id_)]["logprob"] for entry, id_ in zip(choice["prompt_logprobs"][1:], ids[1:], strict=True)
    ]
    assert choice["logprobs"]["token_logprobs"][: len(ids)] == [None, *listed]
    assert choice["logprobs"]["text_offset"][: len(ids)] == [0, 1, 2, 3, 4]
    assert len(choice["logprobs"]["tokens"]) == len(ids) + 2


def test_a_prompt_that_leaves_no_room_is_refused_beside_one_that_does(call):
    body = {"prompt": [[5] * 120, [5] * 3], "max_tokens": 9, "temperature": 0}
    status, answer = call("POST", COMPLETIONS, body)
    assert (status, answer["error"]["param"]) == (400, "input_tokens")
    assert "contains 120 input tokens" in answer["error"]["message"]
    _, answer = call("POST", COMPLETIONS, body | {"max_tokens": 8, "ignore_eos": True})
    assert answer["usage"]["completion_tokens"] == 16


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
        ({"logprobs": -1}, "logprobs", "non-negative"),
        ({"seed": 2**70}, "seed", "64-bit"),
        ({"max_tokens": "many"}, "max_tokens", "valid integer"),
        ({"max_tokens": 2.5}, "max_tokens", "valid integer"),
        ({"ignore_eos": "yes"}, "ignore_eos", "valid boolean"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids", "list of integers"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "does not support"),
        ({"min_p": 0.1}, "min_p", "does not support"),
        ({"allowed_token_ids": [5]}, "allowed_token_ids", "does not support"),
    ],
)
def test_settings_that_cannot_be_are_refused(call, change, param, words):
    body = {"token_ids": IDS, "sampling_params": {"max_tokens": 2} | change}
    status, answer = call("POST", GENERATE, body)
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, 400, param)
    assert words in answer["error"]["message"]


def test_a_temperature_that_is_no_number_is_refused(call):
    body = b'{"token_ids": [5], "sampling_params": {"max_tokens": 2, "temperature": NaN}}'
    status, answer = call("POST", GENERATE, body)
    assert (status, answer["error"]["param"]) == (400, "temperature")


@pytest.mark.parametrize("path", [GENERATE, COMPLETIONS])
@pytest.mark.parametrize(
    "extra",
    [
        {"features": {"mm_hashes": {}}},
        {"truncate_prompt_tokens": 2},
        {"response_format": {"type": "json_object"}},
        {"use_beam_search": True},
    ],
    ids=str,
)
def test_what_would_change_the_answer_is_never_ignored(call, path, extra):
    body = {"token_ids": IDS, "prompt": IDS, "sampling_params": {"max_tokens": 2}, "max_tokens": 2}
    (param,) = extra
    status, answer = call("POST", path, body | extra)
    assert (status, answer["error"]["param"]) == (400, param)
    assert call("POST", path, body | {"cache_salt": "a", "nonsense": 3})[0] == 200


class Failing:
    """An engine that fails at a sequence's third step."""

    def __init__(self, engine):
        self._engine = engine

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def step(self, generation):
        if len(generation.generated) == 2:
            raise RuntimeError("out of luck")
        return self._engine.step(generation)


def test_a_fault_of_the_server_is_told_in_vllms_form(engine):
    body = {"token_ids": IDS, "sampling_params": {"max_tokens": 5, "ignore_eos": True}}
    status, answer = ask(Failing(engine), "POST", GENERATE, body)
    assert (status, answer["error"]["type"]) == (500, "InternalServerError")
    assert "out of luck" in answer["error"]["message"]
    _, text = ask(Failing(engine), "POST", GENERATE, body | {"stream": True})
    *before, last = events(text)
    assert len(before) == 2
    assert last == answer


@pytest.mark.parametrize("body", [b"{bad", b"[]", b"", b"\xff\xfe"])
@pytest.mark.parametrize("path", [GENERATE, COMPLETIONS, "/tokenize", "/detokenize"])
def test_bodies_that_are_no_objects_are_refused(call, path, body):
    status, answer = call("POST", path, body or b" ")
    assert status == 400
    assert answer["error"]["type"] == "Bad Request"


@pytest.mark.parametrize("tokens", [[2**40], [-1], ["a"], "abc", None])
def test_token_ids_that_cannot_be_are_refused(call, tokens):
    status, answer = call("POST", "/detokenize", {"tokens": tokens})
    assert (status, answer["error"]["type"]) == (400, "Bad Request")


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


def test_a_taken_port_is_named(engine):
    service = Service(engine, name="m", root="/m")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            EmbeddedServerError, match=rf"cannot listen on 127\.0\.0\.1:{port}.*choose another --port"
        ):
            asyncio.run(_serve(service.app(), port, watch_stdin=False))
