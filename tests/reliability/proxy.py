"""A proxy that does to answers what bad nights do, by a seeded script, and keeps a record of each request.

It speaks HTTP to the client by hand, since no HTTP library lets a server send half a header.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

HTML = b"<html><body><h1>The service is being restarted</h1></body></html>"
ERROR = b'{"error": {"message": "the engine is busy", "type": "Busy", "param": null, "code": 0}}'

# The request never reaches the server.
TURNED_AWAY = ("hang_up", "429", "500", "503", "html_200", "html_503", "restart")
# The request reaches the server, and its answer does not arrive as it was sent.
DAMAGED = ("cut_head", "cut_body", "truncate", "corrupt_head", "corrupt")
# The answer arrives whole.
HARMLESS = ("none", "delay", "drip", "stale")


@dataclass(frozen=True)
class Fault:
    """What happens to one request.

    Attributes:
        kind: one of TURNED_AWAY, DAMAGED and HARMLESS. `stale` answers, and then drops the connection that
            the client was promised could be used again.
        where: the place of the damage, from 0 (the beginning) to 1.
        seconds: how long a delay, or a restart, lasts.
        retry_after: sent with 429 and 503 as Retry-After, in seconds.
    """

    kind: str
    where: float = 0.5
    seconds: float = 0.01
    retry_after: int = 0


def script(seed: int, weights: Mapping[str, float], *, seconds: float = 0.01) -> Iterator[Fault]:
    """Faults without end, the kinds drawn by their weights."""
    unknown = set(weights) - {*TURNED_AWAY, *DAMAGED, *HARMLESS}
    if unknown:
        raise ValueError(f"unknown faults: {sorted(unknown)}")
    rng = random.Random(seed)
    kinds, shares = list(weights), list(weights.values())
    while True:
        yield Fault(rng.choices(kinds, shares)[0], where=rng.random(), seconds=seconds)


@dataclass(frozen=True)
class Record:
    """A request that the proxy saw: which prompt it carried, and what happened to it."""

    prompt: tuple[int, ...] | str
    fault: Fault

    @property
    def reached_server(self) -> bool:
        return self.fault.kind not in TURNED_AWAY


@dataclass
class FaultProxy:
    """Stands before the server at `upstream`; made by `proxying`."""

    upstream: str
    faults: Iterator[Fault]
    url: str = ""
    records: list[Record] = field(default_factory=list)
    _server: asyncio.Server | None = None
    _port: int = 0
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _serving: set[asyncio.Task[None]] = field(default_factory=set)
    _restart: asyncio.Task[None] | None = None

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port, limit=2**26)
        self._port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def close(self) -> None:
        if self._restart is not None:
            await self._restart
        self._drop_all()
        if self._serving:
            await asyncio.wait(self._serving)

    def _drop_all(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _go_away(self, seconds: float) -> None:
        """Refuse connections for a while, as a server does that is started again."""
        self._drop_all()
        await asyncio.sleep(seconds)
        await self.listen()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        task = asyncio.current_task()
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        try:
            async with aiohttp.ClientSession(auto_decompress=False) as http:
                # A connection that breaks, from either side, is this proxy's daily bread.
                with contextlib.suppress(
                    ConnectionError, asyncio.IncompleteReadError, aiohttp.ClientConnectionError
                ):
                    while await self._answer_one(reader, writer, http):
                        pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer_one(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, http: aiohttp.ClientSession
    ) -> bool:
        """Take one request and treat it by the script; return whether the connection goes on."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        (method, path, _), headers = head.split("\r\n")[0].split(" "), _headers(head)
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if method != "POST":  # only requests that sample are subject to faults
            await _send(writer, *await _ask(http, method, self.upstream + path, headers, body))
            return True
        fault = next(self.faults)
        self.records.append(Record(_prompt(json.loads(body)), fault))
        kind = fault.kind
        if kind == "restart" and self._restart is not None and not self._restart.done():
            kind = "hang_up"  # one restart at a time
        if kind == "restart":
            self._restart = asyncio.create_task(self._go_away(fault.seconds))
            return False
        if kind == "hang_up":
            return False
        if kind in TURNED_AWAY:
            await _send(writer, *_refusal(kind, fault.retry_after))
            return True
        if kind == "delay":
            await asyncio.sleep(fault.seconds)
        status, head_out, answer = await _ask(http, method, self.upstream + path, headers, body)
        if kind == "truncate":  # so that the framing shows nothing
            answer = answer[: int(fault.where * len(answer))]
        elif kind == "corrupt":
            answer = _corrupt(answer, fault.where)
        whole = _frame(status, head_out, answer)
        head_end = whole.index(b"\r\n\r\n") + 4
        if kind == "corrupt_head":
            whole = _corrupt(whole[: head_end - 4], fault.where) + whole[head_end - 4 :]
        elif kind == "cut_head":
            whole = whole[: int(fault.where * (head_end - 1))]
        elif kind == "cut_body":
            whole = whole[: head_end + int(fault.where * (len(whole) - head_end))]
        await _write(writer, whole, piece=1 if kind == "drip" else 2**16)
        return kind not in ("cut_head", "cut_body", "corrupt_head", "stale")


@asynccontextmanager
async def proxying(upstream: str, faults: Iterator[Fault]) -> AsyncIterator[FaultProxy]:
    proxy = FaultProxy(upstream, faults)
    await proxy.listen()
    try:
        yield proxy
    finally:
        await proxy.close()


def _headers(head: str) -> dict[str, str]:
    lines = (line.partition(":") for line in head.split("\r\n")[1:] if line)
    return {name.strip().lower(): value.strip() for name, _, value in lines}


def _prompt(body: Mapping[str, Any]) -> tuple[int, ...] | str:
    """What tells a request that samples apart from others, whichever route it goes to."""
    prompt = body.get("token_ids", body.get("prompt", body.get("messages", body.get("input_ids"))))
    return (
        tuple(prompt)
        if isinstance(prompt, list) and prompt and type(prompt[0]) is int
        else json.dumps(prompt)
    )


async def _ask(
    http: aiohttp.ClientSession, method: str, url: str, headers: Mapping[str, str], body: bytes
) -> tuple[int, dict[str, str], bytes]:
    kept = {
        name: headers[name] for name in ("content-type", "authorization", "x-session-id") if name in headers
    }
    async with http.request(method, url, data=body or None, headers=kept) as response:
        names = ("Content-Type", "Transfer-Encoding", "Retry-After")
        head = {name: response.headers[name] for name in names if name in response.headers}
        return response.status, head, await response.read()


def _refusal(kind: str, retry_after: int) -> tuple[int, dict[str, str], bytes]:
    html = kind.startswith("html")
    head = {"Content-Type": "text/html" if html else "application/json"}
    if kind in ("429", "503"):
        head["Retry-After"] = str(retry_after)
    return int(kind.removeprefix("html_")), head, HTML if html else ERROR


def _frame(status: int, head: Mapping[str, str], body: bytes) -> bytes:
    """A whole HTTP/1.1 answer, in chunks where the server sent chunks."""
    lines = [f"HTTP/1.1 {status} Status", *(f"{name}: {value}" for name, value in head.items())]
    if "Transfer-Encoding" in head:
        pieces = [body[start : start + 1000] for start in range(0, len(body), 1000)]
        framed = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in [*pieces, b""])
    else:
        lines.append(f"Content-Length: {len(body)}")
        framed = body
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + framed


def _corrupt(data: bytes, where: float) -> bytes:
    """One bit of one byte turned over."""
    if not data:
        return data
    changed = bytearray(data)
    position = min(int(where * len(data)), len(data) - 1)
    changed[position] ^= 1 << (position % 7)  # bit 7 alone would be noticed in any text
    return bytes(changed)


async def _send(writer: asyncio.StreamWriter, status: int, head: Mapping[str, str], body: bytes) -> None:
    await _write(writer, _frame(status, head, body), piece=2**16)


async def _write(writer: asyncio.StreamWriter, data: bytes, *, piece: int) -> None:
    for start in range(0, len(data), piece):
        writer.write(data[start : start + piece])
        await writer.drain()
        await asyncio.sleep(0)  # without it small pieces leave together
