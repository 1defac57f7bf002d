"""Starts the embedded server as a child process that never outlives its parent."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO, Self

from rtk.errors import EmbeddedServerError
from rtk.extras import install
from rtk.serve import shipped

_START_TIMEOUT_S = 120.0
_READY = "rtk serve: listening on "


class EmbeddedServer:
    """A running embedded server; a context manager that stops it.

    Attributes:
        url: its address on loopback.
        model: the folder of the model that it serves.
    """

    def __init__(self, process: subprocess.Popen[str], url: str, model: Path) -> None:
        self.url = url
        self.model = model
        self._process = process
        atexit.register(self.stop)

    def stop(self) -> None:
        """Stop the server; calling it again does nothing."""
        _stop(self._process)
        atexit.unregister(self.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = "running" if self._process.poll() is None else "stopped"
        return f"<rtk embedded server: {self.model.name} at {self.url}, {state}>"


def embedded(
    model: str | os.PathLike[str] | None = None,
    *,
    port: int = 0,
    max_model_len: int | None = None,
    routed_experts: bool = True,
) -> EmbeddedServer:
    """Start a server for a small MoE model on this machine's CPU, and wait until it answers.

    It runs in a process of its own, in float32, reachable from this machine alone. It ends with `stop()`,
    with this process, however that ends, or with the `with` block.

    Args:
        model: folder of a Hugging Face MoE model; the tiny model that comes with rtk where left out.
        port: loopback port; 0 takes a free one.
        max_model_len: longest sequence in tokens; the model's own limit where left out.
        routed_experts: False answers without routes, as vLLM does without its flag.

    Raises:
        EmbeddedServerError: it did not start; the message ends with what it printed.
    """
    folder = Path(model).resolve() if model is not None else shipped.find("tiny_moe")
    command = [sys.executable, "-m", "rtk", "serve", str(folder), "--port", str(port), "--watch-stdin"]
    if max_model_len is not None:
        command += ["--max-model-len", str(max_model_len)]
    if not routed_experts:
        command += ["--no-routed-experts"]
    # A file, not a pipe: nobody reads it while the server runs, and a full pipe would block it.
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            # Its own process group, or the Ctrl-C that interrupts a cell would reach the server too.
            start_new_session=True,
        )
        try:
            return EmbeddedServer(process, _wait_until_ready(process, log), folder)
        except BaseException:
            _stop(process)
            raise


def _wait_until_ready(process: subprocess.Popen[str], log: IO[str]) -> str:
    assert process.stdout is not None
    # A server that hangs is killed, which ends its output and so the reading below.
    timed_out = threading.Event()

    def give_up() -> None:
        timed_out.set()
        process.kill()

    watchdog = threading.Timer(_START_TIMEOUT_S, give_up)
    watchdog.start()
    try:
        line = process.stdout.readline()
    finally:
        watchdog.cancel()
    if line.startswith(_READY):
        return line.removeprefix(_READY).strip()
    status = process.wait()
    log.seek(0)
    said = log.read()[-2000:].strip()
    if "No module named 'torch'" in said or "No module named 'transformers'" in said:
        raise EmbeddedServerError(f"the embedded server needs torch and transformers: {install('embedded')}")
    if timed_out.is_set():
        said += f"\n(it did not answer within {_START_TIMEOUT_S:.0f} s and was stopped)"
    raise EmbeddedServerError(f"the embedded server did not start (exit status {status}): {said}")


def _stop(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None and process.stdout is not None
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    process.stdin.close()
    process.stdout.close()
