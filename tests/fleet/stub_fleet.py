"""Several stub servers, and a client for them."""

import asyncio
import json
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from rtk import RemoteInferenceClient, RetryPolicy
from tests.stub import serving, text

QUICK = RetryPolicy(tries=3, wait_s=0.01)
OK = text('{"status": "ok"}')


@dataclass
class Call:
    method: str
    path: str
    query: list[tuple[str, str]]
    body: object
    session_id: str | None


@dataclass
class Server:
    url: str
    calls: list[Call] = field(default_factory=list)


@asynccontextmanager
async def fleet(*answers):
    """One server an answer, each remembering what it was asked. An answer may be a list, given in turn."""
    async with AsyncExitStack() as stack:
        servers = []
        for answer in answers:
            server = Server("")

            stub = await stack.enter_async_context(serving(remembering(server, answer)))
            server.url = stub.url
            servers.append(server)
        yield servers


def remembering(server, answer):
    answers = answer if isinstance(answer, list) else [answer]

    async def handle(request):
        raw = await request.read()
        server.calls.append(
            Call(
                request.method,
                request.path,
                list(request.query.items()),
                json.loads(raw) if raw else None,
                request.headers.get("X-Session-ID"),
            )
        )
        return await answers[min(len(server.calls), len(answers)) - 1](request)

    return handle


def client_of(servers, **options):
    urls = [server.url for server in servers]
    return RemoteInferenceClient(urls[0], urls, control_retry=QUICK, retry=QUICK, **options)


def control(*answers, call, **options):
    """Awaits call(client) against a fleet; returns what came back (or the error raised) and the servers."""

    async def run():
        async with fleet(*answers) as servers, client_of(servers, **options) as client:
            try:
                return await call(client), servers
            except Exception as error:
                return error, servers

    return asyncio.run(run())
