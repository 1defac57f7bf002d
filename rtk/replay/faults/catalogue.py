"""The faults that were reported in the field, each made from clean traces, to see that a check catches it.

    for fault in faults.catalogue():
        report = fault.inject(traces).check()
        print(fault.name, "->", report.fault)

Each builds what a checker would be given: the traces, the shard, and the tensors or the record of the faulty
program. The reports are public issues and pull requests of the projects named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from rtk.replay.faults import server, trainer
from rtk.replay.faults.case import Clean, Specimen, stage
from rtk.trace.route_trace import RouteTrace
from rtk.usage.selection import as_traces

__all__ = ["Fault", "Specimen", "catalogue"]


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
    _make: Callable[[Clean], Specimen] = field(repr=False)

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
        return self._make(Clean(several, other, rng, stage(several[0].layout, rng)))


def catalogue() -> tuple[Fault, ...]:
    """All faults, in the order of their first report."""
    return _CATALOGUE


def _rows() -> Iterator[Fault]:
    r, t, c = "routes", "tensors", "record"
    yield Fault(
        "capture bypassed",
        "not captured",
        ("vllm #54730", "vllm #44116"),
        "right shape, all zeros in MoE layers",
        r,
        server.not_captured,
    )
    yield Fault(
        "capturer bound too early",
        "not captured",
        ("vllm #33013",),
        "all zeros",
        r,
        server.not_captured,
    )
    yield Fault(
        "physical experts, with copies",
        "physical experts",
        ("vllm #33013",),
        "some ids are at or past num_experts",
        r,
        server.out_of_range,
    )
    yield Fault(
        "physical experts, permuted",
        "physical experts",
        ("vllm #33013",),
        "a permutation of the true ids, layer by layer",
        c,
        server.permuted,
    )
    yield Fault(
        "wrong KV group",
        "prompt not captured",
        ("tpu-inference #3583", "vllm #35744"),
        "prompt rows all zero, generated rows right",
        r,
        server.prompt_zero,
    )
    yield Fault(
        "slot offset, zero",
        "prompt not captured",
        ("tpu-inference #2965",),
        "prompt rows zero",
        r,
        server.prompt_zero,
    )
    yield Fault(
        "slot offset, shifted",
        "shifted tokens",
        ("tpu-inference #2965",),
        "prompt rows shifted by one chunk",
        c,
        server.chunk_offset,
    )
    yield Fault(
        "padded rows captured",
        "stale rows",
        ("sglang #36404",),
        "one stale row repeated over contiguous tokens",
        r,
        server.stale_rows,
    )
    yield Fault(
        "retraction after an update",
        "other weights",
        ("miles #3277",),
        "routes of a span belong to other weights",
        c,
        server.other_weights,
    )
    yield Fault(
        "uint8 on the wire",
        "wrapped ids",
        ("ms-swift #9981",),
        "ids modulo 256, repeats within a row",
        r,
        server.wrapped_trace,
    )
    yield Fault(
        "uint8 in the trainer",
        "wrapped ids",
        ("ms-swift #9981",),
        "ids modulo 256, repeats within a row",
        t,
        trainer.wrapped_tensors,
    )
    yield Fault(
        "context-parallel cut",
        "context-parallel order",
        ("ms-swift #9981",),
        "each token carries another token's routes",
        t,
        trainer.context_order,
    )
    yield Fault(
        "offset counts dense layers",
        "shifted layers",
        ("verl #5452", "verl #7106"),
        "layers shifted by the number of dense layers",
        t,
        trainer.layer_offset,
    )
    yield Fault(
        "MTP numbering",
        "MTP layers",
        ("NeMo RL #3903",),
        "MTP layer 1 replays backbone layer 1",
        t,
        trainer.mtp_numbering,
    )
    yield Fault(
        "MTP routes of the backbone",
        "MTP layers",
        ("NeMo RL #3903",),
        "MTP layer 1, with routes of its own, is given the backbone's",
        t,
        trainer.mtp_replays_backbone,
    )
    yield Fault(
        "packed without padding",
        "packing padding",
        ("verl #7106",),
        "routes after the first padded sequence shifted by its padding",
        t,
        trainer.packed_without_padding,
    )
    yield Fault(
        "backward queue not cleared",
        "stale replay queue",
        ("SkyRL #1908",),
        "recompute pops the last step's routes",
        t,
        trainer.stale_queue,
    )
    yield Fault(
        "repeats in padding",
        "repeated padding",
        ("miles #1002", "verl #4986"),
        "repeats or padding break tokens * top_k",
        t,
        trainer.repeated_padding,
    )
    yield Fault(
        "padding on one rank",
        "unbalanced padding",
        ("miles #2697", "slime #2308", "prime-rl #3350", "verl #7524"),
        "padding rows all go to the first experts",
        t,
        trainer.unbalanced_padding,
    )
    yield Fault(
        "start offset ignored",
        "repeated turns",
        ("strands-sglang #72",),
        "joined turns give many times the rows",
        t,
        trainer.repeated_turns,
    )
    yield Fault(
        "prompts right-aligned",
        "padding side",
        ("tunix #2046",),
        "all routes off by the prompt's padding",
        t,
        trainer.prompt_alignment,
    )
    yield Fault("gap at the wrong end", "off by one", ("twinkle #240",), "off by one", t, trainer.off_by_one)


_CATALOGUE = tuple(_rows())
