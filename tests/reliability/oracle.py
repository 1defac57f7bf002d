"""A server whose answers can be worked out again from the prompt, so that each one can be checked."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from aiohttp import web

from rtk import ModelLayout

LAYOUT = ModelLayout(num_layers=6, moe_layers=(1, 2, 3, 4, 5), num_experts=40, top_k=4)


@dataclass(frozen=True, eq=False)
class Truth:
    """What the server answers to a prompt."""

    token_ids: list[int]
    logprobs: list[float]
    routes: np.ndarray

    def differences(self, result: Any) -> dict[str, int]:
        """In how many values a result differs, field by field; only fields that do."""
        found = {
            "token_ids": _differing(self.token_ids, result.token_ids),
            "logprobs": _differing(self.logprobs, result.logprobs),
            "stop_reason": int(result.stop_reason != "length"),
            "routed_experts": 0
            if result.routed_experts is None
            else _differing(self.routes, result.routed_experts),
        }
        return {name: count for name, count in found.items() if count}


def truth(prompt: Sequence[int], max_tokens: int) -> Truth:
    rng = np.random.default_rng(list(prompt))
    # Distinct experts in each row, as a router chooses them.
    rows = len(prompt) + max_tokens - 1
    scores = rng.random((rows, LAYOUT.num_layers, LAYOUT.num_experts))
    routes = np.argsort(scores, axis=-1)[..., : LAYOUT.top_k].astype(np.uint8)
    routes[:, 0] = 0  # layer 0 is dense
    return Truth(
        token_ids=rng.integers(10, 50_000, max_tokens).tolist(),
        logprobs=(-rng.random(max_tokens)).tolist(),
        routes=routes,
    )


@asynccontextmanager
async def answering() -> AsyncIterator[str]:
    """The server's address, on this loop."""
    app = web.Application()
    app.router.add_post("/inference/v1/generate", _handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def _handle(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    answer = truth(body["token_ids"], body["sampling_params"]["max_tokens"])
    if not body.get("stream"):
        whole = {"request_id": "r", "choices": [_choice(answer, 0, len(answer.token_ids))]}
        return web.json_response(whole)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for at in range(len(answer.token_ids)):
        event = {"request_id": "r", "choices": [_choice(answer, at, at + 1)]}
        await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await asyncio.sleep(0)
    await response.write(b"data: [DONE]\n\n")
    return response


def _choice(answer: Truth, begin: int, end: int) -> dict[str, Any]:
    last = end == len(answer.token_ids)
    file = io.BytesIO()
    np.save(file, answer.routes)
    return {
        "index": 0,
        "logprobs": {"content": [{"logprob": value, "bytes": None} for value in answer.logprobs[begin:end]]},
        "finish_reason": "length" if last else None,
        "token_ids": answer.token_ids[begin:end],
        "routed_experts": base64.b64encode(file.getvalue()).decode() if last else None,
    }


def _differing(truth: Any, seen: Any) -> int:
    if seen is None or np.shape(truth) != np.shape(seen):
        return max(np.size(truth), 1)
    return int(np.count_nonzero(np.asarray(truth) != np.asarray(seen)))
