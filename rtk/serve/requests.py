"""What clients may ask of the embedded server, checked as vLLM 0.30 checks it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rtk.serve.answer_text import TextOptions
from rtk.serve.engine import Engine, SamplingParams
from rtk.serve.errors import ApiError, bad_value, invalid, out_of_length, unknown_model
from rtk.serve.sampling_params import flag, number, refuse, sampling_params, sequences_per_prompt

# As in _sampling: what cannot be done here, with the values that ask for nothing.
_NOT_SUPPORTED: Mapping[str, tuple[object, ...]] = {
    "content_parts": (None, []),
    "ec_transfer_params": (None, {}),
    "features": (None,),
    "kv_transfer_params": (None, {}),
    "prompt_embeds": (None, []),
    "response_format": (None, {"type": "text"}),
    "suffix": (None,),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
}


@dataclass(frozen=True)
class GenerateRequest:
    """A request of either generate route, ready to run.

    Attributes:
        prompts: token ids of each prompt; one for `/inference/v1/generate`.
        sequences: prompt and parameters of each sequence to generate, in the order of the choices.
        stream: whether to answer token by token.
        include_usage: whether a stream ends with the token counts.
        return_token_ids: whether the answer names the prompt's token ids.
        first_row: the routes start at this token of the prompt.
        text: how the answer becomes text, which stop texts end.
    """

    prompts: list[list[int]]
    sequences: list[tuple[list[int], SamplingParams]]
    stream: bool
    include_usage: bool
    return_token_ids: bool
    first_row: int
    text: TextOptions


@dataclass(frozen=True)
class CompletionRequest(GenerateRequest):
    """A request of `/v1/completions`, ready to run.

    Attributes:
        echoes: for each sequence the text to put before its own; None to put none.
        echo_only: whether nothing but the prompt is wanted back.
        tokens_as_ids: whether logprobs name tokens by their ids instead of their texts.
    """

    echoes: list[str] | None
    echo_only: bool
    tokens_as_ids: bool


def parse_json(raw: bytes) -> dict[str, Any]:
    """The body of a request as a JSON object."""
    try:
        body = json.loads(raw)
    except json.JSONDecodeError as error:
        raise invalid(f"body.{error.pos}", f"JSON decode error: {error.msg}") from error
    except ValueError as error:
        raise invalid("body", f"the body is not UTF-8: {error}") from error
    if not isinstance(body, dict):
        raise invalid("body", f"Input should be an object, not a {type(body).__name__}")
    return body


def check_model(body: Mapping[str, Any], served: str) -> None:
    """Refuse a model that is not served; a request may also name none."""
    model = body.get("model")
    if model is not None and model != served:
        raise unknown_model(model)


def parse_generate(body: Mapping[str, Any], engine: Engine) -> GenerateRequest:
    """A request of `/inference/v1/generate`; an answer past the model's length is cut in silence."""
    refuse(body, _NOT_SUPPORTED)
    fields = body.get("sampling_params")
    if not isinstance(fields, dict):
        raise invalid(
            "body.sampling_params", "Field required" if fields is None else "Input should be an object"
        )
    prompt = token_ids(body.get("token_ids"), "body.token_ids", engine)
    _check_prompt_length(len(prompt), engine.max_model_len)
    limit = engine.max_model_len - len(prompt)
    params = sampling_params(fields, engine, max_tokens=limit)
    params = replace(params, max_tokens=min(params.max_tokens, limit))
    n = sequences_per_prompt(fields, params)
    return GenerateRequest(
        prompts=[prompt],
        sequences=[(prompt, each) for each in _seeded(params, n)],
        stream=flag(body, "stream"),
        include_usage=_include_usage(body),
        return_token_ids=flag(body, "return_token_ids"),
        first_row=_first_row(fields, [prompt]),
        text=_text_options(fields, params),
    )


def parse_completion(body: Mapping[str, Any], engine: Engine) -> CompletionRequest:
    """A request of `/v1/completions`, where vLLM refuses an answer that could pass the model's length."""
    refuse(body, _NOT_SUPPORTED)
    prompts, texts = _prompts(body, engine)
    echo = flag(body, "echo")
    echo_only = echo and body.get("max_tokens") == 0
    # A step is what it takes to score the prompt, as in vLLM.
    fields = {**body, "max_tokens": 1} if echo_only else body
    params = sampling_params(fields, engine, max_tokens=16)
    if echo and params.prompt_logprobs is None:
        params = replace(params, prompt_logprobs=params.logprobs)
    stream = flag(body, "stream")
    _check_stream(body, stream)
    for prompt in prompts:
        _check_room(len(prompt), params.max_tokens, engine.max_model_len)
    n = sequences_per_prompt(body, params)
    return_token_ids = flag(body, "return_token_ids")
    # Who gets the prompt's ids does not get its text as well.
    echoes = ["" if return_token_ids else text for text in texts for _ in range(n)]
    return CompletionRequest(
        prompts=prompts,
        sequences=[(prompt, each) for prompt in prompts for each in _seeded(params, n)],
        stream=stream,
        include_usage=_include_usage(body),
        return_token_ids=return_token_ids,
        first_row=_first_row(body, prompts),
        text=_text_options(body, params),
        echoes=echoes if echo else None,
        echo_only=echo_only,
        tokens_as_ids=flag(body, "return_tokens_as_token_ids"),
    )


def token_ids(value: object, where: str, engine: Engine) -> list[int]:
    """A prompt's token ids, which must all be in the vocabulary."""
    if value is None:
        raise invalid(where, "Field required")
    if not isinstance(value, list):
        raise invalid(where, "Input should be a valid list")
    if not value:
        raise invalid(where, "List should have at least 1 item after validation, not 0")
    for position, token in enumerate(value):
        if type(token) is not int:
            raise invalid(f"{where}.{position}", "Input should be a valid integer")
        if token < 0:
            raise invalid(where, f"Value error, {where.split('.')[-1]} must not contain negative values")
        if token >= engine.vocab_size:
            raise ApiError(f"Token id {token} is out of vocabulary")
    return value


def _check_prompt_length(tokens: int, longest: int) -> None:
    if tokens > longest:
        raise ApiError(
            f"The decoder prompt (length {tokens}) is longer than the maximum model length of {longest}. "
            "Make sure that `max_model_len` is no smaller than the number of text tokens."
        )
    if tokens == longest:
        raise ApiError(
            f"The decoder prompt (length {tokens}) plus the number of requested output tokens (at least 1) is "
            f"longer than the maximum model length of {longest}. Make sure that `max_model_len` is no "
            "smaller than the number of text tokens (prompt + requested output tokens)."
        )


def _check_room(prompt_tokens: int, max_tokens: int, longest: int) -> None:
    if max_tokens > longest:
        raise bad_value(
            f"max_tokens={max_tokens} cannot be greater than max_model_len=max_total_tokens={longest}. "
            "Please request fewer output tokens.",
            "max_tokens",
            max_tokens,
        )
    if prompt_tokens + max_tokens > longest:
        raise out_of_length(prompt_tokens, max_tokens, longest)


def _check_stream(body: Mapping[str, Any], stream: bool) -> None:
    if stream and body.get("prompt_logprobs"):
        name, message = "prompt_logprobs", "`prompt_logprobs` are not available when `stream=True`."
    elif body.get("stream_options") and not stream:
        name, message = "stream_options", "Stream options can only be defined when `stream=True`."
    else:
        return
    raise ApiError(f"{message} (parameter={name})", param=name)


def _prompts(body: Mapping[str, Any], engine: Engine) -> tuple[list[list[int]], list[str]]:
    """Token ids and text of each prompt, from any of its four forms: a text, texts, ids, lists of ids."""
    value = body.get("prompt")
    if value is None or value == "":
        raise ApiError("prompt must be given, and not be empty", param="prompt")
    if isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], int)):
        value = [value]
    if not isinstance(value, list):
        raise invalid("body.prompt", "Input should be a text, token ids, or a list of either")
    if not value:
        raise ApiError("You must pass at least one prompt")
    special = flag(body, "add_special_tokens", default=True)
    prompts, texts = [], []
    for prompt in value:
        is_text = isinstance(prompt, str)
        ids = engine.tokenizer.encode(prompt, add_special_tokens=special) if is_text else prompt
        if ids == []:
            raise ApiError("The decoder prompt cannot be empty")
        prompts.append(token_ids(ids, "body.prompt", engine))
        texts.append(prompt if is_text else engine.tokenizer.decode(ids))
    return prompts, texts


def _seeded(params: SamplingParams, n: int) -> list[SamplingParams]:
    """The parameters of each of a prompt's sequences: with a seed, vLLM counts on from it."""
    if params.seed is None:
        return [params] * n
    return [replace(params, seed=params.seed + index) for index in range(n)]


def _first_row(fields: Mapping[str, Any], prompts: list[list[int]]) -> int:
    name = "routed_experts_prompt_start"
    first: int = number(fields, name, int, 0)
    shortest = min(map(len, prompts))
    if not 0 <= first <= shortest:
        raise bad_value(
            f"{name} must be between 0 and the prompt length ({shortest}), inclusive.", name, first
        )
    return first


def _include_usage(body: Mapping[str, Any]) -> bool:
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise invalid("body.stream_options", "Input should be an object")
    refuse(options, {"continuous_usage_stats": (None, False)})
    return flag(options, "include_usage")


def _text_options(fields: Mapping[str, Any], params: SamplingParams) -> TextOptions:
    stop = fields.get("stop") or []
    if fields.get("stop") == "" or (isinstance(stop, list) and "" in stop):
        raise ApiError("stop cannot contain an empty string.")
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) for text in stop):
        raise invalid("body.stop", "Input should be a text or a list of texts")
    return TextOptions(
        stop=stop,
        keep_stop=flag(fields, "include_stop_str_in_output"),
        skip_special_tokens=flag(fields, "skip_special_tokens", default=True),
        min_tokens=params.min_tokens,
    )
