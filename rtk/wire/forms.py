"""How each kind of server is asked for one sequence from token ids, and where its answer holds what."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rtk.errors import PayloadError
from rtk.layout import ModelLayout
from rtk.result import GenerateChunk
from rtk.wire import routes

Json = Mapping[str, Any]
FLOOR_LOGPROB = -9999.0

# Where each form is asked.
GENERATE = "/inference/v1/generate"
SKYRL_GENERATE = "/skyrl/v1/generate"
SGLANG_GENERATE = "/generate"
COMPLETIONS = "/v1/completions"


class Form(Protocol):
    """One form of request and answer.

    Attributes:
        path: where requests are posted.
    """

    path: str

    def body(
        self, token_ids: Sequence[int], sampling_params: Json, *, routed_experts: bool
    ) -> dict[str, Any]:
        """The request's body, without the fields that all forms share."""

    def choice(self, payload: Json) -> Json:
        """The answer's one sequence. Raises PayloadError where there are none or several."""

    def chunk(self, choice: Json) -> GenerateChunk:
        """Its tokens and logprobs. Raises PayloadError where they are not as the form promises."""

    def finish_reason(self, choice: Json) -> str | None:
        """Why it ended; None in the middle of a stream."""

    def request_id(self, payload: Json) -> str | None:
        """The server's name for the request."""

    def routed_experts(self, payload: Json, choice: Json) -> routes.Routes | None:
        """Its routes `[rows, layers, top_k]`, or None where it has none."""


class VllmGenerate:
    """vLLM's `/inference/v1/generate`, and SkyRL's endpoint, which speaks the same but for the routes.

    vLLM 0.22 and newer send one array; 0.21 sends the prompt's rows apart, as `prompt_routed_experts` of the
    answer, before the generated tokens' rows in the choice. Joined in this order they are the one array.
    """

    def __init__(self, path: str = GENERATE) -> None:
        self.path = path

    def body(
        self, token_ids: Sequence[int], sampling_params: Json, *, routed_experts: bool
    ) -> dict[str, Any]:
        return {"sampling_params": dict(sampling_params), "token_ids": list(token_ids)}

    def choice(self, payload: Json) -> Json:
        choices = payload.get("choices")
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            count = len(choices) if isinstance(choices, list) else "no"
            raise PayloadError(
                f"the answer has {count} choices; one request generates one sequence, so leave n at 1"
            )
        return choices[0]

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

    def finish_reason(self, choice: Json) -> str | None:
        reason = choice.get("finish_reason")
        return None if reason is None else str(reason)

    def request_id(self, payload: Json) -> str | None:
        return payload.get("request_id") or payload.get("id")

    def routed_experts(self, payload: Json, choice: Json) -> routes.Routes | None:
        of_choice, of_prompt = choice.get("routed_experts"), payload.get("prompt_routed_experts")
        if of_prompt is None:
            return None if of_choice is None else routes.decode(of_choice)
        # A single generated token was never forwarded, so there is nothing beside the prompt's rows.
        parts = [routes.decode(part) for part in (of_prompt, of_choice) if part not in (None, [])]
        return routes.join(parts)


class Completions(VllmGenerate):
    """vLLM's `/v1/completions` with token ids in and out, which needs no --enable-scale-out.

    `return_token_ids` has vLLM name the tokens that it generated. Its streams carry no routes.
    """

    def __init__(self) -> None:
        super().__init__(COMPLETIONS)

    def body(
        self, token_ids: Sequence[int], sampling_params: Json, *, routed_experts: bool
    ) -> dict[str, Any]:
        return {**sampling_params, "prompt": list(token_ids), "return_token_ids": True}

    def _logprobs(self, logprobs: Json) -> list[object] | None:
        values = logprobs.get("token_logprobs")
        return values if isinstance(values, list) else None


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
        self, token_ids: Sequence[int], sampling_params: Json, *, routed_experts: bool
    ) -> dict[str, Any]:
        params = {_SGLANG_NAMES.get(name, name): value for name, value in sampling_params.items()}
        top = params.pop("logprobs", None)
        body = {
            "input_ids": list(token_ids),
            "sampling_params": params,
            "return_logprob": True,
            "top_logprobs_num": top or 0,
        }
        return body | ({"return_routed_experts": True} if routed_experts else {})

    def choice(self, payload: Json) -> Json:
        meta = payload.get("meta_info")
        if not isinstance(meta, dict):
            raise PayloadError(
                f"the answer has no meta_info object, but the keys {sorted(map(str, payload))}"
            )
        return meta

    def chunk(self, choice: Json) -> GenerateChunk:
        entries = choice.get("output_token_logprobs")
        if not isinstance(entries, list) or not all(isinstance(e, list) and len(e) >= 2 for e in entries):
            raise PayloadError(
                f"output_token_logprobs are {_short(entries)}; a list of [logprob, token id, text] is expected"
            )
        return GenerateChunk(_token_ids([e[1] for e in entries]), _finite([e[0] for e in entries]))

    def finish_reason(self, choice: Json) -> str | None:
        reason = choice.get("finish_reason")
        # {"type": "length", "length": 16}, or {"type": "stop", "matched": ...}
        if isinstance(reason, dict):
            reason = reason.get("type")
        return None if reason is None else str(reason)

    def request_id(self, payload: Json) -> str | None:
        meta = payload.get("meta_info")
        return meta.get("id") if isinstance(meta, dict) else None

    def routed_experts(self, payload: Json, choice: Json) -> routes.Routes | None:
        encoded = choice.get("routed_experts")
        if encoded is None or self._layout is None:
            return None
        return routes.decode_int32_buffer(encoded, layers=self._layout.num_layers, top_k=self._layout.top_k)


def _token_ids(value: object) -> list[int]:
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise PayloadError(
            f"token_ids of the answer are {_short(value)}; a list of whole numbers is expected"
        )
    return value


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
