"""The few requests that the doctor sends, and what came back in one form whatever the server.

How a route is asked and read is what `rtk.client.servers` says. Here answers are read without the generator's promise
that they are as expected, since what is not is a finding.
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
from rtk.client.servers import Prompt, Route
from rtk.client.servers.fields import only
from rtk.client.transport import RetryPolicy
from rtk.errors import PayloadError, RtkError

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
        max_model_len: int | None,
    ) -> None:
        # A copy comes without the open connection, so the caller's retries and its loop are left alone.
        self._generator = copy.copy(generator)
        self._generator.retry = _ONCE
        self._model = model
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

    async def generate(self, route: Route, salt: str, first_row: int = 0) -> Asked:
        """Generate greedily from the prompt, or from a short chat; a failure is returned, not raised.

        Args:
            route: which of the server's routes to ask.
            salt: keeps the prefix cache apart from that of other salts.
            first_row: ask for rows from this one on.
        """
        self.generations += 1
        prompt: Prompt = _CHAT_MESSAGES if route.chat else self.prompt
        body = route.body(prompt, _settings(), routed_experts=True, start=first_row)
        body |= {"model": self._model, route.cache_salt: salt}
        try:
            return self._answer(route, await self.ask("POST", route.path, body))
        except RtkError as error:
            return error

    async def stream(self, route: Route, salt: str, *, routes: bool) -> Asked:
        """As `generate`, as a stream."""
        self.requests += 1
        self.generations += 1
        try:
            async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                (result,) = await self._generator.ask(
                    route,
                    self.prompt,
                    _settings(),
                    prompt_tokens=len(self.prompt),
                    routed_experts=routes,
                    cache_salt=salt,
                    on_chunk=lambda _: None,
                )
        except TimeoutError:
            return PayloadError(f"the stream did not end within {_REQUEST_TIMEOUT_S:.0f} s")
        except RtkError as error:
            return error
        return Answer(result.token_ids, result.logprobs, result.routed_experts)

    def _answer(self, route: Route, payload: Mapping[str, Any]) -> Answer:
        choice = only(route.choices(payload))
        chunk = GenerateChunk([], None) if route.chat else route.chunk(choice)
        try:
            found, fault = route.routed_experts(payload, choice), None
        except PayloadError as error:
            found, fault = None, str(error)
        return Answer(chunk.token_ids, chunk.logprobs, found, fault)


def fresh_salt() -> str:
    """A cache salt that no request before has had."""
    return f"rtk-doctor-{uuid.uuid4().hex}"


def _settings() -> dict[str, Any]:
    return {"max_tokens": MAX_TOKENS, "temperature": 0.0, "logprobs": 0, "ignore_eos": True}
