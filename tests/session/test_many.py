"""sample_many: all of it against the embedded server, and its file against kills, damage and other processes."""

import asyncio
import contextlib
import inspect
import json
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

import rtk
from rtk.errors import LayoutError, PromptError, RequestRejected, SamplesFailed, SamplesFileError
from rtk.serve import shipped
from tests.reliability.proxy import proxying, script
from tests.stub import serving, text

PROMPTS = ["def f(", "It was a cold", [5, 6, 7]]
SHORT = {"max_tokens": 4, "progress": False}


@pytest.fixture(scope="module")
def session(embedded_server):
    with rtk.connect(embedded_server.url) as session:
        yield session


def contents(sample):
    return (
        sample.prompt_index, sample.sample_index, sample.text, sample.prompt_token_ids, sample.result.token_ids,
        sample.result.logprobs, sample.result.stop_reason, sample.trace,
    )  # fmt: skip


def without_time(trace):
    return {name: value for name, value in trace.source.items() if name != "sampled_at"}


class TestWhatComesBack:
    def test_the_same_as_one_by_one(self, session):
        many = session.sample_many(PROMPTS, n=2, seed=7, **SHORT)
        assert (len(many), many.wanted, many.failures) == (6, 6, [])
        for index, prompt in enumerate(PROMPTS):
            for number, sample in enumerate(many.of_prompt(index)):
                assert (sample.prompt_index, sample.sample_index) == (index, number)
                alone = session.sample(prompt, max_tokens=4, seed=7 + number)
                assert sample.result.token_ids == alone.result.token_ids
                assert sample.text == alone.text
                assert np.array_equal(sample.trace.routed_experts, alone.trace.routed_experts)
                assert without_time(sample.trace) == without_time(alone.trace)

    def test_awaited_in_any_loop(self, session):
        seen = []

        async def main():
            return await session.asample_many(PROMPTS, seed=1, on_sample=seen.append, **SHORT)

        many = asyncio.run(main())
        assert [s.result.token_ids for s in many] == [
            s.result.token_ids for s in session.sample_many(PROMPTS, seed=1, **SHORT)
        ]
        assert sorted(s.prompt_index for s in seen) == [0, 1, 2]

    def test_failures_stand_beside_successes(self, session):
        seen = []
        many = session.sample_many(["a", [10**6], "b"], n=2, on_sample=seen.append, **SHORT)
        assert [(s.prompt_index, s.sample_index) for s in many] == [(0, 0), (0, 1), (2, 0), (2, 1)]
        assert [(f.prompt_index, f.sample_index, f.prompt) for f in many.failures] == [
            (1, 0, [10**6]), (1, 1, [10**6]),
        ]  # fmt: skip
        assert all(type(failure.error) is RequestRejected for failure in many.failures)
        assert len(seen) == 6
        assert "4 of 6 samples, 2 failed" in repr(many)
        assert "out of vocabulary" in many._repr_html_()
        with pytest.raises(
            SamplesFailed, match=r"2 of 6 samples failed:\n  prompt 1, sample 0: RequestRejected"
        ):
            many.raise_for_failures()

    def test_sources_of_each_and_of_all(self, session):
        named = [{"domain": "code"}, {"domain": "prose"}]
        many = session.sample_many(["a", "b"], source=named, **SHORT)
        assert [trace.source["domain"] for trace in many.traces] == ["code", "prose"]
        many = session.sample_many(["a", "b"], source={"run": 3}, **SHORT)
        assert {trace.source["run"] for trace in many.traces} == {3}
        with pytest.raises(ValueError, match="source has 2 entries for 1 prompts"):
            session.sample_many(["a"], source=named, **SHORT)

    def test_without_routes(self, session):
        many = session.sample_many(["a"], routes=False, **SHORT)
        assert many.traces == []
        assert many[0].text

    def test_nothing_asked(self, session):
        assert list(session.sample_many([], **SHORT)) == []


def test_a_prompt_is_tokenized_once_and_concurrency_is_kept(vllm_answers):
    at_once, most = 0, 0

    async def answer(request):
        nonlocal at_once, most
        if request.path == "/tokenize":
            return await text('{"tokens": [1, 2]}')(request)
        if request.path == "/detokenize":
            return await text('{"prompt": "x"}')(request)
        if request.path != "/inference/v1/generate":
            return await text('{"data": [{"id": "m"}]}')(request)
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.01)
        at_once -= 1
        return await text(vllm_answers["plain"]["text"])(request)

    async def main():
        async with serving(answer) as stub:
            session = await asyncio.to_thread(rtk.connect, stub.url, server="vllm")
            many = await session.asample_many(["a", "b"], n=20, concurrency=5, routes=False, progress=False)
            session.close()
            return many, stub.paths

    many, paths = asyncio.run(main())
    assert len(many) == 40
    assert paths.count("/tokenize") == 2
    assert most == 5


@pytest.mark.parametrize(
    ("prompts", "index", "words"),
    [
        ("a", None, "takes a list of prompts, not a single str"),
        (["a", "\ud800"], 1, "prompt 1 is no text that UTF-8 can write"),
        (["a", 7], 1, "prompt 1 is a int; it must be a text, a list of token ids, or"),
        (["a", [1.5]], 1, "prompt 1 is a list of float"),
        ([b"a"], 0, "prompt 0 is a bytes"),
        ([[{"content": "x"}]], 0, 'message 0 of prompt 0 has no "role"'),
        ([[{"role": "user", "content": {1, 2}}]], 0, "no JSON value"),
    ],
)
def test_a_prompt_without_form_is_refused_before_anything_is_sent(
    session, monkeypatch, prompts, index, words
):
    monkeypatch.setattr(session._generator, "request", None)
    with pytest.raises(PromptError, match=words) as caught:
        session.sample_many(prompts, **SHORT)
    assert caught.value.index == index


def test_numpys_numbers_are_taken(session):
    params = {"max_tokens": np.int64(3), "temperature": np.float32(0.0)}
    a = session.sample(np.array([5, 6, 7]), **params)
    assert a.result.token_ids == session.sample([5, 6, 7], max_tokens=3, temperature=0).result.token_ids


@pytest.mark.parametrize("call", ["sample", "asample", "sample_many", "asample_many"])
def test_parameters_are_named_in_the_signature_and_no_others_are_taken(session, call):
    parameters = inspect.signature(getattr(session, call)).parameters
    assert {"max_tokens", "temperature", "top_p", "seed", "stop", "presence_penalty"} <= set(parameters)
    assert parameters["max_tokens"].default == 64
    with pytest.raises(TypeError, match="'temprature' is no sampling parameter; there are max_tokens"):
        called = getattr(session, call)(["a"], temprature=1)
        asyncio.run(called)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float64("nan")])
def test_a_parameter_that_is_no_number_is_refused(session, value):
    """JSON would have it as null, and the server would take its own default."""
    with pytest.raises(ValueError, match=r"temperature is (nan|inf)"):
        session.sample("a", temperature=value)
    with pytest.raises(ValueError, match=r"temperature is (nan|inf)"):
        asyncio.run(session._generator.generate([1], {"temperature": value}))


def test_stop_and_penalties_reach_the_server(vllm_answers):
    async def main():
        async with serving(text('{"data": [{"id": "m"}]}'), text(vllm_answers["plain"]["text"])) as stub:
            session = await asyncio.to_thread(rtk.connect, stub.url, server="vllm")
            with pytest.raises(rtk.errors.RtkError):  # the stub cannot detokenize
                await session.asample([1], routes=False, stop=["\n"], presence_penalty=0.5, top_k=None)
            session.close()
            return next(body for body in stub.bodies if body and "token_ids" in body)

    assert asyncio.run(main())["sampling_params"] == {
        "max_tokens": 64, "temperature": 1.0, "top_p": 1.0, "presence_penalty": 0.5, "stop": ["\n"], "logprobs": 0,
    }  # fmt: skip


class TestChat:
    MESSAGES = [{"role": "user", "content": "Hi"}]  # noqa: RUF012
    TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"

    def test_without_a_template_the_server_says_what_is_missing(self, session):
        with pytest.raises(RequestRejected, match="provide a chat template"):
            session.sample(self.MESSAGES, max_tokens=2)

    def test_the_server_applies_its_template(self, tmp_path):
        for file in shipped.find("tiny_moe").iterdir():
            (tmp_path / file.name).symlink_to(file)
        (tmp_path / "chat_template.jinja").write_text(self.TEMPLATE)
        with rtk.serve.embedded(tmp_path, max_model_len=128) as server, rtk.connect(server.url) as session:
            sample = session.sample(self.MESSAGES, max_tokens=2, temperature=0)
            # What vLLM 0.30 answered to the same messages with the same template.
            assert sample.prompt_token_ids == [3281, 26, 507, 73, 199]
            assert (
                session.sample_many([self.MESSAGES, "a"], **SHORT)[0].prompt_token_ids
                == sample.prompt_token_ids
            )


class TestFile:
    def test_holds_what_came_back(self, session, tmp_path):
        many = session.sample_many(PROMPTS, n=2, seed=3, out=tmp_path / "s.jsonl", **SHORT)
        read = sorted(rtk.read_samples(tmp_path / "s.jsonl"), key=lambda s: (s.prompt_index, s.sample_index))
        kept = session.sample_many(PROMPTS, n=2, seed=3, **SHORT)
        assert len(read) == len(many) == 6
        for a, b, c in zip(read, many, kept, strict=True):
            assert contents(a) == contents(b)
            assert contents(a)[:-1] == contents(c)[:-1]
            assert a.trace.routed_experts.dtype == c.trace.routed_experts.dtype
            assert np.array_equal(a.trace.routed_experts, c.trace.routed_experts)

    def test_without_routes(self, session, tmp_path):
        session.sample_many(["a"], routes=False, out=tmp_path / "s.jsonl", **SHORT)
        (sample,) = rtk.read_samples(tmp_path / "s.jsonl")
        assert sample.trace is None
        assert sample.result.routed_experts is None

    def test_a_rerun_asks_only_for_what_is_missing(self, session, tmp_path, monkeypatch):
        out = tmp_path / "s.jsonl"
        first = session.sample_many(["a", [10**6], "a"], n=2, seed=1, out=out, **SHORT)
        assert (len(first), len(first.failures)) == (4, 2)
        before = out.read_bytes()
        asked = []
        generate = session._generator.generate

        async def counting(prompt, *args, **options):
            asked.append(prompt)
            return await generate(prompt, *args, **options)

        monkeypatch.setattr(session._generator, "generate", counting)
        # Another order, another prompt, and one that failed before.
        again = session.sample_many(["b", "a", [10**6], "a"], n=2, seed=1, out=out, **SHORT)
        assert len(asked) == 4
        assert (len(again), len(again.failures)) == (6, 2)
        assert out.read_bytes().startswith(before)
        assert [s.prompt_index for s in again] == [0, 0, 1, 1, 3, 3]
        assert [s.text for s in again.of_prompt(1)] == [s.text for s in first.of_prompt(0)]

    @pytest.mark.parametrize(
        ("change", "words"), [({"max_tokens": 5}, "sampling_params="), ({"routes": False}, "routes=True")]
    )
    def test_other_settings_are_refused(self, session, tmp_path, change, words):
        out = tmp_path / "s.jsonl"
        session.sample_many(["a"], out=out, **SHORT)
        before = out.read_bytes()
        with pytest.raises(SamplesFileError, match=words):
            session.sample_many(["a"], out=out, **{**SHORT, **change})
        assert out.read_bytes() == before

    @pytest.mark.parametrize(
        "body",
        [b"prompt,text\n1,2\n", b"{}\n", b"no line at all", b'{"format": "rtk-samples", "version": 9}\n'],
    )
    def test_a_file_of_another_kind_is_left_alone(self, session, tmp_path, body):
        out = tmp_path / "mine.csv"
        out.write_bytes(body)
        with pytest.raises(SamplesFileError, match=r"is no file of samples|version 9"):
            session.sample_many(["a"], out=out, **SHORT)
        with pytest.raises(SamplesFileError):
            list(rtk.read_samples(out))
        assert out.read_bytes() == body

    def test_a_torn_last_line_is_dropped_with_a_warning_and_asked_again(self, session, tmp_path):
        out = tmp_path / "s.jsonl"
        session.sample_many(["a", "b"], seed=1, out=out, **SHORT)
        whole = out.read_bytes()
        last = whole.rstrip(b"\n").rfind(b"\n") + 1
        for cut in (last + 1, len(whole) - 1):
            out.write_bytes(whole[:cut])
            assert len(list(rtk.read_samples(out))) == 1
            with pytest.warns(UserWarning, match=f"its {cut - last} bytes are dropped"):
                again = session.sample_many(["a", "b"], seed=1, out=out, **SHORT)
            assert len(again) == 2
            assert len(list(rtk.read_samples(out))) == 2

    def test_a_damaged_line_is_an_error_with_its_number(self, session, tmp_path):
        out = tmp_path / "s.jsonl"
        session.sample_many(["a", "b"], out=out, **SHORT)
        lines = out.read_bytes().splitlines(keepends=True)
        for bad in (b'{"asked": \n', b"[]\n", b'{"asked": "x"}\n'):
            out.write_bytes(lines[0] + bad + lines[2])
            with pytest.raises(SamplesFileError, match="line 2 is damaged"):
                list(rtk.read_samples(out))
        with pytest.raises(SamplesFileError, match="cannot be read"):
            list(rtk.read_samples(tmp_path / "none"))
        with pytest.raises(SamplesFileError, match="cannot be written"):
            session.sample_many(["a"], out=tmp_path / "no" / "such", **SHORT)

    def test_one_writer_at_a_time(self, session, tmp_path):
        out = tmp_path / "s.jsonl"
        session.sample_many(["a"], out=out, **SHORT)
        code = f"import fcntl, sys; f = open({str(out)!r}, 'ab'); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True); sys.stdin.read()"
        with subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as other:
            other.stdout.readline()
            with pytest.raises(SamplesFileError, match="is being written by another process"):
                session.sample_many(["a"], out=out, **SHORT)
            assert len(list(rtk.read_samples(out))) == 1
            other.stdin.close()
        assert len(session.sample_many(["a"], out=out, **SHORT)) == 1


WRITER = """
    import sys, rtk
    url, out = sys.argv[1:]
    session = rtk.connect(url)
    print("begun", flush=True)
    prompts = [[5 + i, 6, 7] for i in range(30)]
    session.sample_many(prompts, n=2, max_tokens=3, seed=1, concurrency=4, out=out, progress=False)
"""


def test_a_killed_process_loses_nothing_that_was_finished(embedded_server, session, tmp_path):
    """Killed at random moments, again and again, until nothing is left to do."""
    out, rng, kills = tmp_path / "s.jsonl", random.Random(4), 0
    prompts = [[5 + i, 6, 7] for i in range(30)]
    kept = b""
    for _ in range(4):
        command = [sys.executable, "-c", textwrap.dedent(WRITER), embedded_server.url, str(out)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as writer:
            writer.stdout.readline()
            time.sleep(rng.uniform(0.1, 0.7))
            kills += writer.poll() is None
            writer.kill()
        now = out.read_bytes() if out.exists() else b""
        assert now.startswith(kept), "what was finished has changed"
        kept = now[: now.rfind(b"\n") + 1]
    assert kills >= 2
    finished = kept.count(b"\n") - 1
    assert finished > 0
    with pytest.warns() if not out.read_bytes().endswith(b"\n") else contextlib.nullcontext():
        many = session.sample_many(prompts, n=2, max_tokens=3, seed=1, out=out, progress=False)
    assert len(many) == 60
    assert out.read_bytes().startswith(kept)
    asked = [json.loads(line)["asked"] for line in out.read_bytes().splitlines()[1:]]
    assert len(asked) == len(set(asked)) == 60
    direct = session.sample_many(prompts, n=2, max_tokens=3, seed=1, progress=False)
    assert [s.result.token_ids for s in many] == [s.result.token_ids for s in direct]


@pytest.mark.parametrize("out", [False, True])
def test_an_interrupt_keeps_what_was_finished(session, tmp_path, out):
    seen = []

    def after_three(sample):
        seen.append(sample)
        if len(seen) == 3:
            # To this very thread, as the kernel's interrupt button does it.
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    options = {"out": tmp_path / "s.jsonl"} if out else {}
    prompts = [[i, 6, 7] for i in range(5, 45)]
    with pytest.raises(KeyboardInterrupt) as caught:
        session.sample_many(prompts, seed=1, concurrency=2, on_sample=after_three, **SHORT, **options)
    assert "session.unfinished" in caught.value.__notes__[0]
    unfinished = session.unfinished
    assert 3 <= len(unfinished) < 40
    assert unfinished[0].text is not None
    assert "not asked or not finished" in repr(unfinished)
    # The file is free again, and the rest follows.
    many = session.sample_many(prompts, seed=1, **SHORT, **options)
    assert len(many) == 40
    assert session.unfinished is None


def test_a_bad_night(embedded_server, tmp_path):
    """200 requests through dropped, cut and refused answers, a restart included: each is there, once, or said to have failed."""
    weights = {"none": 8, "hang_up": 1, "cut_body": 1, "html_503": 1, "429": 1, "truncate": 1, "500": 0.3}

    async def main():
        async with proxying(embedded_server.url, script(3, weights)) as proxy:
            retry = rtk.RetryPolicy(tries=8, wait_s=0.01)
            session = await asyncio.to_thread(rtk.connect, proxy.url, retry=retry)
            many = await session.asample_many(
                [[i, 6, 7] for i in range(5, 105)],
                n=2,
                seed=1,
                max_tokens=2,
                out=tmp_path / "s.jsonl",
                progress=False,
            )
            session.close()
            return many

    many = asyncio.run(main())
    assert len(many) + len(many.failures) == 200
    places = [(s.prompt_index, s.sample_index) for s in [*many, *many.failures]]
    assert len(set(places)) == 200
    assert len(many.failures) > 0, "a 500 with an explanation is final, so some must have failed"
    with rtk.connect(embedded_server.url) as session:
        again = session.sample_many(
            [[i, 6, 7] for i in range(5, 105)],
            n=2,
            seed=1,
            max_tokens=2,
            out=tmp_path / "s.jsonl",
            progress=False,
        )
        assert len(again) == 200
        direct = session.sample_many(
            [[i, 6, 7] for i in range(5, 105)], n=2, seed=1, max_tokens=2, progress=False
        )
    assert [s.result.token_ids for s in again] == [s.result.token_ids for s in direct]
    assert all(
        np.array_equal(a.trace.routed_experts, b.trace.routed_experts)
        for a, b in zip(again, direct, strict=True)
    )


def test_an_unknown_layout_is_said_before_anything_is_sampled(vllm_answers):
    async def main():
        async with serving(text('{"data": [{"id": "m"}]}')) as stub:
            session = await asyncio.to_thread(rtk.connect, stub.url, server="vllm")
            with pytest.raises(LayoutError, match="routes=False"):
                await session.asample_many(["a"], progress=False)
            session.close()
            return stub.paths

    assert "/tokenize" not in asyncio.run(main())


def test_the_bar_says_how_many_and_how_many_failed(session, capsys):
    session.sample_many(["a", [10**6]], max_tokens=2)
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "failed=1" in shown
    session.sample_many(["a"], **SHORT)
    assert capsys.readouterr().err == ""
