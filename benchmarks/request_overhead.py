"""What a generate call costs beside the same request sent with bare aiohttp and orjson.

python benchmarks/request_overhead.py

The server is a process of its own that reads the request and sends a fixed small answer, so that nearly all the
time is the client's and HTTP's; a real model only makes the share smaller. The ways take turns, round by round.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import aiohttp
import numpy as np
import orjson
from aiohttp import web

from rtk import RemoteInferenceGenerator

PROMPT = list(range(100, 164))
NEW_TOKENS = 16
PARAMS = {"max_tokens": NEW_TOKENS, "temperature": 1.0, "logprobs": 0}
REQUESTS = {1: 400, 64: 3200, 512: 3584}  # by concurrency, a round
ROUNDS = 9

Send = Callable[[], Awaitable[object]]


def answer() -> bytes:
    """As vLLM 0.30 answers: 16 tokens with logprobs, and the routes of 8 layers, top-2."""
    routes = np.random.default_rng(0).integers(0, 16, (len(PROMPT) + NEW_TOKENS - 1, 8, 2), dtype=np.uint8)
    file = io.BytesIO()
    np.save(file, routes)
    entries = [
        {"token": f"token_id:{t}", "logprob": -1.25, "bytes": None, "top_logprobs": []}
        for t in range(NEW_TOKENS)
    ]
    choice = {
        "index": 0,
        "logprobs": {"content": entries},
        "finish_reason": "length",
        "token_ids": list(range(NEW_TOKENS)),
        "routed_experts": base64.b64encode(file.getvalue()).decode(),
    }
    return json.dumps({"request_id": "generate-0", "model": "m", "created": 0, "choices": [choice]}).encode()


def serve() -> None:
    body = answer()

    async def handle(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=body, content_type="application/json")

    async def run() -> None:
        app = web.Application()
        app.router.add_post("/inference/v1/generate", handle)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)  # until the parent is gone

    asyncio.run(run())


async def one_round(send: Send, concurrency: int) -> tuple[float, float]:
    """Microseconds a request: on the clock, and of this process' CPU."""
    left = iter(range(REQUESTS[concurrency]))

    async def worker() -> None:
        for _ in left:
            await send()

    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    count = REQUESTS[concurrency]
    return (time.perf_counter() - wall) / count * 1e6, (time.process_time() - cpu) / count * 1e6


async def measure(url: str) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with (
        aiohttp.ClientSession(connector=connector, timeout=timeout) as http,
        RemoteInferenceGenerator(url) as generator,
    ):
        path = url + "/inference/v1/generate"
        headers = {"Content-Type": "application/json"}

        async def bare() -> object:
            data = orjson.dumps({"sampling_params": PARAMS, "token_ids": PROMPT})
            async with http.post(path, data=data, headers=headers) as response:
                return orjson.loads(await response.read())

        async def bare_routes() -> object:
            text = (await bare())["choices"][0]["routed_experts"]  # type: ignore[index]
            return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)

        async def rtk() -> object:
            return await generator.generate(PROMPT, PARAMS)

        async def rtk_routes() -> object:
            return await generator.generate(PROMPT, PARAMS, routed_experts=True)

        ways: dict[str, Send] = {
            "aiohttp + orjson": bare,
            "rtk": rtk,
            "aiohttp + orjson + np.load": bare_routes,
            "rtk, with routes": rtk_routes,
        }
        print(f"{'concurrency':>11}  {'':27}{'us a request':>13}{'CPU us':>8}{'over bare':>11}{'CPU':>8}")
        for concurrency in REQUESTS:
            seen: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
            for send in ways.values():
                await one_round(send, concurrency)  # opens the connections
            for _ in range(ROUNDS):
                for name, send in ways.items():
                    seen[name].append(await one_round(send, concurrency))
            medians = {
                name: [statistics.median(values) for values in zip(*rounds, strict=True)]
                for name, rounds in seen.items()
            }
            for name, (wall, cpu) in medians.items():
                base_wall, base_cpu = medians[
                    "aiohttp + orjson + np.load" if "rout" in name or "np" in name else "aiohttp + orjson"
                ]
                print(
                    f"{concurrency:11}  {name:27}{wall:13.0f}{cpu:8.0f}{wall / base_wall - 1:+11.1%}"
                    f"{cpu / base_cpu - 1:+8.1%}"
                )


def main() -> None:
    command = [sys.executable, __file__, "serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None and server.stdin is not None
        try:
            asyncio.run(measure(f"http://127.0.0.1:{server.stdout.readline().strip()}"))
        finally:
            server.stdin.close()


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["serve"] else main()
