"""What a fault is made from, and what it becomes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rtk.errors import ShardError
from rtk.layout.model_layout import ModelLayout
from rtk.replay.checks.check import check
from rtk.replay.checks.report import ReplayReport
from rtk.replay.checks.two_sides import Ids
from rtk.replay.layouts.shard import Shard
from rtk.trace.route_trace import RouteTrace


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
class Clean:
    """What a fault is made from.

    Attributes:
        traces: clean traces.
        engine: the same tokens on the trainer's engine.
        rng: chooses where the fault sits.
        shard: a pipeline stage with at least one router.
    """

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


def stage(layout: ModelLayout, rng: np.random.Generator) -> Shard:
    """Any pipeline stage that has a router, of one chunk or of several."""
    sizes = pipelines(layout)
    size, virtual = sizes[int(rng.integers(len(sizes)))]
    stages = Shard(layout, pipeline_size=size, virtual_size=virtual).every_rank()
    usable = [stage for stage in stages if stage.router_layer_numbers]
    return usable[int(rng.integers(len(usable)))]


def pipelines(layout: ModelLayout) -> list[tuple[int, int]]:
    """Pipeline and virtual sizes that cut the model evenly."""
    return [
        (size, virtual)
        for size, virtual in ((1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (2, 3), (4, 2))
        if layout.num_layers % (size * virtual) == 0
    ]


def need(met: bool, what: str) -> None:
    if not met:
        raise ShardError(f"these traces cannot show this fault: it needs {what}")


def changed(trace: RouteTrace, routes: Ids) -> RouteTrace:
    return dataclasses.replace(trace, routed_experts=routes)
