"""Time and peak memory of `rtk.replay.expand` beside widening all of a trace to int32 first.

    python benchmarks/expand.py [--tokens N] [--layers N] [--top-k N] [--experts N] [--pipeline N]

Both ways give the same tensors, which is compared first. Memory is what NumPy allocates on top of the trace,
as tracemalloc counts it; time is the best of several rounds, the two ways in turn.
"""

from __future__ import annotations

import argparse
import time
import tracemalloc
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from rtk import ModelLayout, RouteTrace
from rtk.replay import Shard, expand

Tensors = tuple[npt.NDArray[np.int32], ...]


def widen_first(trace: RouteTrace, shard: Shard) -> Tensors:
    """The whole trace becomes int32, then the shard's layers are cut out of it."""
    wide = trace.routed_experts.astype(np.int32)
    return tuple(np.ascontiguousarray(wide[:, number - 1]) for number in shard.router_layer_numbers)


def widen_last(trace: RouteTrace, shard: Shard) -> Tensors:
    """What rtk does."""
    return expand(trace, shard).tensors


def measured(run: Callable[[], Tensors]) -> tuple[float, int]:
    """Seconds, and bytes at the peak; measured apart, since counting bytes takes time."""
    start = time.perf_counter()
    run()
    seconds = time.perf_counter() - start
    tracemalloc.start()
    run()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return seconds, peak


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("tokens", 32768), ("layers", 94), ("top-k", 8), ("experts", 128), ("pipeline", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    layout = ModelLayout(options.layers, tuple(range(options.layers)), options.experts, options.top_k)
    # Ids repeat within a row here; neither way looks at them.
    shape = (options.tokens, options.layers, options.top_k)
    dtype = np.uint8 if options.experts <= 256 else np.uint16
    routes = np.random.default_rng(0).integers(0, options.experts, shape, dtype)
    trace = RouteTrace(np.zeros(options.tokens, int), ("",) * options.tokens, 1, routes, layout)
    # 94 layers on 8 stages as Megatron cuts Qwen3-235B-A22B: the embedding and the loss count as layers.
    uneven = (options.layers + 2) % options.pipeline == 0 and options.layers % options.pipeline
    shard = Shard(
        layout,
        options.pipeline,
        options.pipeline // 2,
        account_for_embedding_in_pipeline_split=bool(uneven),
        account_for_loss_in_pipeline_split=bool(uneven),
    )
    ways = {"widen everything first": widen_first, "rtk.replay.expand": widen_last}
    for one, other in zip(widen_first(trace, shard), widen_last(trace, shard), strict=True):
        assert np.array_equal(one, other)
        assert one.dtype == other.dtype == np.int32

    results = [
        {name: measured(lambda way=way: way(trace, shard)) for name, way in ways.items()}
        for _ in range(options.rounds)
    ]
    print(
        f"{options.tokens} tokens, {options.layers} layers, top-{options.top_k}, {dtype.__name__}: a trace of "
        f"{routes.nbytes / 1e6:.1f} MB; {shard} with {len(shard.router_layer_numbers)} routers"
    )
    for name in ways:
        seconds = min(result[name][0] for result in results)
        peak = max(result[name][1] for result in results)
        print(f"  {name:24} {seconds * 1e3:8.1f} ms {peak / 1e6:8.1f} MB at the peak")


if __name__ == "__main__":
    main()
