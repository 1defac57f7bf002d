"""Whatever a server sends, the decoders give what was sent or a PayloadError, in bounded memory.

RTK_FUZZ_EXAMPLES=5000 runs longer, with new random examples each time; see benchmarks/fuzz.py.
"""

import base64
import contextlib
import copy
import io
import json
import math
import os
import tracemalloc
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rtk import ModelLayout
from rtk.client import body, routed_experts
from rtk.client.servers.fields import only
from rtk.client.servers.openai_routes import Chat, Completions
from rtk.client.servers.sglang import SglangCompletions, SglangGenerate
from rtk.client.servers.vllm import VllmGenerate
from rtk.errors import PayloadError

LONGER = "RTK_FUZZ_EXAMPLES" in os.environ
fuzz = settings(
    max_examples=int(os.environ.get("RTK_FUZZ_EXAMPLES", "150")),
    derandomize=not LONGER,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

FIXTURES = Path(__file__).parents[1] / "fixtures"
LAYOUT = ModelLayout(num_layers=8, moe_layers=tuple(range(1, 8)), num_experts=16, top_k=2)
ROUTES = (np.arange(5 * 8 * 2) % 16).astype(np.int32).reshape(5, 8, 2)


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def real_answers():
    """One answer of each form; vLLM's as they came over the wire, SkyRL's and SGLang's as documented."""
    generate = json.loads((FIXTURES / "vllm_0_30_generate.json").read_text())
    completions = json.loads((FIXTURES / "vllm_0_30_completions.json").read_text())
    more = json.loads((FIXTURES / "vllm_0_30_forms.json").read_text())
    plain = json.loads(generate["plain"]["text"])
    buffer = base64.b64encode(ROUTES.tobytes()).decode()
    skyrl, split = copy.deepcopy(plain), copy.deepcopy(plain)
    skyrl["choices"][0]["routed_experts"] = {"data": buffer, "shape": [5, 8, 2], "dtype": "int32"}
    split["prompt_routed_experts"] = ROUTES[:4].tolist()
    split["choices"][0]["routed_experts"] = ROUTES[4:].tolist()
    last_event = generate["streamed"]["text"].split("\n\n")[-3].removeprefix("data: ")
    sglang = {
        "text": " a b",
        "meta_info": {
            "id": "c2f1",
            "finish_reason": {"type": "length", "length": 2},
            "output_token_logprobs": [[-0.25, 11, None], [-1.5, 12, None]],
            "routed_experts": buffer,
        },
    }
    sgl_ext = json.loads(completions["completions"]["text"])
    del sgl_ext["choices"][0]["routed_experts"]
    sgl_ext["choices"][0]["sgl_ext"] = {"routed_experts": buffer}
    return [
        (VllmGenerate(), plain),
        (VllmGenerate(), json.loads(last_event)),
        (VllmGenerate(), skyrl),
        (VllmGenerate(), split),
        (Completions(), json.loads(completions["completions"]["text"])),
        (Chat(), json.loads(more["chat"]["text"])),
        (VllmGenerate(), json.loads(more["generate_prompt_logprobs"]["text"])),
        (SglangCompletions(LAYOUT), sgl_ext),
        (SglangGenerate(LAYOUT), sglang),
    ]


REAL = real_answers()
reals = st.sampled_from(REAL)


def read(form, payload):
    """All that a client takes from an answer."""
    choice = only(form.choices(payload))
    chunk = form.chunk(choice)
    assert all(type(token) is int for token in chunk.token_ids)
    if chunk.logprobs is not None:
        assert len(chunk.logprobs) == len(chunk.token_ids)
        assert all(type(value) is float and math.isfinite(value) for value in chunk.logprobs)
    reason = form.finish_reason(choice)
    assert reason is None or isinstance(reason, str)
    form.request_id(payload)
    assert isinstance(form.stop_match(choice), str | int | None)
    tokens = form.prompt_token_ids(payload, choice)
    assert tokens is None or all(type(token) is int for token in tokens)
    alternatives = form.prompt_logprobs(payload, choice) or []
    with contextlib.suppress(PayloadError):  # only asked for where there are some
        alternatives = alternatives + form.top_logprobs(choice)
    for entry in alternatives:
        assert all(type(token) is int and math.isfinite(value) for token, value in entry.items())
    decoded = form.routed_experts(payload, choice)
    if decoded is not None:
        assert decoded.ndim == 3 and decoded.dtype.kind in "iu"
        assert not decoded.size or decoded.min() >= 0
    return chunk, decoded


@contextmanager
def bounded(size):
    """JSON's own objects take up to some 30 bytes a character (`{},{},{}`); nothing may take much more."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 64 * size + 2**20
    finally:
        tracemalloc.stop()


KEYS = [
    "choices", "token_ids", "logprobs", "content", "logprob", "routed_experts", "prompt_routed_experts", "data", "shape",
    "dtype", "meta_info", "output_token_logprobs", "finish_reason", "token_logprobs", "id", "type",
]  # fmt: skip
plain = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=20)
scalars = (
    plain
    | st.integers(-(10**400), 10**400)
    | st.sampled_from(["uint8", "int32", npy(ROUTES), npy(ROUTES)[:-3], "AAAA"])
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=20,
)


def places(node, path=()):
    yield path
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield from places(value, (*path, key))


@st.composite
def mutated(draw):
    """A real answer in which one to three values are replaced, removed or doubled."""
    form, payload = draw(reals)
    payload = copy.deepcopy(payload)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(list(places(payload))[1:] or [()]))
        if not path:
            break
        parent = payload
        for key in path[:-1]:
            parent = parent[key]
        change = draw(st.sampled_from(["replace", "remove", "double"]))
        if change == "remove":
            del parent[path[-1]]
        elif change == "double" and isinstance(parent, list):
            parent.insert(path[-1], copy.deepcopy(parent[path[-1]]))
        else:
            parent[path[-1]] = draw(values)
    return form, payload


@given(reals, values)
@fuzz
def test_any_json_object(real, payload):
    form, _ = real
    if isinstance(payload, dict):
        with bounded(len(json.dumps(payload))), suppress(PayloadError):
            read(form, payload)


@given(mutated())
@fuzz
def test_real_answers_with_other_values(case):
    form, payload = case
    with bounded(len(json.dumps(payload))), suppress(PayloadError):
        read(form, payload)


@given(
    reals,
    st.lists(st.tuples(st.floats(0, 1), st.binary(max_size=3), st.integers(0, 3)), min_size=1, max_size=4),
)
@fuzz
def test_real_bodies_with_other_bytes(real, edits):
    form, payload = real
    raw = bytearray(json.dumps(payload).encode())
    for where, new, removed in edits:
        at = int(where * len(raw))
        raw[at : at + removed] = new
    with bounded(len(raw)):
        try:
            payload = body.parse(bytes(raw))
        except ValueError:
            return
        if isinstance(payload, dict):
            with suppress(PayloadError):
                read(form, payload)


headers = st.fixed_dictionaries(
    {
        "descr": st.sampled_from(["|u1", "<u2", ">i4", "<i8", "|O", "<f4", "|b1", "<M8[s]", "|V3", "<U9"])
        | values,
        "fortran_order": st.booleans() | values,
        "shape": st.tuples(*[st.integers(0, 6) | st.integers(-(2**65), 2**65)] * 3) | values,
    },
    optional={"more": values},
)


@given(
    headers.map(repr) | st.text(max_size=40),
    st.sampled_from([(1, 0), (2, 0), (3, 0), (9, 9)]),
    st.integers(-3, 3),
    st.binary(max_size=200),
)
@fuzz
def test_any_npy_header(header, version, more_bytes, data):
    text = header.encode("utf-8", "replace")
    length = max(0, len(text) + more_bytes).to_bytes(2 if version == (1, 0) else 4, "little")
    raw = b"\x93NUMPY" + bytes(version) + length + text + data
    with bounded(len(raw)), suppress(PayloadError):
        decoded = routed_experts.decode(base64.b64encode(raw).decode())
        assert decoded.nbytes <= len(data) + len(text)


@given(st.text(max_size=50) | st.text("ABab01+/= \n-_", max_size=50) | st.binary(max_size=60).map(memoryview))
@fuzz
def test_any_text_as_base64(text):
    try:
        decoded = routed_experts.from_base64(text)
    except PayloadError:
        return
    plain = text if isinstance(text, str) else bytes(text).decode()
    assert decoded == base64.b64decode(plain, validate=True)


long_texts = st.binary(min_size=3100, max_size=3200).map(lambda data: base64.b64encode(data).decode())
# A whole number past 64 bits becomes a float, which no field of any form takes.
bodies = st.recursive(
    plain | long_texts | st.sampled_from(["\x00rtk 0", '"data": "', '\\"routed_experts": "']),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from([*KEYS, 'x"data', "top_logprobs"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(bodies, st.sampled_from([(",", ":"), (" ,\n", " : ")]))
@fuzz
def test_a_body_reads_as_json_reads_it(payload, separators):
    def as_text(node):
        if isinstance(node, memoryview):
            return node.tobytes().decode()
        if isinstance(node, dict):
            return {key: as_text(value) for key, value in node.items()}
        return [as_text(item) for item in node] if isinstance(node, list) else node

    raw = json.dumps(payload, separators=separators).encode()
    assert repr(as_text(body.parse(raw))) == repr(json.loads(raw))  # repr, since nan is not nan


@pytest.mark.parametrize(
    "opened", ["[", '{"data":', '{"choices":[', '{"routed_experts":"' + "A" * 5000 + '","x":[']
)
@pytest.mark.parametrize("depth", [100, 900, 990, 1100, 100_000])
def test_nested_deeply(opened, depth):
    closed = {"[": "]", "{": "}"}
    end = "".join(closed[letter] for letter in reversed(opened) if letter in closed)
    raw = (opened * depth + "1" + end * depth).encode()
    try:
        payload = body.parse(raw)
    except ValueError:
        return
    if isinstance(payload, dict):
        for form, _ in REAL:
            with suppress(PayloadError):
                read(form, payload)


CHOICE = {"token_ids": [1], "finish_reason": "stop", "logprobs": None}


@pytest.mark.parametrize(
    "change",
    {
        "a long string among short ones": {"routed_experts": [["a" * 100_000, *["b"] * 10_000]]},
        "an empty array of a huge shape": {
            "routed_experts": {"data": "", "shape": [0, 10**30, 10**30], "dtype": "uint8"}
        },
        "a shape of no bytes": {"routed_experts": {"data": "", "shape": [0, 2**62, 4], "dtype": "int32"}},
        "a huge shape": {"routed_experts": {"data": "AAAA", "shape": [2**62, 2**62, 4], "dtype": "int32"}},
        "a number that is no float": {"logprobs": {"content": [{"logprob": 10**400}]}},
        "lists in 70 dimensions": {"routed_experts": json.loads("[" * 70 + "1" + "]" * 70)},
        "ids past int64": {"routed_experts": [[[2**64]]]},
        "empty lists": {"routed_experts": [[]]},
        "an empty object": {"routed_experts": [{}]},
        "no routes": {"routed_experts": None},
        "parts of two kinds": {"routed_experts": [[[1, 2]]]},
    }.items(),
    ids=lambda item: item[0],
)
@pytest.mark.parametrize("beside", [{}, {"prompt_routed_experts": []}, {"prompt_routed_experts": [[[1]]]}])
def test_bombs(change, beside):
    payload = {"choices": [CHOICE | change[1]], **beside}
    with bounded(len(json.dumps(payload))), suppress(PayloadError):
        read(VllmGenerate(), payload)
