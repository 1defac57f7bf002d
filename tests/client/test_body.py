import base64
import json

import pytest

from rtk.client import body

LONG = base64.b64encode(bytes(range(256)) * 40).decode()


@pytest.mark.parametrize(
    "payload",
    [
        {"choices": [{"text": "a", "routed_experts": LONG}]},
        {
            "choices": [{"routed_experts": LONG}, {"routed_experts": LONG[::-1]}],
            "prompt_routed_experts": LONG,
        },
        {"choices": [{"routed_experts": {"data": LONG, "shape": [1], "dtype": "uint8"}}]},
        {"meta_info": {"routed_experts": LONG, "output_token_logprobs": [[-0.5, 3, None]]}},
        {"choices": [{"sgl_ext": {"routed_experts": LONG}}]},
    ],
)
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_long_values_are_slices_of_the_body(payload, separators):
    raw = json.dumps(payload, separators=separators).encode()
    parsed = body.parse(raw)
    slices = []

    def as_text(node):
        if isinstance(node, memoryview):
            slices.append(node)
            return node.tobytes().decode()
        if isinstance(node, dict):
            return {key: as_text(value) for key, value in node.items()}
        return [as_text(item) for item in node] if isinstance(node, list) else node

    assert as_text(parsed) == payload
    text = json.dumps(payload)
    assert len(slices) == text.count(LONG) + text.count(LONG[::-1])
    assert all(piece.obj is raw for piece in slices)


@pytest.mark.parametrize(
    "payload",
    [
        {"routed_experts": "short"},
        {"text": 'she said "routed_experts": "' + LONG + '" and left', "pad": LONG},
        {"choices": [{"routed_experts": "\\" + LONG}]},
        {'x"data': LONG, "top_logprobs": {"data": LONG}},
        [LONG],
    ],
)
def test_what_only_looks_like_routes_is_plain_json(payload):
    assert body.parse(json.dumps(payload).encode()) == payload


def test_what_strict_json_refuses_and_python_servers_write():
    parsed = body.parse(b'{"logprobs": [NaN, -Infinity, -0.5], "text": "\\ud800"}')
    assert repr(parsed) == repr({"logprobs": [float("nan"), float("-inf"), -0.5], "text": "\ud800"})


@pytest.mark.parametrize("raw", [b"", b"{", b'{"routed_experts": "' + LONG.encode(), b"<html>" + b" " * 5000])
def test_what_is_no_json_is_a_value_error(raw):
    with pytest.raises(ValueError):
        body.parse(raw)
