"""vLLM from 0.32 on, by hand from its protocol classes (vllm/entrypoints/scale_out of 0.32) and its own messages."""

import asyncio
import copy
import json

import numpy as np
import pytest
from aiohttp import web

import rtk
from rtk.client.result import WeightVersionSpan
from rtk.client.servers.vllm import VllmGenerate
from rtk.errors import PayloadError, RequestRejected, ServerFailed
from tests.client.test_generator import QUICK, ask
from tests.stub import events, serving, text

DISABLED = json.dumps(
    {
        "error": {
            "message": "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them.",
            "type": "PermissionDeniedError",
            "param": None,
            "code": 403,
        }
    }
)
PAUSED = {
    "error": {
        "message": "Generation is paused. Please retry after it resumes.",
        "type": "ServiceUnavailableError",
        "param": None,
        "code": 503,
    }
}


def newer(answer):
    """A real answer of 0.30 with logprobs, in the form of 0.32."""
    payload = copy.deepcopy(json.loads(answer))
    (choice,) = payload["choices"]
    for entry in choice["logprobs"]["content"]:
        for place in (entry, *entry["top_logprobs"]):
            place["token_id"] = int(place.pop("token").removeprefix("token_id:"))
            place["rank"] = 1
            del place["bytes"]
    choice["stop_reason"] = None
    choice["weight_versions"] = [
        {"version": "a", "start": 0, "end": 1},
        {"version": "b", "start": 1, "end": 2},
    ]
    return payload


def event(payload):
    return f"data: {json.dumps(payload)}\n\n"


def test_alternatives_are_named_by_token_id(vllm_answers):
    old = json.loads(vllm_answers["plain"]["text"])
    new = newer(vllm_answers["plain"]["text"])
    route = VllmGenerate()
    (was,), (now,) = route.choices(old), route.choices(new)
    assert route.chunk(now) == route.chunk(was)
    assert route.top_logprobs(now) == route.top_logprobs(was) == [
        {12: -3.630524158477783, 14: -3.896149158477783},
        {12: -3.601616621017456, 14: -3.882866621017456},
    ]  # fmt: skip
    now["logprobs"]["content"][0]["top_logprobs"][0]["token_id"] = "12"
    with pytest.raises(PayloadError, match="whole numbers"):
        route.top_logprobs(now)


def test_weight_versions_are_kept(vllm_answers):
    result, _ = ask(text(json.dumps(newer(vllm_answers["plain"]["text"]))), routed_experts=True)
    assert result.weight_versions == [WeightVersionSpan("a", 0, 1), WeightVersionSpan("b", 1, 2)]


@pytest.mark.parametrize("spans", [[{"version": "a"}], [3], "a", [{"version": 1, "start": 0, "end": 1}]])
def test_weight_versions_of_another_form_are_refused(vllm_answers, spans):
    payload = newer(vllm_answers["plain"]["text"])
    payload["choices"][0]["weight_versions"] = spans
    error, _ = ask(text(json.dumps(payload)))
    assert isinstance(error, PayloadError)
    assert "weight_versions" in str(error)


def test_a_missing_flag_is_no_missing_key():
    error, _ = ask(text(DISABLED, status=403))
    assert isinstance(error, RequestRejected)
    assert "--enable-scale-out" in str(error)
    assert "server='completions'" in str(error)
    assert "api_key" not in str(error)
    error, _ = ask(text('{"error": {"message": "Forbidden", "code": 403}}', status=403))
    assert "api_key" in str(error)


@pytest.mark.parametrize(("flag", "name"), [(False, "completions"), (True, "vllm")])
def test_connect_looks_for_the_flag(flag, name):
    """A GET is answered 405 with the flag and without it; only a POST tells."""

    async def answer(request):
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "m", "owned_by": "vllm"}]})
        if request.path == "/version":
            return web.json_response({"version": "0.32.0"})
        if request.path == VllmGenerate.path and request.method == "GET":
            return web.json_response({"detail": "Method Not Allowed"}, status=405)
        if request.path == VllmGenerate.path:
            refusal = '{"error": {"message": "token_ids: Field required"}}' if flag else DISABLED
            return web.Response(text=refusal, status=400 if flag else 403, content_type="application/json")
        return web.json_response({"detail": "Not Found"}, status=404)

    async def run():
        async with serving(answer) as stub:
            with await asyncio.to_thread(rtk.connect, stub.url) as session:
                return session._generator.server.name

    assert asyncio.run(run()) == name


def test_a_pause_is_waited_for(vllm_answers):
    paused = text(json.dumps(PAUSED), status=503)
    result, stub = ask(paused, paused, text(vllm_answers["plain"]["text"]), routed_experts=True)
    assert result.token_ids == [12, 12]
    assert len(stub.paths) == 3


def test_a_pause_that_lasts_is_named():
    error, stub = ask(text(json.dumps(PAUSED), status=503))
    assert isinstance(error, ServerFailed)
    assert error.status == 503
    assert "The server is paused: resume it" in str(error)
    assert len(stub.paths) == QUICK.tries


def test_a_stream_that_begins_with_a_pause_is_sent_again(vllm_answers):
    paused = events(event(PAUSED) + "data: [DONE]\n\n")
    chunks = []
    result, stub = ask(paused, events(vllm_answers["streamed"]["text"]), on_chunk=chunks.append)
    assert len(stub.paths) == 2
    assert result.token_ids == [token for chunk in chunks for token in chunk.token_ids]
    error, stub = ask(paused, on_chunk=chunks.append)
    assert isinstance(error, ServerFailed)
    assert "The server is paused" in str(error)
    assert len(stub.paths) == QUICK.tries


def test_a_stream_that_is_paused_later_is_not_sent_again(vllm_answers):
    first = vllm_answers["streamed"]["text"].split("\n\n")[0] + "\n\n"
    chunks = []
    error, stub = ask(events(first + event(PAUSED)), on_chunk=chunks.append)
    assert isinstance(error, ServerFailed)
    assert len(stub.paths) == 1
    assert len(chunks) == 1


def test_routes_before_the_last_event_and_an_event_of_usage_after_it(vllm_answers):
    parts = [
        json.loads(part.removeprefix("data: "))
        for part in vllm_answers["streamed"]["text"].strip().split("\n\n")
        if part != "data: [DONE]"
    ]
    (last,) = parts[-1]["choices"]
    encoded, last["routed_experts"] = last["routed_experts"], None
    early = copy.deepcopy(parts[-1])
    early["choices"][0] |= {
        "token_ids": [], "logprobs": None, "finish_reason": None, "routed_experts": encoded
    }  # fmt: skip
    usage = {"request_id": parts[-1]["request_id"], "usage": {"completion_tokens": 2}}
    stream = "".join(map(event, [*parts[:-1], early, parts[-1], usage, usage | {"choices": []}]))
    expected, _ = ask(events(vllm_answers["streamed"]["text"]), routed_experts=True, on_chunk=lambda _: None)
    result, _ = ask(events(stream + "data: [DONE]\n\n"), routed_experts=True, on_chunk=lambda _: None)
    assert (result.token_ids, result.stop_reason) == (expected.token_ids, expected.stop_reason)
    np.testing.assert_array_equal(result.routed_experts, expected.routed_experts)


def test_an_answer_without_a_finish_reason_is_refused(vllm_answers):
    payload = json.loads(vllm_answers["plain"]["text"])
    payload["choices"][0]["finish_reason"] = None
    error, _ = ask(text(json.dumps(payload)))
    assert isinstance(error, PayloadError)
    assert "finish reason" in str(error)


def test_a_stop_token_of_id_0_is_no_missing_one(vllm_answers):
    payload = json.loads(vllm_answers["plain"]["text"])
    payload["choices"][0]["stop_reason"] = 0
    result, _ = ask(text(json.dumps(payload)))
    assert result.stop_match == 0


def test_an_empty_session_id_is_refused(vllm_answers):
    error, stub = ask(text(vllm_answers["plain"]["text"]), session_id="")
    assert isinstance(error, ValueError)
    assert stub.paths == []
