"""The few requests that the doctor sends, and what came back in one form whatever the server.

The forms of requests and answers are those of `rtk.client.servers`. Here they are read without its caller's promise
that an answer is as expected, since what is not is a finding.
"""

from __future__ import annotations

import asyncio
import copy
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rtk.client.generator import RemoteInferenceGenerator
from rtk.client.result import GenerateChunk
from rtk.client.routed_experts import Routes
from rtk.client.servers import forms
from rtk.client.transport import RetryPolicy
from rtk.errors import PayloadError, RtkError
from rtk.layout.model_layout import ModelLayout

NATIVE = forms.GENERATE
SKYRL = forms.SKYRL_GENERATE
SGLANG = forms.SGLANG_GENERATE
COMPLETIONS = forms.COMPLETIONS
CHAT = forms.CHAT

_ONCE = RetryPolicy(tries=1)
_REQUEST_TIMEOUT_S = 120.0
# Longer than one block of a prefix cache: 16 tokens on vLLM's GPUs, 128 on its CPUs.
_PROMPT_TOKENS = 160
MAX_TOKENS = 12
_CHAT_MESSAGES = [{"role": "user", "content": "Say yes."}]
_TEXT = (
    "The old harbour was quiet that morning. Two boats had come in before dawn, and their nets lay drying on the "
    "wall beside the chandler's shop. Anna counted 17 crates of mackerel, wrote the number in her book, and asked "
    "the skipper what he wanted for them. He named a price; she laughed. def total(crates, price): return crates * "
    "price. By noon the ice would melt, so neither of them had long to argue. In the end they settled on something "
    "between, shook hands, and carried the crates up the hill to the market, where people from nine villages were "
    "already waiting. Le poisson frais se vend vite. The bells rang twelve, the last crate was gone, and the gulls, "
    "which had followed the cart all the way from the quay, turned back towards the sea without a sound."
)


@dataclass(frozen=True)
class Answer:
    """One generated sequence.

    Attributes:
        token_ids: the generated tokens; empty where the endpoint does not give ids.
        logprobs: of each token, with -9999.0 for one that was missing or not finite; None where there are none.
        routes: expert ids `[rows, layers, top_k]`; None where none came.
        fault: why the routes that came cannot be read; None where they can, or none came.
    """

    token_ids: list[int]
    logprobs: list[float] | None
    routes: Routes | None
    fault: str | None = None


Asked = Answer | RtkError


class Probe:
    """Sends the doctor's requests one after the other, each once, and counts them.

    Attributes:
        requests: how many were sent.
        generations: how many of them generated tokens.
        prompt: token ids of the prompt that every request has.
    """

    def __init__(
        self,
        generator: RemoteInferenceGenerator,
        model: str,
        layout: ModelLayout | None,
        max_model_len: int | None,
    ) -> None:
        # A copy comes without the open connection, so the caller's retries and its loop are left alone.
        self._generator = copy.copy(generator)
        self._generator.retry = _ONCE
        self._generator.server = "vllm"  # what is streamed
        self._model = model
        self._layout = layout
        self._longest = max(2, (max_model_len or 4096) - MAX_TOKENS - 1)
        self.requests = 0
        self.generations = 0
        self.prompt: list[int] = []

    async def aclose(self) -> None:
        """Close the connections."""
        await self._generator.aclose()

    async def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """One request; raises as `RemoteInferenceGenerator.request`, and PayloadError when no answer comes."""
        self.requests += 1
        try:
            async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                return await self._generator.request(method, path, body, retry=_ONCE)
        except TimeoutError as error:
            raise PayloadError(f"{path} gave no answer within {_REQUEST_TIMEOUT_S:.0f} s") from error

    async def find(self, path: str) -> dict[str, Any] | None:
        """The JSON object at a path, or None where there is none."""
        try:
            return await self.ask("GET", path)
        except RtkError:
            return None

    async def choose_prompt(self) -> None:
        """Tokenise the doctor's text; without a tokenizer route, plain small ids stand in."""
        try:
            tokens = (await self.ask("POST", "/tokenize", {"model": self._model, "prompt": _TEXT})).get(
                "tokens"
            )
        except RtkError:
            tokens = None
        if not isinstance(tokens, list) or not tokens or not all(type(token) is int for token in tokens):
            tokens = [3 + 37 * position % 97 for position in range(_PROMPT_TOKENS)]
        self.prompt = tokens[: min(_PROMPT_TOKENS, self._longest)]

    async def generate(self, path: str, salt: str, first_row: int = 0) -> Asked:
        """Generate greedily from the prompt on one of the endpoints; a failure is returned, not raised.

        Args:
            path: NATIVE, SKYRL, SGLANG, COMPLETIONS or CHAT.
            salt: keeps the prefix cache apart from that of other salts.
            first_row: ask for rows from this one on; not on NATIVE and SKYRL, which cannot.
        """
        self.generations += 1
        try:
            form = self._form(path)
            prompt: forms.Prompt = _CHAT_MESSAGES if path == CHAT else self.prompt
            body = form.body(prompt, _settings(), routed_experts=True)
            return self._answer(
                form, await self.ask("POST", path, body | _extras(path, self._model, salt, first_row))
            )
        except RtkError as error:
            return error

    async def stream(self, salt: str, *, routes: bool) -> Asked:
        """As `generate` on NATIVE, as a stream."""
        self.requests += 1
        self.generations += 1
        try:
            async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                result = await self._generator.generate(
                    self.prompt, _settings(), routed_experts=routes, cache_salt=salt, on_chunk=lambda _: None
                )
        except TimeoutError:
            return PayloadError(f"the stream did not end within {_REQUEST_TIMEOUT_S:.0f} s")
        except RtkError as error:
            return error
        return Answer(result.token_ids, result.logprobs, result.routed_experts)

    def _answer(self, form: forms.Form, payload: Mapping[str, Any]) -> Answer:
        choice = forms.only(form.choices(payload))
        chunk = GenerateChunk([], None) if form.path == CHAT else form.chunk(choice)
        try:
            found, fault = form.routed_experts(payload, choice), None
        except PayloadError as error:
            found, fault = None, str(error)
        return Answer(chunk.token_ids, chunk.logprobs, found, fault)

    def _form(self, path: str) -> forms.Form:
        if path == SGLANG:
            return forms.SglangGenerate(self._layout)
        if path in (NATIVE, SKYRL):
            return forms.VllmGenerate(path)
        return forms.Chat(self._layout) if path == CHAT else forms.Completions(self._layout)


def fresh_salt() -> str:
    """A cache salt that no request before has had."""
    return f"rtk-doctor-{uuid.uuid4().hex}"


def _extras(path: str, model: str, salt: str, first_row: int) -> dict[str, Any]:
    if path == SGLANG:
        return {"extra_key": salt} | ({"routed_experts_start_len": first_row} if first_row else {})
    start = {"routed_experts_prompt_start": first_row} if first_row else {}
    return {"model": model, "cache_salt": salt, **start}


def _settings() -> dict[str, Any]:
    return {"max_tokens": MAX_TOKENS, "temperature": 0.0, "logprobs": 0, "ignore_eos": True}
