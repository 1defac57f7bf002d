"""Readers of the fields that several servers' answers have in common."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rtk.errors import PayloadError

Json = Mapping[str, Any]
#: For each token, what could stand there: token id to logprob.
Alternatives = list[dict[int, float]]

#: What stands for a logprob that is missing or not finite, as SkyRL's servers send it.
FLOOR_LOGPROB = -9999.0


def only(choices: Sequence[Json]) -> Json:
    """The one sequence. Raises PayloadError where there are none or several."""
    if len(choices) != 1:
        raise PayloadError(f"the answer has {len(choices)} choices; one sequence was asked for")
    return choices[0]


def token_ids(value: object) -> list[int]:
    """Token ids of an answer. Raises PayloadError where they are no list of whole numbers."""
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise PayloadError(f"token_ids of the answer are {short(value)}; a list of whole numbers is expected")
    return value


def floored(value: Any) -> float:
    """One logprob; FLOOR_LOGPROB where it is missing or not finite."""
    return all_floored([value])[0]


def all_floored(values: list[Any]) -> list[float]:
    """Logprobs; FLOOR_LOGPROB for each that is missing or not finite."""
    # One look at all of them: a sum is finite only where each value is.
    if set(map(type, values)) <= {float} and math.isfinite(sum(values)):
        return values
    return [
        float(value) if isinstance(value, int | float) and abs(value) <= sys.float_info.max else FLOOR_LOGPROB
        for value in values
    ]


def short(value: object) -> str:
    """A value as it stands in an error: its repr, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
