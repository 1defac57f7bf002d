"""Decoding one answer with routes of [32768, 94, 8]: rtk beside nested lists, the plain way and bare base64.

python benchmarks/decode.py

Times are of one process, the ways taking turns. Memory is the high-water mark of a fresh process for each way,
above what it held before the answer was there, as a multiple of the array; so the answer itself counts too.
"""

from __future__ import annotations

import base64
import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import orjson

from rtk.client import body, routed_experts

SHAPE = (32768, 94, 8)
ROUNDS = 9
SLOW_ROUNDS = 2  # of nested lists, which take seconds


def plain(raw: bytes, loads: Callable[[bytes], dict]) -> np.ndarray:
    text = loads(raw)["choices"][0]["routed_experts"]
    return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)


def nested(raw: bytes, loads: Callable[[bytes], dict]) -> np.ndarray:
    return np.array(loads(raw)["choices"][0]["routed_experts"], dtype=np.uint8)


def with_rtk(raw: bytes) -> np.ndarray:
    return routed_experts.decode(body.parse(raw)["choices"][0]["routed_experts"])


def floor(raw: bytes) -> np.ndarray:
    """Not a way to read an answer: the base64 text alone, whose place is known, decoded once."""
    return np.frombuffer(base64.b64decode(raw), dtype=np.uint8)


# The name of a way, the file that it reads, and what it does.
WAYS: dict[str, tuple[str, Callable[[bytes], np.ndarray]]] = {
    "base64 alone (the floor)": ("base64", floor),
    "rtk": ("answer", with_rtk),
    "json, base64, np.load": ("answer", lambda raw: plain(raw, json.loads)),
    "orjson, base64, np.load": ("answer", lambda raw: plain(raw, orjson.loads)),
    "nested lists, json": ("lists", lambda raw: nested(raw, json.loads)),
    "nested lists, orjson": ("lists", lambda raw: nested(raw, orjson.loads)),
}


def write_answers(folder: Path, shape: tuple[int, int, int]) -> None:
    array = np.random.default_rng(0).integers(0, 128, shape, dtype=np.uint8)
    file = io.BytesIO()
    np.save(file, array)
    text = base64.b64encode(file.getvalue()).decode()
    choice = {"index": 0, "token_ids": [1], "finish_reason": "length", "logprobs": None}
    (folder / "base64").write_text(text)
    (folder / "answer").write_text(json.dumps({"choices": [choice | {"routed_experts": text}]}))
    lists = json.dumps({"choices": [choice | {"routed_experts": array.tolist()}]}, separators=(",", ":"))
    (folder / "lists").write_text(lists)


def high_water() -> int:
    """Bytes; of this process alone, where getrusage would count its parent's before exec too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def child(name: str, folder: Path) -> None:
    """Decode once, in a process that has decoded something small before; print peak and array in bytes."""
    file, decode = WAYS[name]
    decode((folder / "small" / file).read_bytes())
    before = high_water()
    array = decode((folder / file).read_bytes())
    print(high_water() - before, array.nbytes)


def peak(name: str, folder: Path) -> float:
    command = [sys.executable, __file__, name, str(folder)]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    above, array = map(int, out.split())
    return above / array


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "small").mkdir()
        write_answers(folder / "small", (600, 4, 8))
        write_answers(folder, SHAPE)
        times: dict[str, list[float]] = {name: [] for name in WAYS}
        for round_ in range(ROUNDS):
            for name, (file, decode) in WAYS.items():
                if file == "lists" and round_ >= SLOW_ROUNDS:
                    continue
                raw = (folder / file).read_bytes()
                begin = time.perf_counter()
                array = decode(raw)
                times[name].append(time.perf_counter() - begin)
                del array, raw
        base = statistics.median(times["base64 alone (the floor)"])
        print(f"{'':26}{'best':>9}{'median':>9}{'/ floor':>9}{'rounds':>8}{'peak / array':>14}")
        for name, seconds in times.items():
            best, median = min(seconds), statistics.median(seconds)
            print(
                f"{name:26}{best * 1e3:7.0f}ms{median * 1e3:7.0f}ms{median / base:9.2f}{len(seconds):8}"
                f"{peak(name, folder):14.2f}"
            )


if __name__ == "__main__":
    if len(sys.argv) == 3:
        child(sys.argv[1], Path(sys.argv[2]))
    else:
        main()
