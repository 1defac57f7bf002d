"""One process of `rtk.replay.verify`: python -m rtk.replay.live.stage_process REQUEST.json RANK."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from rtk.client.servers.fields import FLOOR_LOGPROB
from rtk.errors import RtkError
from rtk.replay.layouts.batch import Batch
from rtk.replay.layouts.expand import ExpandedRoutes, expand
from rtk.replay.layouts.shard import Shard
from rtk.replay.live import cpu_stand_ins, megatron
from rtk.replay.live.stage import Stage
from rtk.trace import RouteTrace, load_traces


def main() -> None:
    threading.Thread(target=leave_with_parent, daemon=True).start()
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    rank = int(sys.argv[2])
    folder = Path(request["folder"])
    torch.set_num_threads(1)  # several ranks share the machine
    dist.init_process_group(
        "gloo", init_method=(folder / "rendezvous").as_uri(), rank=rank, world_size=request["ranks"]
    )
    answer: dict[str, Any]
    try:
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=request["pipeline_size"],
            virtual_pipeline_model_parallel_size=request["virtual_size"],
            expert_model_parallel_size=request["expert_size"],
        )
        cpu_stand_ins.apply()
        stage = Stage(Path(request["model"]))
        answer = _verify(stage, load_traces(folder / "traces.zip"), Shard.from_megatron(stage.chunks))
    except RtkError as error:
        answer = {"error": str(error)}
    (folder / f"answer-{rank}.json").write_text(json.dumps(answer), encoding="utf-8")
    # No destroy_process_group: after an error the other ranks wait in a receive that never comes, and
    # the parent ends them.


def leave_with_parent() -> None:
    """Leave when the parent is gone, killed perhaps, with whatever this process waits for."""
    # Ends when the parent's end of the pipe does. sys.stdin would hold a lock that stops the interpreter's exit.
    while os.read(0, 1):
        pass
    os._exit(1)


def _verify(stage: Stage, traces: list[RouteTrace], shard: Shard) -> dict[str, Any]:
    same: dict[int, list[np.ndarray[Any, Any]]] = {number: [] for number in shard.router_layer_numbers}
    honoured = True
    gaps: dict[str, list[float]] = {"own": [], "replayed": []}
    floored = 0
    # The ranks of an expert-parallel group take the traces in turns, and each round has to be as long for
    # all of them. Who has none left keeps step with one that is not counted.
    for start in range(0, len(traces), shard.expert_size):
        round_ = traces[start : start + shard.expert_size]
        counted = shard.expert_rank < len(round_)
        trace = round_[shard.expert_rank if counted else 0]
        rows = max(each.rows for each in round_)
        expanded = expand(trace, shard, batch=Batch.padded([trace], length=rows))
        inputs = torch.zeros(rows, dtype=torch.int64)
        inputs[: trace.rows] = torch.from_numpy(trace.token_ids[: trace.rows])
        with megatron.recording(stage.chunks) as recorded:
            own_logits = stage.forward(inputs)
        with megatron.replaying(stage.chunks, expanded), _RoutingMaps(stage.chunks) as maps:
            replayed_logits = stage.forward(inputs)
        if not counted:
            continue
        for number, tensor in zip(expanded.layer_numbers, expanded.tensors, strict=True):
            own = recorded[number].numpy()
            equal = (np.sort(own, axis=1) == np.sort(tensor, axis=1)).all(axis=1)
            same[number].append(equal[: trace.rows])
        honoured &= maps.equal(expanded)
        if own_logits is not None and replayed_logits is not None and trace.logprobs is not None:
            floored += int((~(trace.logprobs > FLOOR_LOGPROB)).sum())  # NaN too
            gaps["own"] += _logprob_gaps(own_logits, trace)
            gaps["replayed"] += _logprob_gaps(replayed_logits, trace)
    return {
        "pipeline_rank": shard.pipeline_rank,
        "expert_rank": shard.expert_rank,
        "router_layer_numbers": list(same),
        "agreement": [float(np.concatenate(rows).mean()) for rows in same.values() if rows],
        "replay_honoured": honoured,
        "logprob_gap": float(np.mean(gaps["own"])) if gaps["own"] else None,
        "logprob_gap_replayed": float(np.mean(gaps["replayed"])) if gaps["replayed"] else None,
        "floored": floored,
    }


class _RoutingMaps:
    """Watches which experts each router really sends tokens to, whatever RouterReplay says it did."""

    def __init__(self, model: megatron.Model) -> None:
        self._seen: dict[int, torch.Tensor] = {}
        self._hooks = [router.register_forward_hook(self._see) for router in megatron.routers(model)]

    def _see(self, router: Any, _inputs: object, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        self._seen[router.layer_number] = output[1]  # bool [tokens, experts]

    def __enter__(self) -> _RoutingMaps:
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def equal(self, expanded: ExpandedRoutes) -> bool:
        """Whether each token went to the experts that were installed, and to no other."""
        for number, tensor in zip(expanded.layer_numbers, expanded.tensors, strict=True):
            wanted = torch.zeros_like(self._seen[number])
            wanted.scatter_(1, torch.from_numpy(tensor).long(), True)
            if not torch.equal(wanted, self._seen[number]):
                return False
        return True


def _logprob_gaps(logits: torch.Tensor, trace: RouteTrace) -> list[float]:
    """Absolute differences of the generated tokens' logprobs, where the rollout has one; row i predicts
    token i + 1."""
    assert trace.logprobs is not None
    start, stop = trace.prompt_tokens - 1, len(trace.token_ids) - 1
    targets = torch.from_numpy(trace.token_ids[start + 1 :].astype(np.int64))
    ours = logits[start:stop].log_softmax(-1).gather(1, targets[:, None])[:, 0]
    theirs = torch.from_numpy(trace.logprobs)
    gaps: list[float] = (ours - theirs).abs()[theirs > FLOOR_LOGPROB].tolist()
    return gaps


if __name__ == "__main__":
    main()
