"""Routed experts as servers encode them: base64 of a .npy file, of a raw buffer, or nested lists."""

from __future__ import annotations

import binascii
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rtk.errors import PayloadError

Routes = npt.NDArray[np.integer[Any]]
#: A base64 text, as a string or as a slice of the body that it came in.
Base64 = str | memoryview

# 32k tokens of a 94-layer top-8 model are 25 MB as uint8; a payload 80 times that is a mistake or an attack.
MAX_ROUTES_BYTES = 2 * 1024**3
_SKYRL_DTYPES = ("uint8", "int16", "int32")


def decode(payload: object) -> Routes:
    """Decode routes that carry their own shape, telling the forms apart by their JSON type.

    Known are vLLM's base64 of a .npy file (0.22 and newer), SkyRL's object of a base64 buffer beside its
    shape and dtype (PR #1909), and the nested lists of vLLM 0.21.

    Returns:
        expert ids `[tokens, layers, top_k]` in the dtype of the wire (int32 for nested lists); of a base64
        form a read-only view of the decoded bytes.

    Raises:
        PayloadError: the payload is of no such form, corrupt, truncated or larger than MAX_ROUTES_BYTES.
    """
    if isinstance(payload, Base64):
        return _checked(_decode_npy(from_base64(payload)))
    if isinstance(payload, Mapping):
        return _checked(_decode_object(payload))
    if isinstance(payload, list):
        return _checked(_decode_lists(payload))
    raise PayloadError(
        f"routed_experts is a {type(payload).__name__}; known forms are vLLM's base64 .npy string, SkyRL's "
        '{"data", "shape", "dtype"} object and the nested lists of vLLM 0.21'
    )


def decode_int32_buffer(payload: object, *, layers: int, top_k: int) -> Routes:
    """Decode SGLang's form: base64 of a raw int32 buffer in C order, whose shape the reader has to know.

    Args:
        payload: what `meta_info.routed_experts` or `sgl_ext.routed_experts` holds.
        layers: all layers of the model, dense ones too: SGLang's buffer is `num_hidden_layers` wide.
        top_k: the model's `num_experts_per_tok`.

    Returns:
        int32 ids `[tokens, layers, top_k]`, a read-only view.

    Raises:
        PayloadError: it is no base64, or its bytes are no whole number of rows of that shape.
    """
    if not isinstance(payload, Base64):
        raise PayloadError(f"routed_experts is a {type(payload).__name__}; SGLang sends a base64 string")
    data = from_base64(payload)
    row = layers * top_k * 4
    if len(data) % row:
        raise PayloadError(
            f"routed_experts have {len(data)} bytes, which are no whole number of rows of {layers} layers and "
            f"top-{top_k} as int32 ({row} bytes a row): the payload was cut, or the layout is another model's"
        )
    return _checked(np.frombuffer(data, dtype="<i4").reshape(-1, layers, top_k))


def join(parts: Sequence[Routes]) -> Routes:
    """Rows of several arrays one after the other, as vLLM 0.21's prompt and generated tokens.

    Raises:
        PayloadError: the arrays are of different layers or top-k.
    """
    if len({part.shape[1:] for part in parts}) != 1:
        raise PayloadError(
            f"routed_experts come in parts of shapes {[list(part.shape) for part in parts]}, which do not fit together"
        )
    return np.concatenate(parts)


def from_base64(text: Base64) -> bytes:
    """The bytes of a base64 text.

    Raises:
        PayloadError: the text is no base64, or holds more than MAX_ROUTES_BYTES.
    """
    if len(text) // 4 * 3 > MAX_ROUTES_BYTES:
        raise PayloadError(f"routed_experts are larger than {MAX_ROUTES_BYTES} bytes")
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError as error:
        raise PayloadError(
            f"routed_experts are no base64, or were cut ({len(text)} characters): {error}"
        ) from error


def _checked(routes: Routes) -> Routes:
    if routes.dtype.kind == "i" and routes.size and int(routes.min()) < 0:
        raise PayloadError(f"routed_experts hold a negative expert id ({int(routes.min())})")
    return routes


def _decode_npy(data: bytes) -> Routes:
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


def _decode_object(payload: Mapping[str, Any]) -> Routes:
    data, shape, dtype = payload.get("data"), payload.get("shape"), payload.get("dtype")
    if not isinstance(data, Base64) or not isinstance(shape, list):
        raise PayloadError(
            f"routed_experts need 'data' (string) and 'shape' (list); got the keys {sorted(map(str, payload))}"
        )
    if dtype not in _SKYRL_DTYPES:
        raise PayloadError(
            f"routed_experts have dtype {dtype!r}; SkyRL sends one of {', '.join(_SKYRL_DTYPES)}"
        )
    return _as_routes(memoryview(from_base64(data)), shape, np.dtype(dtype))


def _decode_lists(payload: list[Any]) -> Routes:
    # Looked at before numpy does: among many short strings it would give each the room of the longest.
    try:
        kinds = {kind.__name__ for row in payload for layer in row for kind in map(type, layer)}
    except TypeError as error:
        raise PayloadError(
            "routed_experts are lists that are not nested three deep; [tokens, layers, top_k] is expected"
        ) from error
    if kinds - {"int"}:
        raise PayloadError(f"routed_experts are lists of {', '.join(sorted(kinds))}; ids are whole numbers")
    try:
        routes = np.array(payload, dtype=np.int64)
    except (TypeError, ValueError, OverflowError) as error:
        raise PayloadError(
            f"routed_experts are lists of uneven lengths, or of ids that are no int32: {error}"
        ) from error
    if routes.ndim != 3:
        raise PayloadError(f"routed_experts are lists of shape {list(routes.shape)}; three axes are expected")
    if routes.size and int(routes.max()) > np.iinfo(np.int32).max:
        raise PayloadError(f"routed_experts hold the expert id {int(routes.max())}, which is no int32")
    return routes.astype(np.int32)


def _as_routes(buffer: memoryview, shape: Any, dtype: np.dtype[Any]) -> Routes:
    if len(shape) != 3 or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in shape):
        raise PayloadError(f"routed_experts have shape {list(shape)}; [tokens, layers, top_k] is expected")
    if dtype.kind not in "iu":
        raise PayloadError(f"routed_experts have dtype {dtype}; ids are whole numbers")
    expected = math.prod(shape) * dtype.itemsize
    # An empty array may still claim more layers than numpy can count.
    if len(buffer) != expected or max(shape) > MAX_ROUTES_BYTES:
        raise PayloadError(
            f"routed_experts have {len(buffer)} bytes where shape {list(shape)} of {dtype} needs {expected}: the "
            "payload was cut or garbled"
        )
    return np.frombuffer(buffer, dtype=dtype).reshape(shape)
