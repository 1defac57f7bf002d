"""The embedded server: vLLM's HTTP in front of an Engine, on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from aiohttp import web

from rtk.errors import EmbeddedServerError
from rtk.serve import responses
from rtk.serve.answer_text import AnswerText, Piece
from rtk.serve.completion import Completion
from rtk.serve.engine import Engine, Generation
from rtk.serve.errors import ApiError, invalid
from rtk.serve.http import errors_as_vllm, send_events
from rtk.serve.requests import (
    CompletionRequest,
    GenerateRequest,
    check_model,
    parse_completion,
    parse_generate,
    parse_json,
)
from rtk.serve.sampling_params import flag

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
        self._created = int(time.time())
        # Requests take turns token by token, so that a long one does not keep a short one waiting, and
        # the event loop never waits for the model.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="rtk-engine")

    def app(self) -> web.Application:
        """The application with all routes."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[errors_as_vllm])
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
        card = responses.model_card(self._name, self._root, self._engine.max_model_len, self._created)
        return web.json_response({"object": "list", "data": [card]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        tokenizer = self._engine.tokenizer
        if "messages" in body:
            tokens = self._chat_tokens(body)
        elif isinstance(prompt := body.get("prompt"), str):
            add = flag(body, "add_special_tokens", default=True)
            tokens = tokenizer.encode(prompt, add_special_tokens=add)
        else:
            raise invalid("body.prompt", "Input should be a valid string")
        strings = tokenizer.convert_ids_to_tokens(tokens) if flag(body, "return_token_strs") else None
        return web.json_response(
            {
                "count": len(tokens),
                "max_model_len": self._engine.max_model_len,
                "tokens": tokens,
                "token_strs": strings,
            }
        )

    def _chat_tokens(self, body: Mapping[str, Any]) -> list[int]:
        messages, tokenizer = body["messages"], self._engine.tokenizer
        if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
            raise invalid("body.messages", "Input should be a list of messages")
        if tokenizer.chat_template is None:
            raise ApiError(
                "As of transformers v4.44, default chat template is no longer allowed, so you must provide a chat "
                "template if the tokenizer does not define one."
            )
        text = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=flag(body, "add_generation_prompt", default=True),
        )
        tokens: list[int] = tokenizer.encode(text, add_special_tokens=flag(body, "add_special_tokens"))
        return tokens

    async def _detokenize(self, request: web.Request) -> web.Response:
        tokens = (await self._body(request)).get("tokens")
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise invalid("body.tokens", "Input should be a list of token ids")
        for position, token in enumerate(tokens):
            # The tokenizers' ids are 32 bits wide; ids outside the vocabulary have no text, as in vLLM.
            if not 0 <= token < 2**32:
                raise invalid(f"body.tokens.{position}", "Input should be a token id")
        return web.json_response({"prompt": self._engine.tokenizer.decode(tokens)})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        wanted = parse_generate(await self._body(request), self._engine)
        name = responses.request_id("generate-tokens")
        sequences = self._start(wanted)
        if wanted.stream:
            return await send_events(request, self._generate_events(name, wanted, sequences))
        choices = []
        for index, sequence in enumerate(sequences):
            pieces = [piece async for piece in self._pieces(sequence, wanted)]
            choices.append(self._generate_choice(index, sequence, wanted, pieces))
        scores = sequences[0].prompt_logprobs
        answer = responses.generate_response(
            name,
            self._name,
            choices,
            _counts(wanted, sequences),
            prompt_logprobs=responses.prompt_logprobs(self._engine.tokenizer, scores),
            prompt_token_ids=wanted.prompts[0] if wanted.return_token_ids else None,
        )
        return web.json_response(answer)

    async def _generate_events(
        self, name: str, wanted: GenerateRequest, sequences: list[Generation]
    ) -> AsyncIterator[dict[str, Any]]:
        prompt = {"prompt_token_ids": wanted.prompts[0]} if wanted.return_token_ids else {}
        for index, sequence in enumerate(sequences):
            async for piece in self._pieces(sequence, wanted):
                choice = self._generate_choice(index, sequence, wanted, [piece])
                yield {"request_id": name, "choices": [choice], "usage": None, **prompt}
                prompt = {}
        if wanted.include_usage:
            yield {"request_id": name, "choices": [], "usage": _counts(wanted, sequences)}

    def _generate_choice(
        self, index: int, sequence: Generation, wanted: GenerateRequest, pieces: list[Piece]
    ) -> dict[str, Any]:
        # In a stream the whole array travels with the last token, as vLLM's does.
        routes = self._routes(sequence, wanted) if pieces[-1].finish_reason else None
        return responses.generate_choice(index, pieces, sequence.params.logprobs, routes)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        wanted = parse_completion(await self._body(request), self._engine)
        name = responses.request_id("cmpl")
        sequences = self._start(wanted)
        if wanted.stream:
            return await send_events(request, self._completion_events(name, wanted, sequences))
        choices = []
        for index, sequence in enumerate(sequences):
            pieces = [piece async for piece in self._pieces(sequence, wanted)]
            completion = Completion(self._engine.tokenizer, wanted, index, sequence)
            choices.append(completion.whole(pieces, self._routes(sequence, wanted)))
        counts = _counts(wanted, sequences)
        return web.json_response(responses.completion_response(name, self._name, VERSION, choices, counts))

    async def _completion_events(
        self, name: str, wanted: CompletionRequest, sequences: list[Generation]
    ) -> AsyncIterator[dict[str, Any]]:
        head = {"id": name, "object": "text_completion", "created": int(time.time()), "model": self._name}
        # The very last event of a stream names the server.
        last = {"system_fingerprint": f"vllm-{VERSION}"}
        for index, sequence in enumerate(sequences):
            completion = Completion(self._engine.tokenizer, wanted, index, sequence)
            async for piece in self._pieces(sequence, wanted):
                ends = piece.finish_reason is not None and not wanted.include_usage
                yield {**head, "choices": [completion.event(piece)], **(last if ends else {})}
        if wanted.include_usage:
            yield {**head, "choices": [], "usage": _counts(wanted, sequences), **last}

    def _start(self, wanted: GenerateRequest) -> list[Generation]:
        return [self._engine.start(prompt, params) for prompt, params in wanted.sequences]

    async def _pieces(self, sequence: Generation, wanted: GenerateRequest) -> AsyncIterator[Piece]:
        text = AnswerText(self._engine.tokenizer, sequence.prompt, wanted.text)
        loop = asyncio.get_running_loop()
        finished = False
        while not finished:
            piece = text.add(await loop.run_in_executor(self._worker, self._engine.step, sequence))
            finished = piece.finish_reason is not None
            yield piece

    def _routes(self, sequence: Generation, wanted: GenerateRequest) -> str | None:
        if not self._routed_experts:
            return None
        return responses.encode_routes(sequence.routed_experts()[wanted.first_row :])

    async def _body(self, request: web.Request) -> dict[str, Any]:
        body = parse_json(await request.read())
        check_model(body, self._name)
        return body


def _counts(wanted: GenerateRequest, sequences: list[Generation]) -> dict[str, int]:
    return responses.usage(sum(map(len, wanted.prompts)), sum(len(each.generated) for each in sequences))


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
        # Windows has no such handlers: there a Ctrl-C raises, and a parent closes standard input.
        with contextlib.suppress(NotImplementedError):
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
