"""Several sequences, chats, start offsets and logprobs: real captures, and the embedded server beside real vLLM."""

import asyncio
import json
import warnings
from pathlib import Path

import numpy as np
import pytest

import rtk
from rtk import ModelLayout, RemoteInferenceGenerator
from rtk.errors import PayloadError, RequestRejected
from rtk.serve import shipped
from tests import vllm
from tests.stub import events, serving, text

FIXTURES = Path(__file__).parents[1] / "fixtures"
PROMPT = [5, 200, 901, 33]
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def real():
    answers = json.loads((FIXTURES / "vllm_0_30_forms.json").read_text())
    return answers | {
        name: value
        for name, value in json.loads((FIXTURES / "vllm_0_30_completions.json").read_text()).items()
        if isinstance(value, dict)
    }


def ask(answer, call, *, server="vllm", layout=None):
    async def run():
        async with (
            serving(answer) as stub,
            RemoteInferenceGenerator(stub.url, server=server, layout=layout) as generator,
        ):
            return await call(generator), stub

    return asyncio.run(run())


class TestSeveralSequences:
    @pytest.mark.parametrize(
        ("name", "server", "tokens"),
        [
            ("generate_n2", "vllm", [[66, 2299, 12], [2991, 295, 1454]]),
            ("completions_n2", "completions", [[80, 2456, 874], [84, 939, 510]]),
        ],
    )
    def test_whole(self, real, name, server, tokens):
        def call(generator):
            return generator.generate_n(PROMPT, {"max_tokens": 3, "logprobs": 0}, n=2, routed_experts=True)

        results, stub = ask(text(real[name]["text"]), call, server=server)
        assert [result.token_ids for result in results] == tokens
        assert all(result.routed_experts.shape == (4 + 3 - 1, 8, 2) for result in results)
        assert stub.bodies[0].get("n", stub.bodies[0].get("sampling_params", {}).get("n")) == 2

    def test_sglang_is_sent_one_request_each(self):
        def answer(token):
            meta = {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-0.5, token, None]]}
            return text(json.dumps({"meta_info": meta}))

        async def run():
            async with serving(answer(8), answer(9)) as stub:
                async with RemoteInferenceGenerator(stub.url, server="sglang") as generator:
                    return await generator.generate_n([1], {"seed": 5}, n=2), stub.bodies

        results, bodies = asyncio.run(run())
        assert sorted(result.token_ids for result in results) == [[8], [9]]
        assert sorted(body["sampling_params"]["sampling_seed"] for body in bodies) == [5, 6]

    def test_streamed_each_chunk_says_whose_it_is(self):
        def event(index, token, reason=None):
            choice = {"index": index, "token_ids": [token], "logprobs": None, "finish_reason": reason}
            return f"data: {json.dumps({'request_id': 'r', 'choices': [choice]})}\n\n"

        body = event(0, 1) + event(1, 7) + event(0, 2, "stop") + event(1, 8) + event(1, 9, "length")
        chunks = []
        results, _ = ask(
            events(body + "data: [DONE]\n\n"), lambda g: g.generate_n(PROMPT, {}, n=2, on_chunk=chunks.append)
        )
        assert [(c.index, c.token_ids) for c in chunks] == [(0, [1]), (1, [7]), (0, [2]), (1, [8]), (1, [9])]
        assert [(r.token_ids, r.stop_reason) for r in results] == [([1, 2], "stop"), ([7, 8, 9], "length")]

    def test_vllm_0_30s_own_failure_in_mid_stream_is_passed_on(self, real):
        with pytest.raises(rtk.errors.ServerFailed, match="list index out of range"):
            ask(
                events(real["generate_stream_n2"]["text"]),
                lambda g: g.generate_n(PROMPT, {}, n=2, on_chunk=lambda _: None),
            )

    @pytest.mark.parametrize(
        ("indices", "words"),
        [
            ([0], "has 1 choices, and n is 2"),
            ([0, 0], "sequence 0 twice"),
            ([0, 2], "index 2"),
            ([0, "1"], "index '1'"),
        ],
    )
    def test_missing_doubled_and_foreign_ones_are_errors(self, indices, words):
        choices = [{"index": index, "token_ids": [1], "finish_reason": "stop"} for index in indices]
        with pytest.raises(PayloadError, match=words):
            ask(text(json.dumps({"choices": choices})), lambda g: g.generate_n(PROMPT, {}, n=2))

    def test_a_stream_that_misses_one_is_an_error(self):
        event = json.dumps({"choices": [{"index": 0, "token_ids": [1], "finish_reason": "stop"}]})
        with pytest.raises(PayloadError, match="ended after 0 tokens without a finish reason"):
            ask(
                events(f"data: {event}\n\ndata: [DONE]\n\n"),
                lambda g: g.generate_n(PROMPT, {}, n=2, on_chunk=lambda _: None),
            )


class TestChat:
    def test_whole(self, real):
        params = {"max_tokens": 4, "temperature": 0, "logprobs": 2}
        (result,), stub = ask(
            text(real["chat"]["text"]), lambda g: g.chat(MESSAGES, params, routed_experts=True)
        )
        assert stub.paths == ["/v1/chat/completions"]
        assert stub.bodies[0] == {
            "messages": MESSAGES, "max_tokens": 4, "temperature": 0, "logprobs": True, "top_logprobs": 2,
            "return_token_ids": True, "return_weight_versions": True, "return_tokens_as_token_ids": True,
        }  # fmt: skip
        assert result.prompt_token_ids == [3281, 26, 507, 73, 199]
        assert result.token_ids == [199, 33, 2682, 261]
        assert result.routed_experts.shape == (8, 8, 2)
        assert [max(entry, key=entry.get) for entry in result.top_logprobs] == result.token_ids

    def test_several(self, real):
        results, _ = ask(text(real["chat_n2"]["text"]), lambda g: g.chat(MESSAGES, {"logprobs": 0}, n=2))
        assert len(results) == 2
        assert all(len(result.token_ids) == len(result.logprobs) == 3 for result in results)

    def test_streamed(self, real):
        chunks = []
        (result,), _ = ask(
            events(real["chat_stream"]["text"]),
            lambda g: g.chat(MESSAGES, {"logprobs": 1}, on_chunk=chunks.append),
        )
        assert result.token_ids == [199, 33, 2682] == [t for chunk in chunks for t in chunk.token_ids]
        assert result.prompt_token_ids == [3281, 26, 507, 73, 199]
        assert len(result.logprobs) == len(result.top_logprobs) == 3

    def test_what_cannot_be_had_is_refused_before_anything_is_sent(self):
        with pytest.raises(ValueError, match="name no token ids"):
            ask(text("{}"), lambda g: g.chat(MESSAGES, {}), server="sglang")
        with pytest.raises(ValueError, match="no routes in a stream"):
            ask(text("{}"), lambda g: g.chat(MESSAGES, {}, routed_experts=True, on_chunk=print))

    def test_routes_need_the_prompts_tokens(self, real):
        body = json.loads(real["chat"]["text"])
        body["prompt_token_ids"] = None
        with pytest.raises(PayloadError, match="does not name the prompt's tokens"):
            ask(text(json.dumps(body)), lambda g: g.chat(MESSAGES, {}, routed_experts=True))


class TestStartOffset:
    @pytest.mark.parametrize(
        ("name", "server", "where"),
        [("generate_start", "vllm", "sampling_params"), ("completions_start", "completions", None)],
    )
    def test_the_rows_from_there_on(self, real, name, server, where):
        results, stub = ask(
            text(real[name]["text"]),
            lambda g: g.generate(PROMPT, {"max_tokens": 3}, routed_experts=True, routed_experts_start=3),
            server=server,
        )
        assert results.routed_experts.shape == (3, 8, 2)
        assert results.routed_experts_start == 3
        sent = stub.bodies[0][where] if where else stub.bodies[0]
        assert sent["routed_experts_prompt_start"] == 3

    def test_a_server_that_ignores_it_is_recognised_by_its_rows(self, real):
        """Report 16, strands-sglang #72: joined to the turns before, its rows would be counted twice."""
        whole = text(real["completions"]["text"])

        def call(generator):
            return generator.generate(PROMPT, {}, routed_experts=True, routed_experts_start=3)

        with pytest.warns(
            UserWarning, match="ignored the start offset 3 and sent the routes of all 7 tokens"
        ):
            result, _ = ask(whole, call, server="completions")
        everything, _ = ask(
            whole, lambda g: g.generate(PROMPT, {}, routed_experts=True), server="completions"
        )
        assert np.array_equal(result.routed_experts, everything.routed_experts[3:])

    def test_other_counts_are_errors(self, real):
        with pytest.raises(PayloadError, match=r"routes of 3 tokens .* from token 2 on; 4 rows are expected"):
            ask(
                text(real["generate_start"]["text"]),
                lambda g: g.generate(PROMPT, {}, routed_experts=True, routed_experts_start=2),
            )

    def test_negative_ones_are_refused(self):
        with pytest.raises(ValueError, match="routed_experts_start -1"):
            ask(text("{}"), lambda g: g.generate(PROMPT, {}, routed_experts_start=-1))


def test_features_and_salts_go_where_they_are_known():
    async def call(server, **options):
        async with serving(text("{}")) as stub:
            layout = ModelLayout(1, (0,), 4, 1)
            async with RemoteInferenceGenerator(stub.url, server=server, layout=layout) as generator:
                with pytest.raises((PayloadError, ValueError)) as caught:
                    await generator.generate([1], {}, **options)
            return stub.bodies, caught.value

    bodies, _ = asyncio.run(call("vllm", features={"image": [1]}, cache_salt="s"))
    assert (bodies[0]["features"], bodies[0]["cache_salt"]) == ({"image": [1]}, "s")
    bodies, _ = asyncio.run(call("sglang", cache_salt="s"))
    assert bodies[0]["extra_key"] == "s"
    for server in ("sglang", "completions"):
        bodies, error = asyncio.run(call(server, features={"image": [1]}))
        assert bodies == []
        assert "takes no features" in str(error)


def run(url, call, **options):
    async def main():
        async with RemoteInferenceGenerator(url, **options) as generator:
            return await call(generator)

    return asyncio.run(main())


GREEDY = {"max_tokens": 6, "temperature": 0}


@pytest.mark.parametrize("server", ["vllm", "completions"])
class TestOnServers:
    """The embedded server, and vLLM."""

    def test_n_sequences_are_those_of_single_requests(self, url, server):
        params = {"max_tokens": 5, "temperature": 1.0, "seed": 11, "logprobs": 0}
        results = run(url, lambda g: g.generate_n(PROMPT, params, n=3, routed_experts=True), server=server)
        assert len({tuple(result.token_ids) for result in results}) > 1
        assert all(result.routed_experts.shape == (8, 8, 2) for result in results)
        for number, result in enumerate(results):
            alone = {**params, "seed": 11 + number}  # so vLLM seeds them
            single = run(
                url, lambda g, alone=alone: g.generate(PROMPT, alone, routed_experts=True), server=server
            )
            assert result.token_ids == single.token_ids
            assert np.array_equal(result.routed_experts, single.routed_experts)

    def test_a_start_offset_gives_the_end_of_the_same_routes(self, url, server):
        whole = run(url, lambda g: g.generate(PROMPT, GREEDY, routed_experts=True), server=server)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            part = run(
                url,
                lambda g: g.generate(PROMPT, GREEDY, routed_experts=True, routed_experts_start=3),
                server=server,
            )
        assert np.array_equal(part.routed_experts, whole.routed_experts[3:])

    def test_alternatives_of_the_answer_and_of_the_prompt(self, url, server):
        params = {**GREEDY, "logprobs": 3, "prompt_logprobs": 2}
        result = run(url, lambda g: g.generate(PROMPT, params), server=server)
        assert len(result.top_logprobs) == len(result.token_ids)
        for token, logprob, entry in zip(result.token_ids, result.logprobs, result.top_logprobs, strict=True):
            assert len(entry) >= 3
            assert max(entry, key=entry.get) == token
            assert entry[token] == logprob
            assert sum(np.exp(list(entry.values()))) <= 1 + 1e-6
        assert result.prompt_logprobs[0] == {}
        assert [
            token in entry for token, entry in zip(PROMPT[1:], result.prompt_logprobs[1:], strict=True)
        ] == [True] * 3
        # Forwarding prompt and answer as one prompt gives the answer's logprobs again.
        again = run(
            url,
            lambda g: g.generate(PROMPT + result.token_ids, {"max_tokens": 1, "prompt_logprobs": 0}),
            server=server,
        )
        forced = [e[t] for t, e in zip(result.token_ids, again.prompt_logprobs[len(PROMPT) :], strict=True)]
        assert forced == pytest.approx(result.logprobs, abs=0.05)  # bfloat16 on vLLM

    def test_the_stop_that_matched(self, url, server):
        free = run(url, lambda g: g.generate(PROMPT, GREEDY), server=server)
        stopped = run(
            url,
            lambda g: g.generate(PROMPT, {**GREEDY, "stop_token_ids": [free.token_ids[2]]}),
            server=server,
        )
        assert stopped.token_ids == free.token_ids[:3]
        assert stopped.stop_reason == "stop"
        # vLLM 0.30's generate route does not say which.
        assert stopped.stop_match == (free.token_ids[2] if server == "completions" else None)


def test_the_embedded_servers_alternatives_are_those_of_vllm(embedded_server, real):
    """Names and counts; the values are those of bfloat16 on one side."""
    params = {"max_tokens": 4, "temperature": 0, "logprobs": 2}
    ours = run(embedded_server.url, lambda g: g.generate(PROMPT, params), server="completions")
    theirs, _ = ask(
        text(real["completions"]["text"]), lambda g: g.generate(PROMPT, params), server="completions"
    )
    assert ours.token_ids[0] == theirs.token_ids[0]
    assert set(ours.top_logprobs[0]) == set(theirs.top_logprobs[0])
    assert list(ours.top_logprobs[0].values()) == pytest.approx(
        list(theirs.top_logprobs[0].values()), abs=0.05
    )


@pytest.mark.vllm
def test_a_chat_with_routes_on_vllm(tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    with vllm.running(shipped.find("tiny_moe"), *vllm.ROUTES, "--chat-template", str(template)) as url:
        (chat,) = run(url, lambda g: g.chat(MESSAGES, {**GREEDY, "logprobs": 2}, routed_experts=True))
        with rtk.connect(url) as session:
            sample = session.sample(MESSAGES, max_tokens=6, temperature=0)
        assert chat.prompt_token_ids == sample.prompt_token_ids
        assert chat.token_ids == sample.result.token_ids
        assert np.array_equal(chat.routed_experts, sample.trace.routed_experts)
        several = run(url, lambda g: g.chat(MESSAGES, {"max_tokens": 3, "seed": 1}, n=2, routed_experts=True))
        assert [len(result.routed_experts) for result in several] == [len(chat.prompt_token_ids) + 2] * 2
        chunks = []
        (streamed,) = run(url, lambda g: g.chat(MESSAGES, GREEDY, on_chunk=chunks.append))
        assert streamed.token_ids == chat.token_ids
        part = run(url, lambda g: g.chat(MESSAGES, GREEDY, routed_experts=True, routed_experts_start=2))[0]
        assert np.array_equal(part.routed_experts, chat.routed_experts[2:])


@pytest.mark.vllm
def test_a_chat_without_a_template_says_what_vllm_says(vllm_url):
    with pytest.raises(RequestRejected, match="chat template"):
        run(vllm_url, lambda g: g.chat(MESSAGES, GREEDY))
