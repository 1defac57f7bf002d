"""Try traces on real megatron-core shards, from a process that has neither torch nor a process group.

The ranks run in child processes on gloo and on the CPU, so this works on a laptop. It is a check on the
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

import numpy as np

from rtk.errors import ShardError
from rtk.extras import install
from rtk.layout.model_layout import ModelLayout
from rtk.replay.layouts.shard import Shard
from rtk.trace import RouteTrace, save_traces


@dataclass(frozen=True)
class StageResult:
    """What one real rank, of a pipeline stage and an expert-parallel group, did with the traces.

    The ranks of an expert-parallel group share the traces out: the first rank takes the first, and so on
    in turns.

    Attributes:
        pipeline_rank: the stage's rank.
        router_layer_numbers: Megatron layer numbers read off its live routers; chunk after chunk where the
            pipeline is virtual.
        agreement: for each of them, the share of tokens for which its own choice of experts, in RECORD, is
            the same set as the trace's.
        replay_honoured: whether in REPLAY_FORWARD every token went to exactly the trace's experts.
        logprob_gap: mean absolute difference, in nats, between the rollout's logprobs of the generated
            tokens and those of the stage's own routes; on the last stage of traces with logprobs, else None.
        logprob_gap_replayed: the same with the trace's routes replayed.
        floored: generated tokens left out of both gaps, since the rollout has no logprob for them (-9999.0).
        expert_rank: its rank in the expert-parallel group.
    """

    pipeline_rank: int
    router_layer_numbers: tuple[int, ...]
    agreement: tuple[float, ...]
    replay_honoured: bool
    logprob_gap: float | None
    logprob_gap_replayed: float | None
    floored: int = 0
    expert_rank: int = 0

    def __str__(self) -> str:
        layers = ", ".join(
            f"layer {number} {share:.1%}"
            for number, share in zip(self.router_layer_numbers, self.agreement, strict=True)
        )
        rank = f", expert rank {self.expert_rank}" if self.expert_rank else ""
        text = (
            f"stage {self.pipeline_rank}{rank}: replay {'honoured' if self.replay_honoured else 'NOT honoured'}; "
            f"tokens with the same experts by themselves: {layers or 'no routers here'}"
        )
        if self.logprob_gap is not None:
            text += f"; logprob gap {self.logprob_gap:.2e} nats, {self.logprob_gap_replayed:.2e} with replay"
        if self.floored:
            text += f"; {self.floored} tokens without a logprob left out"
        return text


def verify(
    model: str | os.PathLike[str],
    traces: Sequence[RouteTrace],
    *,
    pipeline_size: int = 2,
    virtual_size: int = 1,
    expert_size: int = 1,
    timeout_s: float = 300.0,
) -> list[StageResult]:
    """Build a model's shards with megatron-core and run traces through them.

    Each rank records what its own routers choose for the trace's tokens, then replays the trace's routes
    and watches where the tokens really go.

    Args:
        model: folder of a Qwen3-MoE model, the one that the traces are of.
        traces: at least one for each expert-parallel rank.
        pipeline_size: pipeline-parallel size (PP).
        virtual_size: model chunks that a pipeline rank holds (VPP); more than one needs two pipeline ranks.
        expert_size: expert-parallel size (EP). Each rank is a process of its own, PP times EP in all.
        timeout_s: give up after so many seconds.

    Returns:
        one StageResult a rank: all expert ranks of the first stage, then those of the second, and so on.

    Raises:
        ShardError: megatron-core is missing, there are too few traces or one of another model, of which a
            token or an expert does not exist, the layers or experts do not divide over the ranks, a rank
            could not be built or failed, or the time was up.
        LayoutError: the model's config.json is missing, or is not that of an MoE model.
    """
    if not traces:
        raise ShardError("there are no traces to verify")
    layout = ModelLayout.from_config(model)
    # These say at once what does not exist or does not divide.
    for rank in range(max(pipeline_size, 1)):
        Shard(layout, pipeline_size, rank, virtual_size=virtual_size, expert_size=expert_size)
    if virtual_size > 1 and pipeline_size < 2:
        raise ShardError("virtual_size > 1 needs a pipeline_size of at least 2, as in Megatron")
    if len(traces) < expert_size:
        raise ShardError(f"{len(traces)} traces are too few for {expert_size} expert-parallel ranks")
    for number, trace in enumerate(traces):
        _fits(number, trace, layout, Path(model))
    for package in ("torch", "megatron.core"):
        if importlib.util.find_spec(package.split(".")[0]) is None:
            raise ShardError(f"{package} is not installed: {install('megatron')}")
    size = pipeline_size * expert_size
    with tempfile.TemporaryDirectory(prefix="rtk-verify-") as scratch:
        folder = Path(scratch)
        save_traces(traces, folder / "traces.zip")
        request = {
            "model": str(Path(model).resolve()),
            "folder": scratch,
            "ranks": size,
            "pipeline_size": pipeline_size,
            "virtual_size": virtual_size if virtual_size > 1 else None,
            "expert_size": expert_size,
        }
        (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
        answers = _run(folder, size, timeout_s)
        return [_result(answers[rank]) for rank in range(size)]


def _fits(number: int, trace: RouteTrace, layout: ModelLayout, model: Path) -> None:
    """Whether a model can be given the trace's tokens and told to use its experts."""
    if trace.layout != layout:
        raise ShardError(
            f"trace {number} is of a model with {trace.layout}, while {model} has {layout}: give the folder "
            "of the model that was sampled"
        )
    vocabulary = json.loads((model / "config.json").read_text(encoding="utf-8")).get("vocab_size")
    if isinstance(vocabulary, int) and (unknown := trace.token_ids >= vocabulary).any():
        position = int(np.argmax(unknown))
        raise ShardError(
            f"trace {number}, position {position}: token {trace.token_ids[position]} is out of the vocabulary of "
            f"{vocabulary} tokens that {model} has: the trace was tokenised for another model"
        )
    outside = (trace.routed_experts < 0) | (trace.routed_experts >= layout.num_experts)
    if outside.any():
        row, layer, slot = np.argwhere(outside)[0]
        raise ShardError(
            f"trace {number}, row {row}, layer {layer + 1}: expert {trace.routed_experts[row, layer, slot]} of "
            f"{layout.num_experts} does not exist; `rtk.replay.check` says what such ids come from"
        )


def _run(folder: Path, size: int, timeout_s: float) -> dict[int, dict[str, Any]]:
    """Run the ranks to their answers; stop all of them when one fails, since the others then wait for it."""
    environment = os.environ | {
        # gloo looks for an interface by the host's name, which need not resolve; the ranks are all here.
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        # Where it sees a GPU, Megatron puts parts of a model there, and the rest of these shards is elsewhere.
        "CUDA_VISIBLE_DEVICES": "",
    }
    logs = [folder / f"log-{rank}.txt" for rank in range(size)]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, log in enumerate(logs):
            command = [
                sys.executable,
                "-m",
                "rtk.replay.live.stage_process",
                str(folder / "request.json"),
                str(rank),
            ]
            with log.open("wb") as output:
                # Nothing is ever written to stdin: it ends with this process, and a rank that sees that leaves.
                processes.append(
                    subprocess.Popen(
                        command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=environment
                    )
                )
        deadline = time.monotonic() + timeout_s
        # A list, since `any` would stop at the first rank that lives and never see a later one die. Kept from
        # before the kill, which gives a status to the ranks that did nothing wrong too.
        while None in (statuses := [process.poll() for process in processes]):
            if any(statuses) or _errors(_answers(folder, size)):
                break
            if time.monotonic() > deadline:
                raise ShardError(f"the ranks did not finish within {timeout_s:.0f} s")
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    answers = _answers(folder, size)
    if errors := _errors(answers):
        raise ShardError("; ".join(errors))
    if len(answers) < size:
        raise ShardError(_crash(statuses, [log.read_text(errors="replace") for log in logs]))
    return answers


def _answers(folder: Path, size: int) -> dict[int, dict[str, Any]]:
    """What the ranks have answered so far."""
    answers = {}
    for rank in range(size):
        try:
            answers[rank] = json.loads((folder / f"answer-{rank}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # not there yet, or not written to its end
    return answers


def _errors(answers: dict[int, dict[str, Any]]) -> list[str]:
    return [f"rank {rank}: {answer['error']}" for rank, answer in answers.items() if "error" in answer]


def _crash(statuses: list[int | None], logs: list[str]) -> str:
    """What the ranks that broke printed last.

    A rank whose neighbour breaks soon breaks too, and may be the first to end. So every rank with an
    exception is quoted, or the cause could be the one that is left out.
    """
    said = []
    for rank, (status, log) in enumerate(zip(statuses, logs, strict=True)):
        if status or "Traceback" in log:
            ended = "" if status is None else f" (exit status {status})"
            said.append(f"rank {rank} failed{ended}; it printed: {log.strip()[-2000:]}")
    return "; ".join(said)


def _result(answer: dict[str, Any]) -> StageResult:
    lists = {name: tuple(answer[name]) for name in ("router_layer_numbers", "agreement")}
    return StageResult(**(answer | lists))
