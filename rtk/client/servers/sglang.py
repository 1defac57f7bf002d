"""SGLang, by its own generate route."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rtk.client import routed_experts as wire
from rtk.client.result import GenerateChunk
from rtk.client.servers.fields import Alternatives, Json, all_floored, floored, short, token_ids
from rtk.client.servers.lookups import Lookups
from rtk.client.servers.openai_routes import Chat, Completions
from rtk.client.servers.route import Prompt, Route
from rtk.client.servers.server import Server
from rtk.client.servers.vllm_answer import VllmAnswer
from rtk.errors import LayoutError, PayloadError
from rtk.layout.model_layout import ModelLayout

# vLLM's names of sampling parameters, where SGLang has others. What stands in neither list has one name in both.
_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}


class Sglang(Server):
    """SGLang: tokens and routes in `meta_info`, the routes without their shape, n sequences by n requests."""

    name = "sglang"

    @property
    def product(self) -> str:
        return "SGLang"

    @classmethod
    async def is_there(cls, lookups: Lookups) -> bool:
        return lookups.owner == "sglang" or await lookups.posts("/get_model_info")

    @classmethod
    async def running_version(cls, lookups: Lookups) -> str:
        # The old name still works in new releases, the new one does not in old ones.
        for path in ("/server_info", "/get_server_info"):
            if info := await lookups.object(path):
                return str(info.get("version", "unknown"))
        return "unknown"

    def generate(self, layout: ModelLayout | None, *, routed_experts: bool) -> Route:
        if routed_experts and layout is None:
            raise LayoutError(
                "SGLang sends routes without their shape: give the generator the model's layout, for example "
                "layout=rtk.ModelLayout.from_config('path/to/config.json')"
            )
        return SglangGenerate(layout)

    def chat(self, layout: ModelLayout | None) -> Route:
        raise ValueError(
            "SGLang's chat answers name no token ids: apply the model's chat template with transformers, and use "
            "generate"
        )

    def routes(self, layout: ModelLayout | None) -> Sequence[Route]:
        return SglangGenerate(layout), SglangCompletions(layout), SglangChat(layout)

    def enable_routes(self) -> str:
        return "start SGLang 0.5.7 or newer with --enable-return-routed-experts"

    @property
    def no_chat_prompts(self) -> str | None:
        return (
            "SGLang's /tokenize takes no chat messages: apply the model's chat template with transformers, and give "
            "the text or the token ids"
        )

    def detokenized(self, answer: Json) -> object:
        return answer.get("text")


class SglangGenerate(Route):
    """SGLang's `/generate`: tokens and routes in `meta_info`, the routes as int32 without their shape.

    Each token comes with its logprob, since SGLang names the generated tokens of a server with a tokenizer
    in `output_token_logprobs` alone. It answers n > 1 with a list, of which one damaged member would cost all.

    Args:
        layout: the model's layout, which gives the routes their shape; None where no routes are wanted.
    """

    path = "/generate"
    streams = False
    streams_routes = False
    several = False
    cache_salt = "extra_key"

    def __init__(self, layout: ModelLayout | None) -> None:
        self._layout = layout

    def body(
        self, prompt: Prompt, sampling_params: Json, *, routed_experts: bool, start: int = 0
    ) -> dict[str, Any]:
        params = {_NAMES.get(name, name): value for name, value in sampling_params.items()}
        top, of_prompt = params.pop("logprobs", None), params.pop("prompt_logprobs", None)
        body = {
            "input_ids": list(prompt),
            "sampling_params": params,
            "return_logprob": True,
            "top_logprobs_num": max(top or 0, of_prompt or 0),
        }
        if of_prompt is not None:
            body["logprob_start_len"] = 0
        return body | _wanted(routed_experts, start)

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
                f"output_token_logprobs are {short(entries)}; a list of [logprob, token id, text] is expected"
            )
        return GenerateChunk(token_ids([e[1] for e in entries]), all_floored([e[0] for e in entries]))

    def top_logprobs(self, choice: Json) -> Alternatives:
        return _alternatives(choice.get("output_token_logprobs"), choice.get("output_top_logprobs"))

    def prompt_logprobs(self, payload: Json, choice: Json) -> Alternatives | None:
        own = choice.get("input_token_logprobs")
        return None if own is None else _alternatives(own, choice.get("input_top_logprobs"))

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

    def routed_experts(self, payload: Json, choice: Json) -> wire.Routes | None:
        encoded = choice.get("routed_experts")
        return None if encoded is None else _shaped(encoded, self._layout)


class _Extended(VllmAnswer):
    """SGLang's OpenAI routes (0.5.23): routes stand in `sglext` of the response, those of choice 0 alone.

    Args:
        layout: the model's layout, which gives the routes their shape; None where no routes are wanted.
    """

    several = False

    def __init__(self, layout: ModelLayout | None) -> None:
        self._layout = layout

    def routed_experts(self, payload: Json, choice: Json) -> wire.Routes | None:
        # Releases before 0.5.9 have the extension in the choice, under another name (by their documentation).
        extension = payload.get("sglext") or choice.get("sgl_ext")
        encoded = extension.get("routed_experts") if isinstance(extension, Mapping) else None
        return None if encoded is None else _shaped(encoded, self._layout)


class SglangCompletions(_Extended, Completions):
    """SGLang's `/v1/completions`."""

    def body(
        self, prompt: Prompt, sampling_params: Json, *, routed_experts: bool, start: int = 0
    ) -> dict[str, Any]:
        asked = Completions.body(self, prompt, sampling_params, routed_experts=routed_experts)
        return asked | _wanted(routed_experts, start)


class SglangChat(_Extended, Chat):
    """SGLang's `/v1/chat/completions`."""

    def body(
        self, prompt: Prompt, sampling_params: Json, *, routed_experts: bool, start: int = 0
    ) -> dict[str, Any]:
        asked = Chat.body(self, prompt, sampling_params, routed_experts=routed_experts)
        return asked | _wanted(routed_experts, start)


def _wanted(routed_experts: bool, start: int) -> dict[str, Any]:
    if not routed_experts:
        return {}
    return {"return_routed_experts": True} | ({"routed_experts_start_len": start} if start else {})


def _shaped(encoded: object, layout: ModelLayout | None) -> wire.Routes:
    if layout is None:
        raise PayloadError("SGLang sends no shape, so the model's layout is needed to read its routes")
    return wire.decode_int32_buffer(encoded, layers=layout.num_layers, top_k=layout.top_k)


def _alternatives(own: Any, others: Any) -> Alternatives:
    """The token itself and those beside it; entries are [logprob, token id, text], and None before the first."""
    try:
        found = [{} if logprob is None else {token: floored(logprob)} for logprob, token, *_ in own]
        for known, entries in zip(found, others or [], strict=False):
            known |= {token: floored(logprob) for logprob, token, *_ in entries or []}
    except (TypeError, ValueError) as error:
        raise PayloadError(
            f"logprobs are {short(own)}; lists of [logprob, token id, text] are expected"
        ) from error
    return found
