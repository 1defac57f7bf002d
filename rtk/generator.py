"""The single-request, raw-token HTTP path to an inference server."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

import aiohttp

from rtk import _receive
from rtk.errors import (
    LayoutError,
    PayloadError,
    RequestRejected,
    RoutesMissing,
    ServerFailed,
    ServerUnreachable,
)
from rtk.layout import ModelLayout
from rtk.result import GenerateChunk, RemoteGenerateResult
from rtk.wire import body as wire_body
from rtk.wire import forms, routes

_log = logging.getLogger(__name__)

Server = Literal["vllm", "completions", "skyrl", "sglang"]
_SERVERS = get_args(Server)
# uvicorn closes an idle connection after 5 s; giving it up sooner ourselves means never writing a
# request into a socket that the server has just closed.
_KEEP_ALIVE_S = 4.0
# Other lines of a stream of server-sent events; what is none of them was garbled on its way.
_OTHER_FIELDS = (b":", b"event:", b"id:", b"retry:")

# Sessions that a forked child got from its parent, kept so that nothing ever closes them there.
_inherited: list[aiohttp.ClientSession] = []


@dataclass(frozen=True)
class RetryPolicy:
    """When and how often a request is sent again.

    Retried are a dropped or refused connection and a body that is no JSON on a 2xx or 5xx status, which
    is what a server in restart, or a proxy in front of it, answers. A 4xx is final, and so is a stream
    of which a part has arrived.

    Attributes:
        tries: how often a request is sent at most; SkyRL's client uses 30.
        wait_s: seconds between two tries.
    """

    tries: int = 30
    wait_s: float = 1.0


class RemoteInferenceGenerator:
    """Sends one prompt of token ids and returns what was generated; SkyRL's generator, for any loop.

    The HTTP session is made on first use, and made again when the running event loop has changed (as it
    does between two `asyncio.run` calls) or the session was closed. A generator pickles without it.

    Args:
        proxy_url: base address of the server, or of the proxy in front of several.
        model_name: sent as `model`; None lets the server use its only one.
        server: "vllm" asks `/inference/v1/generate` for everything; "completions" asks `/v1/completions`,
            for a vLLM without --enable-scale-out; "skyrl" asks `/skyrl/v1/generate` when routed experts
            are wanted, as SkyRL's own client does, and vLLM's endpoint otherwise; "sglang" asks
            `/generate`. See `can_stream` for what they stream.
        layout: the model's layers; SGLang's routes need it, since they come without their shape.
        headers: sent with each request, for example an Authorization header.
        retry: when a request is sent again.
    """

    def __init__(
        self,
        proxy_url: str,
        model_name: str | None = None,
        *,
        server: Server = "vllm",
        layout: ModelLayout | None = None,
        headers: Mapping[str, str] | None = None,
        retry: RetryPolicy = RetryPolicy(),
    ) -> None:
        if server not in _SERVERS:
            raise ValueError(f"server is {server!r}; it is one of {', '.join(map(repr, _SERVERS))}")
        self.proxy_url = proxy_url.rstrip("/")
        self.model_name = model_name
        self.server: Server = server
        self.layout = layout
        self.headers = dict(headers or {})
        self.retry = retry
        self._session: aiohttp.ClientSession | None = None
        self._session_loop: asyncio.AbstractEventLoop | None = None
        self._session_pid: int | None = None

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
    ) -> dict[str, Any]:
        """Send one request and return the JSON object that came back, with the retries of the policy.

        Raises:
            RequestRejected, ServerFailed, ServerUnreachable, PayloadError: as `generate`.
        """
        retry = retry or self.retry
        url = self.proxy_url + path
        data, headers = _json_body(body, headers)
        for tries_left in reversed(range(retry.tries)):
            try:
                async with self._http().request(method, url, data=data, headers=headers) as response:
                    raw = await _receive.body(response)
                    return _json_object(raw, response.status, url)
            except (aiohttp.ClientError, _NotJson) as error:
                if tries_left == 0 or not _is_transient(error):
                    raise _final_error(error, url) from error
                _log.info("%s: %s; sending it again in %s s", url, error, retry.wait_s)
                await asyncio.sleep(retry.wait_s)
        raise ValueError(f"a retry policy allows at least one try, not {retry.tries}")

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
        async for event in self._events(url, {**body, "stream": True}, headers):
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

    async def _events(
        self, url: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> AsyncIterator[dict[str, Any]]:
        """The JSON objects of an SSE answer, up to its [DONE]. Only the connecting is ever retried."""
        data, headers = _json_body(body, headers)
        for tries_left in reversed(range(self.retry.tries)):
            try:
                response = await self._http().post(url, data=data, headers=headers)
                if response.status < 400:
                    break
                async with response:
                    _json_object(await _receive.body(response), response.status, url)
            except (aiohttp.ClientError, _NotJson) as error:
                if tries_left == 0 or not _is_transient(error):
                    raise _final_error(error, url) from error
                await asyncio.sleep(self.retry.wait_s)
        async with response:
            try:
                async for line in _receive.lines(response.content):
                    if not line.startswith(b"data:"):
                        if line.strip() and not line.startswith(_OTHER_FIELDS):
                            raise PayloadError(
                                f"{url}: a line of the stream is no event: {bytes(line[:200])!r}"
                            )
                        continue
                    del line[:5]  # moves nothing, where a slice would copy all the routes
                    if line[:20].strip() == b"[DONE]":
                        return
                    yield _event(line, url)
            except aiohttp.ClientError as error:
                raise ServerUnreachable(
                    f"{url}: the connection broke in mid-stream: {error}", url=url
                ) from error
        raise PayloadError(f"{url}: the stream ended without its [DONE] line: it was cut")

    def _http(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if self._session is not None and self._session_pid != os.getpid():
            # A fork copied it. Its sockets are the parent's, which even forgetting it would disturb.
            _inherited.append(self._session)
            self._session = None
        if self._session is None or self._session.closed or self._session_loop is not loop:
            # A session of another loop cannot be closed from here: that loop may be gone.
            self._session = aiohttp.ClientSession(
                headers=self.headers,
                timeout=aiohttp.ClientTimeout(total=None),
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            )
            self._session_loop = loop
            self._session_pid = os.getpid()
        return self._session

    async def aclose(self) -> None:
        """Close the HTTP session. Never raises: a failure while closing is logged."""
        session, self._session, self._session_loop = self._session, None, None
        if session is None or session.closed:
            return
        if self._session_pid not in (None, os.getpid()):
            _inherited.append(session)
            return
        try:
            await session.close()
        except Exception:
            _log.warning("closing the HTTP session to %s failed", self.proxy_url, exc_info=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_session": None, "_session_loop": None}


class _NotJson(Exception):
    """A body that should be a JSON object and is not; carries the status for the final error."""

    def __init__(self, status: int, body: bytes | bytearray) -> None:
        self.status = status
        start = body[:200].decode("utf-8", "replace")
        super().__init__(f"HTTP {status} with a body that is no JSON object: {start!r}")


def _json_body(
    body: Mapping[str, Any] | None, headers: Mapping[str, str] | None
) -> tuple[bytes | None, dict[str, str]]:
    if body is None:
        return None, dict(headers or {})
    return wire_body.dumps(body), {"Content-Type": "application/json", **(headers or {})}


def _json_object(raw: bytes | bytearray, status: int, url: str) -> dict[str, Any]:
    try:
        payload = wire_body.parse(raw)
    except ValueError:
        payload = None
    if 400 <= status < 500:
        text = _server_text(payload) or raw[:500].decode("utf-8", "replace") or "no explanation"
        raise RequestRejected(
            f"{url} refused the request (HTTP {status}): {text}{_hint(url, status)}", url=url, status=status
        )
    if not isinstance(payload, dict):
        raise _NotJson(status, raw)
    if status >= 500:
        text = _server_text(payload) or raw[:500].decode("utf-8", "replace")
        raise ServerFailed(f"{url} failed (HTTP {status}): {text}", url=url, status=status)
    return payload


def _server_text(payload: object) -> str | None:
    """The explanation in vLLM's error object, or in FastAPI's own."""
    if not isinstance(payload, dict):
        return None
    error = payload.get("error")
    text = error.get("message") if isinstance(error, dict) else payload.get("detail")
    return text if isinstance(text, str) else None


def _hint(url: str, status: int) -> str:
    if status == 404 and url.endswith(forms.GENERATE):
        return (
            ". If the path is unknown there, start vLLM with --enable-scale-out, which serves it; "
            "if the model is, see the names in /v1/models"
        )
    if status == 404 and url.endswith(forms.SKYRL_GENERATE):
        return ". The server is no SkyRL server: use server='vllm'"
    return ""


def _event(data: bytearray, url: str) -> dict[str, Any]:
    try:
        event = wire_body.parse(data)
    except ValueError as error:
        raise PayloadError(f"{url}: an event of the stream is no JSON: {bytes(data[:200])!r}") from error
    if not isinstance(event, dict):
        raise PayloadError(f"{url}: an event of the stream is no JSON object: {bytes(data[:200])!r}")
    if "error" in event:
        raise ServerFailed(f"{url} failed in mid-stream: {_server_text(event) or event}", url=url, status=200)
    return event


def _is_transient(error: Exception) -> bool:
    # ClientPayloadError is a body that was cut: the server died while it answered.
    return isinstance(
        error, (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, aiohttp.ClientPayloadError, _NotJson)
    )


def _final_error(error: Exception, url: str) -> Exception:
    if isinstance(error, _NotJson):
        return ServerFailed(
            f"{url}: {error}. Is this the address of an inference server?", url=url, status=error.status
        )
    if isinstance(error, aiohttp.InvalidURL | aiohttp.NonHttpUrlClientError):
        return ServerUnreachable(
            f"{url!r} is no address of a server; it starts with http:// or https://", url=url
        )
    return ServerUnreachable(
        f"no inference server answers at {url}: {error or type(error).__name__}. Check that it runs, and the port",
        url=url,
    )
