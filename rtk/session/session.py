"""A notebook's handle on one inference server: sample, and get the routes with all that explains them."""

from __future__ import annotations

import asyncio
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Self, TypeVar, Unpack

from rtk import loops
from rtk.client.generator import RemoteInferenceGenerator
from rtk.client.result import GenerateChunk, RemoteGenerateResult
from rtk.client.sampling_params import settings
from rtk.doctor import DoctorReport, Target, examine
from rtk.errors import LayoutError
from rtk.layout.model_layout import ModelLayout
from rtk.session.many import Job, ManySamples, SampleFailure, jobs_for
from rtk.session.many import run as run_many
from rtk.session.options import ManyOptions, SampleOptions, split, takes
from rtk.session.progress import Progress
from rtk.session.prompts import PlainPrompt, Prompt, plain, plain_list
from rtk.session.sample import Sample
from rtk.session.samples_file import SamplesFile
from rtk.session.token_texts import TokenTexts
from rtk.trace.route_trace import RouteTrace

T = TypeVar("T")


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
        unfinished: what the last `sample_many` had finished when it was interrupted; None after one that ended.
    """

    def __init__(
        self,
        generator: RemoteInferenceGenerator,
        *,
        model: str,
        server_version: str,
        root: str | None,
        max_model_len: int | None,
        layout: ModelLayout | None,
    ) -> None:
        self.url = generator.proxy_url
        self.model = model
        self.server_version = server_version
        self._root = root
        self.max_model_len = max_model_len
        self.layout = layout
        self.unfinished: ManySamples | None = None
        self._generator = generator
        self._texts = TokenTexts(generator, model)
        # A cell that runs `session = rtk.connect(...)` again drops the old session without closing it.
        weakref.finalize(self, _close_in_background, generator)

    @takes(SampleOptions)
    def sample(self, prompt: Prompt, **options: Unpack[SampleOptions]) -> Sample:
        """Generate from one prompt, blocking until it is done.

        Args:
            prompt: text, which the server tokenises; token ids; or chat messages, to which the server applies its
                chat template: [{"role": "user", "content": "..."}].
            routes: whether to fetch the routed experts and build the trace.
            on_text: called with the text generated so far as it grows, in the caller's thread; once, at the
                end, where the server cannot stream routes.
            source: added to the trace's own `source`, for example {"domain": "french"}.
            max_tokens, temperature, ...: sampling parameters, see `rtk.client.sampling_params.SamplingParams`.

        Raises:
            PromptError: the prompt has none of these forms.
            LayoutError: routes are wanted and the model's layout is unknown; raised before sampling.
            ServerError, PayloadError, RoutesMissing: as `RemoteInferenceGenerator.generate`.
        """
        call, params = split(options, SampleOptions)
        chosen, asked = settings(params), plain(prompt)
        routes, on_text, source = call["routes"], call["on_text"], call["source"]
        if on_text is None:
            return loops.background.run(self._sample(asked, chosen, routes, source, None))
        relay: loops.Relay[str] = loops.Relay()
        work = self._sample(asked, chosen, routes, source, relay.send)
        return relay.run(loops.background, work, on_text)

    @takes(SampleOptions)
    async def asample(self, prompt: Prompt, **options: Unpack[SampleOptions]) -> Sample:
        """As `sample`, awaitable. on_text is called on the awaiting loop, whose handler gets what it raises."""
        call, params = split(options, SampleOptions)
        chosen, asked = settings(params), plain(prompt)
        send = None if call["on_text"] is None else _on_this_loop(call["on_text"])
        return await loops.background.arun(self._sample(asked, chosen, call["routes"], call["source"], send))

    @takes(ManyOptions)
    def sample_many(self, prompts: Iterable[Prompt], **options: Unpack[ManyOptions]) -> ManySamples:
        """Generate from many prompts, blocking until all are done or have failed.

        A failure stops none of the others. An interrupt cancels what is in flight; what was finished is kept in
        `session.unfinished` and, with `out`, in the file.

        Args:
            prompts: each as `sample` takes it.
            n: samples of each prompt. Each is a request of its own, so that every server can do it and nothing
                but the requests in flight can be lost. With a seed, sample i has seed + i.
            concurrency: how many requests are in flight at once.
            out: a file to which each sample is added the moment it is finished. A later call with the same file and
                settings asks only for what is not in it. Read it with `rtk.read_samples`.
            routes: whether to fetch the routed experts and build the traces.
            progress: whether to show a bar, in a terminal and in a notebook.
            on_sample: called with each sample or failure as it comes, in the caller's thread.
            source: as for `sample`; one for all prompts, or a list with one for each.
            max_tokens, temperature, ...: sampling parameters, see `rtk.client.sampling_params.SamplingParams`.

        Returns:
            the samples, in the order of the prompts, with the failures beside them.

        Raises:
            PromptError: a prompt has none of the forms; raised, with its index, before anything is sent.
            ValueError: n or concurrency is below 1, or source has another length than prompts.
            LayoutError: routes are wanted and the model's layout is unknown.
            SamplesFileError: out is of another kind, damaged, in use, or holds samples with other settings.
        """
        relay: loops.Relay[Sample | SampleFailure] = loops.Relay()
        call, result, jobs = self._many(prompts, options)
        work = run_many(
            self, jobs, result, concurrency=call["concurrency"], routes=call["routes"], send=relay.send
        )
        with Progress(result, call["on_sample"], shown=call["progress"]) as bar:
            relay.run(loops.background, work, bar.advance)
        self.unfinished = None
        return result

    @takes(ManyOptions)
    async def asample_many(self, prompts: Iterable[Prompt], **options: Unpack[ManyOptions]) -> ManySamples:
        """As `sample_many`, awaitable. on_sample is called on the awaiting loop, whose handler gets what it raises."""
        call, result, jobs = self._many(prompts, options)
        with Progress(result, call["on_sample"], shown=call["progress"]) as bar:
            send = _on_this_loop(bar.advance)
            work = run_many(
                self, jobs, result, concurrency=call["concurrency"], routes=call["routes"], send=send
            )
            await loops.background.arun(work)
        self.unfinished = None
        return result

    def tokenize(self, text: str) -> list[int]:
        """The server's token ids for a text."""
        return loops.background.run(self._texts.encode(text))

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """The server's text for token ids."""
        return loops.background.run(self._texts.decode(token_ids))

    def doctor(self) -> DoctorReport:
        """Whether the server is fit to give routes, in a few short requests; see `rtk.doctor.examine`."""
        return loops.background.run(examine(self._target()))

    async def adoctor(self) -> DoctorReport:
        """As `doctor`, awaitable."""
        return await loops.background.arun(examine(self._target()))

    def _target(self) -> Target:
        return Target(self._generator, self.model, self.layout, self.max_model_len, self._root)

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

    def _many(
        self,
        prompts: Iterable[Prompt],
        options: Mapping[str, Any],
    ) -> tuple[dict[str, Any], ManySamples, list[Job]]:
        """Everything that can be wrong is said here, before anything is sent."""
        call, params = split(options, ManyOptions)
        n, concurrency, out, source = call["n"], call["concurrency"], call["out"], call["source"]
        routes = call["routes"]
        if n < 1 or concurrency < 1:
            raise ValueError(f"n is {n} and concurrency {concurrency}; each is at least 1")
        self._need_layout(routes)
        chosen, asked = settings(params), plain_list(prompts)
        sources = [source or {}] * len(asked) if source is None or isinstance(source, Mapping) else source
        if len(sources) != len(asked):
            raise ValueError(f"source has {len(sources)} entries for {len(asked)} prompts")
        jobs = jobs_for(asked, n, chosen, sources)
        file = None
        if out is not None:
            layout = None if self.layout is None else self.layout.to_dict()
            file = SamplesFile(
                out, {"model": self.model, "layout": layout, "sampling_params": chosen, "routes": routes}
            )
        result = ManySamples(jobs, file)
        self.unfinished = result
        return call, result, jobs

    def _need_layout(self, routes: bool) -> None:
        if routes and self.layout is None:
            raise LayoutError(
                f"the layout of {self.model!r} is unknown here, so its routes cannot be read. Connect with "
                "layout=rtk.ModelLayout.from_config('path/to/config.json'), or sample with routes=False"
            )

    async def _sample(
        self,
        prompt: PlainPrompt,
        settings: dict[str, Any],
        routes: bool,
        source: Mapping[str, Any] | None,
        send_text: Callable[[str], None] | None,
    ) -> Sample:
        self._need_layout(routes)
        prompt_ids = await self._texts.encode_prompt(prompt)
        return await self._sample_tokens(prompt_ids, settings, routes, source, send_text)

    async def _sample_tokens(
        self,
        prompt_ids: list[int],
        settings: dict[str, Any],
        routes: bool,
        source: Mapping[str, Any] | None,
        send_text: Callable[[str], None] | None = None,
    ) -> Sample:
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
                **_versions(result),
                **source,
            },
        )


def _versions(result: RemoteGenerateResult) -> dict[str, Any]:
    """Which weights sampled which generated tokens, for a trace's source; nothing where the server does not say."""
    if result.weight_versions is None:
        return {}
    return {"weight_versions": [dataclasses.asdict(span) for span in result.weight_versions]}


def _on_this_loop(callback: Callable[[T], None]) -> Callable[[T], None]:
    """The callback, called on the running loop from whichever thread."""
    loop = asyncio.get_running_loop()

    def send(event: T) -> None:
        loop.call_soon_threadsafe(callback, event)

    return send


def _close_in_background(generator: RemoteInferenceGenerator) -> None:
    # Garbage may be collected in any thread, the loop's own too, so this must not wait.
    loops.background.submit(generator.aclose())
