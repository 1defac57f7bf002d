"""Sampling parameters of a request, checked as vLLM 0.30 checks them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rtk.serve.engine import Engine, SamplingParams
from rtk.serve.errors import ApiError, bad_value, invalid, not_supported, out_of_range

# What this server cannot do, with the values that ask for nothing. Ignoring any other value would give
# an answer that looks right and is not.
_NOT_SUPPORTED: Mapping[str, tuple[object, ...]] = {
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "logprob_token_ids": (None, []),
    "min_p": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_detection": (None,),
    "repetition_penalty": (None, 1),
    "structured_outputs": (None,),
    "thinking_token_budget": (None, -1),
    "trace_decode_token_ids": (None,),
}
_MAX_LOGPROBS = 20
# vLLM raises smaller temperatures to this one: dividing by them overflows.
_MIN_TEMPERATURE = 0.01


def refuse(fields: Mapping[str, Any], not_supported_here: Mapping[str, tuple[object, ...]]) -> None:
    """Refuse the first of the named fields that asks for something."""
    for name, neutral in not_supported_here.items():
        if fields.get(name) not in neutral:
            raise not_supported(name)


def sampling_params(fields: Mapping[str, Any], engine: Engine, *, max_tokens: int) -> SamplingParams:
    """Read the sampling parameters among the fields of a request.

    Args:
        fields: `sampling_params` of `/inference/v1/generate`, or the whole body of a completion.
        max_tokens: taken where the fields name none.

    Raises:
        ApiError: one of them has a wrong type, is out of range, or cannot be honoured here.
    """
    refuse(fields, _NOT_SUPPORTED)
    max_tokens = number(fields, "max_tokens", int, max_tokens)
    if max_tokens < 1:
        raise out_of_range("max_tokens", "at least 1", max_tokens)
    min_tokens = number(fields, "min_tokens", int, 0)
    if min_tokens < 0:
        raise ApiError(f"min_tokens must be greater than or equal to 0, got {min_tokens}.")
    if min_tokens > max_tokens:
        raise ApiError(f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {min_tokens}.")
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=_temperature(fields),
        top_p=_top_p(fields),
        top_k=_top_k(fields),
        seed=_seed(fields),
        logprobs=_logprobs(fields, "logprobs", "sample"),
        prompt_logprobs=_logprobs(fields, "prompt_logprobs", "prompt"),
        stop_token_ids=_stop_token_ids(fields, engine.vocab_size),
        ignore_eos=flag(fields, "ignore_eos"),
    )


def sequences_per_prompt(fields: Mapping[str, Any], params: SamplingParams) -> int:
    """`n`: how many sequences each prompt gets."""
    n: int = number(fields, "n", int, 1)
    if n < 1:
        raise ApiError(f"n must be at least 1, got {n}.")
    if n > 1 and params.temperature == 0:
        raise ApiError(f"n must be 1 when using greedy sampling, got {n}.")
    return n


def number(fields: Mapping[str, Any], name: str, kind: type[int] | type[float], default: Any) -> Any:
    """A numeric field, or the default where it is missing or null."""
    value = fields.get(name)
    if value is None:
        return default
    allowed = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, allowed):
        raise invalid(name, f"Input should be a valid {'integer' if kind is int else 'number'}")
    return kind(value)


def flag(fields: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """A field that is true or false, or the default where it is missing or null."""
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise invalid(name, "Input should be a valid boolean")
    return value


def _temperature(fields: Mapping[str, Any]) -> float:
    temperature: float = number(fields, "temperature", float, 1.0)
    if not math.isfinite(temperature):
        raise out_of_range("temperature", "a finite number", temperature)
    if temperature < 0:
        raise out_of_range("temperature", "non-negative", temperature)
    if temperature > 2:
        raise out_of_range("temperature", "in [0, 2]", temperature)
    return max(temperature, _MIN_TEMPERATURE) if temperature else 0.0


def _top_p(fields: Mapping[str, Any]) -> float:
    top_p: float = number(fields, "top_p", float, 1.0)
    if not 0 < top_p <= 1:
        raise out_of_range("top_p", "in (0, 1]", top_p)
    return top_p


def _top_k(fields: Mapping[str, Any]) -> int:
    top_k: int = number(fields, "top_k", int, 0)
    if top_k < -1:
        raise ApiError(f"top_k must be 0 (disable), or at least 1, got {top_k}.")
    return max(top_k, 0)


def _seed(fields: Mapping[str, Any]) -> int | None:
    seed: int | None = number(fields, "seed", int, None)
    if seed is not None and not -(2**63) <= seed < 2**63:
        raise out_of_range("seed", "a 64-bit integer", seed)
    return None if seed == -1 else seed


def _logprobs(fields: Mapping[str, Any], name: str, kind: str) -> int | None:
    count: int | None = number(fields, name, int, None)
    if count is not None and count < 0:
        # vLLM's -1, all of the vocabulary, is refused there too unless the server was started for it.
        raise out_of_range(name, "non-negative", count)
    if count is not None and count > _MAX_LOGPROBS:
        message = f"Requested {kind} logprobs of {count}, which is greater than max allowed: {_MAX_LOGPROBS}"
        raise bad_value(message, name, count)
    return count


def _stop_token_ids(fields: Mapping[str, Any], vocab_size: int) -> frozenset[int]:
    tokens = fields.get("stop_token_ids") or []
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise invalid("stop_token_ids", "Input should be a list of integers")
    outside = [token for token in tokens if not 0 <= token < vocab_size]
    if outside:
        raise bad_value(
            f"token_id(s) {outside} in stop_token_ids contain out-of-vocab token ids. "
            f"Vocabulary size: {vocab_size}",
            "stop_token_ids",
            outside,
        )
    return frozenset(tokens)
