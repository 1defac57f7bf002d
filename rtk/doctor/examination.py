"""The course of an examination: what is asked, in which order, and what each answer is checked for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rtk.client.routed_experts import Routes
from rtk.doctor import answer_checks, comparisons, known_faults
from rtk.doctor.known_faults import KNOWN_FAULTS, KnownFault
from rtk.doctor.probe import CHAT, COMPLETIONS, NATIVE, SGLANG, SKYRL, Answer, Asked, Probe, fresh_salt
from rtk.doctor.report import DoctorReport, Finding, Status
from rtk.errors import LayoutError, RequestRejected
from rtk.layout.model_layout import ModelLayout

if TYPE_CHECKING:
    from rtk.session.session import Session


# Every check that needs routes, in the order in which they are reported.
_ROUTE_CHECKS = (
    "row count",
    "layers and top-k",
    "expert range",
    "not all zero",
    "prompt rows",
    "distinct experts",
    "dense layers empty",
    "no stuck rows",
    "same without cache",
    "same with cache",
    "start offset",
)


@dataclass(frozen=True)
class _Server:
    """What kind of server it is; `product` is "vLLM", "SGLang", "embedded" or "unknown"."""

    product: str
    version: str
    skyrl: bool
    root: str | None


async def examine(session: Session) -> DoctorReport:
    """Examine a session's server with at most 13 requests, of which 9 generate 12 tokens.

    The prompt has at most 160 tokens, and every cache salt is fresh, so that what is cached for others is neither
    used nor pushed aside by more than that. What is wrong with the server is a finding in the report.

    Raises:
        ServerUnreachable, ServerFailed, RequestRejected, PayloadError: `/v1/models` gives no answer.
    """
    probe = Probe(session._generator, session.model, session.layout, session.max_model_len)
    try:
        findings = [finding async for finding in _findings(session, probe)]
    finally:
        await probe.aclose()
    return DoctorReport(session.url, tuple(findings), probe.requests, probe.generations)


async def _findings(session: Session, probe: Probe) -> AsyncIterator[Finding]:
    server = await _identify(session, probe)
    seen: list[Finding] = []
    yield _server_finding(server)
    yield _layout_finding(session, server)
    await probe.choose_prompt()
    async for finding in _examine_routes(session, probe, server):
        seen.append(finding)
        yield finding
    for finding in _known(server, seen):
        yield finding


async def _identify(session: Session, probe: Probe) -> _Server:
    cards = (await probe.ask("GET", "/v1/models")).get("data")
    card: dict[str, Any] = {}
    for candidate in cards if isinstance(cards, list) else []:
        if isinstance(candidate, dict) and candidate.get("id") == session.model:
            card = candidate
    owner, version = card.get("owned_by"), session.server_version
    root = card.get("root") if isinstance(card.get("root"), str) else None
    if owner == "sglang":
        # The old name still works in new releases, the new one does not in old ones.
        info = await probe.find("/server_info") or await probe.find("/get_server_info") or {}
        return _Server("SGLang", str(info.get("version", "unknown")), False, root)
    if "+rtk.embedded" in version:
        return _Server("embedded", version, False, root)
    skyrl = session._generator.server == "skyrl"
    return _Server("vLLM" if owner == "vllm" or skyrl else "unknown", version, skyrl, root)


def _server_finding(server: _Server) -> Finding:
    if server.product == "unknown":
        return Finding(
            "server",
            "warn",
            "neither vLLM, SkyRL, SGLang nor rtk's embedded server by what /v1/models says; taken for a vLLM",
        )
    if server.product == "embedded":
        return Finding("server", "ok", f"rtk's embedded server, {server.version}")
    name = "SkyRL, in front of vLLM" if server.skyrl else server.product
    return Finding("server", "ok", f"{name} {server.version}")


def _layout_finding(session: Session, server: _Server) -> Finding:
    model = (
        f"{session.model}, up to {session.max_model_len} tokens" if session.max_model_len else session.model
    )
    layout = session.layout
    if layout is None:
        return Finding(
            "model",
            "warn",
            f"{model}; its layout is unknown, because {server.root or 'its config'} is no folder of this machine: "
            "give --layout CONFIG, or layout= to rtk.connect",
        )
    dense = f", {len(layout.dense_layers)} dense" if layout.dense_layers else ""
    return Finding(
        "model",
        "ok",
        f"{model}; {layout.num_layers} layers ({len(layout.moe_layers)} MoE{dense}), {layout.num_experts} experts, "
        f"top-{layout.top_k}, {_layout_source(session, server)}",
    )


def _layout_source(session: Session, server: _Server) -> str:
    """Where the layout is from: `connect` reads it from the server's folder unless it was given one."""
    if server.root is not None and (Path(server.root) / "config.json").is_file():
        try:
            if ModelLayout.from_config(server.root) == session.layout:
                return f"read from {Path(server.root) / 'config.json'}"
        except LayoutError:
            pass
    return "as given to connect"


async def _examine_routes(session: Session, probe: Probe, server: _Server) -> AsyncIterator[Finding]:
    main = SGLANG if server.product == "SGLang" else SKYRL if server.skyrl else NATIVE
    salt = fresh_salt()
    first = await probe.generate(main, salt)
    offset = len(probe.prompt) // 2
    completion = await probe.generate(COMPLETIONS, salt, offset)
    yield _endpoint(main, first, server, else_completions=_has_routes(completion))
    yield _other_endpoint(COMPLETIONS, completion, server)
    yield _other_endpoint(CHAT, await probe.generate(CHAT, salt), server)
    endpoint = main
    if not _has_routes(first) and _has_routes(completion):
        # The routes there can still be looked at, in full.
        endpoint = COMPLETIONS
        first = await probe.generate(COMPLETIONS, salt)
    if isinstance(first, Answer) and first.routes is not None:
        subject = answer_checks.Subject(endpoint, probe.prompt, first, session.layout)
        async for finding in _with_routes(subject, probe, salt, completion, offset):
            yield finding
    else:
        for name in _ROUTE_CHECKS:
            yield Finding(name, "skipped", "no endpoint gave routes to look at")
    yield await _streaming(first, endpoint, session, probe)
    if isinstance(first, Answer):
        yield comparisons.logprobs(first)
    else:
        yield Finding("logprobs", "skipped", "no endpoint generated anything")


async def _with_routes(
    subject: answer_checks.Subject, probe: Probe, salt: str, completion: Asked, offset: int
) -> AsyncIterator[Finding]:
    findings = list(answer_checks.plausibility(subject))
    for finding in findings:
        yield finding
    trouble = next(
        (f for f in findings if f.status == "fail" and f.check in ("row count", "not all zero")),
        None,
    )
    path = subject.endpoint
    if trouble is not None:
        for name in _ROUTE_CHECKS[-3:]:
            yield Finding(name, "skipped", f"{trouble.check} failed, so a comparison would say nothing")
        return
    yield comparisons.repeat(
        "same without cache", subject, await probe.generate(path, fresh_salt()), "a fresh cache salt"
    )
    yield comparisons.repeat(
        "same with cache", subject, await probe.generate(path, salt), "the same prompt again"
    )
    if path == SGLANG:
        completion = await probe.generate(SGLANG, salt, offset)
    yield comparisons.start_offset(subject, completion, SGLANG if path == SGLANG else COMPLETIONS, offset)


async def _streaming(first: Asked, endpoint: str, session: Session, probe: Probe) -> Finding:
    if endpoint != NATIVE:
        return Finding("streaming", "skipped", f"only {NATIVE} sends routes in a stream that is read here")
    if not isinstance(first, Answer):
        return Finding("streaming", "skipped", f"{NATIVE} failed")
    salt = fresh_salt()
    whole = await probe.generate(NATIVE, salt)
    if not isinstance(whole, Answer):
        return Finding("streaming", "fail", f"the same request without streaming now fails: {whole}")
    # A stream whose routes have other rows than its tokens is refused, which the row count says already.
    rows = len(probe.prompt) + len(whole.token_ids) - 1
    routes = whole.routes is not None and len(whole.routes) == rows
    return comparisons.streaming(whole, await probe.stream(salt, routes=routes), session.layout)


def _has_routes(asked: Asked) -> bool:
    return isinstance(asked, Answer) and asked.routes is not None


def _endpoint(path: str, asked: Asked, server: _Server, *, else_completions: bool) -> Finding:
    """The endpoint that rtk samples from, unless it has to make do with the completions."""
    if isinstance(asked, RequestRejected) and asked.status == 404 and path == NATIVE:
        flag = (
            "start vLLM with --enable-scale-out"
            if known_faults.at_least(server.version, "0.30")
            else "this server may not be vLLM, or a proxy does not pass it on"
        )
        if else_completions:
            flag += f"; until then rtk samples from {COMPLETIONS}, which streams no routes"
        return Finding(path, "warn" if else_completions else "fail", f"is not served (HTTP 404): {flag}")
    return _answered(path, asked, server, "fail", lambda routes: f"{routes.nbytes} bytes of {routes.dtype}")


def _other_endpoint(path: str, asked: Asked, server: _Server) -> Finding:
    if isinstance(asked, RequestRejected):
        if asked.status in (404, 405):
            return Finding(path, "skipped", f"is not served (HTTP {asked.status})")
        if path == CHAT:
            return Finding(path, "skipped", f"refuses a chat (HTTP {asked.status}): {_reason(asked)}")
    return _answered(path, asked, server, "warn", lambda routes: f"shape {list(routes.shape)}")


def _answered(
    path: str, asked: Asked, server: _Server, without: Status, said: Callable[[Routes], str]
) -> Finding:
    """Whether routes came that can be read; `without` is the status where none did."""
    if not isinstance(asked, Answer):
        return Finding(path, without, str(asked))
    if asked.fault:
        return Finding(path, without, f"sends routes that cannot be read: {asked.fault}")
    if asked.routes is None:
        return Finding(path, without, f"answers without routes: {_flag(server)}")
    return Finding(path, "ok", f"sends routes, {said(asked.routes)}")


def _flag(server: _Server) -> str:
    if server.product == "SGLang":
        return "start SGLang 0.5.7 or newer with --enable-return-routed-experts"
    if server.product == "embedded":
        return "start the embedded server without --no-routed-experts"
    if server.product == "vLLM" and not known_faults.at_least(server.version, "0.22"):
        return "vLLM sends them from 0.22 on; update it, and start it with --enable-return-routed-experts"
    return "start vLLM with --enable-return-routed-experts; a model without MoE layers has none"


def _known(server: _Server, seen: list[Finding]) -> list[Finding]:
    known = known_faults.of(server.product, server.version)
    if server.product not in ("vLLM", "SGLang"):
        return [Finding("known faults", "skipped", "they are listed for vLLM and SGLang")]
    if not known:
        newest = "none is listed for this version"
        return [Finding("known faults", "ok", f"{newest}; {len(KNOWN_FAULTS)} are listed for others")]
    failed = {finding.check for finding in seen if finding.status in ("fail", "warn")}
    # A missing endpoint is the symptom of a version that has none.
    failed |= {"routes"} if failed & {NATIVE, SGLANG, SKYRL} else set()
    return [_known_finding(fault, fault.symptom in failed) for fault in known]


def _known_finding(fault: KnownFault, fits: bool) -> Finding:
    span = f"{fault.product} {fault.since} and newer" + (f", before {fault.before}" if fault.before else "")
    here = f"fits what was seen here ({fault.symptom})" if fits else "not seen here"
    said = f"{span}; {fault.when}. Looks like: {fault.looks_like}. {here[0].upper()}{here[1:]}. {fault.remedy[0].upper()}{fault.remedy[1:]}"
    return Finding(f"known: {fault.reference.split(',')[0]}", "warn", said)


def _reason(error: RequestRejected) -> str:
    """The server's own words, without the address and the status that stand before them."""
    text = str(error).split("): ", 1)[-1].split("\n")[0]
    return text if len(text) <= 120 else text[:117] + "..."
