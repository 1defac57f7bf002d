"""What is asked of a server to find out its kind: each path once, however many kinds want to know."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from rtk.errors import PayloadError, RequestRejected, RtkError, ServerFailed

#: Sends a method, a path and a body, and returns the JSON object that came back.
Ask = Callable[[str, str, Mapping[str, Any] | None], Awaitable[dict[str, Any]]]


class Lookups:
    """Small requests to one server, remembered.

    Args:
        ask: sends a method, a path and a body, once; raises as `RemoteInferenceGenerator.request`.
        card: the chosen model's entry of `/v1/models`.
    """

    def __init__(self, ask: Ask, card: Mapping[str, Any]) -> None:
        self._send = ask
        self._card = card
        self._asked: dict[tuple[str, str], asyncio.Task[dict[str, Any] | RtkError]] = {}

    @property
    def owner(self) -> str | None:
        """`owned_by` of the model."""
        owner = self._card.get("owned_by")
        return owner if isinstance(owner, str) else None

    async def version(self) -> str:
        """What `/version` answers; "unknown" where a proxy serves the model routes alone."""
        answer = await self._ask("/version")
        if isinstance(answer, RequestRejected):
            return "unknown"
        if isinstance(answer, RtkError):
            raise answer
        return str(answer.get("version", "unknown"))

    async def posts(self, path: str) -> bool:
        """Whether a path is there. One that takes POST alone answers a GET with 405; one that is not, with 404."""
        answer = await self._ask(path)
        if isinstance(answer, RequestRejected):
            return answer.status == 405
        if isinstance(answer, RtkError) and not isinstance(answer, ServerFailed | PayloadError):
            raise answer
        return not isinstance(answer, RtkError)

    async def object(self, path: str) -> dict[str, Any] | None:
        """The JSON object at a path, or None where there is none."""
        answer = await self._ask(path)
        return None if isinstance(answer, RtkError) else answer

    async def refusal_of_nothing(self, path: str) -> RequestRejected | None:
        """How a path refuses an empty object, which no generate route takes; None where it does not."""
        answer = await self._ask(path, "POST")
        return answer if isinstance(answer, RequestRejected) else None

    async def _ask(self, path: str, method: str = "GET") -> dict[str, Any] | RtkError:
        if (method, path) not in self._asked:
            self._asked[method, path] = asyncio.create_task(self._once(method, path))
        return await self._asked[method, path]

    async def _once(self, method: str, path: str) -> dict[str, Any] | RtkError:
        try:
            return await self._send(method, path, None if method == "GET" else {})
        except RtkError as error:
            return error
