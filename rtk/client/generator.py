"""The single-request, raw-token HTTP path to an inference server."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from rtk.client.reading import Reading
from rtk.client.result import GenerateChunk, RemoteGenerateResult
from rtk.client.sampling_params import check_finite
from rtk.client.servers import Prompt, Route, Server, by_name
from rtk.client.transport import RetryPolicy, Timeouts, Transport, Verify
from rtk.layout.model_layout import ModelLayout


class RemoteInferenceGenerator:
    """Sends one prompt of token ids and returns what was generated; SkyRL's generator, for any loop.

    The HTTP session belongs to the event loop that runs, so that a generator may be used on one loop after the
    other; see `rtk.client.transport.Transport`. A generator pickles without it.

    Args:
        proxy_url: base address of the server, or of the proxy in front of several.
        model_name: sent as `model`; None lets the server use its only one.
        server: "vllm" asks `/inference/v1/generate` for everything; "completions" asks `/v1/completions`,
            for a vLLM without --enable-scale-out; "skyrl" asks `/skyrl/v1/generate` when routed experts
            are wanted, as SkyRL's own client does, and vLLM's endpoint otherwise; "sglang" asks
            `/generate`; "embedded" is rtk's own. Each is a file of `rtk.client.servers`, and an object of one of its
            classes may be given too. See `can_stream` for what they stream.
        layout: the model's layers; SGLang's routes need it, since they come without their shape.
        api_key: sent as a bearer token.
        headers: sent with each request.
        retry: when a request is sent again.
        timeouts: limits on time.
        verify: how a server's TLS certificate is verified, and http_proxy: a forward proxy on the way to it; see
            `rtk.client.transport.Transport`.
    """

    def __init__(
        self,
        proxy_url: str,
        model_name: str | None = None,
        *,
        server: str | Server = "vllm",
        layout: ModelLayout | None = None,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        retry: RetryPolicy = RetryPolicy(),
        timeouts: Timeouts = Timeouts(),
        verify: Verify = True,
        http_proxy: str | None = None,
    ) -> None:
        self.proxy_url = proxy_url.rstrip("/")
        self.model_name = model_name
        self.server = server if isinstance(server, Server) else by_name(server)()
        self.layout = layout
        self.retry = retry
        bearer = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._transport = Transport(
            self.proxy_url,
            headers={**bearer, **(headers or {})},
            timeouts=timeouts,
            verify=verify,
            http_proxy=http_proxy,
        )

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        *,
        routed_experts: bool = False,
        routed_experts_start: int = 0,
        session_id: str | None = None,
        cache_salt: str | None = None,
        features: Mapping[str, Any] | None = None,
        model: str | None = None,
        on_chunk: Callable[[GenerateChunk], None] | None = None,
    ) -> RemoteGenerateResult:
        """Generate one sequence.

        Args:
            token_ids: the prompt, as the model's token ids.
            sampling_params: vLLM's sampling parameters (`max_tokens`, `temperature`, `logprobs`, ...), whatever
                the server; SGLang is sent its own names for them.
            routed_experts: whether the routes must come back.
            routed_experts_start: the first token whose routes are wanted, for a turn whose beginning is known. Where a
                server ignores it, which its row count tells, the rows asked for are kept and a UserWarning says so.
            session_id: sent as X-Session-ID, for routers that keep a conversation on one server.
            cache_salt: keeps the prefix cache apart from that of other salts.
            features: multi-modal inputs, passed on as they are.
            model: for this call, instead of model_name; for example the name of a loaded LoRA adapter.
            on_chunk: called with each piece as it is generated; the answer is then streamed.

        Raises:
            RequestRejected: the server refused the request; the message is the server's own.
            ServerFailed: the server failed, and went on failing.
            ServerUnreachable: there was no connection, or it broke; after all retries.
            ServerTimeout: a limit of the timeouts has passed.
            PayloadError: the answer is not of the documented form.
            RoutesMissing: routes were asked for, and the answer has none.
            ValueError: the server cannot stream this, or has no such input.
        """
        (result,) = await self.generate_n(
            token_ids,
            sampling_params,
            n=1,
            routed_experts=routed_experts,
            routed_experts_start=routed_experts_start,
            session_id=session_id,
            cache_salt=cache_salt,
            features=features,
            model=model,
            on_chunk=on_chunk,
        )
        return result

    async def generate_n(
        self,
        token_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        *,
        n: int,
        routed_experts: bool = False,
        routed_experts_start: int = 0,
        session_id: str | None = None,
        cache_salt: str | None = None,
        features: Mapping[str, Any] | None = None,
        model: str | None = None,
        on_chunk: Callable[[GenerateChunk], None] | None = None,
    ) -> list[RemoteGenerateResult]:
        """Generate n sequences from one prompt, in one request. Arguments and errors are those of `generate`.

        A chunk says by its `index` which sequence it belongs to. vLLM 0.30's generate route fails with an error of
        its own in mid-stream for n > 1; whole, it answers. A server that has no such request (SGLang, SkyRL) is sent n
        of them, with seed + i where there is a seed, as vLLM seeds them.
        """
        route = self.server.generate(self.layout, routed_experts=routed_experts)
        self._check_stream(route, routed_experts, on_chunk)
        if features is not None and not route.features:
            raise ValueError(f"{route.path} takes no features; only vLLM's generate route does")
        if n > 1 and not route.several:
            return await self._each_alone(
                token_ids,
                sampling_params,
                n,
                routed_experts=routed_experts,
                routed_experts_start=routed_experts_start,
                session_id=session_id,
                cache_salt=cache_salt,
                features=features,
                model=model,
            )
        return await self.ask(
            route,
            token_ids,
            sampling_params,
            n=n,
            prompt_tokens=len(token_ids),
            routed_experts=routed_experts,
            start=routed_experts_start,
            session_id=session_id,
            cache_salt=cache_salt,
            features=features,
            model=model,
            on_chunk=on_chunk,
        )

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: Mapping[str, Any],
        *,
        n: int = 1,
        routed_experts: bool = False,
        routed_experts_start: int = 0,
        session_id: str | None = None,
        cache_salt: str | None = None,
        model: str | None = None,
        on_chunk: Callable[[GenerateChunk], None] | None = None,
    ) -> list[RemoteGenerateResult]:
        """Generate n answers to a chat through `/v1/chat/completions`; the server applies its chat template.

        The results' `prompt_token_ids` are what the template made of the messages.

        Args:
            messages: OpenAI's, [{"role": "user", "content": "..."}].
            n: how many answers.
            sampling_params, ...: as for `generate`.

        Raises:
            RequestRejected: the model has no chat template, for example; and the other errors of `generate`.
            ValueError: the server is SGLang, whose chats name no token ids; or routes are wanted in a stream.
        """
        route = self.server.chat(self.layout)
        self._check_stream(route, routed_experts, on_chunk)
        return await self.ask(
            route,
            messages,
            sampling_params,
            n=n,
            prompt_tokens=None,
            routed_experts=routed_experts,
            start=routed_experts_start,
            session_id=session_id,
            cache_salt=cache_salt,
            model=model,
            on_chunk=on_chunk,
        )

    async def _each_alone(
        self, token_ids: Sequence[int], sampling_params: Mapping[str, Any], n: int, **options: Any
    ) -> list[RemoteGenerateResult]:
        """One request a sequence, where the route has no better way; sequence i has seed + i, as vLLM seeds them."""
        seed = sampling_params.get("seed")
        each = [
            sampling_params if seed is None else {**sampling_params, "seed": seed + index}
            for index in range(n)
        ]
        return await asyncio.gather(*(self.generate(token_ids, params, **options) for params in each))

    def can_stream(self, routed_experts: bool) -> bool:
        """Whether `generate` takes on_chunk, with routes or without."""
        return self.server.generate(self.layout, routed_experts=routed_experts).can_stream(routed_experts)

    def _check_stream(self, route: Route, routed_experts: bool, on_chunk: object) -> None:
        if on_chunk is not None and not route.can_stream(routed_experts):
            what = "routes in a stream" if route.streams else "streams that are read here"
            raise ValueError(
                f"{route.path} of server={self.server.name!r} sends no {what}: leave out on_chunk"
            )

    async def ask(
        self,
        route: Route,
        prompt: Prompt,
        sampling_params: Mapping[str, Any],
        *,
        prompt_tokens: int | None,
        n: int = 1,
        routed_experts: bool = False,
        start: int = 0,
        session_id: str | None = None,
        cache_salt: str | None = None,
        features: Mapping[str, Any] | None = None,
        model: str | None = None,
        on_chunk: Callable[[GenerateChunk], None] | None = None,
    ) -> list[RemoteGenerateResult]:
        """Ask one route, whichever the server would be asked by. Arguments and errors are those of `generate_n`.

        Args:
            route: one of the server's `routes`.
            prompt: token ids; for a chat route messages.
            prompt_tokens: how many tokens the prompt has; None where the server has to say.
        """
        if n < 1 or start < 0:
            raise ValueError(f"n is {n} and routed_experts_start {start}; they are at least 1 and 0")
        check_finite(sampling_params)
        params = {**sampling_params, "n": n} if n > 1 else sampling_params
        body = route.body(prompt, params, routed_experts=routed_experts, start=start)
        # Servers reject some of these as null, so what is not set is not sent.
        extras = {"model": model or self.model_name, route.cache_salt: cache_salt, "features": features}
        body |= {name: value for name, value in extras.items() if value is not None}
        headers = session_header(session_id)
        reading = Reading(
            route,
            self.proxy_url,
            advice=self.server.enable_routes(),
            n=n,
            prompt_tokens=prompt_tokens,
            routed_experts=routed_experts,
            start=start,
            top_logprobs=bool(sampling_params.get("logprobs")),
        )
        url = self.proxy_url + route.path
        if on_chunk is None:
            return reading.whole(
                await self._transport.json("POST", url, body, headers, retry=self.retry, advice=route.advice)
            )
        streamed = {**body, "stream": True}
        async for event in self._transport.events(
            url, streamed, headers, retry=self.retry, advice=route.advice
        ):
            reading.piece(event, on_chunk)
        return reading.end()

    async def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        retry: RetryPolicy | None = None,
        timeouts: Timeouts | None = None,
    ) -> dict[str, Any]:
        """Send one request and return the JSON object that came back.

        Args:
            method: "GET" or "POST".
            path: of the endpoint, for example "/tokenize".
            body: sent as JSON.
            headers: beside those of the generator.
            retry: instead of the generator's own.
            timeouts: instead of the generator's own.

        Raises:
            RequestRejected, ServerFailed, ServerUnreachable, ServerTimeout, PayloadError: as `generate`.
        """
        return await self._transport.json(
            method, self.proxy_url + path, body, headers, retry=retry or self.retry, timeouts=timeouts
        )

    async def aclose(self) -> None:
        """Close the HTTP session. Never raises: a failure while closing is logged."""
        await self._transport.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __getstate__(self) -> dict[str, Any]:
        # A copy has connections of its own, as one that was pickled has.
        return {**self.__dict__, "_transport": copy.copy(self._transport)}


def session_header(session_id: str | None) -> dict[str, str]:
    """The header by which routers keep a conversation on one server; raises ValueError for an empty id."""
    if session_id == "":
        raise ValueError("session_id is empty; leave it out where there is no session")
    return {} if session_id is None else {"X-Session-ID": session_id}
