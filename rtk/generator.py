"""The single-request, raw-token HTTP path to an inference server."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self, get_args

from rtk.errors import (
    LayoutError,
    PayloadError,
    RoutesMissing,
)
from rtk.layout import ModelLayout
from rtk.result import GenerateChunk, RemoteGenerateResult
from rtk.transport import RetryPolicy, Timeouts, Transport, Verify
from rtk.wire import forms, routes

Server = Literal["vllm", "completions", "skyrl", "sglang"]
_SERVERS = get_args(Server)


class RemoteInferenceGenerator:
    """Sends one prompt of token ids and returns what was generated; SkyRL's generator, for any loop.

    The HTTP session belongs to the event loop that runs, so that a generator may be used on one loop after the
    other; see `rtk.transport.Transport`. A generator pickles without it.

    Args:
        proxy_url: base address of the server, or of the proxy in front of several.
        model_name: sent as `model`; None lets the server use its only one.
        server: "vllm" asks `/inference/v1/generate` for everything; "completions" asks `/v1/completions`,
            for a vLLM without --enable-scale-out; "skyrl" asks `/skyrl/v1/generate` when routed experts
            are wanted, as SkyRL's own client does, and vLLM's endpoint otherwise; "sglang" asks
            `/generate`. See `can_stream` for what they stream.
        layout: the model's layers; SGLang's routes need it, since they come without their shape.
        api_key: sent as a bearer token.
        headers: sent with each request.
        retry: when a request is sent again.
        timeouts: limits on time.
        verify: how a server's TLS certificate is verified, and http_proxy: a forward proxy on the way to it; see
            `rtk.transport.Transport`.
    """

    def __init__(
        self,
        proxy_url: str,
        model_name: str | None = None,
        *,
        server: Server = "vllm",
        layout: ModelLayout | None = None,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        retry: RetryPolicy = RetryPolicy(),
        timeouts: Timeouts = Timeouts(),
        verify: Verify = True,
        http_proxy: str | None = None,
    ) -> None:
        if server not in _SERVERS:
            raise ValueError(f"server is {server!r}; it is one of {', '.join(map(repr, _SERVERS))}")
        self.proxy_url = proxy_url.rstrip("/")
        self.model_name = model_name
        self.server: Server = server
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
        """
        form = self._form(routed_experts)
        if on_chunk is not None and not self.can_stream(routed_experts):
            raise ValueError(
                f"server={self.server!r} cannot stream this: vLLM's completions send no routes in a stream, and "
                "SGLang's streams are not read here. Leave out on_chunk"
            )
        body = form.body(token_ids, sampling_params, routed_experts=routed_experts)
        # Servers reject some of these as null, so what is not set is not sent.
        optional = {"model": model or self.model_name, "cache_salt": cache_salt, "features": features}
        body |= {name: value for name, value in optional.items() if value is not None}
        headers = {} if session_id is None else {"X-Session-ID": session_id}
        if on_chunk is None:
            payload: Mapping[str, Any] = await self.request("POST", form.path, body, headers=headers)
            choice = form.choice(payload)
            chunk = form.chunk(choice)
        else:
            chunk, choice, payload = await self._stream(form, body, headers, on_chunk)
        return RemoteGenerateResult(
            token_ids=chunk.token_ids,
            logprobs=chunk.logprobs,
            stop_reason=str(form.finish_reason(choice)),
            routed_experts=self._routes(form, payload, choice, len(token_ids), len(chunk.token_ids))
            if routed_experts
            else None,
            request_id=form.request_id(payload),
        )

    def can_stream(self, routed_experts: bool) -> bool:
        """Whether `generate` takes on_chunk, with routes or without."""
        return self.server in ("vllm", "skyrl") or (self.server == "completions" and not routed_experts)

    def _form(self, routed_experts: bool) -> forms.Form:
        if self.server == "sglang":
            if routed_experts and self.layout is None:
                raise LayoutError(
                    "SGLang sends routes without their shape: give the generator the model's layout, for example "
                    "layout=rtk.ModelLayout.from_config('path/to/config.json')"
                )
            return forms.SglangGenerate(self.layout)
        if self.server == "completions":
            return forms.Completions()
        if self.server == "skyrl" and routed_experts:
            return forms.VllmGenerate(forms.SKYRL_GENERATE)
        return forms.VllmGenerate()

    def _routes(
        self,
        form: forms.Form,
        payload: Mapping[str, Any],
        choice: Mapping[str, Any],
        prompt_tokens: int,
        generated_tokens: int,
    ) -> routes.Routes:
        decoded = form.routed_experts(payload, choice)
        if decoded is None and form.finish_reason(choice) == "abort":
            raise RoutesMissing(
                f"{self.proxy_url} aborted the request after {generated_tokens} tokens and sent no routed experts "
                "for them, as vLLM does in a stream or before it began. Send it again once the server goes on"
            )
        if decoded is None:
            raise RoutesMissing(
                f"{self.proxy_url} sent no routed experts. Start vLLM or SGLang with --enable-return-routed-experts "
                "(vLLM with --enable-scale-out too), the embedded server without --no-routed-experts; a model "
                "without MoE layers has none to send"
            )
        expected = prompt_tokens + generated_tokens - 1
        if len(decoded) != expected:
            raise PayloadError(
                f"{self.proxy_url} sent routes of {len(decoded)} tokens for {prompt_tokens} prompt and "
                f"{generated_tokens} generated tokens; {expected} rows are expected, since the last token was never "
                "forwarded"
            )
        return decoded

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

    async def _stream(
        self,
        form: forms.Form,
        body: Mapping[str, Any],
        headers: Mapping[str, str],
        on_chunk: Callable[[GenerateChunk], None],
    ) -> tuple[GenerateChunk, Mapping[str, Any], Mapping[str, Any]]:
        url = self.proxy_url + form.path
        token_ids: list[int] = []
        logprobs: list[float] | None = None
        event: Mapping[str, Any] = {}
        choice: Mapping[str, Any] | None = None
        async for event in self._transport.events(url, {**body, "stream": True}, headers, retry=self.retry):
            choice = form.choice(event)
            chunk = form.chunk(choice)
            token_ids += chunk.token_ids
            if chunk.logprobs is not None:
                logprobs = (logprobs or []) + chunk.logprobs
            on_chunk(chunk)
        if choice is None or form.finish_reason(choice) is None:
            raise PayloadError(
                f"{url}: the stream ended after {len(token_ids)} tokens without a finish reason. vLLM 0.30 may end "
                "one so when it aborts the request, as a pause does"
            )
        if logprobs is not None and len(logprobs) != len(token_ids):
            raise PayloadError(
                f"{url}: the stream brought {len(logprobs)} logprobs for {len(token_ids)} tokens"
            )
        return GenerateChunk(token_ids, logprobs), choice, event

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
