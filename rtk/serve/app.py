"""The embedded server: vLLM's HTTP in front of an Engine, on loopback."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from aiohttp import web

from rtk.errors import EmbeddedServerError
from rtk.serve import _responses
from rtk.serve._completion import CompletionText
from rtk.serve._requests import (
    ApiError,
    GenerateRequest,
    check_model,
    invalid,
    parse_completion,
    parse_generate,
    parse_json,
)
from rtk.serve.engine import Engine, Generation, SamplingParams, Token

HOST = "127.0.0.1"
# The vLLM release whose answers are matched; the suffix keeps anybody from taking this for vLLM.
VERSION = "0.30.0+rtk.embedded"
_MAX_BODY_BYTES = 64 * 2**20


class Service:
    """The routes of one served model.

    Args:
        engine: the model.
        name: what it is served under.
        root: what `/v1/models` says of where it came from; clients read its config there.
        routed_experts: whether answers carry routes, as vLLM's --enable-return-routed-experts.
    """

    def __init__(self, engine: Engine, *, name: str, root: str, routed_experts: bool = True) -> None:
        self._engine = engine
        self._name = name
        self._root = root
        self._routed_experts = routed_experts
        # Requests take turns token by token, so that a long one does not keep a short one waiting, and
        # the event loop never waits for the model.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="rtk-engine")

    def app(self) -> web.Application:
        """The application with all routes."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_errors_as_vllm])
        app.router.add_get("/health", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/v1/completions", self._complete)
        return app

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": VERSION})

    async def _models(self, _: web.Request) -> web.Response:
        card = {
            "id": self._name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "rtk",
            "root": self._root,
            "parent": None,
            "max_model_len": self._engine.max_model_len,
            "permission": [],
        }
        return web.json_response({"object": "list", "data": [card]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        prompt = body.get("prompt")
        if not isinstance(prompt, str):
            raise invalid("body.prompt", "Input should be a valid string")
        tokenizer = self._engine.tokenizer
        tokens = tokenizer.encode(prompt, add_special_tokens=body.get("add_special_tokens", True) is True)
        strings = tokenizer.convert_ids_to_tokens(tokens) if body.get("return_token_strs") is True else None
        return web.json_response(
            {
                "count": len(tokens),
                "max_model_len": self._engine.max_model_len,
                "tokens": tokens,
                "token_strs": strings,
            }
        )

    async def _detokenize(self, request: web.Request) -> web.Response:
        tokens = (await self._body(request)).get("tokens")
        if not isinstance(tokens, list) or not all(type(token) is int and token >= 0 for token in tokens):
            raise invalid("body.tokens", "Input should be a list of token ids")
        return web.json_response({"prompt": self._engine.tokenizer.decode(tokens)})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        wanted = parse_generate(await self._body(request), self._engine)
        name = _responses.request_id("generate-tokens")
        (prompt,) = wanted.prompts
        sequences = [self._engine.start(prompt, params) for params in _each_seed(wanted)]
        if wanted.stream:
            return await _send_events(request, self._generate_events(name, sequences))
        choices = []
        for index, sequence in enumerate(sequences):
            tokens = [token async for token in self._tokens(sequence)]
            choices.append(self._choice(index, sequence, tokens))
        return web.json_response(_responses.generate_response(name, self._name, choices, len(prompt)))

    async def _generate_events(self, name: str, sequences: list[Generation]) -> AsyncIterator[dict[str, Any]]:
        for index, sequence in enumerate(sequences):
            async for token in self._tokens(sequence):
                choice = self._choice(index, sequence, [token])
                yield {"request_id": name, "choices": [choice], "usage": None}

    def _choice(self, index: int, sequence: Generation, tokens: list[Token]) -> dict[str, Any]:
        # In a stream the whole array travels with the last token, as vLLM's does.
        routes = self._routes(sequence) if tokens[-1].finish_reason else None
        logprobs = sequence.params.logprobs is not None
        return _responses.generate_choice(index, tokens, logprobs=logprobs, routes=routes)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        wanted = parse_completion(body, self._engine)
        stop = body.get("stop") or []
        stop = [stop] if isinstance(stop, str) else stop
        if not isinstance(stop, list) or not all(isinstance(string, str) and string for string in stop):
            raise invalid("body.stop", "Input should be a text or a list of texts")
        name = _responses.request_id("cmpl")
        sequences = [
            self._engine.start(prompt, params) for prompt in wanted.prompts for params in _each_seed(wanted)
        ]
        if wanted.stream:
            return await _send_events(request, self._completion_events(name, body, sequences, stop))
        choices = [
            await self._completion_choice(index, sequence, body, stop)
            for index, sequence in enumerate(sequences)
        ]
        counts = _responses.usage(
            sum(map(len, wanted.prompts)), sum(len(sequence.generated) for sequence in sequences)
        )
        return web.json_response(_responses.completion_response(name, self._name, VERSION, choices, counts))

    async def _completion_choice(
        self, index: int, sequence: Generation, body: Mapping[str, Any], stop: list[str]
    ) -> dict[str, Any]:
        text = CompletionText(self._engine, stop)
        tokens: list[Token] = []
        async for token in self._tokens(sequence):
            tokens.append(token)
            text.add(token.id, last=token.finish_reason is not None)
            if text.stop_reason is not None:
                break
        echoed = self._engine.tokenizer.decode(sequence.prompt) if body.get("echo") is True else ""
        ids = body.get("return_token_ids") is True
        return {
            "index": index,
            "text": echoed + text.text,
            "logprobs": self._completion_logprobs(sequence, tokens, 0),
            "finish_reason": "stop" if text.stop_reason is not None else tokens[-1].finish_reason,
            "stop_reason": text.stop_reason,
            "token_ids": sequence.generated if ids else None,
            "prompt_logprobs": None,
            "prompt_token_ids": sequence.prompt if ids else None,
            "routed_experts": self._routes(sequence, _first_row(body, sequence)),
        }

    async def _completion_events(
        self, name: str, body: Mapping[str, Any], sequences: list[Generation], stop: list[str]
    ) -> AsyncIterator[dict[str, Any]]:
        ids = body.get("return_token_ids") is True
        for index, sequence in enumerate(sequences):
            text = CompletionText(self._engine, stop)
            async for token in self._tokens(sequence):
                before = len(text.text)
                new = text.add(token.id, last=token.finish_reason is not None)
                stopped = text.stop_reason is not None
                choice = {
                    "index": index,
                    "text": new,
                    "logprobs": self._completion_logprobs(sequence, [token], before),
                    "finish_reason": "stop" if stopped else token.finish_reason,
                    "stop_reason": text.stop_reason,
                    "prompt_token_ids": sequence.prompt if ids and len(sequence.generated) == 1 else None,
                    "token_ids": [token.id] if ids else None,
                }
                yield {
                    "id": name,
                    "object": "text_completion",
                    "created": int(time.time()),
                    "model": self._name,
                    "choices": [choice],
                }
                if stopped:
                    break

    def _completion_logprobs(
        self, sequence: Generation, tokens: list[Token], text_before: int
    ) -> dict[str, Any] | None:
        if sequence.params.logprobs is None:
            return None
        return _responses.completion_logprobs(self._engine, tokens, text_before)

    def _routes(self, sequence: Generation, first_row: int = 0) -> str | None:
        if not self._routed_experts:
            return None
        return _responses.encode_routes(sequence.routed_experts()[first_row:])

    async def _tokens(self, sequence: Generation) -> AsyncIterator[Token]:
        loop = asyncio.get_running_loop()
        while True:
            token = await loop.run_in_executor(self._worker, self._engine.step, sequence)
            yield token
            if token.finish_reason is not None:
                return

    async def _body(self, request: web.Request) -> dict[str, Any]:
        body = parse_json(await request.read())
        check_model(body, self._name)
        return body


def _each_seed(wanted: GenerateRequest) -> list[SamplingParams]:
    """One set of parameters a sequence of a prompt; with a seed, each gets its own."""
    params = wanted.params
    if params.seed is None:
        return [params] * wanted.n
    return [replace(params, seed=params.seed + index) for index in range(wanted.n)]


def _first_row(body: Mapping[str, Any], sequence: Generation) -> int:
    first = body.get("routed_experts_prompt_start") or 0
    if type(first) is not int or not 0 <= first <= len(sequence.prompt):
        raise invalid("body.routed_experts_prompt_start", f"Input should lie in 0..{len(sequence.prompt)}")
    return first


async def _send_events(request: web.Request, events: AsyncIterator[dict[str, Any]]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    async for payload in events:
        await response.write(_responses.event(payload))
    await response.write(_responses.DONE)
    return response


@web.middleware
async def _errors_as_vllm(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        return web.json_response(error.body, status=error.status)
    except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as error:
        return web.json_response({"detail": error.reason}, status=error.status)


def run(
    model: Path,
    *,
    port: int,
    max_model_len: int | None = None,
    served_model_name: str | None = None,
    routed_experts: bool = True,
    watch_stdin: bool = False,
) -> None:
    """Serve a model on loopback until interrupted.

    Prints one line to standard output, with the address, when it answers.

    Args:
        model: folder of a Hugging Face MoE model.
        port: 0 takes a free one.
        max_model_len, served_model_name, routed_experts: as `Engine` and `Service`.
        watch_stdin: stop when standard input ends, which it does when the parent process dies.

    Raises:
        EmbeddedServerError: the model cannot be served, or the port is taken.
    """
    model = model.resolve()
    engine = Engine(model, max_model_len=max_model_len)
    name = served_model_name or model.name
    service = Service(engine, name=name, root=str(model), routed_experts=routed_experts)
    asyncio.run(_serve(service.app(), port, watch_stdin))


async def _serve(app: web.Application, port: int, watch_stdin: bool) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if watch_stdin:
        threading.Thread(target=_wait_for_end_of_stdin, args=(loop, stop), daemon=True).start()
    # A client that goes away cancels its handler, and with it the generation.
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, HOST, port, shutdown_timeout=1.0).start()
        except OSError as error:
            raise EmbeddedServerError(
                f"cannot listen on {HOST}:{port}: {error.strerror}; choose another --port"
            ) from error
        print(f"rtk serve: listening on http://{HOST}:{runner.addresses[0][1]}", flush=True)
        await stop.wait()
    finally:
        await runner.cleanup()


def _wait_for_end_of_stdin(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    while sys.stdin.buffer.read(4096):
        pass
    loop.call_soon_threadsafe(stop.set)
