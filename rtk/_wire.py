"""Bodies of generate requests, and the forms in which servers send routes and logprobs back.

Formats: vLLM 0.30's `/inference/v1/generate` (routes as base64 of a .npy file) and SkyRL's
`/skyrl/v1/generate` (PR #1909: base64 of the raw buffer beside its shape and dtype). Nothing here does
any I/O, and nothing is repaired: what a format does not promise is a PayloadError.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from rtk.errors import PayloadError
from rtk.result import GenerateChunk

# 32k tokens of a 94-layer top-8 model are 25 MB as uint8; a payload 80 times that is a mistake or an attack.
MAX_ROUTES_BYTES = 2 * 1024**3
FLOOR_LOGPROB = -9999.0
_SKYRL_DTYPES = ("uint8", "int16", "int32")


def decode_routed_experts(payload: object) -> npt.NDArray[np.integer[Any]]:
    """Decode a choice's `routed_experts`, telling vLLM's form (a string) from SkyRL's (an object).

    Returns:
        expert ids `[tokens, layers, top_k]` in the dtype of the wire; a read-only view of the payload.

    Raises:
        PayloadError: the payload is of neither form, corrupt, truncated or larger than MAX_ROUTES_BYTES.
    """
    if isinstance(payload, str):
        routes = _decode_npy(_from_base64(payload))
    elif isinstance(payload, Mapping):
        routes = _decode_buffer(payload)
    else:
        raise PayloadError(
            f"routed_experts is a {type(payload).__name__}; known forms are vLLM's base64 .npy string and "
            'SkyRL\'s {"data", "shape", "dtype"} object'
        )
    if routes.size and int(routes.min()) < 0:
        raise PayloadError(f"routed_experts hold a negative expert id ({int(routes.min())})")
    return routes


def _from_base64(text: str) -> bytes:
    if len(text) // 4 * 3 > MAX_ROUTES_BYTES:
        raise PayloadError(f"routed_experts are larger than {MAX_ROUTES_BYTES} bytes")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise PayloadError(
            f"routed_experts are no base64, or were cut ({len(text)} characters): {error}"
        ) from error


def _decode_npy(data: bytes) -> npt.NDArray[np.integer[Any]]:
    stream = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(stream)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"unknown .npy version {version}")
        read_header = (
            np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        )
        shape, fortran, dtype = read_header(stream)
    except Exception as error:
        # The header is a Python literal that numpy evaluates safely, with whatever error a bad one causes.
        raise PayloadError(f"routed_experts are no .npy file ({len(data)} bytes): {error}") from error
    if fortran:
        raise PayloadError("routed_experts are in Fortran order; C order is expected")
    return _as_routes(memoryview(data)[stream.tell() :], shape, dtype)


def _decode_buffer(payload: Mapping[str, Any]) -> npt.NDArray[np.integer[Any]]:
    data, shape, dtype = payload.get("data"), payload.get("shape"), payload.get("dtype")
    if not isinstance(data, str) or not isinstance(shape, list):
        raise PayloadError(
            f"routed_experts need 'data' (string) and 'shape' (list); got the keys {sorted(payload)}"
        )
    if dtype not in _SKYRL_DTYPES:
        raise PayloadError(
            f"routed_experts have dtype {dtype!r}; SkyRL sends one of {', '.join(_SKYRL_DTYPES)}"
        )
    return _as_routes(memoryview(_from_base64(data)), shape, np.dtype(dtype))


def _as_routes(buffer: memoryview, shape: Any, dtype: np.dtype[Any]) -> npt.NDArray[np.integer[Any]]:
    if len(shape) != 3 or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in shape):
        raise PayloadError(f"routed_experts have shape {list(shape)}; [tokens, layers, top_k] is expected")
    if dtype.kind not in "iu":
        raise PayloadError(f"routed_experts have dtype {dtype}; ids are whole numbers")
    expected = math.prod(shape) * dtype.itemsize
    if len(buffer) != expected:
        raise PayloadError(
            f"routed_experts have {len(buffer)} bytes where shape {list(shape)} of {dtype} needs {expected}: the "
            "payload was cut or garbled"
        )
    return np.frombuffer(buffer, dtype=dtype).reshape(shape)


def decode_chunk(choice: Mapping[str, Any]) -> GenerateChunk:
    """Tokens and logprobs of a choice, whole or one event of a stream.

    Raises:
        PayloadError: the fields are missing, of another type, or of different lengths.
    """
    token_ids = choice.get("token_ids")
    if not isinstance(token_ids, list) or not all(type(t) is int for t in token_ids):
        raise PayloadError(
            f"token_ids of the answer are {_short(token_ids)}; a list of whole numbers is expected"
        )
    logprobs = choice.get("logprobs")
    if logprobs is None:
        return GenerateChunk(token_ids, None)
    content = logprobs.get("content") if isinstance(logprobs, Mapping) else None
    if not isinstance(content, list) or len(content) != len(token_ids):
        raise PayloadError(f"logprobs of the answer are {_short(logprobs)} for {len(token_ids)} tokens")
    return GenerateChunk(token_ids, [_finite_logprob(entry) for entry in content])


def _finite_logprob(entry: object) -> float:
    value = entry.get("logprob") if isinstance(entry, Mapping) else None
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return FLOOR_LOGPROB


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
