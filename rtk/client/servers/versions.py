"""Versions of servers, compared by their numbers."""

from __future__ import annotations

import re


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version; empty for one that has none, such as a nightly's."""
    match = re.match(r"v?(\d+(?:\.\d+)+)", version)
    return tuple(int(number) for number in match[1].split(".")) if match else ()


def at_least(version: str, wanted: str) -> bool:
    """Whether a version is that one or newer; a version that is no number counts as new."""
    return not numbers(version) or numbers(version) >= numbers(wanted)
