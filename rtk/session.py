"""A notebook's handle on one inference server: sample, and get the routes with all that explains them."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from rtk import loops
from rtk._text import TokenTexts
from rtk.doctor import DoctorReport, examine
from rtk.errors import LayoutError, PayloadError, RequestRejected, ServerFailed, UnknownModel
from rtk.generator import RemoteInferenceGenerator, Server
from rtk.layout import ModelLayout
from rtk.result import GenerateChunk, RemoteGenerateResult
from rtk.trace import RouteTrace
from rtk.transport import RetryPolicy, Timeouts, Verify
from rtk.wire.forms import GENERATE, SKYRL_GENERATE

# A notebook user who mistyped the port wants to know now, not after half a minute of retries.
_ASK_ONCE = RetryPolicy(tries=1)
_ASK_TIMEOUTS = Timeouts(connect_s=20.0, total_s=20.0)
_SAMPLE_RETRY = RetryPolicy(tries=5)


@dataclass(frozen=True)
class Sample:
    """One prompt and what the model made of it.

    Attributes:
        text: the generated text.
        prompt_token_ids: the prompt's tokens.
        result: the server's answer.
        trace: the routes with their tokens and layout; None where they were not asked for.
    """

    text: str
    prompt_token_ids: list[int]
    result: RemoteGenerateResult
    trace: RouteTrace | None


class Session:
    """A connection to one model on one server, made by `rtk.connect`.

    Every request runs on a private loop in a background thread, so that `sample` blocks and `asample` is
    awaitable wherever they are called: a cell, a widget callback, a script, a coroutine of any loop.
    Interrupting the kernel, or cancelling the awaiting task, cancels the request.

    Attributes:
        url: the server's address.
        model: the model's name on the server.
        server_version: what `/version` answers.
        max_model_len: the longest sequence that the server takes, in tokens; None where it does not say.
        layout: the model's layers and routers; None where they could not be found out.
    """

    def __init__(
        self,
        generator: RemoteInferenceGenerator,
        *,
        model: str,
        server_version: str,
        max_model_len: int | None,
        layout: ModelLayout | None,
    ) -> None:
        self.url = generator.proxy_url
        self.model = model
        self.server_version = server_version
        self.max_model_len = max_model_len
        self.layout = layout
        self._generator = generator
        self._texts = TokenTexts(generator, model)
        # A cell that runs `session = rtk.connect(...)` again drops the old session without closing it.
        weakref.finalize(self, _close_in_background, generator)

    def sample(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 64,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int | None = None,
        routes: bool = True,
        on_text: Callable[[str], None] | None = None,
        source: Mapping[str, Any] | None = None,
    ) -> Sample:
        """Generate from one prompt, blocking until it is done.

        Args:
            prompt: text, which the server tokenises, or token ids.
            max_tokens: generate at most so many tokens.
            temperature: 0 takes the most probable token each time.
            top_p: sample from the smallest set of tokens that holds this much probability.
            seed: makes sampling repeatable.
            routes: whether to fetch the routed experts and build the trace.
            on_text: called with the text generated so far as it grows, in the caller's thread; once, at the
                end, where the server cannot stream routes.
            source: added to the trace's own `source`, for example {"domain": "french"}.

        Raises:
            LayoutError: routes are wanted and the model's layout is unknown; raised before sampling.
            ServerError, PayloadError, RoutesMissing: as `RemoteInferenceGenerator.generate`.
        """
        settings = _settings(max_tokens, temperature, top_p, seed)
        if on_text is None:
            return loops.background.run(self._sample(prompt, settings, routes, source, None))
        relay: loops.Relay[str] = loops.Relay()
        work = self._sample(prompt, settings, routes, source, relay.send)
        return relay.run(loops.background, work, on_text)

    async def asample(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 64,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int | None = None,
        routes: bool = True,
        on_text: Callable[[str], None] | None = None,
        source: Mapping[str, Any] | None = None,
    ) -> Sample:
        """As `sample`, awaitable. on_text is called on the awaiting loop, whose handler gets what it raises."""
        settings = _settings(max_tokens, temperature, top_p, seed)
        send = None
        if on_text is not None:
            loop, callback = asyncio.get_running_loop(), on_text

            def send(text: str) -> None:
                loop.call_soon_threadsafe(callback, text)

        return await loops.background.arun(self._sample(prompt, settings, routes, source, send))

    def tokenize(self, text: str) -> list[int]:
        """The server's token ids for a text."""
        return loops.background.run(self._texts.encode(text))

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """The server's text for token ids."""
        return loops.background.run(self._texts.decode(token_ids))

    def doctor(self) -> DoctorReport:
        """Whether the server is fit to give routes, in a few short requests; see `rtk.doctor.examine`."""
        return loops.background.run(examine(self))

    async def adoctor(self) -> DoctorReport:
        """As `doctor`, awaitable."""
        return await loops.background.arun(examine(self))

    def close(self) -> None:
        """Close the connections. Never raises."""
        loops.background.run(self._generator.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        layout = self.layout
        shape = (
            "layout unknown"
            if layout is None
            else f"{layout.num_layers} layers, {len(layout.moe_layers)} of them MoE, "
            f"top-{layout.top_k} of {layout.num_experts} experts"
        )
        return f"<rtk session: {self.model!r} ({shape}) at {self.url}, version {self.server_version}>"

    async def _sample(
        self,
        prompt: str | Sequence[int],
        settings: dict[str, Any],
        routes: bool,
        source: Mapping[str, Any] | None,
        send_text: Callable[[str], None] | None,
    ) -> Sample:
        if routes and self.layout is None:
            raise LayoutError(
                f"the layout of {self.model!r} is unknown here, so its routes cannot be read. Connect with "
                "layout=rtk.ModelLayout.from_config('path/to/config.json'), or sample with routes=False"
            )
        prompt_ids = await self._texts.encode(prompt) if isinstance(prompt, str) else [int(t) for t in prompt]
        if send_text is None:
            result = await self._generate(prompt_ids, settings, routes, None)
        else:
            result = await self._generate_with_text(prompt_ids, settings, routes, send_text)
        text = await self._texts.decode(result.token_ids)
        trace = await self._trace(prompt_ids, result, settings, source or {}) if routes else None
        return Sample(text=text, prompt_token_ids=prompt_ids, result=result, trace=trace)

    async def _generate(
        self,
        prompt_ids: list[int],
        settings: dict[str, Any],
        routes: bool,
        on_chunk: Callable[[GenerateChunk], None] | None,
    ) -> RemoteGenerateResult:
        return await self._generator.generate(prompt_ids, settings, routed_experts=routes, on_chunk=on_chunk)

    async def _generate_with_text(
        self, prompt_ids: list[int], settings: dict[str, Any], routes: bool, send_text: Callable[[str], None]
    ) -> RemoteGenerateResult:
        """Turn tokens into text beside the stream; where that falls behind, texts in between are skipped."""
        if not self._generator.can_stream(routes):
            result = await self._generate(prompt_ids, settings, routes, None)
            send_text(await self._texts.decode(result.token_ids))
            return result
        token_ids: list[int] = []
        grew = asyncio.Event()

        def collect(chunk: GenerateChunk) -> None:
            token_ids.extend(chunk.token_ids)
            grew.set()

        async def show() -> None:
            while True:
                await grew.wait()
                grew.clear()
                send_text(await self._texts.decode(list(token_ids)))

        showing = asyncio.create_task(show())
        try:
            result = await self._generate(prompt_ids, settings, routes, collect)
        finally:
            showing.cancel()
            await asyncio.wait([showing])
        if not showing.cancelled():
            showing.result()  # a failure to show must surface
        send_text(await self._texts.decode(result.token_ids))
        return result

    async def _trace(
        self,
        prompt_ids: list[int],
        result: RemoteGenerateResult,
        settings: dict[str, Any],
        source: Mapping[str, Any],
    ) -> RouteTrace:
        token_ids = prompt_ids + result.token_ids
        assert self.layout is not None and result.routed_experts is not None
        return RouteTrace(
            token_ids=token_ids,  # type: ignore[arg-type]
            token_text=tuple(await self._texts.each(token_ids)),
            prompt_tokens=len(prompt_ids),
            routed_experts=result.routed_experts,
            layout=self.layout,
            logprobs=result.logprobs,  # type: ignore[arg-type]
            source={
                "url": self.url,
                "server_version": self.server_version,
                "model": self.model,
                "sampled_at": datetime.now(UTC).isoformat(timespec="seconds"),
                "sampling_params": settings,
                "stop_reason": result.stop_reason,
                **source,
            },
        )


def _close_in_background(generator: RemoteInferenceGenerator) -> None:
    # Garbage may be collected in any thread, the loop's own too, so this must not wait.
    loops.background.submit(generator.aclose())


def connect(
    url: str,
    *,
    model: str | None = None,
    layout: ModelLayout | None = None,
    server: Server | None = None,
    api_key: str | None = None,
    headers: Mapping[str, str] | None = None,
    retry: RetryPolicy = _SAMPLE_RETRY,
    timeouts: Timeouts = Timeouts(),
    verify: Verify = True,
    http_proxy: str | None = None,
) -> Session:
    """Connect to a running server, asking it at once for its version and models.

    Args:
        url: the server's address, for example "http://127.0.0.1:8000".
        model: the model's name there; may be left out where the server has only one.
        layout: the model's layers and routers. Left out, it is read from the model's config where the
            server names a folder that this machine can read.
        server: see `RemoteInferenceGenerator`. Left out, it is found out by the routes that the server has:
            SkyRL's endpoint, vLLM's generate, SGLang's model info, and else the OpenAI completions.
        api_key, headers, retry, timeouts, verify, http_proxy: as for `RemoteInferenceGenerator`; retry and
            timeouts count for sampling. Connecting asks once, and waits 20 s for each answer.

    Raises:
        ServerUnreachable: nothing answers there; ServerTimeout where something listens and does not answer.
        RequestRejected, ServerFailed, PayloadError: what answers is no inference server, or refuses.
        UnknownModel: the server does not have that model, or has several and none was named.
        LayoutError: the model's config is unreadable, or is of a model without experts.
    """
    generator = RemoteInferenceGenerator(
        url,
        model,
        api_key=api_key,
        headers=headers,
        retry=retry,
        timeouts=timeouts,
        verify=verify,
        http_proxy=http_proxy,
    )
    return loops.background.run(_connect(generator, layout, server))


async def _connect(
    generator: RemoteInferenceGenerator, layout: ModelLayout | None, server: Server | None
) -> Session:
    try:
        models = await _ask(generator, "/v1/models")
        card = _choose_model(models, generator.model_name, generator.proxy_url)
        version, kind = await asyncio.gather(_version(generator), _kind(generator, server))
        generator.server = kind
    except BaseException:
        await generator.aclose()
        raise
    generator.model_name = card["id"]
    generator.layout = layout or _layout_of(card)
    max_model_len = card.get("max_model_len")
    return Session(
        generator,
        model=card["id"],
        server_version=version,
        max_model_len=max_model_len if isinstance(max_model_len, int) else None,
        layout=generator.layout,
    )


async def _ask(generator: RemoteInferenceGenerator, path: str) -> dict[str, Any]:
    return await generator.request("GET", path, retry=_ASK_ONCE, timeouts=_ASK_TIMEOUTS)


async def _version(generator: RemoteInferenceGenerator) -> str:
    try:
        answer = await _ask(generator, "/version")
    except RequestRejected:
        return "unknown"  # proxies often serve the model routes alone
    return str(answer.get("version", "unknown"))


async def _kind(generator: RemoteInferenceGenerator, known: Server | None) -> Server:
    """Which form of generate request the server takes.

    A path that takes POST alone answers a GET with 405; one that does not exist, with 404.
    """
    if known is not None:
        return known
    paths: dict[Server, str] = {"skyrl": SKYRL_GENERATE, "vllm": GENERATE, "sglang": "/get_model_info"}
    there = await asyncio.gather(*(_exists(generator, path) for path in paths.values()))
    return next((server for server, exists in zip(paths, there, strict=True) if exists), "completions")


async def _exists(generator: RemoteInferenceGenerator, path: str) -> bool:
    try:
        await _ask(generator, path)
    except RequestRejected as error:
        return error.status == 405
    except (ServerFailed, PayloadError):
        return False
    return True


def _choose_model(models: Mapping[str, Any], wanted: str | None, url: str) -> Mapping[str, Any]:
    data = models.get("data")
    cards = [c for c in data if isinstance(c, dict) and "id" in c] if isinstance(data, list) else []
    if not cards:
        raise PayloadError(f"{url}/v1/models names no models; is this an inference server?")
    names = ", ".join(repr(card["id"]) for card in cards)
    if wanted is None:
        if len(cards) > 1:
            raise UnknownModel(f"{url} serves {names}; choose one with model=...", url=url)
        return cards[0]
    for card in cards:
        if card["id"] == wanted:
            return card
    raise UnknownModel(f"{url} has no model {wanted!r}; it serves {names}", url=url)


def _layout_of(card: Mapping[str, Any]) -> ModelLayout | None:
    root = card.get("root")
    if not isinstance(root, str) or not (Path(root) / "config.json").is_file():
        return None  # a hub name, or a folder of the server's own machine
    return ModelLayout.from_config(root)


def _settings(max_tokens: int, temperature: float, top_p: float, seed: int | None) -> dict[str, Any]:
    settings = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "logprobs": 0,  # of the sampled token alone
    }
    return settings if seed is None else settings | {"seed": seed}
