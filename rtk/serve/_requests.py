"""What clients may ask of the embedded server, checked as vLLM 0.30 checks it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rtk.serve.engine import Engine, SamplingParams

# What this server cannot do, with the values that ask for nothing. Ignoring any other value would give
# an answer that looks right and is not.
_NOT_SUPPORTED: Mapping[str, tuple[object, ...]] = {
    "bad_words": (None, []),
    "best_of": (None, 1),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "min_p": (None, 0),
    "presence_penalty": (None, 0),
    "prompt_logprobs": (None,),
    "repetition_penalty": (None, 1),
    "structured_outputs": (None,),
    "suffix": (None, ""),
}


class ApiError(Exception):
    """An answer that is an error, in vLLM's form."""

    def __init__(
        self, message: str, *, param: str | None = None, status: int = 400, kind: str = "BadRequestError"
    ):
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


@dataclass(frozen=True)
class GenerateRequest:
    """A request of either generate route, ready to run.

    Attributes:
        prompts: token ids of each prompt; one for `/inference/v1/generate`.
        params: how to sample.
        n: sequences a prompt.
        stream: whether to answer token by token.
    """

    prompts: list[list[int]]
    params: SamplingParams
    n: int
    stream: bool


def parse_json(raw: bytes) -> dict[str, Any]:
    """The body of a request as a JSON object."""
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise invalid("body", f"JSON decode error: {error}") from error
    if not isinstance(body, dict):
        raise invalid("body", f"Input should be an object, not a {type(body).__name__}")
    return body


def invalid(where: str, what: str) -> ApiError:
    """A field of the wrong type or shape, worded like the validation errors of vLLM's routes."""
    return ApiError(
        f"1 validation error:\n  {{'loc': '{where}', 'msg': '{what}'}}", param=where, kind="Bad Request"
    )


def check_model(body: Mapping[str, Any], served: str) -> None:
    """Refuse a model that is not served; a request may also name none."""
    model = body.get("model")
    if model is not None and model != served:
        raise ApiError(
            f"The model `{model}` does not exist.", param="model", status=404, kind="NotFoundError"
        )


def parse_generate(body: Mapping[str, Any], engine: Engine) -> GenerateRequest:
    """A request of `/inference/v1/generate`."""
    fields = body.get("sampling_params")
    if not isinstance(fields, dict):
        raise invalid(
            "body.sampling_params", "Field required" if fields is None else "Input should be an object"
        )
    if fields.get("stop"):
        raise ApiError("stop strings need text: use stop_token_ids here, or /v1/completions", param="stop")
    prompt = token_ids(body.get("token_ids"), "body.token_ids", engine)
    limit = engine.max_model_len - len(prompt)
    params = _sampling_params(fields, default_max_tokens=limit, limit=limit)
    return GenerateRequest([prompt], params, _n(fields, params), body.get("stream") is True)


def parse_completion(body: Mapping[str, Any], engine: Engine) -> GenerateRequest:
    """A request of `/v1/completions`."""
    prompts = _prompts(body.get("prompt"), engine)
    limit = engine.max_model_len - max(map(len, prompts))
    params = _sampling_params(body, default_max_tokens=16, limit=limit)
    return GenerateRequest(prompts, params, _n(body, params), body.get("stream") is True)


def token_ids(value: object, where: str, engine: Engine) -> list[int]:
    """A prompt's token ids, which must be in the vocabulary and leave room for an answer."""
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
            raise invalid(where, "Value error, token_ids must not contain negative values")
        if token >= engine.vocab_size:
            raise ApiError(f"Token id {token} is out of vocabulary")
    if len(value) >= engine.max_model_len:
        raise ApiError(
            f"The decoder prompt (length {len(value)}) plus the number of requested output tokens (at least 1) is "
            f"longer than the maximum model length of {engine.max_model_len}. Make sure that `max_model_len` is no "
            "smaller than the number of text tokens (prompt + requested output tokens)."
        )
    return value


def _prompts(value: object, engine: Engine) -> list[list[int]]:
    """The four forms of a completion's prompt: a text, texts, token ids, lists of token ids."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not value:
        raise invalid("body.prompt", "Input should be a text, token ids, or a list of either")
    if isinstance(value[0], int):
        value = [value]
    return [
        token_ids(
            engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt, "body.prompt", engine
        )
        for prompt in value
    ]


def _sampling_params(fields: Mapping[str, Any], *, default_max_tokens: int, limit: int) -> SamplingParams:
    for name, neutral in _NOT_SUPPORTED.items():
        if fields.get(name) not in neutral:
            raise ApiError(f"the embedded server does not support {name}; vLLM does", param=name)
    max_tokens = _number(fields, "max_tokens", int, default_max_tokens)
    if max_tokens < 1:
        raise _out_of_range("max_tokens", "at least 1", max_tokens)
    temperature = _number(fields, "temperature", float, 1.0)
    if temperature < 0:
        raise _out_of_range("temperature", "non-negative", temperature)
    top_p = _number(fields, "top_p", float, 1.0)
    if not 0 < top_p <= 1:
        raise _out_of_range("top_p", "in (0, 1]", top_p)
    top_k = _number(fields, "top_k", int, 0)
    if top_k < -1:
        raise _out_of_range("top_k", "0 (disable), or at least 1", top_k)
    min_tokens = _number(fields, "min_tokens", int, 0)
    if not 0 <= min_tokens <= max_tokens:
        raise _out_of_range("min_tokens", f"in 0..max_tokens={max_tokens}", min_tokens)
    seed = None if fields.get("seed") is None else _number(fields, "seed", int, 0)
    if seed is not None and not -(2**63) <= seed < 2**63:
        raise _out_of_range("seed", "a 64-bit integer", seed)
    logprobs = fields.get("logprobs")
    if logprobs is not None:
        logprobs = _number(fields, "logprobs", int, 0)
        if not 0 <= logprobs <= 20:
            raise _out_of_range("logprobs", "in 0..20", logprobs)
    stop_token_ids = fields.get("stop_token_ids") or []
    if not isinstance(stop_token_ids, list) or not all(type(token) is int for token in stop_token_ids):
        raise invalid("stop_token_ids", "Input should be a list of integers")
    return SamplingParams(
        max_tokens=min(max_tokens, limit),  # cut in silence, as vLLM does; finish_reason says "length"
        min_tokens=min_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=max(top_k, 0),
        seed=seed,
        logprobs=logprobs,
        stop_token_ids=frozenset(stop_token_ids),
        ignore_eos=fields.get("ignore_eos") is True,
    )


def _n(fields: Mapping[str, Any], params: SamplingParams) -> int:
    n: int = _number(fields, "n", int, 1)
    if n < 1:
        raise _out_of_range("n", "at least 1", n)
    if n > 1 and params.temperature == 0:
        raise ApiError(f"n must be 1 when using greedy sampling, got {n}.")
    return n


def _number(fields: Mapping[str, Any], name: str, kind: type[int] | type[float], default: Any) -> Any:
    value = fields.get(name)
    if value is None:
        return default
    allowed = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, allowed):
        raise invalid(name, f"Input should be a valid {'integer' if kind is int else 'number'}")
    return kind(value)


def _out_of_range(name: str, rule: str, value: object) -> ApiError:
    return ApiError(f"{name} must be {rule}, got {value}. (parameter={name}, value={value})", param=name)
