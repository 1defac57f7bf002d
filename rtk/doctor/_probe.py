"""The few requests that the doctor sends, and what came back in one form whatever the server.

Endpoints: vLLM's `/inference/v1/generate` and OpenAI routes, SkyRL's `/skyrl/v1/generate`, SGLang's `/generate`
(`return_routed_experts`, `routed_experts_start_len`; routes are base64 of int32 without a shape).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import copy
import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rtk import _wire
from rtk.errors import PayloadError, RequestRejected, RtkError
from rtk.generator import RemoteInferenceGenerator, RetryPolicy
from rtk.layout import ModelLayout

NATIVE = "/inference/v1/generate"
SKYRL = "/skyrl/v1/generate"
SGLANG = "/generate"
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"

_ONCE = RetryPolicy(tries=1)
_REQUEST_TIMEOUT_S = 120.0
# Longer than one block of a prefix cache: 16 tokens on vLLM's GPUs, 128 on its CPUs.
_PROMPT_TOKENS = 160
MAX_TOKENS = 12
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
    routes: npt.NDArray[np.integer[Any]] | None
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

    async def serves(self, path: str) -> bool:
        """Whether a POST route exists, told by how it refuses a GET: 405 instead of 404."""
        try:
            await self.ask("GET", path)
        except RequestRejected as error:
            return error.status == 405
        except RtkError:
            return False
        return False

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
            payload = await self.ask("POST", path, self._body(path, salt, first_row))
            return self._sglang_answer(payload) if path == SGLANG else self._answer(payload)
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

    def _body(self, path: str, salt: str, first_row: int) -> dict[str, Any]:
        if path == SGLANG:
            return {
                "input_ids": self.prompt,
                "sampling_params": {"max_new_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True},
                "return_logprob": True,
                "return_routed_experts": True,
                "extra_key": salt,
                **({"routed_experts_start_len": first_row} if first_row else {}),
            }
        common = {"model": self._model, "cache_salt": salt}
        if path in (NATIVE, SKYRL):
            return {**common, "token_ids": self.prompt, "sampling_params": _settings()}
        body = {
            **common,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            # SGLang's OpenAI routes want to be asked; vLLM's ignore what they do not know.
            "return_routed_experts": True,
        }
        if path == CHAT:
            return {**body, "messages": [{"role": "user", "content": "Say yes."}]}
        return {**body, "prompt": self.prompt, "logprobs": 0, **_start(first_row)}

    def _answer(self, payload: Mapping[str, Any]) -> Answer:
        """An answer of vLLM's, SkyRL's or an OpenAI route."""
        choices = payload.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
            raise PayloadError(f"the answer has no choices; got the keys {sorted(payload)}")
        choice = choices[0]
        given = choice.get("logprobs")
        if isinstance(given, Mapping) and "content" in given and isinstance(choice.get("token_ids"), list):
            chunk = _wire.decode_chunk(choice)
            tokens, logprobs = chunk.token_ids, chunk.logprobs
        else:
            ids = choice.get("token_ids")
            tokens = ids if isinstance(ids, list) and all(type(token) is int for token in ids) else []
            values = given.get("token_logprobs") if isinstance(given, Mapping) else None
            logprobs = [_number([value]) for value in values] if isinstance(values, list) else None
        extra = choice.get("sgl_ext")
        encoded = choice.get("routed_experts") or (
            extra.get("routed_experts") if isinstance(extra, Mapping) else None
        )
        routes, fault = _readable(lambda: None if encoded is None else _wire.decode_routed_experts(encoded))
        return Answer(tokens, logprobs, routes, fault)

    def _routes(self, choice: Mapping[str, Any]) -> npt.NDArray[np.integer[Any]] | None:
        extra = choice.get("sgl_ext")
        if isinstance(extra, Mapping):
            return self._sglang_routes(extra.get("routed_experts"))
        encoded = choice.get("routed_experts")
        return None if encoded is None else _wire.decode_routed_experts(encoded)

    def _sglang_answer(self, payload: Mapping[str, Any]) -> Answer:
        meta = payload.get("meta_info")
        meta = meta if isinstance(meta, Mapping) else {}
        tokens = payload.get("output_ids")
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise PayloadError(f"{SGLANG} answered without output_ids; got the keys {sorted(payload)}")
        pairs = meta.get("output_token_logprobs")
        logprobs = [_number(pair) for pair in pairs] if isinstance(pairs, list) else None
        routes, fault = _readable(lambda: self._sglang_routes(meta.get("routed_experts")))
        return Answer(tokens, logprobs, routes, fault)

    def _sglang_routes(self, text: object) -> npt.NDArray[np.integer[Any]] | None:
        if text is None:
            return None
        if self._layout is None:
            raise PayloadError("SGLang sends no shape, so the model's layout is needed to read its routes")
        try:
            data = base64.b64decode(text, validate=True) if isinstance(text, str) else b"?"
        except (binascii.Error, ValueError) as error:
            raise PayloadError(f"routed_experts are no base64, or were cut: {error}") from error
        row = self._layout.num_layers * self._layout.top_k * 4
        if len(data) % row:
            raise PayloadError(
                f"routed_experts have {len(data)} bytes, which are no whole rows of {self._layout.num_layers} layers, "
                f"top-{self._layout.top_k}, int32"
            )
        return np.frombuffer(data, "<i4").reshape(-1, self._layout.num_layers, self._layout.top_k)


def fresh_salt() -> str:
    """A cache salt that no request before has had."""
    return f"rtk-doctor-{uuid.uuid4().hex}"


def _start(first_row: int) -> dict[str, int]:
    return {"routed_experts_prompt_start": first_row} if first_row else {}


def _settings() -> dict[str, Any]:
    return {"max_tokens": MAX_TOKENS, "temperature": 0.0, "logprobs": 0, "ignore_eos": True}


def _readable(read: Any) -> tuple[npt.NDArray[np.integer[Any]] | None, str | None]:
    try:
        return read(), None
    except PayloadError as error:
        return None, str(error)


def _number(pair: object) -> float:
    """The first of SGLang's (logprob, id, text), floored as `_wire` floors."""
    value = pair[0] if isinstance(pair, list) and pair else None
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else _wire.FLOOR_LOGPROB
