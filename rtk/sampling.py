"""The sampling parameters: their names, their defaults, and which values servers take."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypedDict, TypeVar

from rtk.errors import SamplingParamError

P = ParamSpec("P")
T = TypeVar("T")


class SamplingParams(TypedDict, total=False):
    """OpenAI's names where there is one, and vLLM's. What is None is not sent: the server's own default holds.

    Attributes:
        max_tokens: generate at most so many tokens; 1 or more.
        temperature: 0 takes the most probable token each time; 0 to 2.
        top_p: sample from the smallest set of tokens that holds this much probability; above 0, up to 1.
        top_k: sample from so many of the most probable tokens; 0 or -1 for all.
        min_p: leave out tokens less probable than this share of the most probable one; 0 to 1.
        min_tokens: generate at least so many tokens before a stop; 0 to max_tokens.
        presence_penalty, frequency_penalty: against tokens that were generated already, once or each time; -2 to 2.
        repetition_penalty: divides the scores of tokens that stand in the prompt or the answer; above 0, 1 for none.
        seed: makes sampling repeatable; 64 bits. vLLM reads -1 as no seed, so it is refused here.
        stop: end at this text, or at the first of these texts. The text of a sample still holds it, as its tokens do.
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


_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(SamplingParams.__annotations__),
    "max_tokens": 64,
    "temperature": 1.0,
    "top_p": 1.0,
}


def settings(params: Mapping[str, Any]) -> dict[str, Any]:
    """The `sampling_params` of a request, in vLLM's names and as plain JSON values; logprobs of the sampled token.

    The ranges are those of vLLM 0.30 (`SamplingParams._verify_args`).

    Raises:
        TypeError: a name is not one of SamplingParams'.
        SamplingParamError: a value has the wrong type, or lies outside its range.
    """
    unknown = sorted(set(params) - set(_DEFAULTS))
    if unknown:
        raise TypeError(f"{unknown[0]!r} is no sampling parameter; there are {', '.join(_DEFAULTS)}")
    values = {
        name: _checked(name, value)
        for name, value in {**_DEFAULTS, **params}.items()
        if value is not None or name in ("max_tokens", "temperature", "top_p")
    }
    if values.get("min_tokens", 0) > values["max_tokens"]:
        raise _refused("min_tokens", f"at most max_tokens={values['max_tokens']}", values["min_tokens"])
    return {**values, "logprobs": 0}


def settings_of_each(params: Mapping[str, Any], n: int) -> list[dict[str, Any]]:
    """`settings` for each of n samples of one prompt; with a seed, sample number i has seed + i.

    Raises:
        TypeError, SamplingParamError: as `settings`.
    """
    seed = params.get("seed")
    if seed is None:
        return [settings(params)] * n
    first = settings(params)["seed"]
    return [settings({**params, "seed": first + index}) for index in range(n)]


def in_signature(function: Callable[P, T]) -> Callable[P, T]:
    """Show the names of SamplingParams, with their defaults, in the signature of a function that takes them all.

    Jupyter shows a call's arguments by that signature, where it would show one **params.
    """
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    assert parameters.pop().kind is inspect.Parameter.VAR_KEYWORD
    annotations = inspect.get_annotations(SamplingParams)
    parameters += [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=annotations[name].__forward_arg__,
        )
        for name, default in _DEFAULTS.items()
    ]
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return function


def _checked(name: str, value: Any) -> Any:
    try:
        return _CHECKS[name](value)
    except (TypeError, ValueError, OverflowError):
        raise _refused(name, _WORDS[name], value) from None


def _refused(name: str, rule: str, value: object) -> SamplingParamError:
    return SamplingParamError(f"{name} must be {rule}, not {value!r}")


def _whole(low: int, high: float = math.inf) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        number = operator.index(_no_bool(value))
        return _inside(number, low <= number <= high)

    return check


def _real(is_allowed: Callable[[float], bool]) -> Callable[[Any], float]:
    def check(value: Any) -> float:
        if isinstance(value, str):
            raise TypeError
        number = float(_no_bool(value))
        return _inside(number, is_allowed(number))

    return check


def _seed(value: Any) -> int:
    number = _whole(-(2**63), 2**63 - 1)(value)
    return _inside(number, number != -1)


def _texts(value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else list(value)
    return _inside(texts, all(isinstance(text, str) and text for text in texts))


def _token_ids(value: Any) -> list[int]:
    return [_whole(0)(token) for token in value]


def _truth(value: Any) -> bool:
    return _inside(bool(value), isinstance(value, bool))


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise TypeError
    return value


def _inside(value: T, is_allowed: bool) -> T:
    if not is_allowed:
        raise ValueError
    return value


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "max_tokens": _whole(1),
    "temperature": _real(lambda value: 0 <= value <= 2),
    "top_p": _real(lambda value: 0 < value <= 1),
    "top_k": _whole(-1),
    "min_p": _real(lambda value: 0 <= value <= 1),
    "min_tokens": _whole(0),
    "presence_penalty": _real(lambda value: -2 <= value <= 2),
    "frequency_penalty": _real(lambda value: -2 <= value <= 2),
    "repetition_penalty": _real(lambda value: 0 < value < math.inf),
    "seed": _seed,
    "stop": _texts,
    "stop_token_ids": _token_ids,
    "ignore_eos": _truth,
}
_WORDS = {
    "max_tokens": "a whole number of 1 or more",
    "temperature": "a number in [0, 2]",
    "top_p": "a number in (0, 1]",
    "top_k": "a whole number of -1 or more (0 and -1 for all tokens)",
    "min_p": "a number in [0, 1]",
    "min_tokens": "a whole number of 0 or more",
    "presence_penalty": "a number in [-2, 2]",
    "frequency_penalty": "a number in [-2, 2]",
    "repetition_penalty": "a finite number above 0",
    "seed": "a 64-bit whole number other than -1, which vLLM reads as no seed",
    "stop": "a text or a list of texts, none of them empty",
    "stop_token_ids": "a list of token ids",
    "ignore_eos": "True or False",
}
