"""JSON bodies in which most of the bytes are one base64 string."""

from __future__ import annotations

import json
import operator
import re
from typing import Any

import orjson

# The keys whose values may be long base64 texts: the routes themselves, and the buffer in SkyRL's object.
# An unescaped quote cannot stand inside a JSON string, so what this matches is a key.
_KEY = re.compile(rb'"(?:prompt_)?(?:routed_experts|data)"\s*:\s*"')
# Below this a copy costs less than looking for what to leave out of it.
_LONG = 4096


def parse(raw: bytes | bytearray) -> Any:
    """Parse a JSON body, with long base64 values as slices of the body instead of strings.

    A plain parser would copy the routes twice, once as text and once as a string of their own. Here the rest is
    parsed alone, and the values become memoryviews of `raw`, which they keep alive.

    Raises:
        ValueError: the body is no JSON, or is nested deeper than Python reads.
    """
    try:
        return _parse(raw)
    except RecursionError as error:
        raise ValueError(f"JSON nested too deeply: {error}") from error


def dumps(value: Any) -> bytes:
    """JSON of a request's body, in which numpy's and torch's whole numbers may stand.

    Raises:
        TypeError: something in it is no JSON value.
    """
    return orjson.dumps(value, default=operator.index, option=orjson.OPT_SERIALIZE_NUMPY)


def _loads(raw: bytes | bytearray) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        # It refuses NaN and -Infinity, which Python servers write for logprobs, and lone surrogates.
        return json.loads(raw)


def _parse(raw: bytes | bytearray) -> Any:
    cuts: dict[str, memoryview] = {}
    rest: list[bytes | bytearray | memoryview] = []
    view, end = memoryview(raw), 0
    if len(raw) > _LONG:
        for start, stop in _long_values(raw):
            name = f"\0rtk {len(cuts)}"
            rest += [view[end:start], json.dumps(name)[1:-1].encode()]
            cuts[name] = view[start:stop]
            end = stop
    if not cuts:
        return _loads(raw)
    rest.append(view[end:])
    payload = _loads(b"".join(rest))
    restored = _restore(payload, cuts)
    # A long value at a place that no form has: rare enough to pay for the copies.
    return payload if restored == len(cuts) else _loads(raw)


def _long_values(raw: bytes | bytearray) -> list[tuple[int, int]]:
    found, position = [], 0
    while match := _KEY.search(raw, position):
        start = match.end()
        stop = raw.find(b'"', start)
        if stop < 0:
            break
        if stop - start >= _LONG and raw.find(b"\\", start, stop) < 0:
            found.append((start, stop))
        position = stop
    return found


def _restore(node: Any, cuts: dict[str, memoryview]) -> int:
    """Put the slices back where they were cut out; returns how many found their place."""
    restored = 0
    if isinstance(node, list):
        return sum(_restore(item, cuts) for item in node if isinstance(item, dict))
    for key, value in node.items() if isinstance(node, dict) else ():
        if isinstance(value, str):
            if value in cuts:
                node[key] = cuts[value]
                restored += 1
        # Logprobs are long lists without any routes in them.
        elif isinstance(value, dict | list) and not key.endswith("logprobs"):
            restored += _restore(value, cuts)
    return restored
