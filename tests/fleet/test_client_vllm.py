"""The client against a real vLLM 0.30 with its development endpoints on."""

import asyncio
import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from rtk import RemoteInferenceClient, RetryPolicy
from rtk.errors import (
    FanOutError,
    PayloadError,
    RequestRejected,
    RoutesMissing,
    ServerFailed,
    ServerUnreachable,
)
from rtk.serve import shipped
from tests import vllm

pytestmark = pytest.mark.vllm

PROMPT = [5, 6, 7]
LONG = {"max_tokens": 400, "ignore_eos": True, "temperature": 0}
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
CONTROL = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[str]:
    template = tmp_path_factory.mktemp("chat") / "template.jinja"
    template.write_text(CHAT)
    with vllm.running(
        shipped.find("tiny_moe"), *vllm.ROUTES, "--chat-template", str(template), variables=CONTROL
    ) as url:  # fmt: skip
        yield url


@pytest.fixture
def tokenizer() -> Tokenizer:
    """The model's own, as another implementation of what the server does."""
    return Tokenizer.from_file(str(shipped.find("tiny_moe") / "tokenizer.json"))


def talk(server, conversation, **options):
    async def run():
        async with asyncio.timeout(120), RemoteInferenceClient(server, **options) as client:
            try:
                return await conversation(client)
            finally:
                await client.call_all_servers("POST", "/resume")

    return asyncio.run(run())


def tokens_generated(server) -> float:
    """The server's own count."""
    with urllib.request.urlopen(f"{server}/metrics", timeout=10) as metrics:
        text = metrics.read().decode()
    return sum(
        float(n) for n in re.findall(r"^vllm:generation_tokens_total\{.*\} (\S+)$", text, re.MULTILINE)
    )


async def begin(client, chunks=1, **options):
    """A long generation of which that many pieces have come, and the list that they go to."""
    begun = asyncio.Event()
    seen = []

    def on_chunk(chunk):
        seen.append(chunk)
        if len(seen) == chunks:
            begun.set()

    task = asyncio.create_task(client.generate_single(PROMPT, LONG, on_chunk=on_chunk, **options))
    await begun.wait()
    return task, seen


@pytest.fixture(scope="module")
def undisturbed(server):
    return talk(server, lambda c: c.generate_single(PROMPT, LONG)).token_ids


def test_keep_freezes_and_resume_goes_on(server, undisturbed):
    async def conversation(client):
        # Routes without a stream: vLLM 0.30 may lose those of a stream (vllm #37094).
        task = asyncio.create_task(client.generate_single(PROMPT, LONG, routed_experts=True))
        streamed, _ = await begin(client)
        assert await client.pause("keep") == {server: {"status": "paused"}}
        assert await client.is_paused() == {server: True}
        await asyncio.sleep(0.3)  # the last tokens before the pause may not be counted yet
        before = tokens_generated(server)
        later = asyncio.create_task(client.generate_single([9], {"max_tokens": 1}))
        await asyncio.sleep(0.5)
        assert not task.done()
        assert not later.done()
        assert tokens_generated(server) == before
        assert await client.resume() == {server: {"status": "resumed"}}
        assert await client.is_paused() == {server: False}
        assert len((await later).token_ids) == 1
        assert (await streamed).token_ids == undisturbed
        return await task

    result = talk(server, conversation)
    assert result.token_ids == undisturbed
    assert result.routed_experts.shape == (len(PROMPT) + 400 - 1, 8, 2)


def test_wait_lets_running_requests_finish(server, undisturbed):
    async def conversation(client):
        task, chunks = await begin(client)
        assert len(chunks) < 400
        await client.pause("wait")
        async with asyncio.timeout(5):  # the last of it may still be on the wire
            return await task

    assert talk(server, conversation).token_ids == undisturbed


def test_abort_ends_running_requests_with_what_they_have(server, undisturbed):
    """In a stream vLLM 0.30 sends no routes then, and no finish reason either where no token is new."""

    async def conversation(client):
        plain = asyncio.create_task(client.generate_single(PROMPT, LONG, routed_experts=True))
        streamed, _ = await begin(client, chunks=5, routed_experts=True)
        await client.pause("abort")
        with pytest.raises((RoutesMissing, PayloadError), match="abort"):
            await streamed
        return await plain

    result = talk(server, conversation)
    assert result.stop_reason == "abort"
    assert 0 < len(result.token_ids) < 400
    assert result.token_ids == undisturbed[: len(result.token_ids)]
    assert len(result.routed_experts) == len(PROMPT) + len(result.token_ids) - 1


def test_the_prefix_cache_is_not_reset_while_it_is_in_use(server):
    async def conversation(client):
        task, _ = await begin(client)
        with pytest.raises(FanOutError, match="reset_running_requests=True") as caught:
            await client.reset_prefix_cache()
        assert isinstance(caught.value.failures[server], ServerFailed)
        assert await client.reset_prefix_cache(reset_running_requests=True) == {server: {"success": True}}
        assert len((await task).token_ids) == 400
        assert await client.reset_prefix_cache() == {server: {"success": True}}

    talk(server, conversation)


def test_sleep_and_wake_up(server, undisturbed):
    """The CPU build frees no memory (it logs that it ignores that part), but it stops and starts."""

    async def conversation(client):
        assert await client.sleep(1) == {server: None}
        assert await client.is_sleeping() == {server: True}
        task = asyncio.create_task(client.generate_single(PROMPT, LONG))
        await asyncio.sleep(0.3)
        assert not task.done()
        assert await client.wake_up(["weights", "kv_cache"]) == {server: None}
        assert await client.is_sleeping() == {server: False}
        return await task

    assert talk(server, conversation).token_ids == undisturbed


def test_weight_version_world_size_info_and_health(server):
    async def conversation(client):
        assert await client.update_weight_version(12) == {server: {"success": True, "new_version": "12"}}
        assert await client.get_weight_version() == {server: "12"}
        assert await client.get_world_size() == (1, 1)
        assert await client.health() == {server: None}
        info = (await client.get_server_info())[server]
        assert info["vllm_config"]["model_config"]["max_model_len"] == 512
        assert "vllm_env" in info

    talk(server, conversation)


@pytest.fixture
def adapter(tmp_path) -> Path:
    """A random LoRA adapter for the tiny model's queries, in PEFT's form."""
    model = json.loads((shipped.find("tiny_moe") / "config.json").read_text())
    random, weights = np.random.default_rng(0), {}
    for layer in range(model["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        queries = model["num_attention_heads"] * model["head_dim"]
        weights[f"{name}.lora_A.weight"] = random.normal(size=(4, model["hidden_size"])).astype(np.float32)
        weights[f"{name}.lora_B.weight"] = random.normal(size=(queries, 4)).astype(np.float32)
    save_file(weights, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    return tmp_path


def test_lora_adapters_come_and_go(adapter):
    """Generating with one is beyond this CPU build: LoRA's kernels are Triton's, and the engine dies."""

    async def models(client):
        return [model["id"] for model in (await client.generator.request("GET", "/v1/models"))["data"]]

    async def conversation(client):
        (server,) = client.server_urls
        added = {server: "Success: LoRA adapter 'style' added successfully."}
        assert await client.load_lora_adapter("style", str(adapter)) == added
        assert await models(client) == ["tiny-moe", "style"]
        with pytest.raises(FanOutError, match="has already been loaded"):
            await client.load_lora_adapter("style", str(adapter))
        assert await client.load_lora_adapter("style", str(adapter), load_inplace=True) == added
        await client.unload_lora_adapter("style")
        assert await models(client) == ["tiny-moe"]

    flags = ("--enable-lora", "--max-lora-rank", "8")
    with vllm.running(shipped.find("tiny_moe"), *flags, variables=CONTROL) as url:
        talk(url, conversation)


def test_lora_without_enable_lora(server):

    async def conversation(client):
        with pytest.raises(FanOutError, match="Use --enable-lora") as caught:
            await client.load_lora_adapter("style", "/nowhere")
        assert isinstance(caught.value.failures[server], ServerFailed)
        with pytest.raises(FanOutError, match="'style' cannot be found") as caught:
            await client.unload_lora_adapter("style")
        assert isinstance(caught.value.failures[server], RequestRejected)

    talk(server, conversation)


def test_an_endpoint_without_a_method_of_its_own(server):
    async def conversation(client):
        with pytest.raises(FanOutError, match="has no attribute 'no_such_method'"):
            await client.call_all_servers("POST", "/collective_rpc", {"method": "no_such_method"})
        return await client.call_all_servers("GET", "/version")

    assert talk(server, conversation)[server]["version"] == vllm.installed()


def test_one_server_of_two_is_gone(server):
    async def conversation(client):
        with pytest.raises(FanOutError) as caught:
            await client.pause()
        assert caught.value.answers == {server: {"status": "paused"}}
        assert isinstance(caught.value.failures[NOWHERE], ServerUnreachable)
        health = await client.health()
        assert health[server] is None
        assert isinstance(health[NOWHERE], ServerUnreachable)

    async def run():
        servers = [server, NOWHERE]
        retry = RetryPolicy(tries=2, wait_s=0.1)
        async with asyncio.timeout(60), RemoteInferenceClient(server, servers, control_retry=retry) as client:
            await conversation(client)
        async with RemoteInferenceClient(server) as client:
            await client.resume()

    asyncio.run(run())


def test_a_batch(server, tokenizer, undisturbed):
    batch = {
        "prompt_token_ids": [PROMPT, [9, 10], PROMPT],
        "sampling_params": {**LONG, "max_tokens": 20, "logprobs": 0},
        "session_ids": ["a", "b", "c"],
    }
    output = talk(server, lambda c: c.generate(batch, routed_experts=True))
    first, second, third = output["response_ids"]
    assert first == third == undisturbed[:20]
    assert output["responses"] == [
        tokenizer.decode(ids, skip_special_tokens=False) for ids in (first, second, third)
    ]
    assert [len(logprobs) for logprobs in output["response_logprobs"]] == [20] * 3
    assert [routes.shape for routes in output["rollout_expert_indices"]] == [
        (22, 8, 2),
        (21, 8, 2),
        (22, 8, 2),
    ]


def test_texts_and_chats_to_tokens(server, tokenizer):
    texts = ["def fibonacci(n):", "", "été \N{CAT FACE}"]

    async def conversation(client):
        tokens = await client.tokenize(texts)
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0}
        rendered = await client.render_chat_completion(chat)
        answer = await client.chat_completion({**chat, "return_token_ids": True})
        again = await client.generate_single(rendered["token_ids"], {"max_tokens": 3, "temperature": 0})
        assert again.token_ids == answer["choices"][0]["token_ids"]
        return tokens, await client.detokenize(tokens), rendered

    tokens, back, rendered = talk(server, conversation)
    assert tokens == [tokenizer.encode(text).ids for text in texts]
    assert back == texts
    assert rendered["token_ids"] == tokenizer.encode("user: hi\n").ids
    assert rendered["sampling_params"]["max_tokens"] == 3
    assert rendered["features"] is None


def test_a_server_without_the_development_endpoints(vllm_url):
    async def conversation(client):
        with pytest.raises(FanOutError, match="Set VLLM_SERVER_DEV_MODE=1"):
            await client.pause()
        assert await client.health() == {vllm_url: None}

    async def run():
        async with RemoteInferenceClient(vllm_url) as client:
            await conversation(client)

    asyncio.run(run())
