"""From traces' compact ids to the one tensor a router that a trainer installs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rtk.errors import ShardError
from rtk.replay.layouts.batch import Batch, LocalTokens, Placement
from rtk.replay.layouts.shard import Shard
from rtk.trace.route_trace import RouteTrace
from rtk.usage.selection import as_traces

# Where the rows of one trace stand in the shard's input, and which rows of the trace they are.
_Index = slice | npt.NDArray[np.integer]
_Places = tuple[_Index, _Index]


@dataclass(frozen=True)
class ExpandedRoutes:
    """Target routes for the routers of one shard.

    Attributes:
        tensors: one int32 array `[rows, top_k]` a local backbone router, in the order in which Megatron builds
            the routers, as `RouterReplay.set_replay_data` takes them.
        layer_numbers: the Megatron layer number (1-based, global) of each.
        padding_mask: bool `[rows]`, True for padding and for tokens without routes, whose experts are those
            of `padding_experts`. They belong into no load statistics.
        mtp_tensors: the same of the local MTP layers, whose routers Megatron builds after the backbone's;
            empty unless their routes were given.
        mtp_numbers: the depth (1-based) of each. It is no layer number: megatron-core 0.16 counts on from the
            backbone's last layer, 0.19 starts again from 1.
    """

    tensors: tuple[npt.NDArray[np.int32], ...]
    layer_numbers: tuple[int, ...]
    padding_mask: npt.NDArray[np.bool_]
    mtp_tensors: tuple[npt.NDArray[np.int32], ...] = ()
    mtp_numbers: tuple[int, ...] = ()


def expand(
    traces: RouteTrace | Iterable[RouteTrace],
    shard: Shard,
    *,
    batch: Placement | None = None,
    mtp_routes: Sequence[npt.ArrayLike] | None = None,
) -> ExpandedRoutes:
    """Select the shard's own MoE layers from traces and widen them, and only them, to int32.

    Without a batch, rows are the traces' rows, one trace after the other: for a sampled sequence
    `len(trace.token_ids) - 1` of them, the inputs `token_ids[:-1]` of a next-token loss.

    Layers are found by their global layer number, not by an offset into the list of MoE layers, which
    would be right only where all dense layers come first (the fault of verl #5452).

    Args:
        traces: one trace, or those of one microbatch.
        shard: whose routers the tensors are for.
        batch: how the traces become the model's input. Its padding rows, and tokens without routes, get the
            experts of `padding_experts`.
        mtp_routes: for each trace the ids `[trace.rows, mtp_layers, top_k]` of the MTP layers, depth 1 first.
            Left out, MTP routers are left out too, and choose for themselves.

    Returns:
        An ExpandedRoutes without any tensor where the rank holds dense layers only.

    Raises:
        ShardError: the shard is of another model than a trace, or does not divide the batch; the batch is
            of other traces; MTP routes have another shape; or an id does not fit into int32.
    """
    several = as_traces(traces)
    for trace in several:
        if shard.layout != trace.layout:
            raise ShardError(
                f"the shard is of a model with {shard.layout}, the trace of one with {trace.layout}"
            )
    if isinstance(batch, Batch):
        _same_traces(batch, several)
    here = (batch or Batch.packed(several)).local(shard)
    routed = _routed(several, here)
    places = list(_places(here, routed, len(several)))
    gaps = np.flatnonzero(~routed)
    filler = padding_experts(len(gaps), shard)

    def widen(columns: Iterable[npt.NDArray[np.integer]], name: str) -> npt.NDArray[np.int32]:
        tensor = np.empty((len(routed), shard.layout.top_k), dtype=np.int32)
        tensor[gaps] = filler
        for (at, rows), column in zip(places, columns, strict=True):
            tensor[at] = _fitting(column[rows], name)
        return tensor

    tensors = tuple(
        widen((trace.routed_experts[:, number - 1] for trace in several), f"layer {number}")
        for number in shard.router_layer_numbers
    )
    depths: tuple[int, ...] = ()
    mtp_tensors: tuple[npt.NDArray[np.int32], ...] = ()
    if mtp_routes is not None:
        mtp = checked_mtp(several, shard, mtp_routes)
        depths = shard.mtp_router_numbers
        mtp_tensors = tuple(
            widen((ids[:, depth - 1] for ids in mtp), f"MTP depth {depth}") for depth in depths
        )
    return ExpandedRoutes(tensors, shard.router_layer_numbers, ~routed, mtp_tensors, depths)


def padding_experts(rows: int, shard: Shard) -> npt.NDArray[np.int32]:
    """Distinct experts for padding rows, dealt out to the expert-parallel ranks in turn.

    The rule, which `padding_rule` says in words: Megatron gives rank r of `size` the experts from
    r * E / size on. Slot by slot, the rows take experts 0, E/size, 2E/size, ..., then 1, E/size + 1, ..., and
    round again after E of them, so that any run of slots falls on the ranks in equal shares, give or take one,
    and no row holds an expert twice. Rank r starts r slots on, or the odd slots of all ranks would meet on
    rank 0. (All padding on the first experts ran one rank out of memory: miles #2697, slime #2308,
    prime-rl #3350, verl #7524.)

    Returns:
        int32 `[rows, top_k]`.
    """
    experts, ranks = shard.layout.num_experts, shard.expert_size
    dealt = np.arange(experts, dtype=np.int32).reshape(ranks, experts // ranks).T.ravel()
    slots = (shard.expert_rank + np.arange(rows * shard.layout.top_k)) % experts
    return dealt[slots].reshape(rows, shard.layout.top_k)


def padding_rule(shard: Shard) -> str:
    """What `padding_experts` does on this shard, in a sentence that a report can print."""
    layout = shard.layout
    if shard.expert_size == 1:
        return f"{layout.top_k} distinct experts a row, going round all {layout.num_experts} in turn"
    return (
        f"{layout.top_k} distinct experts a row, each slot from the next of {shard.expert_size} ranks of "
        f"{layout.num_experts // shard.expert_size} experts, beginning with rank {shard.expert_rank}; an equal share "
        "for each rank, give or take one slot"
    )


def _same_traces(batch: Batch, traces: Sequence[RouteTrace]) -> None:
    """A batch of more traces is found out by `_routed`; one of fewer would leave some unchecked."""
    missing = {number for number, trace in enumerate(traces) if trace.rows} - set(
        np.unique(batch.sample).tolist()
    )
    if missing:
        raise ShardError(
            f"the batch holds no token of trace {min(missing)} of {len(traces)}: make it of the same traces, in the same "
            "order"
        )


def _routed(traces: Sequence[RouteTrace], here: LocalTokens) -> npt.NDArray[np.bool_]:
    """bool `[rows]`: the row stands for a token that has routes."""
    padding = np.asarray(here.padding_mask, dtype=bool)
    if padding.all():
        return ~padding
    sample, row = here.sample[~padding], here.row[~padding]
    tokens = np.array([len(trace.token_ids) for trace in traces])
    rows = np.array([trace.rows for trace in traces])
    if sample.min() < 0 or sample.max() >= len(traces) or (row < 0).any() or (row >= tokens[sample]).any():
        raise ShardError(
            f"the batch has tokens that the {len(traces)} traces do not have: make it of the same traces, in the "
            "same order"
        )
    routed = ~padding
    routed[routed] = row < rows[sample]
    return routed


def _places(here: LocalTokens, routed: npt.NDArray[np.bool_], traces: int) -> Iterator[_Places]:
    """For each trace in turn."""
    at = np.flatnonzero(routed)
    at = at[np.argsort(here.sample[at], kind="stable")]
    ends = np.searchsorted(here.sample[at], np.arange(traces + 1))
    for start, end in itertools.pairwise(ends):
        own = at[start:end]
        yield _even(own), _even(here.row[own])


def _even(indices: npt.NDArray[np.integer]) -> _Index:
    """The same indices as a slice, where they go up in even steps: a slice is read without a copy."""
    steps = np.diff(indices[:2])
    if len(steps) and steps[0] > 0 and (np.diff(indices) == steps[0]).all():
        return slice(int(indices[0]), int(indices[-1]) + 1, int(steps[0]))
    return indices


def checked_mtp(
    traces: Sequence[RouteTrace], shard: Shard, mtp_routes: Sequence[npt.ArrayLike]
) -> list[npt.NDArray[np.integer]]:
    """The routes of the MTP layers as arrays, one a trace. Raises ShardError where they are of another shape."""
    if not shard.mtp_layers:
        raise ShardError("mtp_routes were given for a shard with mtp_layers=0: say how many the model has")
    arrays = [np.asarray(ids) for ids in mtp_routes]
    shapes = [(trace.rows, shard.mtp_layers, shard.layout.top_k) for trace in traces]
    if [array.shape for array in arrays] != shapes or any(array.dtype.kind not in "iu" for array in arrays):
        raise ShardError(
            f"mtp_routes are {[f'{a.dtype} {list(a.shape)}' for a in arrays]}; whole numbers of shapes "
            f"{[list(shape) for shape in shapes]} are needed, [rows, MTP layers, top-k] of each trace"
        )
    return arrays


def _fitting(ids: npt.NDArray[np.integer], name: str) -> npt.NDArray[np.integer]:
    if ids.dtype.itemsize >= 4 and ids.dtype != np.int32 and ids.size:
        limits = np.iinfo(np.int32)
        if ids.min() < limits.min or ids.max() > limits.max:
            raise ShardError(f"{name} has ids {ids.min()}..{ids.max()}, which do not fit into int32")
    return ids
