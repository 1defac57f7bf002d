import base64
import io
import json

import numpy as np
import pytest

from rtk.client import routed_experts as wire
from rtk.errors import PayloadError


def npy(array: np.ndarray) -> str:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return base64.b64encode(buffer.getvalue()).decode()


def skyrl(array: np.ndarray, **changes: object) -> dict:
    data = base64.b64encode(array.tobytes()).decode()
    return {"data": data, "shape": list(array.shape), "dtype": str(array.dtype)} | changes


def test_real_vllm_payload(vllm_answers):
    answer = json.loads(vllm_answers["plain"]["text"])
    routes = wire.decode(answer["choices"][0]["routed_experts"])
    # 4 prompt and 2 generated tokens, of which the last was never forwarded; 8 layers, top-2 of 16.
    assert (routes.shape, routes.dtype) == ((5, 8, 2), np.uint8)
    assert not routes[:, 0].any()
    # The .npy file's last 16 bytes are the last row; read off the base64 text by hand.
    assert routes[-1].ravel().tolist() == [0, 0, 14, 4, 13, 14, 8, 5, 2, 13, 1, 7, 6, 1, 3, 7]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32"])
def test_vllm_form_keeps_values_and_dtype(dtype):
    routes = np.arange(24, dtype=dtype).reshape(4, 3, 2)
    decoded = wire.decode(npy(routes))
    assert decoded.dtype == routes.dtype
    np.testing.assert_array_equal(decoded, routes)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32"])
def test_skyrl_form_keeps_values_and_dtype(dtype):
    routes = np.arange(24, dtype=dtype).reshape(4, 3, 2)
    decoded = wire.decode(skyrl(routes))
    assert decoded.dtype == routes.dtype
    np.testing.assert_array_equal(decoded, routes)


ROUTES = np.arange(24, dtype=np.int32).reshape(4, 3, 2)


@pytest.mark.parametrize(
    ("payload", "named"),
    [
        (7, "is a int"),
        ([[1, 2]], "not nested three deep"),
        ([[[1, 2]], [[1]]], "uneven"),
        ([[[1.0, 2.0]]], "lists of float"),
        ([[[1, 2**40]]], "no int32"),
        ([[[1, -2]]], "negative expert id"),
        ("not base64!", "no base64"),
        (npy(ROUTES)[:-5], "no base64, or were cut"),
        (npy(ROUTES)[:-8], "bytes where shape"),
        (base64.b64encode(b"PK\x03\x04 something else").decode(), "no .npy"),
        (npy(np.asfortranarray(ROUTES)), "Fortran"),
        (npy(ROUTES.astype(np.float32)), "float32"),
        (npy(ROUTES.reshape(4, 6)), r"shape \[4, 6\]"),
        (npy(ROUTES - 1), "negative expert id"),
        (skyrl(ROUTES, dtype="int64"), "'int64'"),
        (skyrl(ROUTES, shape=[4, 3, 3]), "96 bytes where shape"),
        (skyrl(ROUTES, shape=[4, 3, 2.0]), "shape"),
        (skyrl(ROUTES, shape=[4, -3, -2]), "shape"),
        (skyrl(ROUTES, shape=[True, 12, 2]), "shape"),
        ({"shape": [1, 1, 1], "dtype": "uint8"}, "'data'"),
    ],
)
def test_damaged_payloads_are_refused(payload, named):
    with pytest.raises(PayloadError, match=named):
        wire.decode(payload)


def test_pickled_objects_are_never_loaded():
    with pytest.raises(PayloadError):
        wire.decode(npy(np.array([[[object()]]], dtype=object)))


def test_nested_lists_of_vllm_0_21():
    decoded = wire.decode([[[0, 1], [300, 2]], [[3, 4], [5, 6]]])
    assert decoded.dtype == np.int32
    assert decoded.tolist() == [[[0, 1], [300, 2]], [[3, 4], [5, 6]]]


def test_sglangs_buffer_takes_its_shape_from_the_layout():
    # Three tokens, two layers, top-2, little-endian int32, written by hand.
    data = b"".join(n.to_bytes(4, "little") for n in (0, 0, 7, 300, 0, 0, 1, 2, 0, 0, 4, 3))
    decoded = wire.decode_int32_buffer(base64.b64encode(data).decode(), layers=2, top_k=2)
    assert decoded.dtype == np.int32
    assert decoded.tolist() == [[[0, 0], [7, 300]], [[0, 0], [1, 2]], [[0, 0], [4, 3]]]


def test_a_buffer_that_does_not_fit_the_layout_is_refused():
    encoded = base64.b64encode(bytes(48)).decode()
    with pytest.raises(PayloadError, match="no whole number of rows of 5 layers and top-2"):
        wire.decode_int32_buffer(encoded, layers=5, top_k=2)
    with pytest.raises(PayloadError, match="SGLang sends a base64 string"):
        wire.decode_int32_buffer([1], layers=1, top_k=1)


def test_parts_of_different_models_are_not_joined():
    with pytest.raises(PayloadError, match="do not fit together"):
        wire.join([np.zeros((1, 2, 2), np.int32), np.zeros((1, 3, 2), np.int32)])
