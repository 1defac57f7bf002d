"""The doctor against servers that have one fault each, against the embedded server, and against real vLLM."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from aiohttp import web

import rtk
from rtk import ModelLayout, cli, loops
from rtk.doctor import KNOWN_FAULTS, DoctorReport, Finding, known_faults
from rtk.serve import shipped
from tests import vllm
from tests.stub import serving

LAYOUT = ModelLayout(num_layers=4, moe_layers=(1, 3), num_experts=8, top_k=2)
PROMPT = list(range(5, 105))
GENERATED = [7, 300, 12, 301, 9, 302, 33, 303, 41, 304, 55, 305]
ROWS = len(PROMPT) + len(GENERATED) - 1


def true_routes() -> np.ndarray:
    """Experts of each row and MoE layer, drawn without repeats."""
    draw = np.random.default_rng(8)
    routes = np.zeros((ROWS, LAYOUT.num_layers, LAYOUT.top_k), dtype=np.uint8)
    for row in range(ROWS):
        for layer in LAYOUT.moe_layers:
            routes[row, layer] = draw.permutation(LAYOUT.num_experts)[: LAYOUT.top_k]
    return routes


def npy(routes: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, routes)
    return base64.b64encode(file.getvalue()).decode()


@dataclass
class Fake:
    """A server with the routes of `true_routes`, and the faults that a test gives it."""

    owner: str = "vllm"
    version: str = "0.31.0"
    paths: tuple[str, ...] = ("/inference/v1/generate", "/v1/completions", "/tokenize")
    sends_routes: bool = True
    heeds_start: bool = True
    logprob: float = -0.5
    salts: list[str] = field(default_factory=list)

    def routes(self, salt: str, times_seen: int, stream: bool) -> np.ndarray:
        return true_routes()

    def tokens(self, stream: bool) -> list[int]:
        return GENERATED

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if path == "/v1/models":
            card = {"id": "tiny", "owned_by": self.owner, "root": "org/tiny", "max_model_len": 512}
            return web.json_response({"data": [card]})
        if path == "/version" and self.owner == "vllm":
            return web.json_response({"version": self.version})
        if path in ("/server_info", "/get_model_info") and self.owner == "sglang":
            return web.json_response({"version": self.version})
        if path not in self.paths:
            return web.json_response({"detail": "Not Found"}, status=404)
        if request.method != "POST":
            return web.json_response({"detail": "Method Not Allowed"}, status=405)
        body = await request.json()
        if path == "/tokenize":
            return web.json_response({"tokens": PROMPT})
        return await self.generate(request, body)

    async def generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        salt, stream = body.get("cache_salt") or body["extra_key"], body.get("stream", False)
        tokens = self.tokens(stream)
        routes = self.routes(salt, self.salts.count(salt), stream)
        self.salts.append(salt)
        start = body.get("routed_experts_prompt_start") or body.get("routed_experts_start_len") or 0
        routes = routes[start:] if self.heeds_start else routes
        if request.path == "/generate":
            raw = base64.b64encode(routes.astype("<i4").tobytes()).decode()
            pairs = [[self.logprob, token, None] for token in tokens]
            meta = {"id": "1", "finish_reason": {"type": "length"}, "output_token_logprobs": pairs}
            meta |= {"routed_experts": raw} if self.sends_routes else {}
            return web.json_response({"text": "", "meta_info": meta})
        logprobs: dict[str, Any] = {"content": [{"logprob": self.logprob} for _ in tokens]}
        if request.path == "/v1/completions":
            logprobs = {"token_logprobs": [self.logprob for _ in tokens]}
        sent: Any = npy(routes) if self.sends_routes else None
        if request.path == "/skyrl/v1/generate" and sent:
            raw = base64.b64encode(routes.tobytes()).decode()
            sent = {"data": raw, "shape": list(routes.shape), "dtype": "uint8"}
        choice = {
            "index": 0,
            "token_ids": tokens,
            "logprobs": logprobs,
            "finish_reason": "length",
            "routed_experts": sent,
        }
        payload = {"request_id": "1", "choices": [choice]}
        if stream:
            text = f"data: {json.dumps(payload)}\n\ndata: [DONE]\n\n"
            return web.Response(text=text, content_type="text/event-stream")
        return web.json_response(text=json.dumps(payload))


def examine(fake: Fake, layout: ModelLayout | None = LAYOUT) -> DoctorReport:
    async def run() -> DoctorReport:
        async with serving(fake.answer) as stub:
            session = await asyncio.to_thread(rtk.connect, stub.url, layout=layout)
            before = len(stub.paths)
            report = await session.adoctor()
            assert report.requests == len(stub.paths) - before
            await asyncio.to_thread(session.close)
            return report

    return asyncio.run(run())


def failed(report: DoctorReport) -> list[str]:
    return [finding.check for finding in report.failed]


def statuses(report: DoctorReport) -> dict[str, str]:
    return {finding.check: finding.status for finding in report.findings}


def test_a_server_without_faults_is_healthy():
    report = examine(Fake())
    assert report.ok
    assert {check for check, status in statuses(report).items() if status != "ok"} == {"/v1/chat/completions"}
    assert "vLLM 0.31.0" in report["server"].evidence
    assert "4 layers (2 MoE, 2 dense), 8 experts, top-2" in report["model"].evidence
    assert report.generations == 7


class Zeros(Fake):
    def routes(self, salt, times_seen, stream):
        return np.zeros_like(true_routes())


class EmptyPrompt(Fake):
    def routes(self, salt, times_seen, stream):
        routes = true_routes()
        routes[: len(PROMPT)] = 0
        return routes


class HalfTheGenerated(Fake):
    def routes(self, salt, times_seen, stream):
        routes = true_routes()
        routes[-5:] = 0
        return routes


class Physical(Fake):
    def routes(self, salt, times_seen, stream):
        routes = true_routes()
        routes[:, list(LAYOUT.moe_layers)] += 3
        return routes


class Repeated(Fake):
    def routes(self, salt, times_seen, stream):
        routes = true_routes()
        routes[40, 3] = [6, 6]
        return routes


class Dense(Fake):
    def routes(self, salt, times_seen, stream):
        routes = true_routes()
        routes[:, 2] = routes[:, 1]
        return routes


class Stuck(Fake):
    def routes(self, salt, times_seen, stream):
        routes = true_routes()
        routes[60:80] = routes[59]
        return routes


class LastRowToo(Fake):
    def routes(self, salt, times_seen, stream):
        return np.concatenate([true_routes(), true_routes()[-1:]])


class MoeLayersOnly(Fake):
    def routes(self, salt, times_seen, stream):
        return true_routes()[:, list(LAYOUT.moe_layers)]


class OtherWithoutCache(Fake):
    def routes(self, salt, times_seen, stream):
        return true_routes() if not self.salts or salt == self.salts[0] else true_routes()[::-1]


class OtherWithCache(Fake):
    def routes(self, salt, times_seen, stream):
        routes = true_routes()
        if times_seen:
            routes[: len(PROMPT)] = routes[1 : len(PROMPT) + 1]
        return routes


class OtherStream(Fake):
    def routes(self, salt, times_seen, stream):
        return true_routes()[::-1] if stream else true_routes()


@pytest.mark.parametrize(
    ("fake", "checks", "words"),
    [
        (Zeros(), ["not all zero"], "all 2 MoE layers are 0 in all 111 rows"),
        (EmptyPrompt(), ["not all zero", "prompt rows"], "layer 1 is 0 in 100 of 111 rows, from row 0 on"),
        (HalfTheGenerated(), ["not all zero", "prompt rows"], "layer 1 is 0 in 5 of 111 rows, from row 106 on"),
        (Physical(), ["expert range"], "of 8 experts"),
        (Repeated(), ["distinct experts"], "layer 3, row 40: [6, 6] (1 such rows)"),
        (Dense(), ["dense layers empty"], "dense layer 2 has routes in 111 of 111 rows"),
        (Stuck(), ["no stuck rows"], "rows 59..79 hold one and the same"),
        (LastRowToo(), ["row count"], "112 rows for 100 prompt and 12 generated tokens, 111 are expected"),
        (MoeLayersOnly(), ["layers and top-k"], "2 layers, top-2, uint8, the model's config has 4 layers"),
        (OtherWithCache(), ["same with cache", "streaming"], "the same prompt again"),
        (OtherStream(), ["streaming"], "the same tokens, but the same experts in"),
        (Fake(logprob=float("nan")), ["logprobs"], "12 of 12 are missing or not finite"),
        (Fake(logprob=0.5), ["logprobs"], "above 0"),
        (Fake(sends_routes=False), ["/inference/v1/generate"], "--enable-return-routed-experts"),
        (
            Fake(paths=("/v1/completions", "/tokenize"), sends_routes=False),
            ["/inference/v1/generate"],
            "start vLLM with --enable-scale-out",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Fake) else "",
)  # fmt: skip
def test_each_fault_is_named(fake, checks, words):
    report = examine(replace(fake, salts=[]))
    assert failed(report) == checks
    assert words in report.failed[0].evidence
    assert not report.ok
    assert report.summary.endswith(f"NOT healthy ({', '.join(checks)})") or "warning" in report.summary


def test_another_pass_with_other_routes_is_a_fault():
    fake = OtherWithoutCache()
    assert "same without cache" in failed(examine(fake))


def test_a_few_routes_that_differ_between_passes_are_numerics():
    class Nearly(Fake):
        def routes(self, salt, times_seen, stream):
            routes = true_routes()
            if len(self.salts):
                routes[3, 1] = [(e + 1) % 8 for e in routes[3, 1]]
            return routes

    report = examine(Nearly())
    assert report.ok
    assert report["same without cache"].status == "warn"
    assert "99.5% of 222 row-layer pairs" in report["same without cache"].evidence


def test_a_stream_that_loses_its_routes_is_a_warning():
    class Loses(Fake):
        async def generate(self, request, body):
            self.sends_routes = not body.get("stream")
            return await super().generate(request, body)

    report = examine(Loses())
    assert report.ok
    assert report["streaming"].status == "warn"
    assert "without the routes that the whole answer has" in report["streaming"].evidence


def test_what_cannot_be_checked_is_skipped_with_the_reason():
    report = examine(Fake(sends_routes=False))
    skipped = {f.check: f.evidence for f in report.findings if f.status == "skipped"}
    assert skipped["row count"] == skipped["same with cache"] == "no endpoint gave routes to look at"
    # Streaming and logprobs need no routes.
    assert statuses(report)["streaming"] == statuses(report)["logprobs"] == "ok"

    report = examine(Zeros())
    assert report["same with cache"] == Finding(
        "same with cache", "skipped", "not all zero failed, so a comparison would say nothing"
    )
    assert report["distinct experts"].evidence == "routes are missing in MoE layers"

    report = examine(MoeLayersOnly())
    assert report["dense layers empty"].evidence == "the routes are of another model's shape"

    report = examine(LastRowToo())
    assert report["prompt rows"].status == report["no stuck rows"].status == "skipped"
    assert report["distinct experts"].status == "ok"


def test_without_scale_out_the_routes_of_completions_are_examined():
    report = examine(Fake(paths=("/v1/completions", "/tokenize")))
    assert report["/v1/completions"].status == report["row count"].status == "ok"
    assert report["same with cache"].status == "ok"
    assert report["streaming"].status == "skipped"
    assert report.ok
    assert report["/inference/v1/generate"].status == "warn"
    assert "--enable-scale-out" in report["/inference/v1/generate"].evidence


def test_scale_out_is_asked_of_versions_that_have_it():
    evidence = examine(Fake(version="0.29.0", paths=("/v1/completions", "/tokenize")))[
        "/inference/v1/generate"
    ].evidence
    assert "--enable-scale-out" not in evidence


def test_an_unknown_layout_is_a_warning_and_skips_what_needs_it():
    report = examine(Fake(), layout=None)
    assert report.ok
    assert report["model"].status == report["layers and top-k"].status == "warn"
    assert report["expert range"].status == report["dense layers empty"].status == "skipped"
    assert report["not all zero"].status == report["distinct experts"].status == "ok"
    assert failed(examine(Zeros(), layout=None)) == ["not all zero"]


def test_a_start_offset_that_is_ignored_is_a_warning():
    report = examine(Fake(heeds_start=False))
    assert report.ok
    assert report["start offset"].status == "warn"
    assert "asked for rows from 50 on and sent all 111" in report["start offset"].evidence


SGLANG = Fake(owner="sglang", version="0.5.10", paths=("/generate", "/tokenize"))


def test_sglang_is_examined_on_its_own_endpoint():
    report = examine(replace(SGLANG, version="0.5.12", salts=[]))
    assert report.ok
    assert "SGLang 0.5.12" in report["server"].evidence
    assert report["/generate"].status == report["row count"].status == report["start offset"].status == "ok"


def test_sglangs_ignored_offset_fits_its_known_fault():
    report = examine(replace(SGLANG, heeds_start=False, salts=[]))
    assert report["start offset"].status == "warn"
    assert "Fits what was seen here (start offset)" in report["known: strands-sglang #72"].evidence


def test_sglang_without_the_flag_is_told_so():
    report = examine(replace(SGLANG, sends_routes=False, salts=[]))
    assert failed(report) == ["/generate"]
    assert "with --enable-return-routed-experts" in report["/generate"].evidence


def test_sglangs_routes_need_the_layout():
    report = examine(replace(SGLANG, salts=[]), layout=None)
    assert failed(report) == ["/generate"]
    assert "the model's layout is needed" in report["/generate"].evidence


def test_skyrl_is_examined_on_its_own_endpoint():
    paths = ("/skyrl/v1/generate", "/inference/v1/generate", "/tokenize")
    report = examine(Fake(paths=paths))
    assert report.ok
    assert "SkyRL" in report["server"].evidence
    assert report["/skyrl/v1/generate"].status == report["row count"].status == "ok"


def test_a_server_of_no_known_kind_is_taken_for_a_vllm():
    report = examine(Fake(owner="somebody"))
    assert report["server"].status == "warn"
    assert report["known faults"].status == "skipped"
    assert report.ok


def test_a_server_that_fails_is_a_finding():
    class Broken(Fake):
        async def generate(self, request, body):
            return web.json_response({"error": {"message": "engine is dead"}}, status=500)

    report = examine(Broken())
    assert failed(report) == ["/inference/v1/generate"]
    assert "engine is dead" in report["/inference/v1/generate"].evidence


def test_routes_that_cannot_be_read_are_a_finding():
    class Garbled(Fake):
        async def generate(self, request, body):
            choice = {"token_ids": GENERATED, "finish_reason": "length", "routed_experts": "AAAA"}
            return web.json_response({"choices": [choice]})

    report = examine(Garbled())
    assert "/inference/v1/generate" in failed(report)
    assert "no .npy file" in report["/inference/v1/generate"].evidence


# Read by hand out of the releases' sources: the first with the fault, the last with it, the first without.
@pytest.mark.parametrize(
    ("product", "version", "references"),
    [
        ("vLLM", "0.13.0", []),
        ("vLLM", "0.15.1", ["vllm #33013", "vllm #35744", "vllm #28284"]),
        ("vLLM", "0.16.0", ["vllm #35744", "vllm #28284"]),
        ("vLLM", "0.18.0", ["vllm #28284"]),
        ("vLLM", "0.21.0", ["vllm #38939"]),
        ("vLLM", "0.22.0", ["vllm #44116, #54730", "vllm #37094"]),
        ("vLLM", "0.26.0+cu130", ["vllm #44116, #54730", "vllm #37094"]),
        ("vLLM", "0.27.0", ["vllm #37094"]),
        ("vLLM", "0.30.0", ["vllm #37094"]),
        ("vLLM", "0.31.0", []),
        ("vLLM", "unknown", []),
        ("SGLang", "0.5.7", []),
        ("SGLang", "0.5.8.post1", ["strands-sglang #72, sglang #24851"]),
        ("SGLang", "0.5.11", ["strands-sglang #72, sglang #24851", "sglang #36404"]),
        ("SGLang", "0.5.12", ["sglang #36404"]),
    ],
)
def test_known_faults_of_a_version(product, version, references):
    assert [fault.reference for fault in known_faults.of(product, version)] == references


def test_each_symptom_is_a_check_of_the_doctor():
    checks = set(statuses(examine(Fake()))) | {"routes"}
    assert {fault.symptom for fault in KNOWN_FAULTS} <= checks


def test_a_known_fault_says_whether_it_was_seen():
    seen, unseen = examine(Zeros(version="0.26.0")), examine(Fake(version="0.26.0"))
    assert "Fits what was seen here (not all zero)" in seen["known: vllm #44116"].evidence
    assert unseen.ok
    assert "Not seen here" in unseen["known: vllm #44116"].evidence


REPORT = DoctorReport(
    "http://h:1",
    (
        Finding("server", "ok", "vLLM 0.30.0"),
        Finding("expert <range>", "fail", "expert 9 of 8 " * 12),
        Finding("streaming", "skipped", "nothing to stream"),
    ),
    4,
    2,
)


def test_the_table_keeps_to_the_width():
    for width in (80, 120):
        lines = REPORT.to_text(width).splitlines()
        assert max(map(len, lines)) <= width
        assert lines[0] == "http://h:1: NOT healthy (expert <range>)"
        assert [line.split()[0] for line in lines if line.startswith("  ") and line[2] != " "] == [
            "ok",
            "FAIL",
            "-",
        ]
        assert lines[-1] == "4 requests were sent, 2 of which generated a few tokens"


def test_the_notebook_shows_the_same_findings():
    class Cells(HTMLParser):
        cells: list[str] = []  # noqa: RUF012
        open = False

        def handle_starttag(self, tag, attrs):
            if tag == "td":
                self.open = True
                self.cells.append("")

        def handle_endtag(self, tag):
            self.open = self.open and tag != "td"

        def handle_data(self, data):
            if self.open:
                self.cells[-1] += data

    parser = Cells()
    parser.feed(REPORT._repr_html_())
    rows = [tuple(parser.cells[i : i + 3]) for i in range(0, len(parser.cells), 3)]
    assert [row[1:] for row in rows] == [(f.check, f.evidence) for f in REPORT.findings]
    assert [row[0].split()[-1] for row in rows] == ["ok", "fail", "skipped"]


def test_to_dict_is_json():
    kept = json.loads(REPORT.to_json())
    assert kept == REPORT.to_dict()
    assert kept["ok"] is False
    assert kept["findings"][1]["check"] == "expert <range>"


def test_the_embedded_server_is_healthy(embedded_server):
    with rtk.connect(embedded_server.url) as session:
        report = session.doctor()
        assert loops.background.run(session.adoctor()).ok
    assert report.ok
    expected = {"/v1/chat/completions": "skipped", "known faults": "skipped"}
    assert {check: status for check, status in statuses(report).items() if status != "ok"} == expected
    assert "read from" in report["model"].evidence


def test_the_embedded_server_without_routes_says_its_own_flag():
    pytest.importorskip("transformers", reason="needs moe-rtk[embedded]")
    with rtk.serve.embedded(routed_experts=False) as server, rtk.connect(server.url) as session:
        report = session.doctor()
    assert failed(report) == ["/inference/v1/generate"]
    assert "--no-routed-experts" in report["/inference/v1/generate"].evidence


def test_a_session_samples_as_before_after_the_doctor(embedded_server):
    with rtk.connect(embedded_server.url) as session:
        session.doctor()
        assert session.sample("One", max_tokens=2).trace is not None


def test_the_command_answers_by_its_exit_status(embedded_server, capsys, tmp_path):
    assert cli.main(["doctor", embedded_server.url]) == 0
    assert ": healthy\n" in capsys.readouterr().out
    # Another model's layout, so that the routes have another shape than they should.
    other = {"num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [0]}
    (tmp_path / "config.json").write_text(json.dumps(other))
    assert cli.main(["doctor", embedded_server.url, "--layout", str(tmp_path), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"]
    assert "layers and top-k" in [f["check"] for f in report["findings"] if f["status"] == "fail"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["http://127.0.0.1:9"],
        ["{url}", "--model", "nope"],
        ["{url}", "--layout", "/nowhere"],
        ["{url}", "--api-key-env", "RTK_NO_SUCH_VARIABLE"],
    ],
)
def test_nothing_to_examine_is_status_2(embedded_server, arguments, capsys):
    assert cli.main(["doctor", *(a.format(url=embedded_server.url) for a in arguments)]) == 2
    out, error = capsys.readouterr()
    assert not out
    assert error.startswith("rtk: ")
    assert error.count("\n") == 1


@pytest.mark.vllm
def test_real_vllm_is_healthy(vllm_url):
    with rtk.connect(vllm_url) as session:
        report = session.doctor()
    assert report.ok, str(report)
    assert f"vLLM {vllm.installed()}" in report["server"].evidence
    wanted = (
        "/inference/v1/generate",
        "/v1/completions",
        "row count",
        "same with cache",
        "start offset",
        "streaming",
    )
    assert [report[check].status for check in wanted] == ["ok"] * len(wanted), str(report)
    # On a busy machine this version may lose a stream's routes, which the doctor then says: vllm #37094.
    assert report["streaming"].status in ("ok", "warn"), str(report)


@pytest.mark.vllm
@pytest.mark.parametrize(("flag", "status"), [(vllm.ROUTES[0], "warn"), (vllm.ROUTES[1], "fail")])
def test_real_vllm_with_one_flag_is_told_the_other(flag, status):
    (missing,) = set(vllm.ROUTES) - {flag}
    with vllm.running(shipped.find("tiny_moe"), flag) as url, rtk.connect(url) as session:
        report = session.doctor()
    finding = report["/inference/v1/generate"]
    assert finding.status == status, str(report)
    assert missing in finding.evidence
    assert failed(report) == ([] if status == "warn" else ["/inference/v1/generate"])
