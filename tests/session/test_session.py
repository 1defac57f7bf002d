"""Sessions against the embedded server and, where it is installed, against a real vLLM."""

import asyncio
import json
import re
import signal
import threading
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web

import rtk
from rtk import ModelLayout, RemoteInferenceGenerator, RetryPolicy, Timeouts, compare
from rtk.errors import (
    LayoutError,
    PayloadError,
    RequestRejected,
    RoutesMissing,
    ServerFailed,
    ServerTimeout,
    ServerUnreachable,
    UnknownModel,
)
from rtk.replay import Shard, check
from rtk.serve import shipped
from tests import vllm
from tests.stub import serving, text

PROMPT = "It was a cold evening, and the whole party"


def test_connect_finds_out_what_is_served(session, request):
    config = json.loads((shipped.find("tiny_moe") / "config.json").read_text())
    assert session.max_model_len == 512
    real = "vllm" in request.node.callspec.id
    assert session.server_version.startswith(vllm.installed() if real else "0.30.0+rtk.embedded")
    assert session.layout.num_layers == config["num_hidden_layers"]
    assert session.layout.dense_layers == tuple(config["mlp_only_layers"])
    assert session.layout.num_experts == config["num_local_experts"]
    assert session.url in repr(session)


@pytest.mark.parametrize(
    ("paths", "server"),
    [
        ({"/inference/v1/generate": 405, "/skyrl/v1/generate": 405}, "skyrl"),
        ({"/inference/v1/generate": 405}, "vllm"),
        ({"/get_model_info": 200}, "sglang"),
        ({}, "completions"),
    ],
)
def test_connect_finds_out_which_kind_of_server_it_is(paths, server):
    async def answer(request):
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "m"}]})
        return web.json_response({}, status=paths.get(request.path, 404))

    async def run():
        async with serving(answer) as stub:
            with await asyncio.to_thread(rtk.connect, stub.url) as session:
                return session._generator.server.name

    assert asyncio.run(run()) == server


def test_completions_give_the_same_as_generate(session):
    with rtk.connect(session.url, server="completions") as other:
        texts = []
        a = session.sample(PROMPT, max_tokens=8, temperature=0)
        b = other.sample(PROMPT, max_tokens=8, temperature=0, on_text=texts.append)
    assert a.result.token_ids == b.result.token_ids
    np.testing.assert_allclose(a.result.logprobs, b.result.logprobs, atol=1e-5)
    np.testing.assert_array_equal(a.result.routed_experts, b.result.routed_experts)
    assert texts == [b.text]


def test_sample_gives_text_tokens_and_routes_that_belong_together(session):
    sample = session.sample(PROMPT, max_tokens=12, temperature=0)
    prompt, result, trace = sample.prompt_token_ids, sample.result, sample.trace
    assert session.detokenize(prompt) == PROMPT
    assert 1 <= len(result.token_ids) <= 12
    assert len(result.logprobs) == len(result.token_ids)
    assert trace.token_ids.tolist() == prompt + result.token_ids
    assert trace.text == PROMPT + sample.text
    assert trace.prompt_tokens == len(prompt)
    assert trace.rows == len(trace.token_ids) - 1
    assert trace.routed_experts.dtype == np.uint8
    assert trace.source["model"] == session.model
    assert trace.source["sampling_params"]["max_tokens"] == 12


def test_token_ids_are_taken_as_they_are(session):
    ids = session.tokenize(PROMPT)
    a = session.sample(ids, max_tokens=5, temperature=0)
    b = session.sample(PROMPT, max_tokens=5, temperature=0)
    assert a.prompt_token_ids == ids
    assert a.result.token_ids == b.result.token_ids


def test_a_seed_repeats_a_sample(session):
    a, b = (session.sample(PROMPT, max_tokens=8, temperature=1.0, seed=11) for _ in range(2))
    assert a.result.token_ids == b.result.token_ids


def test_the_text_comes_in_while_it_is_generated(session):
    seen = []
    sample = session.sample(PROMPT, max_tokens=10, temperature=0, on_text=seen.append)
    assert seen[-1] == sample.text
    assert all(sample.text.startswith(part.rstrip("\ufffd")) for part in seen)
    assert sample.result.token_ids == session.sample(PROMPT, max_tokens=10, temperature=0).result.token_ids


def test_a_failing_callback_is_not_swallowed(session):
    def fail(_: str) -> None:
        raise RuntimeError("display is gone")

    with pytest.raises(RuntimeError, match="display is gone"):
        session.sample(PROMPT, max_tokens=10, on_text=fail)
    assert session.sample(PROMPT, max_tokens=2).trace is not None


def test_awaitable_in_any_loop_and_many_at_once(session):
    async def run():
        seen = []
        samples = await asyncio.gather(
            *(session.asample(PROMPT, max_tokens=3, temperature=0, on_text=seen.append) for _ in range(6))
        )
        return samples, seen

    samples, seen = asyncio.run(run())
    assert len({tuple(sample.result.token_ids) for sample in samples}) == 1
    assert len(seen) >= 6


def test_blocking_calls_work_inside_a_running_loop(session):
    async def run():
        return session.sample(PROMPT, max_tokens=3, temperature=0)

    assert asyncio.run(run()).trace is not None


def test_without_routes_there_is_no_trace(session):
    sample = session.sample(PROMPT, max_tokens=2, routes=False)
    assert sample.trace is None
    assert sample.result.routed_experts is None


def test_routes_line_up_with_every_stage(session):
    trace = session.sample(PROMPT, max_tokens=20, seed=0).trace
    for rank in range(2):
        report = check(trace, Shard(trace.layout, 2, rank))
        assert report.ok, str(report)


def test_the_same_prompt_twice_gives_the_same_routes(session):
    """The second time its prefix may come from a cache."""
    a, b = (session.sample(PROMPT * 4, max_tokens=6, temperature=0).trace for _ in range(2))
    np.testing.assert_array_equal(a.routed_experts, b.routed_experts)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([5, 999_999], "Token id 999999 is out of vocabulary"),
        ([5] * 600, "maximum model length of 512"),
        ([], "at least 1 item"),
        ([5, -1], "negative"),
    ],
)
def test_bad_prompts_carry_the_servers_explanation(session, prompt, words):
    with pytest.raises(RequestRejected, match=words):
        session.sample(prompt, max_tokens=2)


def test_bad_settings_carry_the_servers_explanation(session):
    with pytest.raises(RequestRejected, match="temperature must be non-negative"):
        session.sample(PROMPT, temperature=-1)


def test_an_unknown_model_names_those_that_are_there(url):
    with pytest.raises(UnknownModel, match=r"has no model 'gpt-5'; it serves '"):
        rtk.connect(url, model="gpt-5")


def test_a_generator_asked_for_an_unknown_model_says_what_the_server_says(url):
    async def run():
        async with RemoteInferenceGenerator(url, "nope") as generator:
            await generator.generate([5, 6], {"max_tokens": 1})

    with pytest.raises(RequestRejected, match="The model `nope` does not exist"):
        asyncio.run(run())


def test_no_server_is_said_at_once():
    with pytest.raises(ServerUnreachable, match=r"no inference server answers at http://127.0.0.1:9/"):
        rtk.connect("http://127.0.0.1:9")


def test_something_else_at_the_port():
    async def run(answer):
        async with serving(answer) as stub:
            return await asyncio.to_thread(rtk.connect, stub.url)

    with pytest.raises(ServerFailed, match="Is this the address of an inference server"):
        asyncio.run(run(text("<html>welcome</html>", content_type="text/html")))
    with pytest.raises(PayloadError, match="names no models"):
        asyncio.run(run(text('{"data": []}')))
    with pytest.raises(RequestRejected, match="404"):
        asyncio.run(run(text("not here", 404, "text/plain")))


def test_an_unknown_layout_is_said_before_anything_is_sampled(vllm_answers):
    models = text('{"data": [{"id": "m", "root": "somebody/some-moe"}]}')

    async def run():
        async with serving(models) as stub:
            session = await asyncio.to_thread(rtk.connect, stub.url)
            asked = len(stub.paths)
            with pytest.raises(LayoutError, match=r"layout=rtk\.ModelLayout\.from_config"):
                await session.asample([1, 2])
            assert len(stub.paths) == asked
            session.layout = ModelLayout(8, tuple(range(1, 8)), 16, 2)
            await asyncio.to_thread(session.close)

    asyncio.run(run())


def test_several_models_want_a_choice():
    models = text('{"data": [{"id": "a"}, {"id": "b"}]}')

    async def run(model):
        async with serving(models) as stub:
            return await asyncio.to_thread(rtk.connect, stub.url, model=model)

    with pytest.raises(UnknownModel, match=r"'a', 'b'; choose one"):
        asyncio.run(run(None))
    assert asyncio.run(run("b")).model == "b"


def test_the_api_key_is_sent():
    async def run():
        async with serving(text('{"data": [{"id": "a"}]}')) as stub:
            await asyncio.to_thread(rtk.connect, stub.url, api_key="secret")
            return stub.headers

    assert {headers["Authorization"] for headers in asyncio.run(run())} == {"Bearer secret"}


def test_an_embedded_server_without_routes_says_what_to_do(embedded_server):
    with rtk.serve.embedded(routed_experts=False) as server, rtk.connect(server.url) as session:
        assert session.sample(PROMPT, max_tokens=2, routes=False).text
        with pytest.raises(RoutesMissing, match="without --no-routed-experts"):
            session.sample(PROMPT, max_tokens=2)


@pytest.mark.vllm
def test_a_vllm_without_the_flags_says_which(tmp_path):
    with vllm.running(shipped.find("tiny_moe"), "--enable-scale-out") as url, rtk.connect(url) as session:
        with pytest.raises(RoutesMissing, match="--enable-return-routed-experts"):
            session.sample(PROMPT, max_tokens=2)


@pytest.mark.vllm
def test_vllms_routes_agree_with_the_embedded_servers(vllm_url, embedded_server, capsys):
    """bfloat16 against float32: nearly all routes are the same, and a fault would leave few of them so."""
    theirs, ours = [], []
    with rtk.connect(vllm_url) as there, rtk.connect(embedded_server.url) as here:
        for texts in shipped.prompts().values():
            for seed, prompt in enumerate(texts):
                trace = there.sample(prompt, max_tokens=48, temperature=0.7, seed=seed).trace
                theirs.append(trace)
                # The same tokens as a prompt: one forward pass over all of them.
                ours.append(here.sample(trace.token_ids, max_tokens=1).trace)
    table = compare.agreement(theirs, [_first_tokens(a, b) for a, b in zip(ours, theirs, strict=True)])
    with capsys.disabled():
        print("\n\nvLLM (bfloat16) against the embedded server (float32), same tokens:")
        print(table.round(4).to_string())
    assert (table["tokens"] > 800).all()
    assert (table["same_experts"] > 0.9).all()


def _first_tokens(trace, other):
    """The part of a trace that the other one covers."""
    tokens = len(other.token_ids)
    return rtk.RouteTrace(
        token_ids=trace.token_ids[:tokens],
        token_text=trace.token_text[:tokens],
        prompt_tokens=other.prompt_tokens,
        routed_experts=trace.routed_experts[:tokens],
        layout=trace.layout,
    )


def metric(url: str, name: str) -> float:
    """One of vLLM's own figures, summed over its engines."""
    metrics = urllib.request.urlopen(f"{url}/metrics", timeout=10).read().decode()
    return sum(map(float, re.findall(rf"^vllm:{name}\{{.*\}} (\S+)$", metrics, re.M)))


def running(url: str) -> float:
    return metric(url, "num_requests_running")


def until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


async def cancelled(url, stream):
    on_chunk = (lambda _: None) if stream else None
    async with RemoteInferenceGenerator(url, retry=RetryPolicy(tries=1)) as generator:
        work = generator.generate([5, 6, 7], {"max_tokens": 480, "ignore_eos": True}, on_chunk=on_chunk)
        task = asyncio.create_task(work)
        assert await asyncio.to_thread(until, lambda: running(url) == 1, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def out_of_time(url, stream):
    on_chunk = (lambda _: None) if stream else None
    async with RemoteInferenceGenerator(url, timeouts=Timeouts(total_s=0.3)) as generator:
        with pytest.raises(ServerTimeout):
            await generator.generate([5, 6, 7], {"max_tokens": 480, "ignore_eos": True}, on_chunk=on_chunk)


def interrupted(url, stream):
    """As the kernel's interrupt button does it, in the main thread that waits for an answer."""

    def interrupt():
        assert until(lambda: running(url) == 1, 20)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    with rtk.connect(url) as session:
        threading.Thread(target=interrupt, daemon=True).start()
        on_text = (lambda _: None) if stream else None
        with pytest.raises(KeyboardInterrupt):
            session.sample([5, 6, 7], max_tokens=480, temperature=0, on_text=on_text)


@pytest.mark.vllm
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("stop", [cancelled, out_of_time, interrupted])
def test_vllm_stops_when_its_client_does(vllm_url, stop, stream):
    """Proved by vLLM's own counts: nothing runs any more, and of 480 tokens many were never generated."""
    assert until(lambda: running(vllm_url) == 0, 60)
    before = metric(vllm_url, "generation_tokens_total")
    stopped = stop(vllm_url, stream)
    if asyncio.iscoroutine(stopped):
        asyncio.run(stopped)
    assert until(lambda: running(vllm_url) == 0, 60)
    assert 0 < metric(vllm_url, "generation_tokens_total") - before < 400


def test_the_shipped_model_is_small_enough_to_clone():
    assert (Path(shipped.find("tiny_moe")) / "model.safetensors").stat().st_size < 20_000_000


def test_a_failing_detokenizer_is_reported_as_what_it_is():
    """Many lookups run at once; their one cause must come out, not a group of errors."""

    async def answer(request):
        if request.path == "/v1/models":
            return await text('{"data": [{"id": "m"}]}')(request)
        if request.path.endswith("/generate"):
            routes = {"data": "AAECAwQF", "shape": [3, 1, 2], "dtype": "uint8"}
            choice = {"token_ids": [9], "finish_reason": "stop", "logprobs": None, "routed_experts": routes}
            return await text(json.dumps({"choices": [choice]}))(request)
        if request.path == "/detokenize" and len((await request.json())["tokens"]) > 0:
            answer.calls += 1
            if answer.calls > 1:  # the first is for the text
                return await text('{"error": {"message": "tokenizer is gone"}}', 400)(request)
        return await text('{"prompt": "x"}')(request)

    answer.calls = 0

    async def run():
        async with serving(answer) as stub:
            session = await asyncio.to_thread(rtk.connect, stub.url, layout=ModelLayout(1, (0,), 16, 2))
            with pytest.raises(RequestRejected, match="tokenizer is gone"):
                await session.asample([1, 2, 3])

    asyncio.run(run())
