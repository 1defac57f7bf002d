"""JSON over HTTP to an inference server: the connection, its limits, and what is sent again when."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import ssl
import time
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp

from rtk.client import body as wire_body
from rtk.client import receive
from rtk.client.servers.route import general_advice
from rtk.errors import (
    PayloadError,
    RequestRejected,
    ServerError,
    ServerFailed,
    ServerTimeout,
    ServerUnreachable,
)

Verify = bool | str | os.PathLike[str] | ssl.SSLContext

_log = logging.getLogger(__name__)

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

    Always sent again are a connection that was refused, dropped or not made in time, and a body that is no JSON on a
    2xx or 5xx status, which is what a server in restart, or a proxy in front of it, answers. Never: any other 4xx or
    5xx with an explanation, a stream of which a part has arrived, and what ran into a limit on time after it was sent,
    since the server may still be at work on it.

    Attributes:
        tries: how often a request is sent at most; SkyRL's client uses 30.
        wait_s: seconds between two tries, or more where the server asks for more with Retry-After.
        statuses: HTTP statuses that are sent again although the server explains them: too many requests, and
            not available for now.
        longest_wait_s: a Retry-After of more seconds than this is not waited for; the error is raised at once.
    """

    tries: int = 30
    wait_s: float = 1.0
    statuses: tuple[int, ...] = (429, 503)
    longest_wait_s: float = 60.0

    def __post_init__(self) -> None:
        if self.tries < 1:
            raise ValueError(f"a retry policy allows at least one try, not {self.tries}")

    def pause_after(self, error: Exception) -> float | None:
        """Seconds to wait before the request is sent again; None where it is not."""
        if isinstance(error, RequestRejected | ServerFailed):
            asked = error.retry_after_s or 0.0
            return (
                max(self.wait_s, asked)
                if error.status in self.statuses and asked <= self.longest_wait_s
                else None
            )
        if isinstance(error, aiohttp.ClientSSLError):
            return None
        # ClientPayloadError is a body that was cut: the server died while it answered.
        passing = (
            aiohttp.ServerDisconnectedError,
            aiohttp.ClientOSError,
            aiohttp.ClientPayloadError,
            aiohttp.ConnectionTimeoutError,
            NotAnAnswer,
        )
        return self.wait_s if isinstance(error, passing) else None


@dataclass(frozen=True)
class Timeouts:
    """Limits on time, each in seconds; None is no limit.

    Attributes:
        connect_s: until there is a connection, TLS included.
        first_byte_s: from sending a request until its answer begins, connecting included. An answer that is not
            streamed begins when everything is generated.
        total_s: from sending a request until the whole answer is there. SkyRL has none, and neither has rtk by
            default: a long rollout behind a long queue is no fault.
    """

    connect_s: float | None = 30.0
    first_byte_s: float | None = None
    total_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("connect_s", "first_byte_s", "total_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(
                    f"{name} is {value}; it is a number of seconds above 0, or None for no limit"
                )


#: What to do about an HTTP status and the server's words for it; empty for nothing.
Advice = Callable[[int, str], str]


class NotAnAnswer(Exception):
    """A body that no inference server writes; carries the status for the final error."""

    def __init__(self, status: int, body: bytes | bytearray) -> None:
        self.status = status
        start = body[:200].decode("utf-8", "replace")
        super().__init__(f"HTTP {status} with a body that no inference server sends: {start!r}")


class Transport:
    """The HTTP session of whichever event loop runs, and JSON requests over it.

    The session is made on first use, and made again when the running event loop has changed (as it does between two
    `asyncio.run` calls), in a forked child, or after closing. A transport pickles without it.

    Args:
        headers: sent with each request.
        timeouts: limits on time.
        verify: whether and how a server's TLS certificate is verified: True by the system's authorities, False not
            at all, a path by the authorities in that file, or an SSLContext, which may hold a client certificate.
        http_proxy: address of a forward proxy. Left out, HTTP_PROXY, HTTPS_PROXY and NO_PROXY are heeded, but
            never for a server on this machine.
        url: the server's address.

    Raises:
        ValueError: verify names a file that is not there or holds no certificates.
    """

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str],
        timeouts: Timeouts,
        verify: Verify,
        http_proxy: str | None,
    ) -> None:
        self.headers = dict(headers)
        self.timeouts = timeouts
        self._verify = verify
        self._http_proxy = http_proxy
        self._local = _is_loopback(url)
        _tls(verify)  # says at once what cannot be read
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid: int | None = None

    def session(self) -> aiohttp.ClientSession:
        """The session of the running loop in this process."""
        loop = asyncio.get_running_loop()
        if self._session is not None and self._pid != os.getpid():
            # A fork copied it. Its sockets are the parent's, which even forgetting it would disturb.
            _inherited.append(self._session)
            self._session = None
        if self._session is None or self._session.closed or self._loop is not loop:
            # A session of another loop cannot be closed from here: that loop may be gone.
            self._session = aiohttp.ClientSession(
                headers=self.headers,
                timeout=_aiohttps(self.timeouts),
                connector=aiohttp.TCPConnector(
                    limit=0, keepalive_timeout=_KEEP_ALIVE_S, ssl=_tls(self._verify)
                ),
                proxy=self._http_proxy,
                trust_env=self._http_proxy is None and not self._local,
            )
            self._loop = loop
            self._pid = os.getpid()
        return self._session

    async def json(
        self,
        method: str,
        url: str,
        body: Mapping[str, Any] | None,
        headers: Mapping[str, str] | None,
        *,
        retry: RetryPolicy,
        timeouts: Timeouts | None = None,
        advice: Advice = general_advice,
    ) -> dict[str, Any]:
        """Send a request and return the JSON object that came back.

        Args:
            advice: what to do about a status of 400 or more, for the message.

        Raises:
            RequestRejected, ServerFailed, ServerUnreachable, ServerTimeout, PayloadError.
        """
        data, headers = _json_body(body, headers)
        limits = timeouts or self.timeouts

        tries = Tries(url, retry, limits)
        while True:
            try:
                async with await self._begin(method, url, data, headers, limits) as response:
                    return _json_object(await receive.body(response), response, url, advice)
            except FAILURES as error:
                await tries.after(error)

    async def events(
        self,
        url: str,
        body: Mapping[str, Any],
        headers: Mapping[str, str],
        *,
        retry: RetryPolicy,
        advice: Advice = general_advice,
    ) -> AsyncIterator[dict[str, Any]]:
        """The JSON objects of an answer in server-sent events, up to its [DONE]. Sent again is only what has brought no event yet.

        Raises:
            RequestRejected, ServerFailed, ServerUnreachable, ServerTimeout, PayloadError.
        """
        data, headers = _json_body(body, headers)

        tries = Tries(url, retry, self.timeouts)
        while True:
            try:
                response = await self._begin("POST", url, data, headers, self.timeouts)
                if response.status >= 400:
                    async with response:
                        _json_object(await receive.body(response), response, url, advice)
            except FAILURES as error:
                await tries.after(error)
                continue
            begun = False
            try:
                async with response:
                    async for event in self._read_events(response, url, advice):
                        begun = True
                        yield event
                return
            except ServerFailed as error:
                # A server that is not available for now may say so in the first event of an answer with status 200.
                if begun or error.status == 200:
                    raise
                await tries.after(error)

    async def _read_events(
        self, response: aiohttp.ClientResponse, url: str, advice: Advice
    ) -> AsyncIterator[dict[str, Any]]:
        lines = receive.lines(response.content)
        while True:
            try:
                line = await anext(lines, None)
            except TimeoutError as error:
                raise ServerTimeout(_late(error, self.timeouts, url), url=url) from error
            except aiohttp.ClientError as error:
                raise ServerUnreachable(
                    f"{url}: the connection broke in mid-stream: {error}", url=url
                ) from error
            if line is None:
                raise PayloadError(f"{url}: the stream ended without its [DONE] line: it was cut")
            if not line.startswith(b"data:"):
                if line.strip() and not line.startswith(_OTHER_FIELDS):
                    raise PayloadError(f"{url}: a line of the stream is no event: {bytes(line[:200])!r}")
                continue
            del line[:5]  # moves nothing, where a slice would copy all the routes
            if line[:20].strip() == b"[DONE]":
                return
            yield _event(line, url, advice)

    async def aclose(self) -> None:
        """Close the session. Never raises: a failure while closing is logged."""
        session, self._session, self._loop = self._session, None, None
        if session is None or session.closed:
            return
        if self._pid not in (None, os.getpid()):
            _inherited.append(session)
            return
        try:
            await session.close()
        except Exception:
            _log.warning("closing an HTTP session failed", exc_info=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_session": None, "_loop": None}

    def _begin(
        self,
        method: str,
        url: str,
        data: bytes | None,
        headers: Mapping[str, str],
        limits: Timeouts,
    ) -> Awaitable[aiohttp.ClientResponse]:
        """Send a request and wait for the head of its answer."""
        timeout = aiohttp.helpers.sentinel if limits is self.timeouts else _aiohttps(limits)
        sent = self.session().request(method, url, data=data, headers=headers, timeout=timeout)
        return sent if limits.first_byte_s is None else _within(limits.first_byte_s, sent)


# What `Tries.after` takes.
FAILURES = (aiohttp.ClientError, TimeoutError, NotAnAnswer, RequestRejected, ServerFailed)


class Tries:
    """The tries of one request: after a failure, either wait for the next or raise what is final.

    Args:
        url: the address, for messages.
        retry: when it is sent again.
        limits: the limits on time, for messages.
    """

    def __init__(self, url: str, retry: RetryPolicy, limits: Timeouts) -> None:
        self._url = url
        self._retry = retry
        self._limits = limits
        self._begin = time.monotonic()
        self._count = 0

    async def after(self, error: Exception) -> None:
        """Wait as long as the policy says.

        Raises:
            ServerError: the failure is final, or the tries are used up; its message says how many there were.
        """
        self._count += 1
        pause = self._retry.pause_after(error)
        if pause is None or self._count == self._retry.tries:
            raise self._final(error) from error
        _log.info("%s: %s; sending it again in %g s", self._url, error, pause)
        await asyncio.sleep(pause)

    def _final(self, error: Exception) -> ServerError:
        url, often = self._url, ""
        if self._count > 1:
            often = f" (sent {self._count} times in {time.monotonic() - self._begin:.1f} s)"
        if isinstance(error, RequestRejected | ServerFailed):
            return type(error)(
                f"{error}{often}", url=url, status=error.status, retry_after_s=error.retry_after_s
            )
        if isinstance(error, NotAnAnswer):
            return ServerFailed(
                f"{url}: {error}{often}. Is this the address of an inference server?",
                url=url,
                status=error.status,
            )
        if isinstance(error, TimeoutError):
            return ServerTimeout(f"{_late(error, self._limits, url)}{often}", url=url)
        return ServerUnreachable(f"{_unreachable(error, url)}{often}", url=url)


async def _within(seconds: float, sent: Awaitable[aiohttp.ClientResponse]) -> aiohttp.ClientResponse:
    try:
        async with asyncio.timeout(seconds) as first_byte:
            return await sent
    except TimeoutError as error:
        if first_byte.expired():
            raise _NoFirstByte from error
        raise


def retry_after(response: aiohttp.ClientResponse) -> float | None:
    """Seconds that the answer's Retry-After asks for: it names them, or a date (RFC 9110, section 10.2.3)."""
    value = response.headers.get("Retry-After")
    if value is None:
        return None
    try:
        return max(float(value), 0.0)
    except ValueError:
        pass
    try:
        return max(parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    except ValueError:
        return None  # neither; the server wrote nonsense, and the policy's own pause will do


class _NoFirstByte(TimeoutError):
    """The answer did not begin in time."""


def _aiohttps(timeouts: Timeouts) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=timeouts.total_s, connect=timeouts.connect_s)


def _late(error: TimeoutError, limits: Timeouts, url: str) -> str:
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return f"no connection to {url} within connect_s={limits.connect_s} s: check the address, the network and any proxy"
    if isinstance(error, _NoFirstByte):
        return (
            f"{url} did not begin to answer within first_byte_s={limits.first_byte_s} s, and may still be at work on "
            "it: an answer that is not streamed begins when it is complete, so allow more time, or stream"
        )
    return (
        f"{url} did not answer within total_s={limits.total_s} s, and may still be at work on it: allow more time, or "
        "ask for fewer tokens"
    )


def _unreachable(error: Exception, url: str) -> str:
    if isinstance(error, aiohttp.InvalidURL | aiohttp.NonHttpUrlClientError):
        return f"{url!r} is no address of a server; it starts with http:// or https://"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return (
            f"the certificate of {url} is not trusted: {error.certificate_error}. Give the file of its authority as "
            "verify='ca.pem', or verify=False in a network that you trust"
        )
    if isinstance(error, aiohttp.ClientSSLError):
        return (
            f"no TLS with {url}: {error}. A server without TLS has an http:// address; one that wants a client "
            "certificate gets it from an ssl.SSLContext as verify=..."
        )
    if isinstance(error, aiohttp.ClientHttpProxyError):
        return f"the forward proxy refuses to connect to {url}: {error}. Check http_proxy, and HTTPS_PROXY"
    return (
        f"no inference server answers at {url}: {error or type(error).__name__}. Check that it runs, and the address "
        "(http:// or https://, host and port)"
    )


def _tls(verify: Verify) -> bool | ssl.SSLContext:
    if isinstance(verify, bool | ssl.SSLContext):
        return verify
    try:
        return ssl.create_default_context(cafile=os.fspath(verify))
    except (OSError, ssl.SSLError) as error:
        raise ValueError(
            f"verify={os.fspath(verify)!r} is no file of certificates (PEM) that can be read: {error}"
        ) from error


def _is_loopback(url: str) -> bool:
    host = urllib.parse.urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _json_body(
    body: Mapping[str, Any] | None, headers: Mapping[str, str] | None
) -> tuple[bytes | None, dict[str, str]]:
    if body is None:
        return None, dict(headers or {})
    return wire_body.dumps(body), {"Content-Type": "application/json", **(headers or {})}


def _json_object(
    raw: bytes | bytearray, response: aiohttp.ClientResponse, url: str, advice: Advice
) -> dict[str, Any]:
    status = response.status
    try:
        payload = wire_body.parse(raw)
    except ValueError:
        payload = None
    if 400 <= status < 500:
        text = _server_text(payload) or raw[:500].decode("utf-8", "replace") or "no explanation"
        raise RequestRejected(
            _advised(f"{url} refused the request (HTTP {status}): {text}", advice, status, text),
            url=url,
            status=status,
            retry_after_s=retry_after(response),
        )
    if not isinstance(payload, dict):
        raise NotAnAnswer(status, raw)
    if status >= 500:
        text = _server_text(payload) or raw[:500].decode("utf-8", "replace")
        raise ServerFailed(
            _advised(f"{url} failed (HTTP {status}): {text}", advice, status, text),
            url=url,
            status=status,
            retry_after_s=retry_after(response),
        )
    return payload


def _server_text(payload: object) -> str | None:
    """The explanation in vLLM's error object, or in FastAPI's own."""
    if not isinstance(payload, dict):
        return None
    error = payload.get("error")
    text = error.get("message") if isinstance(error, dict) else error or payload.get("detail")
    return text if isinstance(text, str) else None


def _advised(message: str, advice: Advice, status: int, said: str) -> str:
    what = advice(status, said)
    return f"{message}. {what}" if what else message


def _event(data: bytearray, url: str, advice: Advice) -> dict[str, Any]:
    try:
        event = wire_body.parse(data)
    except ValueError as error:
        raise PayloadError(f"{url}: an event of the stream is no JSON: {bytes(data[:200])!r}") from error
    if not isinstance(event, dict):
        raise PayloadError(f"{url}: an event of the stream is no JSON object: {bytes(data[:200])!r}")
    if "error" in event:
        said, code = _server_text(event) or str(event), _code(event)
        message = _advised(f"{url} failed in mid-stream: {said}", advice, code, said)
        raise ServerFailed(message, url=url, status=code)
    return event


def _code(event: Mapping[str, Any]) -> int:
    """The HTTP status that an error event names; that of the stream itself where it names none."""
    error = event["error"]
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and 400 <= code < 600 else 200
