"""The faults that were reported in the field, each made from clean traces, to see that a check catches it.

    for fault in faults.catalogue():
        report = fault.inject(traces).check()
        print(fault.name, "->", report.fault)

Each builds what a checker would be given: the traces, the shard, and the tensors or the record of the faulty
program. The reports are public issues and pull requests of the projects named.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rtk.errors import ShardError
from rtk.layout import ModelLayout
from rtk.replay._laid import Laid
from rtk.replay._sides import Ids
from rtk.replay.check import check
from rtk.replay.report import ReplayReport
from rtk.replay.shard import Shard
from rtk.trace import RouteTrace
from rtk.usage import as_traces


@dataclass(frozen=True, eq=False)
class Specimen:
    """A faulty replay, as a checker meets it.

    Attributes:
        traces: what the rollout recorded.
        shard: the shard that replays it.
        options: the keyword arguments of `rtk.replay.check` for what else is known.
    """

    traces: tuple[RouteTrace, ...]
    shard: Shard
    options: Mapping[str, Any] = field(default_factory=dict)

    def check(self, **more: Any) -> ReplayReport:
        """Run `rtk.replay.check` on it; `more` are further arguments of it."""
        return check(self.traces, self.shard, **{**self.options, **more})


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    Attributes:
        name: which one; several of them may have the same diagnosis.
        diagnosis: the name that a report gives it (`ReplayReport.fault`).
        reports: where it was reported.
        looks: what the data looks like.
        sees: what it takes to see it: "routes" alone, the "tensors" to be installed, or a "record" of the
            trainer's own choices.
    """

    name: str
    diagnosis: str
    reports: tuple[str, ...]
    looks: str
    sees: str
    _make: Callable[[_Clean], Specimen] = field(repr=False)

    def inject(
        self,
        traces: RouteTrace | Sequence[RouteTrace],
        *,
        rng: np.random.Generator | None = None,
        engine: Sequence[RouteTrace] | None = None,
    ) -> Specimen:
        """Make the fault.

        Args:
            traces: clean traces, at least two for faults between sequences.
            rng: chooses where the fault sits; left out, always the same.
            engine: the same tokens as the trainer's own engine routes them, where it differs from the rollout;
                left out, it does not differ. It becomes what the shard recorded.

        Raises:
            ShardError: these traces cannot show it; the message says what it needs.
        """
        several = as_traces(traces)
        other = several if engine is None else list(engine)
        rng = rng or np.random.default_rng(0)
        return self._make(_Clean(several, other, rng, _stage(several[0].layout, rng)))


@dataclass(frozen=True)
class _Clean:
    """What a fault is made from."""

    traces: list[RouteTrace]
    engine: list[RouteTrace]
    rng: np.random.Generator

    @property
    def first(self) -> RouteTrace:
        return self.traces[0]

    shard: Shard

    def record(self, index: int = 0) -> dict[int, Ids]:
        """What the trainer's routers chose for one sequence."""
        trace = self.engine[index]
        rows = self.traces[index].rows
        return {layer + 1: trace.routed_experts[:rows, layer] for layer in trace.layout.moe_layers}


def _stage(layout: ModelLayout, rng: np.random.Generator) -> Shard:
    """Any pipeline stage that has a router."""
    sizes = [size for size in (1, 2, 4) if layout.num_layers % size == 0]
    size = int(rng.choice(sizes))
    stages = [Shard(layout, pipeline_size=size, pipeline_rank=rank) for rank in range(size)]
    usable = [stage for stage in stages if stage.router_layer_numbers]
    return usable[int(rng.integers(len(usable)))]


def catalogue() -> tuple[Fault, ...]:
    """All faults, in the order of their first report."""
    return _CATALOGUE


def _need(met: bool, what: str) -> None:
    if not met:
        raise ShardError(f"these traces cannot show this fault: it needs {what}")


def _changed(trace: RouteTrace, routes: Ids) -> RouteTrace:
    return dataclasses.replace(trace, routed_experts=routes)


# Faults of the server: the trace itself is wrong.


def _not_captured(clean: _Clean) -> Specimen:
    return Specimen((_changed(clean.first, np.zeros_like(clean.first.routed_experts)),), clean.shard)


def _out_of_range(clean: _Clean) -> Specimen:
    """EPLB with redundant experts: a tenth more ids than experts, dealt anew in each layer."""
    trace, experts = clean.first, clean.first.layout.num_experts
    copies = max(experts // 8, 1)
    routes = trace.routed_experts.astype(np.int32)
    for layer in trace.layout.moe_layers:
        logical = np.concatenate([np.arange(experts), clean.rng.choice(experts, copies, replace=False)])
        physical_of = np.argsort(clean.rng.permutation(len(logical)), kind="stable")[:experts]
        spare = np.setdiff1d(np.arange(len(logical)), physical_of)
        # Tokens of an expert with two copies are dealt out between them.
        second = np.full(experts, -1)
        second[logical[experts:]] = spare[:copies]
        ids = routes[:, layer]
        use_second = (second[ids] >= 0) & (clean.rng.random(ids.shape) < 0.5)
        routes[:, layer] = np.where(use_second, second[ids], physical_of[ids])
    _need(int(routes.max()) >= experts, "more rows, so that a redundant expert is used")
    return Specimen((_changed(trace, routes),), clean.shard)


def _permuted(clean: _Clean) -> Specimen:
    trace, experts = clean.first, clean.first.layout.num_experts
    _need(experts > 2, "more than two experts")
    routes = trace.routed_experts.copy()
    for layer in trace.layout.moe_layers:
        routes[:, layer] = clean.rng.permutation(experts).astype(routes.dtype)[routes[:, layer]]
    return Specimen((_changed(trace, routes),), clean.shard, {"recorded": clean.record()})


def _prompt_zero(clean: _Clean) -> Specimen:
    trace = clean.first
    _need(trace.rows > trace.prompt_tokens, "generated tokens with routes")
    routes = trace.routed_experts.copy()
    routes[: trace.prompt_tokens] = 0
    return Specimen((_changed(trace, routes),), clean.shard)


def _chunk_offset(clean: _Clean) -> Specimen:
    """The slots of a chunk are read after the step has moved on, so a prompt's rows are one chunk late."""
    trace = clean.first
    _need(trace.prompt_tokens >= 24, "a prompt of 24 tokens or more")
    chunk = max(trace.prompt_tokens // 6, 3)
    routes = trace.routed_experts.copy()
    end = min(trace.prompt_tokens, trace.rows)
    routes[: end - chunk] = trace.routed_experts[chunk:end]
    return Specimen((_changed(trace, routes),), clean.shard, {"recorded": clean.record()})


def _stale_rows(clean: _Clean) -> Specimen:
    trace = clean.first
    _need(trace.rows >= 64, "64 rows or more")
    start = int(clean.rng.integers(8, trace.rows // 2))
    stop = min(start + max(trace.rows // 3, 32), trace.rows)
    routes = trace.routed_experts.copy()
    routes[start:stop] = routes[start - 1]
    return Specimen((_changed(trace, routes),), clean.shard)


def _other_weights(clean: _Clean) -> Specimen:
    """Half of the routers in a span choose at least one other expert, as after a weight update."""
    trace, layout = clean.first, clean.first.layout
    _need(trace.rows >= 64 and layout.num_experts > layout.top_k, "64 rows or more, and a choice of experts")
    start = int(clean.rng.integers(0, trace.rows // 2))
    stop = start + trace.rows // 3
    routes = trace.routed_experts.copy()
    for layer in layout.moe_layers:
        for row in np.flatnonzero(clean.rng.random(stop - start) < 0.55) + start:
            left = np.setdiff1d(np.arange(layout.num_experts), routes[row, layer])
            routes[row, layer, clean.rng.integers(layout.top_k)] = clean.rng.choice(left)
    return Specimen((_changed(trace, routes),), clean.shard, {"recorded": clean.record()})


def _wrapped_trace(clean: _Clean) -> Specimen:
    trace = clean.first
    _need(trace.layout.num_experts > 256, "more than 256 experts")
    return Specimen((_changed(trace, (trace.routed_experts % 256).astype(np.uint8)),), clean.shard)


# Faults of the trainer: the trace is right, and something else is installed.


def _wrapped_tensors(clean: _Clean) -> Specimen:
    trace = clean.first
    _need(trace.layout.num_experts > 256, "more than 256 experts")
    _need(int(trace.routed_experts.max()) >= 256, "a token that goes past expert 255")
    tensors = [trace.routed_experts[:, n - 1] % 256 for n in clean.shard.router_layer_numbers]
    return Specimen((trace,), clean.shard, {"tensors": tensors})


def _context_order(clean: _Clean) -> Specimen:
    """Routes cut zigzag, the model contiguous; any rank shows it, some less than others."""
    trace = clean.first
    _need(trace.rows >= 32, "32 rows or more")
    size = 2 if trace.rows < 128 else 4
    rank = int(clean.rng.integers(size))
    batch = Laid.padded([trace], multiple=2 * size)
    shard = dataclasses.replace(clean.shard, context_size=size, context_rank=rank, context_order="contiguous")
    wrong = dataclasses.replace(shard, context_order="zigzag")
    return Specimen((trace,), shard, {"batch": batch, "tensors": batch.expanded([trace], wrong)})


def _layer_offset(clean: _Clean) -> Specimen:
    """The offset of a chunk into the list of MoE layers counts the dense layers before it too."""
    trace, layout = clean.first, clean.first.layout
    for size in (2, 3, 4):
        if layout.num_layers % size == 0:
            for rank in range(1, size):
                shard = Shard(layout, pipeline_size=size, pipeline_rank=rank)
                before = sum(layer + 1 < shard.layer_numbers[0] for layer in layout.dense_layers)
                if before and shard.router_layer_numbers:
                    start = layout.moe_layers.index(shard.router_layer_numbers[0] - 1) + before
                    taken = [
                        layout.moe_layers[(start + i) % len(layout.moe_layers)]
                        for i in range(len(shard.router_layer_numbers))
                    ]
                    wrong = [layer + 1 for layer in taken] != list(shard.router_layer_numbers)
                    if wrong:
                        tensors = [trace.routed_experts[:, layer] for layer in taken]
                        return Specimen((trace,), shard, {"tensors": tensors})
    raise ShardError(
        "these traces cannot show this fault: it needs a dense layer before a later pipeline stage"
    )


def _mtp_numbering(clean: _Clean) -> Specimen:
    """The MTP layer's router says layer 1, as the backbone's first does, and gets that one's routes."""
    trace = clean.first
    numbers = (*clean.shard.router_layer_numbers, 1)
    tensors = [trace.routed_experts[:, n - 1] for n in numbers]
    return Specimen((trace,), clean.shard, {"tensors": tensors, "layer_numbers": numbers})


def _packed_without_padding(clean: _Clean) -> Specimen:
    traces = clean.traces
    _need(len(traces) > 1, "two sequences or more")
    batch = Laid.packed(traces, multiple=8)
    _need(batch.row[: traces[0].rows + 1].min() < 0, "a first sequence that is not a multiple of 8 rows")
    joined = Laid.packed(traces, multiple=1, length=len(batch.row))
    return Specimen(
        tuple(traces), clean.shard, {"batch": batch, "tensors": joined.expanded(traces, clean.shard)}
    )


def _stale_queue(clean: _Clean) -> Specimen:
    """The backward pass of this step pops what a forward-only schedule left in the queue."""
    _need(len(clean.traces) > 1, "two sequences or more")
    now, before = clean.traces[0], clean.traces[1]
    rows = min(now.rows, before.rows)
    _need(rows >= 8, "sequences of 8 rows or more")
    now, before = _cut(now, rows), _cut(before, rows)
    tensors = [before.routed_experts[:, n - 1] for n in clean.shard.router_layer_numbers]
    return Specimen((now,), clean.shard, {"tensors": tensors, "others": {"the microbatch before": before}})


def _cut(trace: RouteTrace, rows: int) -> RouteTrace:
    return dataclasses.replace(
        trace,
        token_ids=trace.token_ids[:rows],
        token_text=trace.token_text[:rows],
        prompt_tokens=min(trace.prompt_tokens, rows),
        routed_experts=trace.routed_experts[:rows],
        logprobs=None,
    )


def _repeated_padding(clean: _Clean) -> Specimen:
    trace = clean.first
    _need(trace.layout.top_k > 1, "top-2 or more")
    batch = Laid.padded([trace], length=trace.rows + 4)
    tensors = batch.expanded([trace], clean.shard)
    for tensor in tensors:
        tensor[batch.row < 0] = 0
    return Specimen((trace,), clean.shard, {"batch": batch, "tensors": tensors})


def _unbalanced_padding(clean: _Clean) -> Specimen:
    trace, layout = clean.first, clean.first.layout
    ranks = next(
        (n for n in (8, 4, 2) if layout.num_experts % n == 0 and layout.num_experts // n >= layout.top_k), 1
    )
    _need(ranks > 1, "experts for two expert-parallel ranks")
    _need(ranks > 2 or layout.top_k * 2 < layout.num_experts, "more experts")
    batch = Laid.padded([trace], length=trace.rows + 64)
    shard = dataclasses.replace(clean.shard, expert_size=ranks)
    tensors = batch.expanded([trace], shard)
    for tensor in tensors:
        tensor[batch.row < 0] = np.arange(layout.top_k)
    return Specimen((trace,), shard, {"batch": batch, "tensors": tensors})


def _repeated_turns(clean: _Clean) -> Specimen:
    """Three turns, each of which brings the rows of all turns before it again."""
    trace = clean.first
    _need(trace.rows >= 24, "24 rows or more")
    thirds = [trace.rows // 3, 2 * trace.rows // 3, trace.rows]
    tensors = [
        np.concatenate([trace.routed_experts[:stop, n - 1] for stop in thirds])
        for n in clean.shard.router_layer_numbers
    ]
    return Specimen((trace,), clean.shard, {"tensors": tensors})


def _prompt_alignment(clean: _Clean) -> Specimen:
    """Prompts end and completions begin at one column; routes begin at the first."""
    traces = clean.traces
    _need(len({trace.prompt_tokens for trace in traces}) > 1, "prompts of different lengths")
    batch = Laid.meeting(traces)
    wrong = Laid.padded(traces, length=batch.length)
    return Specimen(
        tuple(traces), clean.shard, {"batch": batch, "tensors": wrong.expanded(traces, clean.shard)}
    )


def _off_by_one(clean: _Clean) -> Specimen:
    trace = clean.first
    batch = Laid.padded([trace], length=trace.rows + 1)
    wrong = Laid.padded([trace], length=trace.rows + 1, side="left")
    return Specimen((trace,), clean.shard, {"batch": batch, "tensors": wrong.expanded([trace], clean.shard)})


def _rows() -> Iterator[Fault]:
    r, t, c = "routes", "tensors", "record"
    yield Fault(
        "capture bypassed",
        "not captured",
        ("vllm #54730", "vllm #44116"),
        "right shape, all zeros in MoE layers",
        r,
        _not_captured,
    )
    yield Fault("capturer bound too early", "not captured", ("vllm #33013",), "all zeros", r, _not_captured)
    yield Fault(
        "physical experts, with copies",
        "physical experts",
        ("vllm #33013",),
        "some ids are at or past num_experts",
        r,
        _out_of_range,
    )
    yield Fault(
        "physical experts, permuted",
        "physical experts",
        ("vllm #33013",),
        "a permutation of the true ids, layer by layer",
        c,
        _permuted,
    )
    yield Fault(
        "wrong KV group",
        "prompt not captured",
        ("tpu-inference #3583", "vllm #35744"),
        "prompt rows all zero, generated rows right",
        r,
        _prompt_zero,
    )
    yield Fault(
        "slot offset, zero",
        "prompt not captured",
        ("tpu-inference #2965",),
        "prompt rows zero",
        r,
        _prompt_zero,
    )
    yield Fault(
        "slot offset, shifted",
        "shifted tokens",
        ("tpu-inference #2965",),
        "prompt rows shifted by one chunk",
        c,
        _chunk_offset,
    )
    yield Fault(
        "padded rows captured",
        "stale rows",
        ("sglang #36404",),
        "one stale row repeated over contiguous tokens",
        r,
        _stale_rows,
    )
    yield Fault(
        "retraction after an update",
        "other weights",
        ("miles #3277",),
        "routes of a span belong to other weights",
        c,
        _other_weights,
    )
    yield Fault(
        "uint8 on the wire",
        "wrapped ids",
        ("ms-swift #9981",),
        "ids modulo 256, repeats within a row",
        r,
        _wrapped_trace,
    )
    yield Fault(
        "uint8 in the trainer",
        "wrapped ids",
        ("ms-swift #9981",),
        "ids modulo 256, repeats within a row",
        t,
        _wrapped_tensors,
    )
    yield Fault(
        "context-parallel cut",
        "context-parallel order",
        ("ms-swift #9981",),
        "each token carries another token's routes",
        t,
        _context_order,
    )
    yield Fault(
        "offset counts dense layers",
        "shifted layers",
        ("verl #5452", "verl #7106"),
        "layers shifted by the number of dense layers",
        t,
        _layer_offset,
    )
    yield Fault(
        "MTP numbering",
        "MTP layers",
        ("NeMo RL #3903",),
        "MTP layer 1 replays backbone layer 1",
        t,
        _mtp_numbering,
    )
    yield Fault(
        "packed without padding",
        "packing padding",
        ("verl #7106",),
        "routes after the first padded sequence shifted by its padding",
        t,
        _packed_without_padding,
    )
    yield Fault(
        "backward queue not cleared",
        "stale replay queue",
        ("SkyRL #1908",),
        "recompute pops the last step's routes",
        t,
        _stale_queue,
    )
    yield Fault(
        "repeats in padding",
        "repeated padding",
        ("miles #1002", "verl #4986"),
        "repeats or padding break tokens * top_k",
        t,
        _repeated_padding,
    )
    yield Fault(
        "padding on one rank",
        "unbalanced padding",
        ("miles #2697", "slime #2308", "prime-rl #3350", "verl #7524"),
        "padding rows all go to the first experts",
        t,
        _unbalanced_padding,
    )
    yield Fault(
        "start offset ignored",
        "repeated turns",
        ("strands-sglang #72",),
        "joined turns give many times the rows",
        t,
        _repeated_turns,
    )
    yield Fault(
        "prompts right-aligned",
        "padding side",
        ("tunix #2046",),
        "all routes off by the prompt's padding",
        t,
        _prompt_alignment,
    )
    yield Fault("gap at the wrong end", "off by one", ("twinkle #240",), "off by one", t, _off_by_one)


_CATALOGUE = tuple(_rows())
