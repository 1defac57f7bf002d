"""Try traces on real megatron-core stages, from a process that has neither torch nor a process group.

The stages run in child processes on gloo and on the CPU, so this works on a laptop. It is a check on the
routes and on the weights, not a way to train.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rtk.errors import ShardError
from rtk.replay.shard import Shard
from rtk.trace import RouteTrace, save_traces


@dataclass(frozen=True)
class StageResult:
    """What one real pipeline stage did with the traces.

    Attributes:
        pipeline_rank: the stage's rank.
        router_layer_numbers: Megatron layer numbers read off its live routers.
        agreement: for each of them, the share of tokens for which its own choice of experts, in RECORD, is
            the same set as the trace's.
        replay_honoured: whether in REPLAY_FORWARD every token went to exactly the trace's experts.
        logprob_gap: mean absolute difference, in nats, between the rollout's logprobs of the generated
            tokens and those of the stage's own routes; on the last stage of traces with logprobs, else None.
        logprob_gap_replayed: the same with the trace's routes replayed.
    """

    pipeline_rank: int
    router_layer_numbers: tuple[int, ...]
    agreement: tuple[float, ...]
    replay_honoured: bool
    logprob_gap: float | None
    logprob_gap_replayed: float | None

    def __str__(self) -> str:
        layers = ", ".join(
            f"layer {number} {share:.1%}"
            for number, share in zip(self.router_layer_numbers, self.agreement, strict=True)
        )
        text = (
            f"stage {self.pipeline_rank}: replay {'honoured' if self.replay_honoured else 'NOT honoured'}; "
            f"tokens with the same experts by themselves: {layers or 'no routers here'}"
        )
        if self.logprob_gap is not None:
            text += f"; logprob gap {self.logprob_gap:.2e} nats, {self.logprob_gap_replayed:.2e} with replay"
        return text


def verify(
    model: str | os.PathLike[str],
    traces: Sequence[RouteTrace],
    *,
    pipeline_size: int = 2,
    timeout_s: float = 300.0,
) -> list[StageResult]:
    """Build a model's pipeline stages with megatron-core and run traces through them.

    Each stage records what its own routers choose for the trace's tokens, then replays the trace's routes
    and watches where the tokens really go.

    Args:
        model: folder of a Qwen3-MoE model, the one that the traces are of.
        traces: at least one.
        pipeline_size: how many stages, each a process of its own.
        timeout_s: give up after so many seconds.

    Returns:
        one StageResult a stage, in order.

    Raises:
        ShardError: megatron-core is missing, there is no trace, the stages do not divide the layers, a
            stage could not be built or failed, or the time was up.
    """
    if not traces:
        raise ShardError("there are no traces to verify")
    Shard(traces[0].layout, pipeline_size)  # says at once when the layers do not divide
    for package in ("torch", "megatron.core"):
        if importlib.util.find_spec(package.split(".")[0]) is None:
            raise ShardError(f"{package} is not installed: pip install 'rtk[megatron]'")
    with tempfile.TemporaryDirectory(prefix="rtk-verify-") as scratch:
        folder = Path(scratch)
        save_traces(traces, folder / "traces.zip")
        request = {"model": str(Path(model).resolve()), "folder": scratch, "pipeline_size": pipeline_size}
        (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
        logs = _run(folder, pipeline_size, timeout_s)
        return [_result(folder, rank, logs[rank]) for rank in range(pipeline_size)]


def _run(folder: Path, size: int, timeout_s: float) -> list[str]:
    """Run the stages; stop all of them when one fails, since the others then wait for it forever."""
    # gloo looks for an interface by the host's name, which need not resolve; the stages are all here.
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0"}
    logs = [folder / f"log-{rank}.txt" for rank in range(size)]
    processes = []
    try:
        for rank, log in enumerate(logs):
            command = [
                sys.executable,
                "-m",
                "rtk.replay._megatron_worker",
                str(folder / "request.json"),
                str(rank),
            ]
            with log.open("wb") as output:
                processes.append(subprocess.Popen(command, stdout=output, stderr=output, env=environment))
        deadline = time.monotonic() + timeout_s
        while any(process.poll() is None for process in processes):
            if any(process.returncode for process in processes) or _failed(folder, size):
                break
            if time.monotonic() > deadline:
                raise ShardError(f"the pipeline stages did not finish within {timeout_s:.0f} s")
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [log.read_text(errors="replace") for log in logs]


def _failed(folder: Path, size: int) -> bool:
    """Whether a stage has written an answer that is an error."""
    for rank in range(size):
        try:
            if "error" in json.loads((folder / f"answer-{rank}.json").read_text(encoding="utf-8")):
                return True
        except (OSError, ValueError):
            continue  # not there yet, or not written to its end
    return False


def _result(folder: Path, rank: int, log: str) -> StageResult:
    errors = []
    for path in sorted(folder.glob("answer-*.json")):
        answer = json.loads(path.read_text(encoding="utf-8"))
        if "error" in answer:
            errors.append(f"pipeline stage {path.stem.removeprefix('answer-')}: {answer['error']}")
    if errors:
        raise ShardError("; ".join(errors))
    try:
        answer = json.loads((folder / f"answer-{rank}.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise ShardError(f"pipeline stage {rank} failed; it printed: {log.strip()[-2000:]}") from error
    return StageResult(
        pipeline_rank=rank,
        router_layer_numbers=tuple(answer["router_layer_numbers"]),
        agreement=tuple(answer["agreement"]),
        replay_honoured=answer["replay_honoured"],
        logprob_gap=answer["logprob_gap"],
        logprob_gap_replayed=answer["logprob_gap_replayed"],
    )
