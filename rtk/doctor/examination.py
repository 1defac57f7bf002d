"""The course of an examination: what is asked, in which order, and what each answer is checked for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from rtk.client.generator import RemoteInferenceGenerator
from rtk.client.routed_experts import Routes
from rtk.client.servers import Route, Server
from rtk.doctor import answer_checks, comparisons, known_faults
from rtk.doctor.known_faults import KNOWN_FAULTS, KnownFault
from rtk.doctor.probe import Answer, Asked, Probe, fresh_salt
from rtk.doctor.report import DoctorReport, Finding, Status
from rtk.errors import LayoutError, RequestRejected
from rtk.layout.model_layout import ModelLayout

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
class Target:
    """What is examined.

    Attributes:
        generator: asks the server, and knows its kind.
        model: the model's name there.
        layout: the model's layers and routers; None where unknown.
        max_model_len: the longest sequence that the server takes, in tokens; None where unknown.
        root: the folder or hub name that the server has the model from; None where it does not say.
    """

    generator: RemoteInferenceGenerator
    model: str
    layout: ModelLayout | None = None
    max_model_len: int | None = None
    root: str | None = None


async def examine(target: Target) -> DoctorReport:
    """Examine a server with at most 10 requests, of which 9 generate 12 tokens.

    The prompt has at most 160 tokens, and every cache salt is fresh, so that what is cached for others is neither
    used nor pushed aside by more than that. What is wrong with the server is a finding in the report.
    """
    probe = Probe(target.generator, target.model, target.max_model_len)
    try:
        findings = [finding async for finding in _findings(target, probe)]
    finally:
        await probe.aclose()
    return DoctorReport(target.generator.proxy_url, tuple(findings), probe.requests, probe.generations)


async def _findings(target: Target, probe: Probe) -> AsyncIterator[Finding]:
    server = target.generator.server
    seen: list[Finding] = []
    yield _server_finding(server)
    yield _layout_finding(target)
    await probe.choose_prompt()
    async for finding in _examine_routes(target, probe):
        seen.append(finding)
        yield finding
    for finding in _known(server, seen):
        yield finding


def _server_finding(server: Server) -> Finding:
    if server.product == "unknown":
        return Finding(
            "server",
            "warn",
            "neither vLLM, SkyRL, SGLang nor rtk's embedded server by what /v1/models says; taken for a vLLM",
        )
    return Finding("server", "ok", server.title)


def _layout_finding(target: Target) -> Finding:
    model, layout = target.model, target.layout
    if target.max_model_len:
        model += f", up to {target.max_model_len} tokens"
    if layout is None:
        return Finding(
            "model",
            "warn",
            f"{model}; its layout is unknown, because {target.root or 'its config'} is no folder of this machine: "
            "give --layout CONFIG, or layout= to rtk.connect",
        )
    dense = f", {len(layout.dense_layers)} dense" if layout.dense_layers else ""
    return Finding(
        "model",
        "ok",
        f"{model}; {layout.num_layers} layers ({len(layout.moe_layers)} MoE{dense}), {layout.num_experts} experts, "
        f"top-{layout.top_k}, {_layout_source(target)}",
    )


def _layout_source(target: Target) -> str:
    """Where the layout is from: `connect` reads it from the server's folder unless it was given one."""
    if target.root is not None and (Path(target.root) / "config.json").is_file():
        try:
            if ModelLayout.from_config(target.root) == target.layout:
                return f"read from {Path(target.root) / 'config.json'}"
        except LayoutError:
            pass
    return "as given to connect"


async def _examine_routes(target: Target, probe: Probe) -> AsyncIterator[Finding]:
    server = target.generator.server
    main, *others = server.routes(target.layout)
    salt = fresh_salt()
    first = await probe.generate(main, salt)
    offset = len(probe.prompt) // 2
    # Start offsets are asked of the first route that has them, beside what it is asked for anyway where it is another.
    offset_route = next((route for route in (main, *others) if route.start_offset and not route.chat), None)
    answers = [await probe.generate(route, salt, offset if route is offset_route else 0) for route in others]
    asked = list(zip(others, answers, strict=True))
    fallback = next((route for route, answer in asked if not route.chat and _has_routes(answer)), None)
    yield _endpoint(main, first, server, fallback)
    for route, answer in asked:
        yield _other_endpoint(route, answer, server)
    examined = main
    if not _has_routes(first) and fallback is not None:
        # The routes there can still be looked at, in full.
        examined, first = fallback, await probe.generate(fallback, salt)
    if isinstance(first, Answer) and first.routes is not None:
        subject = answer_checks.Subject(examined.path, probe.prompt, first, target.layout)
        findings = list(answer_checks.plausibility(subject))
        for finding in findings:
            yield finding
        # After these failures comparing the answer with another would say nothing.
        trouble = next(
            (f for f in findings if f.status == "fail" and f.check in ("row count", "not all zero")), None
        )
        if trouble is not None:
            for name in _ROUTE_CHECKS[-3:]:
                yield Finding(name, "skipped", f"{trouble.check} failed, so a comparison would say nothing")
        else:
            again = await probe.generate(examined, fresh_salt())
            yield comparisons.repeat("same without cache", subject, again, "a fresh cache salt")
            again = await probe.generate(examined, salt)
            yield comparisons.repeat("same with cache", subject, again, "the same prompt again")
            cut = dict(asked).get(offset_route) if offset_route else None
            if offset_route is main:
                cut = await probe.generate(main, salt, offset)
            if offset_route is not None and cut is not None:
                yield comparisons.start_offset(subject, cut, offset_route.path, offset)
            else:
                yield Finding("start offset", "skipped", "no route of this server leaves out rows")
    else:
        for name in _ROUTE_CHECKS:
            yield Finding(name, "skipped", "no endpoint gave routes to look at")
    yield await _streaming(first, examined, target, probe)
    if isinstance(first, Answer):
        yield comparisons.logprobs(first)
    else:
        yield Finding("logprobs", "skipped", "no endpoint generated anything")


async def _streaming(first: Asked, route: Route, target: Target, probe: Probe) -> Finding:
    if not route.streams_routes:
        return Finding("streaming", "skipped", f"{route.path} sends no routes in a stream that is read here")
    if not isinstance(first, Answer):
        return Finding("streaming", "skipped", f"{route.path} failed")
    salt = fresh_salt()
    whole = await probe.generate(route, salt)
    if not isinstance(whole, Answer):
        return Finding("streaming", "fail", f"the same request without streaming now fails: {whole}")
    # A stream whose routes have other rows than its tokens is refused, which the row count says already.
    rows = len(probe.prompt) + len(whole.token_ids) - 1
    routes = whole.routes is not None and len(whole.routes) == rows
    return comparisons.streaming(whole, await probe.stream(route, salt, routes=routes), target.layout)


def _has_routes(asked: Asked) -> bool:
    return isinstance(asked, Answer) and asked.routes is not None


def _not_served(route: Route, asked: Asked, server: Server) -> str | None:
    return server.not_served(route, asked.status, str(asked)) if isinstance(asked, RequestRejected) else None


def _endpoint(route: Route, asked: Asked, server: Server, fallback: Route | None) -> Finding:
    """The endpoint that rtk samples from, unless it has to make do with another one."""
    advice = _not_served(route, asked, server)
    if isinstance(asked, RequestRejected) and advice is not None:
        if fallback is not None:
            advice += f"; until then rtk samples from {fallback.path}"
            advice += "" if fallback.streams_routes else ", which streams no routes"
        return Finding(
            route.path, "warn" if fallback else "fail", f"is not served (HTTP {asked.status}): {advice}"
        )
    return _answered(route, asked, server, "fail", lambda routes: f"{routes.nbytes} bytes of {routes.dtype}")


def _other_endpoint(route: Route, asked: Asked, server: Server) -> Finding:
    if isinstance(asked, RequestRejected):
        if _not_served(route, asked, server) is not None:
            return Finding(route.path, "skipped", f"is not served (HTTP {asked.status})")
        if route.chat:
            return Finding(route.path, "skipped", f"refuses a chat (HTTP {asked.status}): {_reason(asked)}")
    return _answered(route, asked, server, "warn", lambda routes: f"shape {list(routes.shape)}")


def _answered(
    route: Route, asked: Asked, server: Server, without: Status, said: Callable[[Routes], str]
) -> Finding:
    """Whether routes came that can be read; `without` is the status where none did."""
    path = route.path
    if not isinstance(asked, Answer):
        return Finding(path, without, str(asked))
    if asked.fault:
        return Finding(path, without, f"sends routes that cannot be read: {asked.fault}")
    if asked.routes is None:
        return Finding(path, without, f"answers without routes: {server.enable_routes()}")
    return Finding(path, "ok", f"sends routes, {said(asked.routes)}")


def _known(server: Server, seen: list[Finding]) -> list[Finding]:
    products = sorted({fault.product for fault in KNOWN_FAULTS}, reverse=True)
    if server.product not in products:
        return [Finding("known faults", "skipped", f"they are listed for {' and '.join(products)}")]
    known = known_faults.of(server.product, server.version)
    if not known:
        newest = "none is listed for this version"
        return [Finding("known faults", "ok", f"{newest}; {len(KNOWN_FAULTS)} are listed for others")]
    failed = {finding.check for finding in seen if finding.status in ("fail", "warn")}
    # A missing endpoint is the symptom of a version that has none.
    failed |= {"routes"} if seen[0].check in failed else set()
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
