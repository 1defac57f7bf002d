"""What is asked of a server to find out its kind: each path once, however many kinds want to know."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from rtk.errors import PayloadError, RequestRejected, RtkError, ServerFailed


class Lookups:
    """GETs of one server, remembered.

    Args:
        get: asks for a path, once; raises as `RemoteInferenceGenerator.request`.
        card: the chosen model's entry of `/v1/models`.
    """

    def __init__(self, get: Callable[[str], Awaitable[dict[str, Any]]], card: Mapping[str, Any]) -> None:
        self._get = get
        self._card = card
        self._asked: dict[str, asyncio.Task[dict[str, Any] | RtkError]] = {}

    async def owner(self) -> str | None:
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

    async def _ask(self, path: str) -> dict[str, Any] | RtkError:
        if path not in self._asked:
            self._asked[path] = asyncio.create_task(self._once(path))
        return await self._asked[path]

    async def _once(self, path: str) -> dict[str, Any] | RtkError:
        try:
            return await self._get(path)
        except RtkError as error:
            return error
