"""How often rtk.replay.check catches and names each fault, and how often it cries wolf.

    python -m benchmarks.fault_rates [--shapes 300] [--seed 1] [--real] [--url URL]

Prints the tables of docs/replay.md. Shapes are drawn at random: 2 to 16 layers, dense ones anywhere, 4 to 512
experts, top-1 to top-10, one to three sequences of 24 to 600 tokens. The trainer's own choices differ from the
rollout's in 1 to 5 % of routers, near ties decided the other way.

With --real the tiny model is run by transformers in float32, in bfloat16 and with moved weights, and the same
is counted on its own routes. With --url, the address of a vLLM that serves the tiny model, it is counted on vLLM's
routes against what real megatron-core modules choose in float32.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from rtk import ModelLayout, RouteTrace, compare
from rtk.errors import ShardError
from rtk.replay import Batch, ReplayReport, Shard, check, expand, faults
from rtk.replay.faults.simulated_model import other_engine, simulate


def shape(rng: np.random.Generator) -> tuple[ModelLayout, list[tuple[int, int]]]:
    """A model's layout, and the prompt and generated tokens of each sequence."""
    layers = int(rng.choice([2, 3, 4, 6, 8, 12, 16]))
    experts = int(rng.choice([4, 8, 16, 60, 64, 128, 256, 384, 512]))
    top_k = int(rng.integers(1, min(10, experts // 2) + 1))
    dense = rng.random(layers) < rng.choice([0.0, 0.2, 0.4])
    dense[-1] &= not dense.all()
    layout = ModelLayout(layers, tuple(np.flatnonzero(~dense).tolist()), experts, top_k)
    lengths = [
        (int(rng.integers(8, 200)), int(rng.integers(16, 400))) for _ in range(int(rng.integers(1, 4)))
    ]
    return layout, lengths


def clean_reports(
    traces: list[RouteTrace], runners_up: list[npt.NDArray[np.int64]], rng: np.random.Generator
) -> Iterator[tuple[str, bool]]:
    """Checks of routes that are as they should be, by kind: whether each passed."""
    shard = Shard(traces[0].layout)
    yield "one trace", check(traces[0], shard).ok
    yield "several traces", check(traces, shard).ok
    for name, batch in (
        ("padded batch", Batch.padded(traces, align=8)),
        ("packed batch", Batch.packed(traces, align=8)),
    ):
        tensors = expand(traces, shard, batch=batch).tensors
        yield name, check(traces, shard, batch=batch, tensors=tensors).ok
    for low, high in ((0.01, 0.05), (0.05, 0.10)):
        share = float(rng.uniform(low, high))
        other = other_engine(traces, runners_up, share, rng)
        recorded = {
            n: np.concatenate([t.routed_experts[:, n - 1] for t in other]) for n in shard.router_layer_numbers
        }
        said = f"{low:.0%} to {high:.0%} of routers differ"
        yield f"record, {said}", check(traces, shard, recorded=recorded).ok
        yield f"reference, {said}", check(traces, shard, reference=other).ok


def measure(shapes: int, seed: int) -> tuple[dict[str, Counter[str]], dict[str, Counter[str]]]:
    """Counts for each fault, and for each kind of clean input."""
    rng = np.random.default_rng(seed)
    caught: dict[str, Counter[str]] = defaultdict(Counter)
    clean: dict[str, Counter[str]] = defaultdict(Counter)
    for _ in range(shapes):
        layout, lengths = shape(rng)
        traces, runners_up = simulate(layout, lengths, rng)
        engine = other_engine(traces, runners_up, float(rng.uniform(0.01, 0.05)), rng)
        for fault in faults.catalogue():
            try:
                specimen = fault.inject(traces, rng=rng, engine=engine)
            except ShardError:
                continue  # this shape cannot show it
            report = specimen.check()
            caught[fault.name].update(_counted(report, fault.diagnosis))
        for name, passed in clean_reports(traces, runners_up, rng):
            clean[name].update(tried=1, alarms=not passed)
    return caught, clean


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--url", help="a vLLM that serves the tiny model")
    options = parser.parse_args()
    caught, clean = measure(options.shapes, options.seed)
    print("| fault | reports | tried | caught | named | misnamed |\n| --- | --- | --- | --- | --- | --- |")
    total: Counter[str] = Counter()
    for fault in faults.catalogue():
        counts = caught[fault.name]
        total += counts
        print(f"| {fault.name} | {', '.join(fault.reports)} | {_row(counts)} |")
    print(f"| all | | {_row(total)} |\n")
    print("| clean input | tried | false alarms |\n| --- | --- | --- |")
    for name, counts in clean.items():
        print(f"| {name} | {counts['tried']} | {counts['alarms']} |")
    tried, alarms = sum(c["tried"] for c in clean.values()), sum(c["alarms"] for c in clean.values())
    print(f"| all | {tried} | {alarms} |")
    if options.real:
        real()
    if options.url:
        from tests.replay import engines

        rollout = engines.rollout(options.url)
        _two_engines("vLLM against Megatron", rollout, engines.by_megatron(rollout))


def _two_engines(name: str, first: Sequence[RouteTrace], second: Sequence[RouteTrace]) -> None:
    """False alarms between two engines that ran the same tokens, and the catalogue on what they chose."""
    shard = Shard(first[0].layout)
    pairs = [*zip(first, second, strict=True), *zip(second, first, strict=True)]
    alarms = sum(not check(a, shard, reference=b).ok for a, b in pairs)
    print(f"\n{name}: {compare.mismatch(first, second)}")
    print(f"{alarms} false alarms in {len(pairs)} pairs of traces\n")
    counts: Counter[str] = Counter()
    rng = np.random.default_rng(0)
    for i in range(len(first)):
        both = [i, (i + 5) % len(first)]
        for fault in faults.catalogue():
            try:
                specimen = fault.inject([first[j] for j in both], rng=rng, engine=[second[j] for j in both])
            except ShardError:
                continue
            report = specimen.check()
            counts.update(_counted(report, fault.diagnosis))
            if report.fault != fault.diagnosis:
                print(f"{fault.name} in trace {i} was told as {report.fault}: {report.diagnosis}")
    print(f"| the whole catalogue on {name} | | {_row(counts)} |\n")


def real() -> None:
    """The same on the tiny model: float32 against bfloat16, and spans of text under moved weights."""
    from tests.replay import engines

    first, second = engines.traces("float32"), engines.traces("bfloat16")
    _two_engines("float32 against bfloat16", first, second)
    shard = Shard(first[0].layout)
    print(
        "| weights moved by | routers that still agree | spans | caught | named | misnamed |\n| --- | --- | --- | --- | --- | --- |"
    )
    for noise in (0.02, 0.05, 0.1, 0.2, 0.4):
        moved = engines.traces("float32", noise)
        counts: Counter[str] = Counter()
        for a, b, c in zip(first, second, moved, strict=True):
            if a.rows < 64:
                continue
            routes, span = a.routed_experts.copy(), slice(a.rows // 4, a.rows // 4 + a.rows // 3)
            routes[span] = c.routed_experts[span]
            report = check(dataclasses.replace(a, routed_experts=routes), shard, reference=b)
            counts.update(_counted(report, "other weights"))
        agree = 1 - compare.mismatch(first, moved).routers_differ
        print(f"| {noise:.0%} | {agree:.1%} | {_row(counts)} |")


def _counted(report: ReplayReport, diagnosis: str) -> dict[str, int]:
    return {
        "tried": 1,
        "caught": not report.ok,
        "named": report.fault == diagnosis,
        "misnamed": report.fault not in (diagnosis, "unknown", None),
    }


def _row(counts: Counter[str]) -> str:
    tried = counts["tried"]
    if not tried:
        return "0 | | | "
    return " | ".join(
        [str(tried)]
        + [f"{counts[key]} ({counts[key] / tried:.2%})" for key in ("caught", "named")]
        + [str(counts["misnamed"])]
    )


if __name__ == "__main__":
    main()
