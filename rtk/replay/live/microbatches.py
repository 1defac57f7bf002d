"""Replay over whole training steps: several microbatches, recomputation, any pipeline schedule.

Megatron's `RouterReplay` takes the routes of a recompute from a list, first in, first out. Every installed
microbatch is appended, and only a recompute takes one out: a forward-only pass, a layer that is not
recomputed, or an exception leaves routes behind, and the next step's recompute gets them instead of its own
(the fault of SkyRL #1908). The session does not rely on that order. It remembers with which routes a model
chunk's output was computed, and when the backward pass comes through that output, each router that
recomputes is given exactly those.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rtk.errors import ShardError
from rtk.extras import bringing
from rtk.replay.layouts.batch import Placement
from rtk.replay.layouts.expand import ExpandedRoutes, expand
from rtk.replay.layouts.shard import Shard
from rtk.trace.route_trace import RouteTrace

with bringing("megatron"):
    import torch
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    from rtk.replay.live import megatron


@contextlib.contextmanager
def session(model: megatron.Model, shard: Shard | None = None) -> Iterator[ReplaySession]:
    """Replay routes in the training or evaluation steps of the block.

        with rtk.replay.session(model) as replay:
            for ... in ...:
                with replay.microbatch(traces):
                    output = model(...)
                loss(output).backward()  # now, or later: any schedule

    With Megatron's schedules, open the session around `forward_backward_func(...)` and `microbatch` in the
    `forward_step_func`, around the call of the model; backward passes need nothing.

    Args:
        model: a module, wrapped or not, or the list of chunks of a virtual pipeline.
        shard: which part of which model that is; read off the modules where it is not given, and needed
            only to expand traces.

    Yields:
        a ReplaySession.

    Raises:
        ShardError: a router has no RouterReplay or is configured in a way that ignores it, or is in another
            session already.
    """
    chunks = megatron.chunks_of(model)
    with megatron.claim(model) as replays:
        for router, replay in replays.items():
            left = len(replay.replay_backward_list)
            if left or replay.router_replay_action is not None:
                warnings.warn(
                    f"the router of layer {router.layer_number} had the action {replay.router_replay_action} and "
                    f"{left} routes for a backward pass left over from earlier steps: both are dropped",
                    stacklevel=3,
                )
            megatron.clear(replay)
        current = ReplaySession(chunks, replays, shard)
        handles = [handle for chunk in current._chunks for handle in chunk.hook()]
        try:
            yield current
        finally:
            current._closed = True
            for handle in handles:
                handle.remove()
            for replay in replays.values():
                megatron.clear(replay)


class ReplaySession:
    """What `rtk.replay.session` yields.

    Attributes:
        forwards: how many forward passes of a router were replayed so far.
        recomputes: how many recomputations of a router, in backward passes, were.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        replays: Mapping[TopKRouter, RouterReplay],
        shard: Shard | None,
    ) -> None:
        self.forwards = 0
        self.recomputes = 0
        self._replays = replays
        self._shard = shard
        self._model = chunks
        self._microbatch: _Microbatch | None = None
        self._closed = False
        self._chunks = [_Chunk(self, chunk) for chunk in chunks]

    @property
    def shard(self) -> Shard:
        """The shard that traces are expanded for."""
        if self._shard is None:
            self._shard = megatron.shard_of(self._model)
        return self._shard

    @contextlib.contextmanager
    def microbatch(
        self, routes: ExpandedRoutes | RouteTrace | Sequence[RouteTrace], batch: Placement | None = None
    ) -> Iterator[None]:
        """Replay these routes in the forward passes of the block, and in what is recomputed for them later.

        The block holds the forward pass of one microbatch, of one model chunk or of several. The ids
        go to a router's device when it first runs, as int32.

        Args:
            routes: what `rtk.replay.expand` gave for this microbatch, or its traces, which are then
                expanded for `shard`.
            batch: how those traces became the model's input, as in `rtk.replay.expand`.

        Raises:
            ShardError: the routes are not those of the model's routers, a router meets another number of
                tokens than there are rows, or another microbatch's block is open.
        """
        if self._closed:
            raise ShardError("this replay session is closed: open a new one for the next step")
        if self._microbatch is not None:
            raise ShardError(
                "microbatch blocks do not nest: one block holds the forward pass of one microbatch; its backward "
                "pass may come at any time later"
            )
        expanded = routes if isinstance(routes, ExpandedRoutes) else expand(routes, self.shard, batch=batch)
        self._microbatch = _Microbatch(megatron.targets(expanded, self._model))
        try:
            yield
        finally:
            self._microbatch = None


@dataclass(eq=False)
class _Microbatch:
    """The routes of one microbatch; it lives as long as a graph that may need them."""

    ids: Mapping[TopKRouter, npt.NDArray[np.int32]]
    # The same on the routers' devices, from their first run on: a virtual pipeline runs one chunk at a time.
    tensors: dict[TopKRouter, torch.Tensor] = field(default_factory=dict)
    # Routers that ran without gradients: a checkpoint will run them again, or nothing will.
    without_grad: set[TopKRouter] = field(default_factory=set)

    def target(self, router: TopKRouter) -> torch.Tensor | None:
        """int32 `[rows, top_k]`; None for an MTP router, which has no routes and chooses by itself."""
        if router not in self.tensors and router in self.ids:
            self.tensors[router] = megatron.on_device_of(router, self.ids[router])
        return self.tensors.get(router)


class _Chunk:
    """The hooks on one model chunk and its routers."""

    def __init__(self, session: ReplaySession, chunk: torch.nn.Module) -> None:
        self._session = session
        self._chunk = chunk
        # Whose backward pass is running through this chunk.
        self._backward: _Microbatch | None = None

    def hook(self) -> Iterator[Any]:
        yield self._chunk.register_forward_hook(self._tag)
        for router in megatron.routers(self._chunk):
            yield router.register_forward_pre_hook(self._steer)
            yield router.register_forward_hook(self._release, always_call=True)

    def _steer(self, router: TopKRouter, inputs: tuple[torch.Tensor, ...]) -> None:
        """Before a router runs: give it the routes of its microbatch."""
        session = self._session
        # Inside a backward pass a router runs for one reason: its activations are computed again.
        recompute = _in_backward()
        microbatch = self._backward if recompute else session._microbatch
        if microbatch is None:
            raise ShardError(
                f"the router of layer {router.layer_number} is recomputed for a forward pass that this session has "
                "not seen: open the session around the forward and the backward passes of a step"
                if recompute
                else f"the router of layer {router.layer_number} runs in a replay session and has no routes: put the "
                "forward pass into a block of `microbatch`"
            )
        target = microbatch.target(router)
        if target is None:
            return
        rows = inputs[0].numel() // inputs[0].shape[-1]
        if rows != len(target):
            raise ShardError(
                f"the router of layer {router.layer_number} meets {rows} tokens and has routes for {len(target)}: "
                "expand the traces with the batch's own padding and for this shard's context and sequence "
                "parallel ranks; a sampled sequence is forwarded without its last token"
            )
        replay = session._replays[router]
        megatron.clear(replay)
        replay.set_target_indices(target)
        if recompute:
            replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
            session.recomputes += 1
        else:
            replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
            session.forwards += 1
            if not torch.is_grad_enabled():
                microbatch.without_grad.add(router)

    def _release(self, router: TopKRouter, _inputs: object, _output: object) -> None:
        megatron.clear(self._session._replays[router])

    def _tag(self, _chunk: torch.nn.Module, _inputs: object, output: object) -> None:
        """After the chunk's forward pass: have its output say whose backward pass comes."""
        microbatch = self._session._microbatch
        if microbatch is None or _in_backward():
            return
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _gradient: self._begin_backward(microbatch))  # type: ignore[no-untyped-call]

    def _begin_backward(self, microbatch: _Microbatch) -> None:
        if self._session._closed:
            if microbatch.without_grad:
                raise ShardError(
                    "a backward pass with activation recomputation began after its replay session was closed, so "
                    "its routers would choose by themselves: keep the session open until the last backward pass"
                )
            return
        self._backward = microbatch
        # Another backward pass, of a forward pass that was not replayed, must not find these routes.
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._backward = None


def _in_backward() -> bool:
    """Whether this code runs inside a backward pass; torch's own checkpoint asks this way, and it has no public
    name."""
    return bool(torch._C._current_graph_task_id() != -1)


def _tensors(output: object) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)
