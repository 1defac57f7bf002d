import base64
import io
import json

import numpy as np
import pytest

from rtk import _wire
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
    routes = _wire.decode_routed_experts(answer["choices"][0]["routed_experts"])
    # 4 prompt and 2 generated tokens, of which the last was never forwarded; 8 layers, top-2 of 16.
    assert (routes.shape, routes.dtype) == ((5, 8, 2), np.uint8)
    assert not routes[:, 0].any()
    # The .npy file's last 16 bytes are the last row; read off the base64 text by hand.
    assert routes[-1].ravel().tolist() == [0, 0, 14, 4, 13, 14, 8, 5, 2, 13, 1, 7, 6, 1, 3, 7]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32"])
def test_vllm_form_keeps_values_and_dtype(dtype):
    routes = np.arange(24, dtype=dtype).reshape(4, 3, 2)
    decoded = _wire.decode_routed_experts(npy(routes))
    assert decoded.dtype == routes.dtype
    np.testing.assert_array_equal(decoded, routes)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32"])
def test_skyrl_form_keeps_values_and_dtype(dtype):
    routes = np.arange(24, dtype=dtype).reshape(4, 3, 2)
    decoded = _wire.decode_routed_experts(skyrl(routes))
    assert decoded.dtype == routes.dtype
    np.testing.assert_array_equal(decoded, routes)


ROUTES = np.arange(24, dtype=np.int32).reshape(4, 3, 2)


@pytest.mark.parametrize(
    ("payload", "named"),
    [
        ([[1, 2]], "is a list"),
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
        _wire.decode_routed_experts(payload)


def test_pickled_objects_are_never_loaded():
    with pytest.raises(PayloadError):
        _wire.decode_routed_experts(npy(np.array([[[object()]]], dtype=object)))


def test_logprobs_that_are_missing_or_not_finite_become_the_floor():
    content = [
        {"logprob": -0.25},
        {"logprob": float("-inf")},
        {"logprob": None},
        {},
        {"logprob": float("nan")},
    ]
    chunk = _wire.decode_chunk({"token_ids": [1, 2, 3, 4, 5], "logprobs": {"content": content}})
    assert chunk.logprobs == [-0.25, -9999.0, -9999.0, -9999.0, -9999.0]


@pytest.mark.parametrize(
    "choice",
    [
        {},
        {"token_ids": ["1"]},
        {"token_ids": [True]},
        {"token_ids": [1, 2], "logprobs": {"content": [{"logprob": -1.0}]}},
        {"token_ids": [1], "logprobs": [-1.0]},
    ],
)
def test_malformed_choices_are_refused(choice):
    with pytest.raises(PayloadError):
        _wire.decode_chunk(choice)
