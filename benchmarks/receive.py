"""Receiving over HTTP and decoding one answer with routes of [32768, 94, 8]: rtk beside plain aiohttp.

python benchmarks/receive.py

Each way runs in a fresh process, which has received a small answer before. Memory is the high-water mark above
what the process held then, as a multiple of the array.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import numpy as np
from aiohttp import web
from decode import SHAPE, high_water, write_answers

from rtk import RemoteInferenceGenerator

ROUNDS = 5
PATH = "/inference/v1/generate"
SMALL = (600, 4, 8)


async def with_rtk(url: str, tokens: int) -> np.ndarray:
    async with RemoteInferenceGenerator(url) as generator:
        result = await generator.generate([1] * tokens, {"max_tokens": 1}, routed_experts=True)
    assert result.routed_experts is not None
    return result.routed_experts


async def streamed(url: str, tokens: int) -> np.ndarray:
    async with RemoteInferenceGenerator(url) as generator:
        result = await generator.generate(
            [1] * tokens, {"max_tokens": 1}, routed_experts=True, on_chunk=lambda _: None
        )
    assert result.routed_experts is not None
    return result.routed_experts


async def plain(url: str, tokens: int) -> np.ndarray:
    body = {"token_ids": [1] * tokens, "sampling_params": {"max_tokens": 1}}
    async with aiohttp.ClientSession() as http, http.post(url + PATH, json=body) as response:
        text = (await response.json())["choices"][0]["routed_experts"]
    return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)


async def bytes_alone(url: str, tokens: int) -> np.ndarray:
    """Not a way to read an answer: its bytes received, and thrown away."""
    body = {"token_ids": [1] * tokens, "sampling_params": {"max_tokens": 1}}
    async with aiohttp.ClientSession() as http, http.post(url + PATH, json=body) as response:
        async for _ in response.content.iter_any():
            pass
    return np.empty(0)


WAYS: dict[str, Callable[[str, int], Awaitable[np.ndarray]]] = {
    "received, not read": bytes_alone,
    "rtk": with_rtk,
    "rtk, streamed": streamed,
    "aiohttp, json, np.load": plain,
}


def serve(folder: Path) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        size = "small/answer" if len(body["token_ids"]) == SMALL[0] else "answer"
        data = (folder / size).read_bytes()
        if body.get("stream"):
            return web.Response(
                body=b"data: " + data + b"\n\ndata: [DONE]\n\n", content_type="text/event-stream"
            )
        return web.Response(body=data, content_type="application/json")

    async def run() -> None:
        app = web.Application()
        app.router.add_post(PATH, handle)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)  # until the parent is gone

    asyncio.run(run())


def child(name: str, url: str) -> None:
    receive = WAYS[name]
    asyncio.run(receive(url, SMALL[0]))  # type: ignore[arg-type]
    before, begin = high_water(), time.perf_counter()
    array = asyncio.run(receive(url, SHAPE[0]))  # type: ignore[arg-type]
    print(json.dumps([time.perf_counter() - begin, high_water() - before]))
    assert not array.size or array.shape == SHAPE


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "small").mkdir()
        write_answers(folder / "small", SMALL)
        write_answers(folder, SHAPE)
        command = [sys.executable, __file__, "serve", str(folder)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdin is not None and server.stdout is not None
            url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
            seen: dict[str, list[list[float]]] = {name: [] for name in WAYS}
            for _ in range(ROUNDS):
                for name in WAYS:
                    out = subprocess.run(
                        [sys.executable, __file__, name, url], check=True, capture_output=True
                    )
                    seen[name].append(json.loads(out.stdout))
            server.stdin.close()
    array = SHAPE[0] * SHAPE[1] * SHAPE[2]
    print(f"{'':26}{'best':>9}{'median':>9}{'peak / array':>14}   of {ROUNDS} processes")
    for name, rounds in seen.items():
        seconds, above = zip(*rounds, strict=True)
        print(
            f"{name:26}{min(seconds) * 1e3:7.0f}ms{statistics.median(seconds) * 1e3:7.0f}ms"
            f"{statistics.median(above) / array:14.2f}"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(Path(sys.argv[2]))
    elif len(sys.argv) == 3:
        child(sys.argv[1], sys.argv[2])
    else:
        main()
