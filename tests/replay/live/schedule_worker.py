"""One rank of Megatron's own pipeline schedule with full activation recompute, replayed in a session.

python -m tests.replay.live.schedule_worker RANK FOLDER VIRTUAL_SIZE FORWARD_ONLY
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from torch.overrides import TorchFunctionMode

from rtk.replay import ExpandedRoutes, megatron, session
from rtk.replay.live import cpu_stand_ins
from rtk.replay.live.stage_process import leave_with_parent
from tests.replay.conftest import megatron_model

MICROBATCHES, TOKENS = 4, 9


class NoCuda(TorchFunctionMode):
    """The schedules make their counters with device="cuda"."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def routes(numbers, microbatch):
    """Distinct experts that no router chose, other ones for each layer and microbatch."""
    rng = np.random.default_rng(microbatch)
    layers = {number: [rng.choice(8, 2, replace=False) for _ in range(TOKENS)] for number in range(1, 9)}
    tensors = tuple(np.array(layers[number], np.int32) for number in numbers)
    return ExpandedRoutes(tensors, numbers, np.zeros(TOKENS, bool))


def main() -> None:
    threading.Thread(target=leave_with_parent, daemon=True).start()
    rank, folder, virtual = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    forward_only = sys.argv[4] == "forward-only"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=(folder / "rendezvous").as_uri(), rank=rank, world_size=2)
    virtual_size = virtual if virtual > 1 else None
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=virtual_size
    )
    cpu_stand_ins.apply()
    chunks = [
        megatron_model(
            vp_stage=stage if virtual_size else None,
            num_layers=8,
            moe_layer_freq=[0] + [1] * 7,
            pipeline_model_parallel_size=2,
            virtual_pipeline_model_parallel_size=virtual_size,
            recompute_granularity="full",
            recompute_method="uniform",
            recompute_num_layers=1,
            batch_p2p_comm=False,
            deallocate_pipeline_outputs=True,
        )
        for stage in range(virtual)
    ]
    numbers = megatron.router_layer_numbers(chunks)
    wanted = {microbatch: routes(numbers, microbatch) for microbatch in range(MICROBATCHES)}
    events: list[tuple[str, int, int | None]] = []

    def watch(router, _inputs, output):
        ids = {
            microbatch: torch.zeros_like(output[1]).scatter(
                1, torch.from_numpy(each.tensors[numbers.index(router.layer_number)]).long(), True
            )
            for microbatch, each in wanted.items()
        }
        followed = [
            microbatch for microbatch, routing_map in ids.items() if torch.equal(routing_map, output[1])
        ]
        kind = "F" if torch._C._current_graph_task_id() == -1 else "B"
        events.append((kind, router.layer_number, followed[0] if len(followed) == 1 else None))

    for router in megatron.routers(chunks):
        router.register_forward_hook(watch)
    tokens = torch.randint(0, 64, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(TOKENS)
    future = (positions[None, :] > positions[:, None])[None, None]

    with session(chunks) as replay, NoCuda():

        def forward_step(iterator, model):
            with replay.microbatch(wanted[next(iterator)]):
                output = model(tokens, positions[None], future)
            return output, lambda logits: (logits.square().mean(), {})

        iterators = [iter(range(MICROBATCHES)) for _ in chunks]
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if virtual_size else iterators[0],
            model=chunks if virtual_size else chunks[0],
            num_microbatches=MICROBATCHES,
            seq_length=TOKENS,
            micro_batch_size=1,
            forward_only=forward_only,
        )
    left = [len(router.router_replay.replay_backward_list) for router in megatron.routers(chunks)]
    actions = [router.router_replay.router_replay_action for router in megatron.routers(chunks)]
    answer = {
        "events": events,
        "clean": not any(left) and not any(actions),
        "counts": [replay.forwards, replay.recomputes],
    }
    (folder / f"{rank}.json").write_text(json.dumps(answer))
    dist.barrier()


if __name__ == "__main__":
    main()
