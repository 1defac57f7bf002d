import asyncio
import json
import logging
import os
import pickle

import numpy as np
import pytest
from aiohttp import web

import rtk
from rtk import RemoteInferenceClient, RemoteInferenceGenerator
from rtk.errors import BatchError, RequestRejected
from tests.fleet.stub_fleet import OK, QUICK, Call, client_of, control, fleet
from tests.stub import text
from tests.test_loops import exit_status, fork


def test_the_proxy_is_the_only_server_where_none_are_named():
    client = RemoteInferenceClient("http://a:8000/")
    assert client.server_urls == ("http://a:8000",)


def by_prompt(answer):
    """A server whose /inference/v1/generate answers answer(token_ids), and that detokenizes to a list's text."""

    async def handle(request):
        body = await request.json()
        if request.path == "/detokenize":
            return web.json_response({"prompt": str(body["tokens"])})
        status, payload = await answer(body["token_ids"])
        return web.json_response(payload, status=status)

    return handle


def generated(token_ids, routes=None):
    logprobs = {"content": [{"logprob": -float(t)} for t in token_ids]}
    choice = {"token_ids": token_ids, "finish_reason": "stop", "logprobs": logprobs, "routed_experts": routes}
    return {"request_id": "r", "choices": [choice]}


async def echo_twice(token_ids):
    await asyncio.sleep(0.05 / token_ids[0])  # the last prompt answers first
    return 200, generated([t * 2 for t in token_ids])


def test_a_batch_comes_back_in_the_order_of_its_prompts():
    batch = {
        "prompt_token_ids": [[1], [2], np.array([3, 4])],
        "sampling_params": {"logprobs": 0},
        "session_ids": ["a", None, 7],
        "cache_salt": "v3",
    }
    output, servers = control(by_prompt(echo_twice), OK, call=lambda c: c.generate(batch), model_name="m")
    assert output == {
        "responses": ["[2]", "[4]", "[6, 8]"],
        "response_ids": [[2], [4], [6, 8]],
        "stop_reasons": ["stop"] * 3,
        "response_logprobs": [[-2.0], [-4.0], [-6.0, -8.0]],
        "rollout_expert_indices": None,
    }
    sent = {tuple(c.body["token_ids"]): c for c in servers[0].calls if c.path == "/inference/v1/generate"}
    assert {prompt: call.session_id for prompt, call in sent.items()} == {(1,): "a", (2,): None, (3, 4): "7"}
    assert sent[1,].body == {
        "token_ids": [1], "sampling_params": {"logprobs": 0}, "model": "m", "cache_salt": "v3",
    }  # fmt: skip
    assert servers[1].calls == []  # data goes to the proxy alone


def test_a_batch_with_routes_for_an_adapter(vllm_answers):
    real = json.loads(vllm_answers["plain"]["text"])

    async def answer(_):
        return 200, real

    output, servers = control(
        by_prompt(answer),
        call=lambda c: c.generate({"prompt_token_ids": [[5, 6, 7, 8]]}, model="style", routed_experts=True),
    )
    (routes,) = output["rollout_expert_indices"]
    assert (routes.shape, routes.dtype) == ((5, 8, 2), np.uint8)
    assert output["response_logprobs"] is None
    assert servers[0].calls[0].body["model"] == "style"


def test_a_failure_in_a_batch_names_its_prompt_and_keeps_the_others():
    async def answer(token_ids):
        if token_ids == [2]:
            return 400, {"error": {"message": "Token id 2 is out of vocabulary"}}
        return 200, generated(token_ids)

    batch = {"prompt_token_ids": [[1], [2], [3]]}
    error, _ = control(by_prompt(answer), call=lambda c: c.generate(batch))
    assert isinstance(error, BatchError)
    assert isinstance(error.failures[1], RequestRejected)
    assert {place: result.token_ids for place, result in error.results.items()} == {0: [1], 2: [3]}
    assert "1 of 3" in str(error)
    assert "item 1: RequestRejected" in str(error)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.results[2].token_ids) == (str(error), [3])


def test_a_text_that_cannot_be_had_loses_no_tokens():
    async def handle(request):
        body = await request.json()
        if request.path == "/detokenize":
            if body["tokens"] == [2]:
                return web.json_response({"error": {"message": "no tokenizer"}}, status=400)
            return web.json_response({"prompt": "x"})
        return web.json_response(generated(body["token_ids"]))

    error, _ = control(handle, call=lambda c: c.generate({"prompt_token_ids": [[1], [2]]}))
    assert list(error.failures) == [1]
    assert [error.results[place].token_ids for place in (0, 1)] == [[1], [2]]
    assert "1 of 2" in str(error)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({}, "this one has nothing"),
        ({"prompts": ["a"]}, "this one has prompts"),
        ({"prompt_token_ids": [[1]], "tools": []}, "perhaps sampling_params"),
        ({"prompt_token_ids": [[1], [2]], "session_ids": ["a"]}, "session_ids has 1 entries for 2 prompts"),
        ({"prompt_token_ids": [[1]], "sampling_params": {"n": 4}}, "n is 4"),
    ],
)
def test_a_batch_of_the_wrong_form(batch, words):
    error, servers = control(OK, call=lambda c: c.generate(batch))
    assert isinstance(error, ValueError)
    assert words in str(error)
    assert servers[0].calls == []


def test_an_empty_batch():
    output, _ = control(OK, call=lambda c: c.generate({"prompt_token_ids": []}))
    assert output["response_ids"] == output["responses"] == []


def test_texts_to_tokens_and_back():
    async def handle(request):
        body = await request.json()
        if request.path == "/tokenize":
            return web.json_response({"tokens": [ord(c) for c in body["prompt"]]})
        return web.json_response({"prompt": "".join(map(chr, body["tokens"]))})

    async def both(client):
        tokens = await client.tokenize(["ab", "c"], add_special_tokens=False)
        return tokens, await client.detokenize(tokens)

    output, servers = control(handle, call=both, model_name="m")
    assert output == ([[97, 98], [99]], ["ab", "c"])
    sent = {"model": "m", "prompt": "ab", "add_special_tokens": False}
    assert sent in [call.body for call in servers[0].calls]


def test_an_answer_without_tokens_is_an_error():
    error, _ = control(OK, call=lambda c: c.tokenize(["a"]))
    assert isinstance(error, BatchError)
    assert "without a 'tokens' of type list" in str(error)


@pytest.mark.parametrize(
    ("call", "path"),
    [
        (lambda c, body: c.completion(body, session_id="s"), "/v1/completions"),
        (lambda c, body: c.chat_completion(body, session_id="s"), "/v1/chat/completions"),
        (lambda c, body: c.render_chat_completion(body, session_id="s"), "/v1/chat/completions/render"),
    ],
)
def test_openai_requests_pass_through(call, path):
    body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}
    answer = {"token_ids": [1, 2], "choices": []}
    for given, expected in [(body, "m"), (body | {"model": "adapter"}, "adapter")]:
        output, servers = control(
            text(json.dumps(answer)), call=lambda c, given=given: call(c, given), model_name="m"
        )
        assert output == answer
        assert servers[0].calls == [Call("POST", path, [], given | {"model": expected}, "s")]
    assert "model" not in body


def test_the_generator_is_made_with_the_client_and_holds_its_session():
    async def run():
        async with (
            fleet(text('{"is_paused": true}')) as servers,
            client_of(servers, headers={"a": "b"}) as client,
        ):
            generator = client._generator
            assert isinstance(generator, RemoteInferenceGenerator)
            assert (generator.proxy_url, generator._transport.headers) == (servers[0].url, {"a": "b"})
            await client.is_paused()
            await client._post("/v1/completions", {})
            assert client.generator is generator
            session = generator._transport._session
            await client.aclose()
            assert session.closed

    asyncio.run(run())


def test_requests_in_flight_stay_below_the_cap_on_loop_after_loop():
    peaks = []

    async def run(client):
        running = peak = 0

        async def count(_):
            nonlocal running, peak
            running += 1
            peak = max(peak, running)
            await asyncio.sleep(0.01)
            running -= 1
            return 200, generated([1])

        async with fleet(by_prompt(count), OK) as servers:
            if client is None:
                client = client_of(servers, concurrency_per_server=2)
            client.generator.proxy_url = client.proxy_url = servers[0].url
            # Two batches at once: the cap is the client's, not a call's.
            batch = {"prompt_token_ids": [[1]] * 10}
            await asyncio.gather(client.generate(batch), client.generate(batch))
            await client.aclose()
        peaks.append(peak)
        return client

    client = asyncio.run(run(None))
    asyncio.run(run(client))
    assert peaks == [4, 4]


def test_a_cancelled_loop_does_not_block_the_next():
    """Where an interrupt ends a cell while every slot is taken, the next cell has all of them."""

    client = begun = None

    async def hang(_):
        begun.set()
        await asyncio.sleep(60)

    async def first():
        nonlocal client, begun
        begun = asyncio.Event()
        async with fleet(by_prompt(hang)) as servers:
            client = client_of(servers, concurrency_per_server=1)
            task = asyncio.create_task(client.generate({"prompt_token_ids": [[1], [2], [3]]}))
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    async def second():
        async with fleet(by_prompt(echo_twice)) as servers:
            client.generator.proxy_url = client.proxy_url = servers[0].url
            async with asyncio.timeout(20), client:
                return (await client.generate({"prompt_token_ids": [[1]]}))["response_ids"]

    asyncio.run(first())
    assert asyncio.run(second()) == [[2]]


def test_pickles_without_generator_and_session():
    async def run():
        async with fleet(by_prompt(echo_twice), OK) as servers:
            client = client_of(servers, model_name="m", concurrency_per_server=3, headers={"a": "b"})
            await client.generate({"prompt_token_ids": [[1]]})
            copy = pickle.loads(pickle.dumps(client))
            assert copy._generator is None
            assert (copy.proxy_url, copy.server_urls, copy.model_name) == (
                client.proxy_url, client.server_urls, "m",
            )  # fmt: skip
            assert copy._generate_cap.limit == 6
            await copy.aclose()  # with nothing to close
            output = await copy.generate({"prompt_token_ids": [[1]]})
            assert copy.generator is not client.generator
            assert (copy.generator._transport.headers, copy.generator.retry) == ({"a": "b"}, QUICK)
            await client.aclose()
            await copy.aclose()
            return output["response_ids"]

    assert asyncio.run(run()) == [[2]]


def test_closing_never_raises(caplog):
    class Broken:
        closed = False

        async def close(self):
            raise RuntimeError("socket is gone")

    async def run():
        async with RemoteInferenceClient("http://127.0.0.1:9") as client:
            client.generator._transport._session = Broken()
            client.generator._transport._pid = os.getpid()

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert "socket is gone" in caplog.text


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_has_connections_of_its_own():
    async def run():
        async with fleet(text('{"is_paused": false}')) as servers, client_of(servers) as client:

            async def ask():
                async with asyncio.timeout(20):
                    return await client.is_paused()

            expected = {servers[0].url: False}
            assert await ask() == expected
            session = client.generator._transport._session
            child = fork(lambda: asyncio.run(ask()) == expected and not session.closed)
            assert await asyncio.to_thread(exit_status, child) == 0
            assert await ask() == expected
            assert client.generator._transport._session is session

    asyncio.run(run())


def test_blocking_calls_through_rtks_own_loop():
    """What docs/client.md tells scripts to write."""

    async def run():
        async with fleet(text('{"is_paused": false}')) as servers:
            client = client_of(servers)
            paused = await asyncio.to_thread(rtk.loops.background.run, client.is_paused())
            await asyncio.to_thread(rtk.loops.background.run, client.aclose())
            return list(paused.values())

    assert asyncio.run(run()) == [False]
