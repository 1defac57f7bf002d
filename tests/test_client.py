import asyncio
import json
import logging
import os
import pickle
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
from aiohttp import web

import rtk
from rtk import RemoteInferenceClient, RemoteInferenceGenerator, RetryPolicy
from rtk._fan_out import LoopCap
from rtk.errors import (
    BatchError,
    FanOutError,
    PayloadError,
    RequestRejected,
    ServerError,
    ServerFailed,
    ServerUnreachable,
)

from .stub import disconnect, serving, text
from .test_loops import exit_status, fork

QUICK = RetryPolicy(tries=3, wait_s=0.01)
OK = text('{"status": "ok"}')


@dataclass
class Call:
    method: str
    path: str
    query: list[tuple[str, str]]
    body: object
    session_id: str | None


@dataclass
class Server:
    url: str
    calls: list[Call] = field(default_factory=list)

    @property
    def paths(self):
        return [call.path for call in self.calls]


@asynccontextmanager
async def fleet(*answers):
    """One server an answer, each remembering what it was asked. An answer may be a list, given in turn."""
    async with AsyncExitStack() as stack:
        servers = []
        for answer in answers:
            server = Server("")

            stub = await stack.enter_async_context(serving(remembering(server, answer)))
            server.url = stub.url
            servers.append(server)
        yield servers


def remembering(server, answer):
    answers = answer if isinstance(answer, list) else [answer]

    async def handle(request):
        raw = await request.read()
        server.calls.append(
            Call(
                request.method,
                request.path,
                list(request.query.items()),
                json.loads(raw) if raw else None,
                request.headers.get("X-Session-ID"),
            )
        )
        return await answers[min(len(server.calls), len(answers)) - 1](request)

    return handle


def client_of(servers, **options):
    urls = [server.url for server in servers]
    return RemoteInferenceClient(urls[0], urls, control_retry=QUICK, retry=QUICK, **options)


def control(*answers, call, **options):
    """Awaits call(client) against a fleet; returns what came back (or the error raised) and the servers."""

    async def run():
        async with fleet(*answers) as servers, client_of(servers, **options) as client:
            try:
                return await call(client), servers
            except Exception as error:
                return error, servers

    return asyncio.run(run())


# The paths, queries and bodies below are those of vLLM 0.30's routers (vllm/entrypoints/serve/dev and
# serve/lora), and tests/test_client_vllm.py sends the same calls to a real one.
@pytest.mark.parametrize(
    ("call", "method", "path", "query", "body"),
    [
        (lambda c: c.pause(), "POST", "/pause", [("mode", "keep"), ("clear_cache", "false")], None),
        (lambda c: c.pause("abort"), "POST", "/pause", [("mode", "abort"), ("clear_cache", "false")], None),
        (
            lambda c: c.pause("wait", clear_cache=True),
            "POST",
            "/pause",
            [("mode", "wait"), ("clear_cache", "true")],
            None,
        ),
        (lambda c: c.resume(), "POST", "/resume", [], None),
        (lambda c: c.sleep(), "POST", "/sleep", [("level", "2")], None),
        (lambda c: c.sleep(1), "POST", "/sleep", [("level", "1")], None),
        (lambda c: c.wake_up(), "POST", "/wake_up", [], None),
        (
            lambda c: c.wake_up(["weights", "kv_cache"]),
            "POST",
            "/wake_up",
            [("tags", "weights"), ("tags", "kv_cache")],
            None,
        ),
        (
            lambda c: c.reset_prefix_cache(),
            "POST",
            "/reset_prefix_cache",
            [("reset_running_requests", "false")],
            None,
        ),
        (
            lambda c: c.reset_prefix_cache(reset_running_requests=True),
            "POST",
            "/reset_prefix_cache",
            [("reset_running_requests", "true")],
            None,
        ),
        (lambda c: c.update_weight_version(7), "POST", "/update_weight_version", [], {"new_version": "7"}),
        (
            lambda c: c.load_lora_adapter("style", "/adapters/style"),
            "POST",
            "/v1/load_lora_adapter",
            [],
            {"lora_name": "style", "lora_path": "/adapters/style", "load_inplace": False},
        ),
        (
            lambda c: c.unload_lora_adapter("style"),
            "POST",
            "/v1/unload_lora_adapter",
            [],
            {"lora_name": "style"},
        ),
        (lambda c: c.get_server_info(), "GET", "/server_info", [("config_format", "json")], None),
        (
            lambda c: c.call_all_servers("POST", "/collective_rpc", {"method": "m"}),
            "POST",
            "/collective_rpc",
            [],
            {"method": "m"},
        ),
    ],
)
def test_every_server_is_sent_the_same_call(call, method, path, query, body):
    answers, servers = control(OK, OK, OK, call=call)
    assert answers == {server.url: {"status": "ok"} for server in servers}
    for server in servers:
        assert server.calls == [Call(method, path, query, body, None)]


@pytest.mark.parametrize(
    ("call", "key", "values"),
    [
        (lambda c: c.is_paused(), "is_paused", [True, False]),
        (lambda c: c.is_sleeping(), "is_sleeping", [False, True]),
        (lambda c: c.get_weight_version(), "weight_version", ["6", "7"]),
    ],
)
def test_questions_return_each_servers_answer(call, key, values):
    answers, servers = control(*(text(json.dumps({key: value})) for value in values), call=call)
    assert answers == dict(zip([server.url for server in servers], values, strict=True))


def test_a_question_without_its_answer_is_that_servers_failure():
    error, servers = control(
        text('{"is_paused": false}'), text('{"paused": false}'), call=lambda c: c.is_paused()
    )
    assert isinstance(error, FanOutError)
    assert list(error.failures) == [servers[1].url]
    assert isinstance(error.failures[servers[1].url], PayloadError)
    assert error.answers == {servers[0].url: False}


def test_answers_may_be_empty_or_a_sentence():
    """As vLLM's /sleep and /v1/load_lora_adapter answer."""
    answers, servers = control(
        text("", 200, "application/octet-stream"), text("Success: added", 200, "text/plain"), call=lambda c: c.sleep()
    )  # fmt: skip
    assert answers == {servers[0].url: None, servers[1].url: "Success: added"}


def test_partial_failure_names_who_failed_and_why_and_who_did_not():
    error, servers = control(
        OK,
        text('{"error": "Failed to pause generation: engine is busy"}', 500),
        text('{"error": {"message": "no such mode"}}', 400),
        text('{"detail": "Not Found"}', 404),
        call=lambda c: c.pause(),
    )
    assert isinstance(error, FanOutError | ServerError)
    ok, busy, refused, missing = (server.url for server in servers)
    assert error.answers == {ok: {"status": "ok"}}
    assert {url: type(e) for url, e in error.failures.items()} == {
        busy: ServerFailed, refused: RequestRejected, missing: RequestRejected,
    }  # fmt: skip
    assert error.url == busy
    message = str(error)
    assert message.startswith("POST /pause failed on 3 of 4 servers")
    for url, why in [
        (busy, "engine is busy"),
        (refused, "no such mode"),
        (missing, "VLLM_SERVER_DEV_MODE=1"),
    ]:
        assert any(url in line and why in line for line in message.splitlines()), message
    assert f"succeeded on {ok}." in message


def test_a_refusal_that_explains_itself_gets_no_advice_about_flags():
    missing = '{"error": {"message": "The lora adapter `a` cannot be found.", "code": 404}}'
    error, _ = control(text(missing, 404), call=lambda c: c.unload_lora_adapter("a"))
    assert "cannot be found" in str(error)
    assert "DEV_MODE" not in str(error)
    assert "succeeded on none" in str(error)


def test_no_call_is_stopped_because_another_failed():
    """A weight sync must not leave a server half way through a pause."""
    finished, failed = [], asyncio.Event()

    async def fails(_):
        failed.set()
        return web.json_response({"error": "broken"}, status=500)

    async def slow(_):
        await failed.wait()
        await asyncio.sleep(0.1)
        finished.append(True)
        return web.json_response({"status": "paused"})

    error, servers = control(fails, slow, call=lambda c: c.pause("wait"))
    assert finished == [True]
    assert error.answers == {servers[1].url: {"status": "paused"}}


def test_a_server_that_hangs_is_named_and_not_asked_again():
    async def hang(_):
        await asyncio.sleep(60)
        return web.Response()

    error, servers = control(OK, hang, call=lambda c: c.pause(), control_timeout_s=0.3)
    assert list(error.failures) == [servers[1].url]
    assert "did not answer within 0.3 s" in str(error)
    assert "may still be at work" in str(error)
    assert len(servers[1].calls) == 1


@pytest.mark.parametrize(
    "fault",
    [
        disconnect(),
        text("<html>bad gateway</html>", 502, "text/html"),
        text("upstream connect error", 503, "text/plain"),
        text("<html>sign in first</html>", 200, "text/html"),
    ],
)
def test_a_server_in_restart_is_asked_again(fault):
    answers, servers = control(OK, [fault, fault, OK], call=lambda c: c.resume())
    assert answers == {server.url: {"status": "ok"} for server in servers}
    assert [len(server.calls) for server in servers] == [1, 3]


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (disconnect(), ServerUnreachable, "no inference server answers"),
        (text("<html>bad gateway</html>", 502, "text/html"), ServerFailed, "bad gateway"),
        (text("<html>sign in first</html>", 200, "text/html"), ServerFailed, "sign in first"),
    ],
)
def test_a_server_that_stays_away_ends_the_tries(fault, kind, words):
    error, servers = control(fault, OK, call=lambda c: c.resume())
    assert isinstance(error.failures[servers[0].url], kind)
    assert words in str(error)
    assert [len(server.calls) for server in servers] == [3, 1]


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.load_lora_adapter("a", "/a"),
        lambda c: c.unload_lora_adapter("a"),
        lambda c: c.call_all_servers("POST", "/collective_rpc", {"method": "m"}),
    ],
)
def test_what_may_not_be_repeated_is_sent_once(call):
    error, servers = control(disconnect(), call=call)
    assert isinstance(error, FanOutError)
    assert len(servers[0].calls) == 1


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9", "127.0.0.1:8000", "not a url", "ftp://127.0.0.1"], ids=str
)
def test_a_server_without_an_address_to_speak_of(url):
    async def run():
        async with fleet(OK) as servers:
            urls = [servers[0].url, url]
            async with RemoteInferenceClient(servers[0].url, urls, control_retry=QUICK) as client:
                await client.pause()

    with pytest.raises(FanOutError) as caught:
        asyncio.run(run())
    assert list(caught.value.failures) == [url]
    assert isinstance(caught.value.failures[url], ServerUnreachable)


def test_a_cache_that_was_not_reset_is_a_failure():
    """vLLM answers 200 with success: false while requests hold blocks."""
    error, servers = control(
        text('{"success": true}'), text('{"success": false}'), call=lambda c: c.reset_prefix_cache()
    )
    assert list(error.failures) == [servers[1].url]
    assert "did not succeed" in str(error)
    assert "reset_running_requests=True" in str(error)


def test_wrong_arguments_reach_no_server():
    async def run():
        async with fleet(OK) as servers, client_of(servers) as client:
            with pytest.raises(ValueError, match="'abort', 'keep', 'wait'"):
                await client.pause("finish")
            with pytest.raises(ValueError, match=r"write \['weights'\]"):
                await client.wake_up("weights")
            assert servers[0].calls == []

    asyncio.run(run())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"server_urls": "http://a"}, r"write \['http://a'\]"),
        ({"server_urls": []}, "is empty"),
        ({"server_urls": ["http://a", "http://b", "http://a/"]}, "http://a more than once"),
        ({"server_urls": ["http://a", "http://b", "http://c"], "data_parallel_size": 2}, "3 servers do not divide"),
        ({"concurrency_per_server": 0}, "at least one"),
        ({"server": "llama"}, "server is 'llama'"),
    ],
)  # fmt: skip
def test_a_client_that_makes_no_sense(options, words):
    with pytest.raises(ValueError, match=words):
        RemoteInferenceClient("http://a", **options)


@pytest.mark.parametrize(
    ("sizes", "data_parallel_size", "expected"), [([4, 4, 4], 1, (12, 4)), ([8, 8, 8, 8], 2, (16, 8))]
)
def test_world_size(sizes, data_parallel_size, expected):
    """vLLM reports tensor x pipeline x data parallel, so servers of one deployment report the same workers."""
    answers = [text(json.dumps({"world_size": size})) for size in sizes]
    total, _ = control(*answers, call=lambda c: c.get_world_size(), data_parallel_size=data_parallel_size)
    assert total == expected


def test_world_sizes_that_differ_are_refused():
    error, servers = control(
        text('{"world_size": 4}'), text('{"world_size": 2}'), call=lambda c: c.get_world_size()
    )
    assert isinstance(error, PayloadError)
    assert f"'{servers[1].url}': 2" in str(error)


def test_health_says_who_is_ill_instead_of_raising():
    health, servers = control(text("", 200), text("", 503), disconnect(), call=lambda c: c.health())
    well, ill, gone = (server.url for server in servers)
    assert health[well] is None
    assert isinstance(health[ill], ServerFailed)
    assert isinstance(health[gone], ServerUnreachable)
    # aiohttp itself repeats a GET whose connection was dropped, once.
    assert [len(server.calls) for server in servers] == [1, 1, 2]


def test_the_proxy_is_the_only_server_where_none_are_named():
    client = RemoteInferenceClient("http://a:8000/")
    assert client.server_urls == ("http://a:8000",)


# Data plane.


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


# Event loops, caps, pickling, closing.


def test_the_generator_is_made_with_the_client_and_holds_its_session():
    async def run():
        async with (
            fleet(text('{"is_paused": true}')) as servers,
            client_of(servers, headers={"a": "b"}) as client,
        ):
            generator = client._generator
            assert isinstance(generator, RemoteInferenceGenerator)
            assert (generator.proxy_url, generator.headers) == (servers[0].url, {"a": "b"})
            await client.is_paused()
            await client._post("/v1/completions", {})
            assert client.generator is generator
            session = generator._session
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


def test_a_cap_forgets_loops_that_are_gone():
    cap = LoopCap(1)

    async def contend():
        async def hold():
            async with cap.here():
                await asyncio.sleep(0)

        await asyncio.gather(hold(), hold(), hold())

    for _ in range(3):
        asyncio.run(contend())
    assert len(cap._by_loop) == 1


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
            assert (copy.generator.headers, copy.generator.retry) == ({"a": "b"}, QUICK)
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
            client.generator._session = Broken()
            client.generator._session_pid = os.getpid()

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
            session = client.generator._session
            child = fork(lambda: asyncio.run(ask()) == expected and not session.closed)
            assert await asyncio.to_thread(exit_status, child) == 0
            assert await ask() == expected
            assert client.generator._session is session

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


def test_a_fan_out_error_survives_pickling():
    failures = {"http://a": ServerFailed("http://a failed (HTTP 500): x", url="http://a", status=500)}
    error = FanOutError("POST /pause", failures, {"http://b": None})
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.url) == (FanOutError, str(error), "http://a")
    assert copy.answers == {"http://b": None}
    assert copy.failures["http://a"].status == 500
