"""The sampling parameters of a session's calls: OpenAI's names where there is one, and vLLM's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import orjson

from rtk.client import body


class SamplingParams(TypedDict, total=False):
    """What is None is not sent, and the server's own default holds. Ranges are the server's to check.

    Attributes:
        max_tokens: generate at most so many tokens.
        temperature: 0 takes the most probable token each time.
        top_p: sample from the smallest set of tokens that holds this much probability.
        top_k: sample from so many of the most probable tokens; 0 for all.
        min_p: leave out tokens that are less probable than this share of the most probable one.
        min_tokens: generate at least so many tokens before a stop.
        presence_penalty, frequency_penalty: against tokens that were generated already, once or each time.
        repetition_penalty: divides the scores of tokens that stand in the prompt or the answer; 1 is none.
        seed: makes sampling repeatable.
        stop: end at this text, or at the first of these texts.
        stop_token_ids: end at any of these tokens.
        ignore_eos: go on after the model's own end.
    """

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int | None
    min_p: float | None
    min_tokens: int | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None


#: What holds for a name that is left out; None leaves it to the server.
DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(SamplingParams.__annotations__),
    "max_tokens": 64,
    "temperature": 1.0,
    "top_p": 1.0,
}


def settings(params: Mapping[str, Any]) -> dict[str, Any]:
    """The `sampling_params` of a request: plain JSON values, with the logprob of each sampled token.

    Raises:
        TypeError: a name is not one of SamplingParams', or a value is no JSON value.
        ValueError: a number is not finite.
    """
    unknown = sorted(set(params) - set(DEFAULTS))
    if unknown:
        raise TypeError(f"{unknown[0]!r} is no sampling parameter; there are {', '.join(DEFAULTS)}")
    given = {name: value for name, value in {**DEFAULTS, **params}.items() if value is not None}
    check_finite(given)
    try:
        plain: dict[str, Any] = orjson.loads(body.dumps(given))  # numpy's numbers become Python's
    except TypeError as error:
        raise TypeError(f"the sampling parameters hold what is no JSON value: {error}") from error
    return {**plain, "logprobs": 0}


def check_finite(params: Mapping[str, Any]) -> None:
    """Raise ValueError where a parameter is NaN or infinite, which JSON would turn into null without a word."""
    for name, value in params.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} is {value}, which is no number that a server takes")
