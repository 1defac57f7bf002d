"""How each kind of server is asked for one sequence from token ids, and where its answer holds what."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rtk.client import routed_experts
from rtk.client.result import GenerateChunk
from rtk.errors import PayloadError
from rtk.layout.model_layout import ModelLayout

Json = Mapping[str, Any]
FLOOR_LOGPROB = -9999.0
#: For each token, what could stand there: token id to logprob.
Alternatives = list[dict[int, float]]

# Where each form is asked.
GENERATE = "/inference/v1/generate"
SKYRL_GENERATE = "/skyrl/v1/generate"
SGLANG_GENERATE = "/generate"
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"

#: A prompt as the form takes it: token ids, or for a chat its messages.
Prompt = Sequence[int] | Sequence[Json]


class Form(Protocol):
    """One form of request and answer.

    Attributes:
        path: where requests are posted.
    """

    path: str

    def body(
        self, prompt: Prompt, sampling_params: Json, *, routed_experts: bool, start: int = 0
    ) -> dict[str, Any]:
        """The request's body, without the fields that all forms share.

        Args:
            prompt: what to go on from.
            sampling_params: in vLLM's names.
            routed_experts: whether routes are wanted.
            start: the first token whose routes are wanted.
        """

    def choices(self, payload: Json) -> Sequence[Json]:
        """The answer's sequences, or what an event has of them. Raises PayloadError where there is no list of them."""

    def chunk(self, choice: Json) -> GenerateChunk:
        """Its tokens and logprobs. Raises PayloadError where they are not as the form promises."""

    def top_logprobs(self, choice: Json) -> Alternatives:
        """For each token of the chunk its alternatives. Raises PayloadError where they are not as promised."""

    def prompt_logprobs(self, payload: Json, choice: Json) -> Alternatives | None:
        """The same for the prompt; empty for its first token."""

    def prompt_token_ids(self, payload: Json, choice: Json) -> list[int] | None:
        """The prompt's tokens, where the answer names them."""

    def finish_reason(self, choice: Json) -> str | None:
        """Why it ended; None in the middle of a stream."""

    def stop_match(self, choice: Json) -> str | int | None:
        """The stop string or token that ended it, where the answer names it."""

    def request_id(self, payload: Json) -> str | None:
        """The server's name for the request."""

    def routed_experts(self, payload: Json, choice: Json) -> routed_experts.Routes | None:
        """Its routes `[rows, layers, top_k]`, or None where it has none."""


def only(choices: Sequence[Json]) -> Json:
    """The one sequence. Raises PayloadError where there are none or several."""
    if len(choices) != 1:
        raise PayloadError(f"the answer has {len(choices)} choices; one sequence was asked for")
    return choices[0]


class VllmGenerate:
    """vLLM's `/inference/v1/generate`, and SkyRL's endpoint, which speaks the same but for the routes.

    vLLM 0.22 and newer send one array; 0.21 sends the prompt's rows apart, as `prompt_routed_experts` of the
    answer, before the generated tokens' rows in the choice. Joined in this order they are the one array.
    """

    def __init__(self, path: str = GENERATE) -> None:
        self.path = path

    def body(
        self, prompt: Prompt, sampling_params: Json, *, routed_experts: bool, start: int = 0
    ) -> dict[str, Any]:
        params = {**sampling_params, **({"routed_experts_prompt_start": start} if start else {})}
        return {"sampling_params": params, "token_ids": list(prompt)}

    def choices(self, payload: Json) -> Sequence[Json]:
        choices = payload.get("choices")
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise PayloadError(f"the answer has no choices, but the keys {sorted(map(str, payload))}")
        return choices

    def chunk(self, choice: Json) -> GenerateChunk:
        token_ids = _token_ids(choice.get("token_ids"))
        logprobs = choice.get("logprobs")
        if logprobs is None:
            return GenerateChunk(token_ids, None)
        values = self._logprobs(logprobs) if isinstance(logprobs, Mapping) else None
        if values is None or len(values) != len(token_ids):
            raise PayloadError(f"logprobs of the answer are {_short(logprobs)} for {len(token_ids)} tokens")
        return GenerateChunk(token_ids, _finite(values))

    def _logprobs(self, logprobs: Json) -> list[object] | None:
        """What the choice's logprobs object says of each token; None where it is of another form."""
        content = logprobs.get("content")
        if not isinstance(content, list):
            return None
        try:
            return [entry["logprob"] for entry in content]
        except (KeyError, TypeError):  # some token has none
            return [entry.get("logprob") if isinstance(entry, dict) else None for entry in content]

    def top_logprobs(self, choice: Json) -> Alternatives:
        content = (choice.get("logprobs") or {}).get("content")
        if not isinstance(content, list):
            raise PayloadError(
                f"top logprobs were asked for, and logprobs are {_short(choice.get('logprobs'))}"
            )
        try:
            return [
                {_named(entry["token"]): _floored(entry["logprob"]) for entry in token["top_logprobs"]}
                for token in content
            ]
        except (KeyError, TypeError) as error:
            raise PayloadError(
                f"top_logprobs are {_short(content)}; objects of token and logprob are expected"
            ) from error

    def prompt_logprobs(self, payload: Json, choice: Json) -> Alternatives | None:
        entries = payload.get("prompt_logprobs")
        if entries is None:
            entries = choice.get("prompt_logprobs")
        if entries is None:
            return None
        try:
            return [
                {int(token): _floored(value["logprob"]) for token, value in (entry or {}).items()}
                for entry in entries
            ]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise PayloadError(
                f"prompt_logprobs are {_short(entries)}; objects of token ids and their logprobs are expected"
            ) from error

    def prompt_token_ids(self, payload: Json, choice: Json) -> list[int] | None:
        tokens = payload.get("prompt_token_ids") or choice.get("prompt_token_ids")
        return None if tokens is None else _token_ids(tokens)

    def finish_reason(self, choice: Json) -> str | None:
        reason = choice.get("finish_reason")
        return None if reason is None else str(reason)

    def stop_match(self, choice: Json) -> str | int | None:
        match = choice.get("stop_reason")
        return match if isinstance(match, str | int) else None

    def request_id(self, payload: Json) -> str | None:
        return payload.get("request_id") or payload.get("id")

    def routed_experts(self, payload: Json, choice: Json) -> routed_experts.Routes | None:
        of_choice, of_prompt = choice.get("routed_experts"), payload.get("prompt_routed_experts")
        if of_prompt is None:
            return None if of_choice is None else routed_experts.decode(of_choice)
        # A single generated token was never forwarded, so there is nothing beside the prompt's rows.
        parts = [routed_experts.decode(part) for part in (of_prompt, of_choice) if part not in (None, [])]
        return routed_experts.join(parts)


class Completions(VllmGenerate):
    """vLLM's `/v1/completions` with token ids in and out, which needs no --enable-scale-out.

    `return_token_ids` has vLLM name the tokens that it generated. Its streams carry no routes. SGLang's route of that
    name has its routes in `sgl_ext`, without their shape, and names no token ids.

    Args:
        layout: the model's layout, which gives SGLang's routes their shape.
    """

    def __init__(self, layout: ModelLayout | None = None) -> None:
        super().__init__(COMPLETIONS)
        self._layout = layout

    def body(
        self, prompt: Prompt, sampling_params: Json, *, routed_experts: bool, start: int = 0
    ) -> dict[str, Any]:
        return {**sampling_params, "prompt": list(prompt), **_openai_extras(sampling_params, start)}

    def _logprobs(self, logprobs: Json) -> list[object] | None:
        values = logprobs.get("token_logprobs")
        return values if isinstance(values, list) else None

    def top_logprobs(self, choice: Json) -> Alternatives:
        entries: Any = (choice.get("logprobs") or {}).get("top_logprobs")
        try:
            return [{_named(token): _floored(value) for token, value in entry.items()} for entry in entries]
        except (AttributeError, TypeError) as error:
            raise PayloadError(
                f"top_logprobs are {_short(entries)}; objects of token to logprob are expected"
            ) from error

    def routed_experts(self, payload: Json, choice: Json) -> routed_experts.Routes | None:
        return _with_sgl_ext(super().routed_experts(payload, choice), choice, self._layout)


class Chat(VllmGenerate):
    """vLLM's `/v1/chat/completions`: messages in, the tokens that its template makes of them and the answer's out.

    Its streams carry no routes. As for completions, SGLang has its routes in `sgl_ext`.

    Args:
        layout: the model's layout, which gives SGLang's routes their shape.
    """

    def __init__(self, layout: ModelLayout | None = None) -> None:
        super().__init__(CHAT)
        self._layout = layout

    def body(
        self, prompt: Prompt, sampling_params: Json, *, routed_experts: bool, start: int = 0
    ) -> dict[str, Any]:
        params = dict(sampling_params)
        if (top := params.pop("logprobs", None)) is not None:
            params |= {"logprobs": True, "top_logprobs": top}
        return {**params, "messages": list(prompt), **_openai_extras(sampling_params, start)}

    def chunk(self, choice: Json) -> GenerateChunk:
        # The first event of a stream names the role and no token.
        return (
            super().chunk(choice) if "message" in choice or "token_ids" in choice else GenerateChunk([], None)
        )

    def routed_experts(self, payload: Json, choice: Json) -> routed_experts.Routes | None:
        return _with_sgl_ext(super().routed_experts(payload, choice), choice, self._layout)


def _openai_extras(sampling_params: Json, start: int) -> dict[str, Any]:
    extras: dict[str, Any] = {"return_token_ids": True}
    if sampling_params.get("logprobs"):
        extras["return_tokens_as_token_ids"] = True  # alternatives are named by their text otherwise
    if start:
        extras["routed_experts_prompt_start"] = start
    return extras


def _with_sgl_ext(
    found: routed_experts.Routes | None, choice: Json, layout: ModelLayout | None
) -> routed_experts.Routes | None:
    extension = choice.get("sgl_ext")
    if found is not None or not isinstance(extension, Mapping) or extension.get("routed_experts") is None:
        return found
    return _shaped(extension["routed_experts"], layout)


def _shaped(encoded: object, layout: ModelLayout | None) -> routed_experts.Routes:
    if layout is None:
        raise PayloadError("SGLang sends no shape, so the model's layout is needed to read its routes")
    return routed_experts.decode_int32_buffer(encoded, layers=layout.num_layers, top_k=layout.top_k)


# vLLM's names of sampling parameters, where SGLang has others. What stands in neither list has one name in both.
_SGLANG_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}


class SglangGenerate:
    """SGLang's `/generate`: tokens and routes in `meta_info`, the routes as int32 without their shape.

    Each token comes with its logprob, since SGLang names the generated tokens of a server with a tokenizer
    in `output_token_logprobs` alone.

    Args:
        layout: the model's layout, which gives the routes their shape; None where no routes are wanted.
    """

    path = SGLANG_GENERATE

    def __init__(self, layout: ModelLayout | None) -> None:
        self._layout = layout

    def body(
        self, prompt: Prompt, sampling_params: Json, *, routed_experts: bool, start: int = 0
    ) -> dict[str, Any]:
        params = {_SGLANG_NAMES.get(name, name): value for name, value in sampling_params.items()}
        top, of_prompt = params.pop("logprobs", None), params.pop("prompt_logprobs", None)
        body = {
            "input_ids": list(prompt),
            "sampling_params": params,
            "return_logprob": True,
            "top_logprobs_num": max(top or 0, of_prompt or 0),
        }
        if of_prompt is not None:
            body["logprob_start_len"] = 0
        if routed_experts:
            body |= {"return_routed_experts": True} | ({"routed_experts_start_len": start} if start else {})
        return body

    def choices(self, payload: Json) -> Sequence[Json]:
        meta = payload.get("meta_info")
        if not isinstance(meta, dict):
            raise PayloadError(
                f"the answer has no meta_info object, but the keys {sorted(map(str, payload))}"
            )
        return [meta]

    def chunk(self, choice: Json) -> GenerateChunk:
        entries = choice.get("output_token_logprobs")
        if not isinstance(entries, list) or not all(isinstance(e, list) and len(e) >= 2 for e in entries):
            raise PayloadError(
                f"output_token_logprobs are {_short(entries)}; a list of [logprob, token id, text] is expected"
            )
        return GenerateChunk(_token_ids([e[1] for e in entries]), _finite([e[0] for e in entries]))

    def top_logprobs(self, choice: Json) -> Alternatives:
        return _sglang_alternatives(choice.get("output_token_logprobs"), choice.get("output_top_logprobs"))

    def prompt_logprobs(self, payload: Json, choice: Json) -> Alternatives | None:
        own = choice.get("input_token_logprobs")
        return None if own is None else _sglang_alternatives(own, choice.get("input_top_logprobs"))

    def prompt_token_ids(self, payload: Json, choice: Json) -> list[int] | None:
        return None

    def stop_match(self, choice: Json) -> str | int | None:
        reason = choice.get("finish_reason")
        match = reason.get("matched") if isinstance(reason, dict) else None
        return match if isinstance(match, str | int) else None

    def finish_reason(self, choice: Json) -> str | None:
        reason = choice.get("finish_reason")
        # {"type": "length", "length": 16}, or {"type": "stop", "matched": ...}
        if isinstance(reason, dict):
            reason = reason.get("type")
        return None if reason is None else str(reason)

    def request_id(self, payload: Json) -> str | None:
        meta = payload.get("meta_info")
        return meta.get("id") if isinstance(meta, dict) else None

    def routed_experts(self, payload: Json, choice: Json) -> routed_experts.Routes | None:
        encoded = choice.get("routed_experts")
        return None if encoded is None else _shaped(encoded, self._layout)


def _sglang_alternatives(own: Any, others: Any) -> Alternatives:
    """The token itself and those beside it; entries are [logprob, token id, text], and None before the first."""
    try:
        found = [{} if logprob is None else {token: _floored(logprob)} for logprob, token, *_ in own]
        for known, entries in zip(found, others or [], strict=False):
            known |= {token: _floored(logprob) for logprob, token, *_ in entries or []}
    except (TypeError, ValueError) as error:
        raise PayloadError(
            f"logprobs are {_short(own)}; lists of [logprob, token id, text] are expected"
        ) from error
    return found


def _token_ids(value: object) -> list[int]:
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise PayloadError(
            f"token_ids of the answer are {_short(value)}; a list of whole numbers is expected"
        )
    return value


def _named(token: object) -> int:
    """The id in vLLM's name for a token, `token_id:17`."""
    digits = token.removeprefix("token_id:") if isinstance(token, str) else ""
    if not digits.isdecimal() or digits == token:
        raise PayloadError(f"a logprob is of the token {_short(token)}; 'token_id:' and the id are expected")
    return int(digits)


def _floored(value: Any) -> float:
    return _finite([value])[0]


def _finite(values: list[Any]) -> list[float]:
    # One look at all of them: a sum is finite only where each value is.
    if set(map(type, values)) <= {float} and math.isfinite(sum(values)):
        return values
    return [
        float(value) if isinstance(value, int | float) and abs(value) <= sys.float_info.max else FLOOR_LOGPROB
        for value in values
    ]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
