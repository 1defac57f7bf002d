"""Runs a test's worker as several ranks on gloo, and never leaves one behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[3]


def run(module: str, size: int, folder: Path, *arguments: str, timeout_s: float = 120.0) -> list[dict]:
    """Start `python -m module RANK FOLDER ARGUMENTS` once a rank; what each wrote to FOLDER/RANK.json."""
    environment = os.environ | {
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONWARNINGS": "ignore",
    }
    logs = [folder / f"{rank}.log" for rank in range(size)]
    processes = []
    try:
        for rank, log in enumerate(logs):
            command = [sys.executable, "-m", module, str(rank), str(folder), *arguments]
            with log.open("wb") as output:
                processes.append(
                    subprocess.Popen(
                        command,
                        cwd=ROOT,
                        env=environment,
                        stdin=subprocess.PIPE,  # its end tells the rank that the tests are gone
                        stdout=output,
                        stderr=output,
                    )
                )
        deadline = time.monotonic() + timeout_s
        while None in (statuses := [process.poll() for process in processes]) and not any(statuses):
            assert time.monotonic() < deadline, f"the ranks did not finish within {timeout_s} s"
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    said = "\n".join(log.read_text(errors="replace")[-3000:] for log in logs)
    assert statuses == [0] * size, said
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]
