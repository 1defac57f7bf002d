"""A server that answers what a test tells it to, and remembers what it was asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Stub:
    """Answers requests with `answers` in turn; the last one is repeated."""

    answers: list[Answer]
    url: str = ""
    bodies: list[Any] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.paths.append(request.path)
        self.headers.append(dict(request.headers))
        self.bodies.append(await request.json() if request.can_read_body else None)
        return await self.answers[min(len(self.paths), len(self.answers)) - 1](request)


@asynccontextmanager
async def serving(*answers: Answer) -> AsyncIterator[Stub]:
    stub = Stub(list(answers))
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", stub.handle)
    # As real servers do: a client that goes away cancels the work for it.
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    stub.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield stub
    finally:
        await runner.cleanup()


def text(body: str, status: int = 200, content_type: str = "application/json") -> Answer:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(text=body, status=status, content_type=content_type)

    return answer


def disconnect() -> Answer:
    """Closes the connection without a word, as a server does that is killed."""

    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    return answer


def events(body: str, *, cut_at: int | None = None, piece: int = 50) -> Answer:
    """An SSE answer in small pieces; the connection is dropped after `cut_at` bytes."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        data = body.encode()[:cut_at]
        for start in range(0, len(data), piece):
            await response.write(data[start : start + piece])
            await asyncio.sleep(0)
        if cut_at is not None:
            assert request.transport is not None
            request.transport.close()
        return response

    return answer
