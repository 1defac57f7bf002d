import asyncio
import base64
import gc
import json
import os
import pickle

import numpy as np
import pytest
from aiohttp import web

from rtk import ModelLayout, RemoteInferenceGenerator, RetryPolicy
from rtk.errors import (
    LayoutError,
    PayloadError,
    RequestRejected,
    RoutesMissing,
    ServerFailed,
    ServerUnreachable,
)
from tests.conftest import FIXTURES
from tests.stub import disconnect, events, serving, text
from tests.test_loops import exit_status, fork

QUICK = RetryPolicy(tries=3, wait_s=0.01)
PROMPT = [5, 6, 7, 8]


def ask(*answers, tries=QUICK, routed_experts=False, server="vllm", model_name=None, layout=None, **options):
    """One generate call against a stub; returns the result (or the error raised) and the stub."""

    async def run():
        async with serving(*answers) as stub:
            async with RemoteInferenceGenerator(
                stub.url, model_name, server=server, layout=layout, retry=tries
            ) as generator:
                try:
                    params = {"max_tokens": 2}
                    return await generator.generate(
                        PROMPT, params, routed_experts=routed_experts, **options
                    ), stub
                except Exception as error:
                    return error, stub

    return asyncio.run(run())


def test_decodes_a_real_answer(vllm_answers):
    result, stub = ask(text(vllm_answers["plain"]["text"]), routed_experts=True)
    assert result.token_ids == [12, 12]
    assert result.logprobs == [-3.630524158477783, -3.601616621017456]
    assert result.stop_reason == "length"
    assert (result.routed_experts.shape, result.routed_experts.dtype) == ((5, 8, 2), np.uint8)
    assert result.request_id == json.loads(vllm_answers["plain"]["text"])["request_id"]
    assert stub.paths == ["/inference/v1/generate"]


def test_sends_what_is_set_and_nothing_else(vllm_answers):
    answer = text(vllm_answers["plain"]["text"])
    _, stub = ask(answer)
    assert stub.bodies == [{"sampling_params": {"max_tokens": 2}, "token_ids": PROMPT}]
    assert "X-Session-ID" not in stub.headers[0]
    features = {"mm_hashes": {"image": ["a"]}}
    _, stub = ask(answer, model_name="m", cache_salt="s", features=features, session_id="chat-1")
    assert stub.bodies[0] == {
        "sampling_params": {"max_tokens": 2}, "token_ids": PROMPT, "model": "m", "cache_salt": "s", "features": features,
    }  # fmt: skip
    assert stub.headers[0]["X-Session-ID"] == "chat-1"


def test_numpy_token_ids_are_sent_as_numbers(vllm_answers):
    async def run():
        async with serving(text(vllm_answers["plain"]["text"])) as stub:
            async with RemoteInferenceGenerator(stub.url) as generator:
                await generator.generate(np.array(PROMPT), {})
            return stub.bodies[0]["token_ids"]

    assert asyncio.run(run()) == PROMPT


def test_skyrls_endpoint_serves_routes_only(vllm_answers):
    choice = {"token_ids": [1], "finish_reason": "stop", "logprobs": None}
    routes = {"data": "AAECAwQFBgc=", "shape": [4, 1, 2], "dtype": "uint8"}
    answer = text(json.dumps({"choices": [choice | {"routed_experts": routes}]}))
    result, stub = ask(answer, routed_experts=True, server="skyrl")
    assert stub.paths == ["/skyrl/v1/generate"]
    assert result.routed_experts.tolist() == [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]]
    _, stub = ask(answer, server="skyrl")
    assert stub.paths == ["/inference/v1/generate"]


def test_streams_a_real_answer_in_pieces(vllm_answers):
    seen = []
    result, stub = ask(
        events(vllm_answers["streamed"]["text"], piece=7),
        routed_experts=True,
        on_chunk=lambda c: seen.append(c.token_ids),
    )
    assert seen == [[12], [12], [12]]
    assert result.token_ids == [12, 12, 12]
    assert result.logprobs == [-3.630524158477783, -3.601616621017456, -3.6018810272216797]
    assert result.routed_experts.shape == (6, 8, 2)
    assert stub.bodies[0]["stream"] is True


def test_a_streamed_line_may_be_longer_than_aiohttps_limit():
    import base64
    import io

    buffer = io.BytesIO()
    routes = np.random.default_rng(0).integers(0, 200, (4, 50_000, 2)).astype(np.uint8)
    np.save(buffer, routes)
    choice = {"token_ids": [1], "finish_reason": "stop", "logprobs": None,
              "routed_experts": base64.b64encode(buffer.getvalue()).decode()}  # fmt: skip
    body = "data: " + json.dumps({"choices": [choice]}) + "\n\ndata: [DONE]\n\n"
    result, _ = ask(events(body, piece=60_000), routed_experts=True, on_chunk=lambda _: None)
    np.testing.assert_array_equal(result.routed_experts, routes)


def test_a_cut_stream_is_an_error_and_is_not_sent_again(vllm_answers):
    body = vllm_answers["streamed"]["text"]
    for cut in (100, 700, len(body) - 20):
        error, stub = ask(events(body, cut_at=cut), on_chunk=lambda _: None)
        assert isinstance(error, ServerUnreachable | PayloadError), error
        assert len(stub.paths) == 1


def test_a_stream_that_just_ends_is_an_error(vllm_answers):
    body = vllm_answers["streamed"]["text"]
    error, _ = ask(events(body.replace("data: [DONE]\n\n", "")), on_chunk=lambda _: None)
    assert isinstance(error, PayloadError)
    assert "[DONE]" in str(error)
    first = body.split("\n\n")[0]
    error, _ = ask(events(f"{first}\n\ndata: [DONE]\n\n"), on_chunk=lambda _: None)
    assert "without a finish reason" in str(error)


def test_an_error_event_in_mid_stream(vllm_answers):
    first = vllm_answers["streamed"]["text"].split("\n\n")[0]
    body = f'{first}\n\ndata: {{"error": {{"message": "engine died"}}}}\n\ndata: [DONE]\n\n'
    error, _ = ask(events(body), on_chunk=lambda _: None)
    assert isinstance(error, ServerFailed)
    assert "engine died" in str(error)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("out_of_vocabulary", 400, "Token id 999999 is out of vocabulary"),
        ("unknown_model", 404, "The model `nope`"),
    ],
)
def test_a_refusal_carries_the_servers_text_and_is_final(vllm_answers, name, status, words, streamed):
    answer = vllm_answers[name]
    error, stub = ask(text(answer["text"], answer["status"]), on_chunk=(lambda _: None) if streamed else None)
    assert isinstance(error, RequestRejected)
    assert error.status == status
    assert words in str(error)
    assert len(stub.paths) == 1


def test_a_server_without_the_endpoint_says_which_flag():
    error, _ = ask(text('{"detail":"Not Found"}', 404))
    assert "Not Found" in str(error)
    assert "--enable-scale-out" in str(error)


def test_a_server_without_routes_says_which_flag(vllm_answers):
    payload = json.loads(vllm_answers["plain"]["text"])
    payload["choices"][0]["routed_experts"] = None
    error, _ = ask(text(json.dumps(payload)), routed_experts=True)
    assert isinstance(error, RoutesMissing)
    assert "--enable-return-routed-experts" in str(error)


def test_an_aborted_request_without_routes_says_so(vllm_answers):
    """vLLM 0.30 sends none for a stream that `/pause?mode=abort` ends."""
    payload = json.loads(vllm_answers["plain"]["text"])
    payload["choices"][0] |= {"routed_experts": None, "finish_reason": "abort"}
    error, _ = ask(text(json.dumps(payload)), routed_experts=True)
    assert isinstance(error, RoutesMissing)
    assert "aborted the request after 2 tokens" in str(error)


def test_routes_of_other_tokens_are_refused(vllm_answers):
    payload = json.loads(vllm_answers["plain"]["text"])
    payload["choices"][0]["token_ids"] = [12]
    payload["choices"][0]["logprobs"] = None
    error, _ = ask(text(json.dumps(payload)), routed_experts=True)
    assert isinstance(error, PayloadError)
    assert "routes of 5 tokens for 4 prompt and 1 generated" in str(error)


def test_several_choices_are_refused(vllm_answers):
    payload = json.loads(vllm_answers["plain"]["text"])
    payload["choices"] *= 2
    error, _ = ask(text(json.dumps(payload)))
    assert "2 choices" in str(error)


@pytest.mark.parametrize(
    "fault",
    [disconnect(), text("<html>restarting</html>", 502, "text/html"), text("", 200), text("[1]", 200)],
)
def test_passing_faults_are_retried(vllm_answers, fault):
    result, stub = ask(fault, fault, text(vllm_answers["plain"]["text"]))
    assert result.token_ids == [12, 12]
    assert len(stub.paths) == 3


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (disconnect(), ServerUnreachable, "no inference server answers"),
        (text("<html>bad gateway</html>", 502, "text/html"), ServerFailed, "bad gateway"),
    ],
)
def test_lasting_faults_end_the_tries(fault, kind, words):
    error, stub = ask(fault)
    assert isinstance(error, kind)
    assert words in str(error)
    assert len(stub.paths) == 3


def test_a_failure_that_the_server_explains_is_not_retried():
    error, stub = ask(text('{"error": {"message": "CUDA out of memory"}}', 500))
    assert isinstance(error, ServerFailed)
    assert "CUDA out of memory" in str(error)
    assert len(stub.paths) == 1


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1:9", "Check that it runs, and the address"),
        ("127.0.0.1:8000", "starts with http://"),
        ("not a url", "starts with http://"),
        ("ftp://127.0.0.1", "starts with http://"),
    ],
)
def test_no_server(url, words):
    async def run():
        async with RemoteInferenceGenerator(url, retry=RetryPolicy(tries=1)) as generator:
            await generator.generate(PROMPT, {})

    with pytest.raises(ServerUnreachable, match=words):
        asyncio.run(run())


def test_one_generator_serves_loop_after_loop(vllm_answers):
    """A notebook that calls asyncio.run twice gives the same generator two loops."""
    generator = None

    async def run():
        nonlocal generator
        async with serving(text(vllm_answers["plain"]["text"])) as stub:
            generator = generator or RemoteInferenceGenerator(stub.url)
            generator.proxy_url = stub.url
            return (await generator.generate(PROMPT, {})).token_ids

    assert asyncio.run(run()) == asyncio.run(run()) == [12, 12]


def test_one_session_is_kept_and_made_again_after_closing(vllm_answers):
    async def run():
        async with serving(text(vllm_answers["plain"]["text"])) as stub:
            generator = RemoteInferenceGenerator(stub.url)
            await generator.generate(PROMPT, {})
            first = generator._transport._session
            await generator.generate(PROMPT, {})
            assert generator._transport._session is first
            await generator.aclose()
            assert first.closed
            await generator.aclose()
            assert (await generator.generate(PROMPT, {})).token_ids == [12, 12]
            await generator.aclose()

    asyncio.run(run())


def test_a_completions_server_is_asked_for_token_ids():
    answers = json.loads((FIXTURES / "vllm_0_30_completions.json").read_text())
    result, stub = ask(text(answers["completions"]["text"]), routed_experts=True, server="completions")
    assert stub.paths == ["/v1/completions"]
    assert stub.bodies == [
        {"max_tokens": 2, "prompt": PROMPT, "return_token_ids": True, "return_weight_versions": True}
    ]
    assert result.token_ids == [82, 278, 83, 12]
    assert result.routed_experts.shape == (7, 8, 2)
    chunks = []
    stream = events(answers["completions_stream"]["text"])
    streamed, _ = ask(stream, server="completions", on_chunk=chunks.append)
    assert streamed.token_ids == [82, 278, 83]
    assert [chunk.token_ids for chunk in chunks] == [[82], [278], [83]]
    assert streamed.routed_experts is None


def test_an_sglang_server_needs_the_layout_for_its_routes():
    layout = ModelLayout(num_layers=2, moe_layers=(1,), num_experts=512, top_k=2)
    routes = np.arange(20, dtype="<i4").reshape(5, 2, 2)
    meta = {
        "id": "c2f1",
        "finish_reason": {"type": "stop", "matched": 2},
        "output_token_logprobs": [[-0.5, 11, None], [-0.25, 2, None]],
        "routed_experts": base64.b64encode(routes.tobytes()).decode(),
    }
    answer = text(json.dumps({"text": "x", "meta_info": meta}))
    result, stub = ask(answer, routed_experts=True, server="sglang", layout=layout)
    assert stub.paths == ["/generate"]
    assert (result.token_ids, result.stop_reason, result.request_id) == ([11, 2], "stop", "c2f1")
    np.testing.assert_array_equal(result.routed_experts, routes)
    error, stub = ask(answer, routed_experts=True, server="sglang")
    assert isinstance(error, LayoutError) and not stub.paths
    # A layout of half the layers divides the bytes too, but gives twice the rows.
    half = ModelLayout(num_layers=1, moe_layers=(0,), num_experts=512, top_k=2)
    error, _ = ask(answer, routed_experts=True, server="sglang", layout=half)
    assert isinstance(error, PayloadError) and "routes of 10 tokens" in str(error)


@pytest.mark.parametrize(("server", "routed_experts"), [("completions", True), ("sglang", False)])
def test_what_cannot_be_streamed_is_refused_before_anything_is_sent(server, routed_experts):
    error, stub = ask(text("{}"), server=server, routed_experts=routed_experts, on_chunk=print)
    assert isinstance(error, ValueError) and not stub.paths


def test_a_session_that_a_fork_copied_is_left_alone(vllm_answers, monkeypatch):
    async def run():
        async with serving(text(vllm_answers["plain"]["text"])) as stub:
            async with RemoteInferenceGenerator(stub.url) as generator:
                await generator.generate(PROMPT, {})
                parents = generator._transport._session
                with monkeypatch.context() as child:
                    child.setattr("os.getpid", lambda: -1)
                    await generator.generate(PROMPT, {})
                    assert generator._transport._session is not parents
                    assert not parents.closed
                    await generator.aclose()
                    generator._transport._session, generator._transport._pid = parents, 1
                    await generator.aclose()
                    assert not parents.closed
                await parents.close()

    asyncio.run(run())


def test_closing_never_raises(caplog):
    class Broken:
        closed = False

        async def close(self):
            raise RuntimeError("socket is gone")

    async def run():
        generator = RemoteInferenceGenerator("http://127.0.0.1:9")
        generator._transport._session = Broken()
        await generator.aclose()
        assert generator._transport._session is None

    asyncio.run(run())
    assert "socket is gone" in caplog.text


def test_pickles_without_its_session(vllm_answers):
    async def run():
        async with serving(text(vllm_answers["plain"]["text"])) as stub:
            generator = RemoteInferenceGenerator(stub.url, "m", headers={"a": "b"}, retry=QUICK)
            await generator.generate(PROMPT, {})
            copy = pickle.loads(pickle.dumps(generator))
            assert copy._transport._session is None
            assert (copy.proxy_url, copy.model_name, copy._transport.headers, copy.retry) == (
                stub.url,
                "m",
                {"a": "b"},
                QUICK,
            )
            result = await copy.generate(PROMPT, {})
            await generator.aclose()
            await copy.aclose()
            return result.token_ids

    assert asyncio.run(run()) == [12, 12]


def test_cancelling_closes_the_connection():
    """So that the server stops generating for nobody."""

    async def run():
        gone = asyncio.Event()
        begun = asyncio.Event()

        async def slow(_: web.Request) -> web.StreamResponse:
            begun.set()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                gone.set()
                raise
            return web.Response()

        async with serving(slow) as stub, RemoteInferenceGenerator(stub.url) as generator:
            task = asyncio.create_task(generator.generate(PROMPT, {}))
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.wait_for(gone.wait(), 10)

    asyncio.run(run())


def test_errors_survive_pickling():
    error = RequestRejected("no", url="http://x", status=400)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.url, copy.status) == (RequestRejected, "no", "http://x", 400)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_makes_a_session_of_its_own():
    """On asyncio's default loop, whose list of sockets the child shares with its parent."""

    async def run():
        async with serving(text('{"data": []}')) as stub:
            generator = RemoteInferenceGenerator(stub.url)

            async def ask():
                async with asyncio.timeout(20):
                    return await generator.request("GET", "/v1/models")

            async def in_child():
                parents = generator._transport._session
                answer = await ask()
                own = generator._transport._session
                await generator.aclose()
                return answer == {"data": []} and own is not parents and own.closed and not parents.closed

            def child_main():
                done = asyncio.run(in_child())
                gc.collect()
                return done

            assert await ask() == {"data": []}
            session = generator._transport._session
            child = fork(child_main)
            assert await asyncio.to_thread(exit_status, child) == 0
            assert await ask() == {"data": []}
            assert generator._transport._session is session
            # And a child that closes first leaves the parent's alone as well.
            child = fork(lambda: asyncio.run(generator.aclose()) is None and not session.closed)
            assert await asyncio.to_thread(exit_status, child) == 0
            assert await ask() == {"data": []}
            await generator.aclose()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"logprobs":{', '"logproBs":{', "2 logprobs for 3 tokens"),
        ("data: {", "dat\x21: {", "no event"),
    ],
)
def test_a_stream_of_which_an_event_was_garbled_is_an_error(vllm_answers, old, new, words):
    body = vllm_answers["streamed"]["text"].replace(old, new, 1)
    assert body != vllm_answers["streamed"]["text"]
    error, _ = ask(events(body), on_chunk=lambda _: None)
    assert isinstance(error, PayloadError)
    assert words in str(error)


def test_a_stream_may_hold_comments_and_other_fields(vllm_answers):
    body = ": ping\n\nevent: message\nid: 1\nretry: 10\n" + vllm_answers["streamed"]["text"].replace(
        "\n", "\r\n"
    )
    result, _ = ask(events(body), on_chunk=lambda _: None)
    assert result.token_ids == [12, 12, 12]
