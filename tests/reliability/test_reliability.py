"""Hundreds of requests through a proxy that damages them. benchmarks/reliability.py sends thousands."""

import asyncio
import gc
import os
import tracemalloc
from collections import Counter, defaultdict

import pytest
from aiohttp import web

from rtk import RemoteInferenceGenerator, RetryPolicy
from rtk.errors import PayloadError, RequestRejected, RtkError, ServerFailed, ServerUnreachable
from tests.reliability.oracle import answering, truth
from tests.reliability.proxy import DAMAGED, HARMLESS, TURNED_AWAY, proxying, script
from tests.stub import serving

MAX_TOKENS = 6
PARAMS = {"max_tokens": MAX_TOKENS, "temperature": 0, "logprobs": 0}
PATIENT = RetryPolicy(tries=100, wait_s=0.005)

# Faults that pass when the request is sent again.
PASSING = ("hang_up", "cut_head", "cut_body", "truncate", "html_200", "html_503")


def prompts(count):
    return [[number, number % 7 + 1, 3] for number in range(count)]


async def ask_all(url, asked, *, concurrency=32, retry=PATIENT, stream=False, **options):
    """One outcome a prompt: the result, or what was raised; and the tokens that a stream brought."""
    outcomes, streamed = {}, defaultdict(list)
    waiting = iter(asked)

    async with RemoteInferenceGenerator(url, retry=retry) as generator:

        async def worker():
            for prompt in waiting:
                key = tuple(prompt)
                assert key not in outcomes
                if stream:
                    options["on_chunk"] = lambda chunk, key=key: streamed[key].extend(chunk.token_ids)
                try:
                    outcomes[key] = await generator.generate(prompt, PARAMS, routed_experts=True, **options)
                except Exception as error:
                    outcomes[key] = error

        await asyncio.gather(*(worker() for _ in range(concurrency)))
    return outcomes, streamed


def run(weights, count, *, seed=1, **options):
    """All outcomes and the proxy's records of each prompt; every outcome is one of the documented ones."""

    async def main():
        async with answering() as server, proxying(server, script(seed, weights)) as proxy:
            outcomes, streamed = await ask_all(proxy.url, prompts(count), **options)
            return outcomes, streamed, proxy.records

    outcomes, streamed, records = asyncio.run(main())
    assert len(outcomes) == count
    assert not [o for o in outcomes.values() if isinstance(o, Exception) and not isinstance(o, RtkError)]
    of_prompt = defaultdict(list)
    for record in records:
        of_prompt[record.prompt].append(record.fault.kind)
    return outcomes, streamed, of_prompt


def right(prompt, outcome):
    return not isinstance(outcome, Exception) and not truth(prompt, MAX_TOKENS).differences(outcome)


def test_passing_faults_lose_nothing_and_send_nothing_twice():
    weights = dict.fromkeys(PASSING, 1) | {"none": 4, "delay": 2, "stale": 2, "drip": 0.5}
    outcomes, _, of_prompt = run(weights, 400)
    assert [outcome for prompt, outcome in outcomes.items() if not right(prompt, outcome)] == []
    for kinds in of_prompt.values():
        # Sent again after each fault that passes, and never after an answer that arrived.
        assert set(kinds[:-1]) <= set(PASSING)
        assert kinds[-1] in HARMLESS
    seen = Counter(kind for kinds in of_prompt.values() for kind in kinds)
    assert set(seen) == set(weights), "the script should have used every fault"


def test_restarts_are_waited_for():
    outcomes, _, of_prompt = run({"none": 40, "restart": 1}, 400)
    assert [outcome for prompt, outcome in outcomes.items() if not right(prompt, outcome)] == []
    assert sum(kinds.count("restart") for kinds in of_prompt.values()) > 3


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_that_explains_itself_is_final(stream):
    outcomes, _, of_prompt = run({"500": 1, "none": 1}, 100, stream=stream)
    for prompt, kinds in of_prompt.items():
        assert len(kinds) == 1
        if kinds == ["500"]:
            assert type(outcomes[prompt]) is ServerFailed
            assert outcomes[prompt].status == 500
            assert "the engine is busy" in str(outcomes[prompt])
        else:
            assert right(prompt, outcomes[prompt])


@pytest.mark.parametrize("stream", [False, True])
def test_too_many_requests_and_not_available_are_sent_again(stream):
    outcomes, _, of_prompt = run({"429": 1, "503": 1, "none": 2}, 200, stream=stream)
    assert [outcome for prompt, outcome in outcomes.items() if not right(prompt, outcome)] == []
    assert {kind for kinds in of_prompt.values() for kind in kinds[:-1]} == {"429", "503"}


@pytest.mark.parametrize(("fault", "kind"), [("429", RequestRejected), ("503", ServerFailed)])
def test_they_are_errors_with_the_servers_words_when_the_tries_are_used_up(fault, kind):
    outcomes, _, of_prompt = run({fault: 1}, 20, retry=RetryPolicy(tries=3, wait_s=0.001))
    for prompt, outcome in outcomes.items():
        assert (type(outcome), outcome.status) == (kind, int(fault))
        assert "the engine is busy (sent 3 times in 0." in str(outcome)
        assert len(of_prompt[prompt]) == 3


def test_an_error_page_that_is_cut_is_no_error_of_aiohttps():
    async def cut(request):
        response = web.StreamResponse(status=503, headers={"Content-Length": "100"})
        await response.prepare(request)
        await response.write(b"<html>")
        request.transport.close()
        return response

    async def main(stream):
        async with serving(cut) as stub:
            outcomes, _ = await ask_all(stub.url, prompts(1), stream=stream, retry=RetryPolicy(2, 0.001))
            return outcomes.popitem()[1], len(stub.paths)

    for stream in (False, True):
        error, sent = asyncio.run(main(stream))
        assert isinstance(error, ServerUnreachable)
        assert sent == 2


def test_a_stream_is_whole_or_an_error():
    weights = dict.fromkeys([*PASSING, "drip", "stale"], 1) | {"none": 4}
    outcomes, streamed, of_prompt = run(weights, 300, stream=True)
    for prompt, kinds in of_prompt.items():
        assert set(kinds[:-1]) <= {"hang_up", "cut_head", "html_503"}, (
            "a stream that has begun is never sent again"
        )
        if kinds[-1] in HARMLESS:
            assert right(prompt, outcomes[prompt])
        else:
            assert isinstance(outcomes[prompt], ServerUnreachable | ServerFailed | PayloadError)
        # What on_chunk got is right as far as it goes, and came once.
        tokens = truth(prompt, MAX_TOKENS).token_ids
        assert streamed[prompt] == tokens[: len(streamed[prompt])]
        if right(prompt, outcomes[prompt]):
            assert streamed[prompt] == tokens


def test_damaged_heads_are_errors_or_sent_again():
    outcomes, _, _ = run({"corrupt_head": 1, "none": 1}, 300)
    for prompt, outcome in outcomes.items():
        assert isinstance(outcome, RtkError) or right(prompt, outcome)


@pytest.mark.parametrize("stream", [False, True])
def test_one_damaged_bit_is_an_error_or_one_wrong_value(stream):
    """HTTP has no checksum, so some damage cannot be seen; docs/reliability.md says which, and what sees it."""
    outcomes, _, of_prompt = run({"corrupt": 1}, 300, stream=stream)
    for prompt, outcome in outcomes.items():
        if isinstance(outcome, RtkError):
            continue
        differences = truth(prompt, MAX_TOKENS).differences(outcome)
        assert len(differences) <= 1
        # A name that was damaged takes its values along; a letter of base64 lies in two bytes at most.
        assert differences.get("routed_experts", 0) <= 2
        assert differences.get("token_ids", 0) <= 1
        assert differences.get("logprobs", 0) <= 1 or outcome.logprobs is None
    assert any(
        isinstance(outcome, RtkError) or len(of_prompt[prompt]) > 1 for prompt, outcome in outcomes.items()
    )


def test_real_answers_through_faults(embedded_server):
    asked = [[ord(letter) for letter in f"def f{number}(x):"] for number in range(12)]

    async def main():
        direct, _ = await ask_all(embedded_server.url, asked, concurrency=2)
        weights = dict.fromkeys(PASSING, 1) | {"none": 3}
        async with proxying(embedded_server.url, script(5, weights)) as proxy:
            through, _ = await ask_all(proxy.url, asked, concurrency=2)
        return direct, through

    direct, through = asyncio.run(main())
    for prompt, outcome in direct.items():
        assert through[prompt].token_ids == outcome.token_ids
        assert through[prompt].routed_experts.tolist() == outcome.routed_experts.tolist()


def test_memory_and_descriptors_stay_flat():
    weights = dict.fromkeys([*TURNED_AWAY, *DAMAGED, *HARMLESS], 1) | {"none": 10, "restart": 0.3}
    weights.pop("drip")
    bounded = RetryPolicy(tries=6, wait_s=0.005)

    async def main():
        async with answering() as server, proxying(server, script(2, weights)) as proxy:

            async def some(stream):
                for _ in range(2):
                    await ask_all(proxy.url, prompts(60), retry=bounded, stream=stream)
                proxy.records.clear()
                await asyncio.sleep(0.2)  # the other ends close too
                gc.collect()

            await some(False)
            await some(True)
            descriptors = len(os.listdir("/proc/self/fd"))
            tracemalloc.start()
            try:
                await some(False)
                await some(True)
                before = tracemalloc.get_traced_memory()[0]
                await some(False)
                await some(True)
                grown = tracemalloc.get_traced_memory()[0] - before
            finally:
                tracemalloc.stop()
            return grown, len(os.listdir("/proc/self/fd")) - descriptors

    grown, descriptors = asyncio.run(main())
    # 240 requests: one result kept of each would show.
    assert grown < 100_000
    assert abs(descriptors) <= 2
