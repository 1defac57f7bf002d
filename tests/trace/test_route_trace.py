import dataclasses
import json
import zipfile

import numpy as np
import pytest

from rtk import RouteTrace, load_traces, save_traces
from rtk.errors import TraceError


def test_save_and_load_lose_nothing(trace, tmp_path):
    wide = dataclasses.replace(trace, routed_experts=trace.routed_experts.astype(np.uint16), logprobs=None)
    save_traces([trace, wide], tmp_path / "two.zip")
    first, second = load_traces(tmp_path / "two.zip")
    assert first == trace
    assert second == wide
    assert second.routed_experts.dtype == np.uint16
    assert second.logprobs is None
    assert first.token_text[4] == "\ufffd"


def test_equality_sees_every_field(trace):
    other_routes = trace.routed_experts.copy()
    other_routes[0, 1, 0] = 2
    for change in (
        {"token_ids": trace.token_ids + 1},
        {"token_text": ("x", *trace.token_text[1:])},
        {"prompt_tokens": 2, "logprobs": np.zeros(3)},
        {"routed_experts": other_routes},
        {"logprobs": None},
        {"source": {}},
    ):
        assert dataclasses.replace(trace, **change) != trace


def test_the_file_can_be_read_without_rtk(trace, tmp_path):
    trace.save(tmp_path / "one.zip")
    with zipfile.ZipFile(tmp_path / "one.zip") as archive:
        assert json.loads(archive.read("traces.json"))["traces"][0]["prompt_tokens"] == 3
        with archive.open("0/routed_experts.npy") as file:
            np.testing.assert_array_equal(np.load(file), trace.routed_experts)


def test_saving_leaves_no_partial_file_behind(trace, tmp_path):
    trace.save(tmp_path / "one.zip")
    with pytest.raises(IsADirectoryError):
        (tmp_path / "folder").mkdir()
        trace.save(tmp_path / "folder")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "one.zip"]


def test_a_whole_forward_has_a_row_for_every_token(trace):
    rows = np.concatenate([trace.routed_experts, trace.routed_experts[-1:]])
    assert dataclasses.replace(trace, routed_experts=rows).rows == 5


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"routed_experts": np.zeros((3, 4, 2), np.uint8)},
            r"3 rows for 5 tokens \(3 prompt \+ 2 generated\)",
        ),
        ({"routed_experts": np.zeros((8, 4, 2), np.uint8)}, "joined twice"),
        ({"routed_experts": np.zeros((4, 3, 2), np.uint8)}, "3 layers, top-2.*4 layers and top-2"),
        ({"routed_experts": np.zeros((4, 4, 1), np.uint8)}, "top-1"),
        ({"routed_experts": np.zeros((4, 4, 2), np.float32)}, "float32"),
        ({"routed_experts": np.zeros((4, 8), np.uint8)}, r"shape \[4, 8\]"),
        ({"token_text": ("a",)}, "1 strings for 5 tokens"),
        ({"prompt_tokens": 0}, "prompt_tokens is 0"),
        ({"prompt_tokens": 6}, "prompt_tokens is 6"),
        ({"logprobs": np.zeros(5)}, r"shape \[5\]; 2 generated"),
        ({"token_ids": np.array([1, 2, 3, 4, -5])}, "not negative"),
        ({"source": {"when": object()}}, "plain JSON"),
    ],
)
def test_inconsistent_traces_are_refused(trace, change, named):
    with pytest.raises(TraceError, match=named):
        dataclasses.replace(trace, **change)


def test_damaged_files_are_named(trace, tmp_path):
    path = tmp_path / "trace.zip"
    with pytest.raises(TraceError, match="there is no trace file"):
        load_traces(path)
    trace.save(path)
    whole = path.read_bytes()
    for cut in range(0, len(whole), 97):
        path.write_bytes(whole[:cut])
        with pytest.raises(TraceError, match=r"trace\.zip"):
            load_traces(path)


def test_a_flipped_bit_never_goes_unnoticed(trace, tmp_path):
    path = tmp_path / "trace.zip"
    trace.save(path)
    whole = path.read_bytes()
    for position in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        # Zip has bytes that carry nothing (time stamps, say): a load must fail, or be right.
        try:
            loaded = load_traces(path)
        except TraceError:
            continue
        assert loaded == [trace]


def test_other_archives_and_newer_versions_are_named(trace, tmp_path):
    path = tmp_path / "other.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("traces.json", "[]")
    with pytest.raises(TraceError, match="no rtk trace file"):
        load_traces(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("traces.json", json.dumps({"format": "rtk-traces", "version": 2, "traces": []}))
    with pytest.raises(TraceError, match="version 2"):
        load_traces(path)


def test_one_trace_is_not_two(trace, tmp_path):
    save_traces([trace, trace], tmp_path / "two.zip")
    with pytest.raises(TraceError, match="holds 2 traces"):
        RouteTrace.load(tmp_path / "two.zip")
