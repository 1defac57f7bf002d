import asyncio
import json
import pickle

import pytest
from aiohttp import web

from rtk import RemoteInferenceClient
from rtk.errors import (
    FanOutError,
    PayloadError,
    RequestRejected,
    ServerError,
    ServerFailed,
    ServerUnreachable,
)
from tests.fleet.stub_fleet import OK, QUICK, Call, client_of, control, fleet
from tests.stub import disconnect, text


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
    assert isinstance(error, FanOutError)
    assert isinstance(error, ServerError)
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


def test_a_fan_out_error_survives_pickling():
    failures = {"http://a": ServerFailed("http://a failed (HTTP 500): x", url="http://a", status=500)}
    error = FanOutError("POST /pause", failures, {"http://b": None})
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.url) == (FanOutError, str(error), "http://a")
    assert copy.answers == {"http://b": None}
    assert copy.failures["http://a"].status == 500
