"""One call to many servers, each to its end; and a cap on how many run at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Coroutine, Hashable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import aiohttp

from rtk.client.transport import FAILURES, NotAnAnswer, RetryPolicy, Timeouts, Tries, retry_after
from rtk.errors import PayloadError, RequestRejected, ServerFailed, ServerTimeout

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

# What a proxy answers for a server that is down or starting.
_PROXY_STATUSES = (502, 503, 504)
_NO_PATH = (
    ". Set VLLM_SERVER_DEV_MODE=1 before starting vLLM, and for LoRA VLLM_ALLOW_RUNTIME_LORA_UPDATING=1; a router "
    "does not have these paths, so name the servers themselves in server_urls"
)
_CACHE_IN_USE = (
    '. Requests still use the cache: pause with "wait" or "abort" first, or say reset_running_requests=True'
)


class LoopCap:
    """A semaphore for whichever event loop runs, made on its first use there.

    asyncio's own belongs to one loop for good, and a notebook that calls `asyncio.run` has one loop a call.

    Args:
        limit: how many may be inside at once, on each loop; None for no limit.
    """

    def __init__(self, limit: int | None) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"a cap lets at least one call through, not {limit}; None means no cap")
        self.limit = limit
        self._by_loop: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}

    def here(self) -> AbstractAsyncContextManager[Any]:
        """To be held by a call while it runs: `async with cap.here(): ...`."""
        if self.limit is None:
            return contextlib.nullcontext()
        loop = asyncio.get_running_loop()
        if loop not in self._by_loop:
            # A semaphore holds on to its loop, so that weak keys would never let go of one.
            self._by_loop = {known: s for known, s in self._by_loop.items() if not known.is_closed()}
            self._by_loop[loop] = asyncio.Semaphore(self.limit)
        return self._by_loop[loop]

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.limit,)


async def settle(work: Mapping[K, Coroutine[Any, Any, T]]) -> tuple[dict[K, T], dict[K, Exception]]:
    """Await all of `work` at once, to the end of each; returns what succeeded and what failed."""
    outcomes = await asyncio.gather(*work.values(), return_exceptions=True)
    done: dict[K, T] = {}
    failed: dict[K, Exception] = {}
    for key, outcome in zip(work, outcomes, strict=True):
        if isinstance(outcome, Exception):
            failed[key] = outcome
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            done[key] = outcome
    return done, failed


async def call(
    http: aiohttp.ClientSession,
    method: str,
    url: str,
    *,
    body: Mapping[str, Any] | None,
    params: Mapping[str, Any] | None,
    timeout_s: float | None,
    retry: RetryPolicy,
) -> Any:
    """Send one control request; returns the JSON value, the text, or None where the answer is empty.

    Control endpoints answer in all three ways: vLLM 0.30's `/pause` sends JSON, `/sleep` nothing, and
    `/v1/load_lora_adapter` a sentence. Sent again is what met no server, a dropped connection, or a proxy's
    error page; never what ran into the timeout, since the server may still be at it.

    Raises:
        RequestRejected: a 4xx status.
        ServerFailed: a 5xx status, a proxy's text instead of an answer, or an answer that says `success: false`.
        ServerUnreachable: no connection after all tries.
        ServerTimeout: no answer in time.
    """
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    tries = Tries(url, retry, Timeouts(total_s=timeout_s))
    while True:
        try:
            async with http.request(method, url, json=body, params=params, timeout=timeout) as response:
                return _checked(await response.read(), response, url)
        except TimeoutError as error:
            raise ServerTimeout(
                f"{url} did not answer within {timeout_s:g} s, and may still be at work on it", url=url
            ) from error
        except FAILURES as error:
            await tries.after(error)


def field(answer: Any, key: str, kind: type[T], url: str) -> T:
    """answer[key], where it is of that kind.

    Raises:
        PayloadError: it is not.
    """
    value = answer.get(key) if isinstance(answer, dict) else None
    if not isinstance(value, kind):
        raise PayloadError(
            f"{url} answered {str(answer)[:200]!r}, without a {key!r} of type {kind.__name__}. Is it a vLLM server?"
        )
    return value


def _checked(raw: bytes, response: aiohttp.ClientResponse, url: str) -> Any:
    status, content_type = response.status, response.content_type
    text = raw.decode("utf-8", "replace")
    try:
        answer = json.loads(raw) if raw.strip() else None
    except ValueError:
        answer = text
    proxys = content_type == "text/html" or (status in _PROXY_STATUSES and isinstance(answer, str))
    if proxys and not 400 <= status < 500:
        raise NotAnAnswer(status, raw)
    reason = _reason(answer)
    if 400 <= status < 500:
        unknown_path = status == 404 and answer in (None, "", {"detail": "Not Found"})
        raise RequestRejected(
            f"{url} refused the request (HTTP {status}): {reason}{_NO_PATH if unknown_path else ''}",
            url=url,
            status=status,
            retry_after_s=retry_after(response),
        )
    if status >= 500:
        raise ServerFailed(
            f"{url} failed (HTTP {status}): {reason}",
            url=url,
            status=status,
            retry_after_s=retry_after(response),
        )
    if isinstance(answer, dict) and answer.get("success") is False:
        hint = _CACHE_IN_USE if url.endswith("/reset_prefix_cache") else ""
        raise ServerFailed(f"{url} answers that it did not succeed: {reason}{hint}", url=url, status=status)
    return answer


def _reason(answer: object) -> str:
    """The explanation in any of the forms that vLLM's and FastAPI's errors have."""
    if isinstance(answer, dict):
        error = answer.get("error", answer.get("detail"))
        if isinstance(error, dict):
            error = error.get("message")
        return error if isinstance(error, str) else json.dumps(answer)[:500]
    return str(answer)[:500] if answer else "no explanation"
