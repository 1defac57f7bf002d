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
from typing import Any

from rtk.errors import ShardError
from rtk.layout import ModelLayout
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
        ShardError: megatron-core is missing, there is no trace or one of another model, the stages do not
            divide the layers, a stage could not be built or failed, or the time was up.
        LayoutError: the model's config.json is missing, or is not that of an MoE model.
    """
    if not traces:
        raise ShardError("there are no traces to verify")
    layout = ModelLayout.from_config(model)
    Shard(layout, pipeline_size)  # says at once when the layers do not divide
    for number, trace in enumerate(traces):
        if trace.layout != layout:
            raise ShardError(
                f"trace {number} is of a model with {trace.layout}, while {model} has {layout}: give the folder "
                "of the model that was sampled"
            )
    for package in ("torch", "megatron.core"):
        if importlib.util.find_spec(package.split(".")[0]) is None:
            raise ShardError(f"{package} is not installed: pip install 'rtk[megatron]'")
    with tempfile.TemporaryDirectory(prefix="rtk-verify-") as scratch:
        folder = Path(scratch)
        save_traces(traces, folder / "traces.zip")
        request = {"model": str(Path(model).resolve()), "folder": scratch, "pipeline_size": pipeline_size}
        (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
        answers = _run(folder, pipeline_size, timeout_s)
        return [_result(rank, answers[rank]) for rank in range(pipeline_size)]


def _run(folder: Path, size: int, timeout_s: float) -> dict[int, dict[str, Any]]:
    """Run the stages to their answers; stop all of them when one fails, since the others then wait for it."""
    environment = os.environ | {
        # gloo looks for an interface by the host's name, which need not resolve; the stages are all here.
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        # Where it sees a GPU, Megatron puts parts of a model there, and the rest of these stages is elsewhere.
        "CUDA_VISIBLE_DEVICES": "",
    }
    logs = [folder / f"log-{rank}.txt" for rank in range(size)]
    processes: list[subprocess.Popen[bytes]] = []
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
        # A list, since `any` would stop at the first stage that lives and never see a later one die. Kept from
        # before the kill, which gives a status to the stages that did nothing wrong too.
        while None in (statuses := [process.poll() for process in processes]):
            if any(statuses) or _errors(_answers(folder, size)):
                break
            if time.monotonic() > deadline:
                raise ShardError(f"the pipeline stages did not finish within {timeout_s:.0f} s")
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    answers = _answers(folder, size)
    if errors := _errors(answers):
        raise ShardError("; ".join(errors))
    if len(answers) < size:
        raise ShardError(_crash(statuses, [log.read_text(errors="replace") for log in logs]))
    return answers


def _answers(folder: Path, size: int) -> dict[int, dict[str, Any]]:
    """What the stages have answered so far, by rank."""
    answers = {}
    for rank in range(size):
        try:
            answers[rank] = json.loads((folder / f"answer-{rank}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # not there yet, or not written to its end
    return answers


def _errors(answers: dict[int, dict[str, Any]]) -> list[str]:
    return [
        f"pipeline stage {rank}: {answer['error']}" for rank, answer in answers.items() if "error" in answer
    ]


def _crash(statuses: list[int | None], logs: list[str]) -> str:
    """What the stages that broke printed last.

    A stage whose neighbour breaks soon breaks too, and may be the first to end. So every stage with an
    exception is quoted, or the cause could be the one that is left out.
    """
    said = []
    for rank, (status, log) in enumerate(zip(statuses, logs, strict=True)):
        if status or "Traceback" in log:
            ended = "" if status is None else f" (exit status {status})"
            said.append(f"pipeline stage {rank} failed{ended}; it printed: {log.strip()[-2000:]}")
    return "; ".join(said)


def _result(rank: int, answer: dict[str, Any]) -> StageResult:
    return StageResult(
        pipeline_rank=rank,
        router_layer_numbers=tuple(answer["router_layer_numbers"]),
        agreement=tuple(answer["agreement"]),
        replay_honoured=answer["replay_honoured"],
        logprob_gap=answer["logprob_gap"],
        logprob_gap_replayed=answer["logprob_gap_replayed"],
    )
