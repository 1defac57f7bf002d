"""The OpenAI routes, as vLLM serves them."""

from __future__ import annotations

from typing import Any

from rtk.client.result import GenerateChunk
from rtk.client.servers.fields import Alternatives, Json, floored, short
from rtk.client.servers.route import Prompt
from rtk.client.servers.vllm_answer import VllmAnswer, named_token
from rtk.errors import PayloadError


class Completions(VllmAnswer):
    """vLLM's `/v1/completions` with token ids in and out, which needs no --enable-scale-out.

    `return_token_ids` has vLLM name the tokens that it generated. Its streams carry no routes.
    """

    path = "/v1/completions"
    streams_routes = False

    def body(
        self, prompt: Prompt, sampling_params: Json, *, routed_experts: bool, start: int = 0
    ) -> dict[str, Any]:
        return {**sampling_params, "prompt": list(prompt), **_extras(sampling_params, start)}

    def _logprobs(self, logprobs: Json) -> list[object] | None:
        values = logprobs.get("token_logprobs")
        return values if isinstance(values, list) else None

    def top_logprobs(self, choice: Json) -> Alternatives:
        entries: Any = (choice.get("logprobs") or {}).get("top_logprobs")
        try:
            return [
                {named_token(token): floored(value) for token, value in entry.items()} for entry in entries
            ]
        except (AttributeError, TypeError) as error:
            raise PayloadError(
                f"top_logprobs are {short(entries)}; objects of token to logprob are expected"
            ) from error


class Chat(VllmAnswer):
    """vLLM's `/v1/chat/completions`: messages in, the tokens that its template makes of them and the answer's out.

    Its streams carry no routes.
    """

    path = "/v1/chat/completions"
    chat = True
    streams_routes = False

    def body(
        self, prompt: Prompt, sampling_params: Json, *, routed_experts: bool, start: int = 0
    ) -> dict[str, Any]:
        params = dict(sampling_params)
        if (top := params.pop("logprobs", None)) is not None:
            params |= {"logprobs": True, "top_logprobs": top}
        return {**params, "messages": list(prompt), **_extras(sampling_params, start)}

    def chunk(self, choice: Json) -> GenerateChunk:
        # The first event of a stream names the role and no token.
        return (
            super().chunk(choice) if "message" in choice or "token_ids" in choice else GenerateChunk([], None)
        )


def _extras(sampling_params: Json, start: int) -> dict[str, Any]:
    # Both are for vLLM; a version that does not know one of them leaves it out of its answer.
    extras: dict[str, Any] = {"return_token_ids": True, "return_weight_versions": True}
    if sampling_params.get("logprobs"):
        extras["return_tokens_as_token_ids"] = True  # alternatives are named by their text otherwise
    if start:
        extras["routed_experts_prompt_start"] = start
    return extras
