"""Faults of the trainer: the trace is right, and something else is installed."""

from __future__ import annotations

import dataclasses

import numpy as np

from rtk.replay.faults.case import Clean, Specimen, need, pipelines
from rtk.replay.faults.faulty_batches import joined, meeting
from rtk.replay.layouts.batch import Batch
from rtk.replay.layouts.expand import expand
from rtk.replay.layouts.shard import Shard
from rtk.trace.route_trace import RouteTrace


def wrapped_tensors(clean: Clean) -> Specimen:
    trace = clean.first
    need(trace.layout.num_experts > 256, "more than 256 experts")
    need(int(trace.routed_experts.max()) >= 256, "a token that goes past expert 255")
    tensors = [trace.routed_experts[:, n - 1] % 256 for n in clean.shard.router_layer_numbers]
    return Specimen((trace,), clean.shard, {"tensors": tensors})


def context_order(clean: Clean) -> Specimen:
    """Routes cut zigzag, the model contiguous; any rank shows it, some less than others."""
    trace = clean.first
    need(trace.rows >= 32, "32 rows or more")
    size = 2 if trace.rows < 128 else 4
    rank = int(clean.rng.integers(size))
    batch = Batch.padded([trace], align=2 * size)
    shard = dataclasses.replace(clean.shard, context_size=size, context_rank=rank, context_order="contiguous")
    wrong = dataclasses.replace(shard, context_order="zigzag")
    return Specimen((trace,), shard, {"batch": batch, "tensors": expand(trace, wrong, batch=batch).tensors})


def layer_offset(clean: Clean) -> Specimen:
    """The offset of a chunk into the list of MoE layers counts the dense layers before the chunk too."""
    trace, layout = clean.first, clean.first.layout
    shards = [
        shard
        for size, virtual in pipelines(layout)
        for shard in Shard(layout, pipeline_size=size, virtual_size=virtual).every_rank()
        if _layers_by_offset(shard) != [number - 1 for number in shard.router_layer_numbers]
    ]
    need(bool(shards), "a dense layer before a later chunk")
    shard = shards[int(clean.rng.integers(len(shards)))]
    tensors = [trace.routed_experts[:, layer] for layer in _layers_by_offset(shard)]
    return Specimen((trace,), shard, {"tensors": tensors})


def _layers_by_offset(shard: Shard) -> list[int]:
    """The layers (from 0) whose routes the faulty offset takes; past the last MoE layer it goes round."""
    moe, taken = shard.layout.moe_layers, []
    for chunk in shard.chunks:
        routers = sum(number - 1 in moe for number in chunk)
        taken += [moe[(chunk[0] - 1 + i) % len(moe)] for i in range(routers)]
    return taken


def mtp_replays_backbone(clean: Clean) -> Specimen:
    """The MTP layer has routes of its own, and its router is given those of the backbone's first MoE layer."""
    trace, layout = clean.first, clean.first.layout
    need(
        layout.num_layers - 1 in layout.moe_layers, "an MoE layer at the end, like which MTP layers are built"
    )
    size = clean.shard.pipeline_size
    shard = dataclasses.replace(clean.shard, pipeline_rank=size - 1, mtp_layers=1)
    own = trace.routed_experts[:, layout.moe_layers[-1]]
    other = (own.astype(np.int32) + 1) % layout.num_experts
    first = trace.routed_experts[:, layout.moe_layers[0]]
    tensors = [*expand(trace, shard).tensors, first]
    return Specimen((trace,), shard, {"tensors": tensors, "mtp_routes": [other[:, None]]})


def mtp_numbering(clean: Clean) -> Specimen:
    """The MTP layer's router says layer 1, as the backbone's first does, and gets that one's routes."""
    trace = clean.first
    numbers = (*clean.shard.router_layer_numbers, 1)
    tensors = [trace.routed_experts[:, n - 1] for n in numbers]
    return Specimen((trace,), clean.shard, {"tensors": tensors, "layer_numbers": numbers})


def packed_without_padding(clean: Clean) -> Specimen:
    traces = clean.traces
    need(len(traces) > 1, "two sequences or more")
    batch = Batch.packed(traces, align=8)
    need(batch.pieces[0] > traces[0].rows, "a first sequence that is not a multiple of 8 rows")
    wrong = joined(traces, sum(batch.pieces))
    tensors = expand(traces, clean.shard, batch=wrong).tensors
    return Specimen(tuple(traces), clean.shard, {"batch": batch, "tensors": tensors})


def stale_queue(clean: Clean) -> Specimen:
    """The backward pass of this step pops what a forward-only schedule left in the queue."""
    need(len(clean.traces) > 1, "two sequences or more")
    now, before = clean.traces[0], clean.traces[1]
    rows = min(now.rows, before.rows)
    need(rows >= 8, "sequences of 8 rows or more")
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


def repeated_padding(clean: Clean) -> Specimen:
    trace = clean.first
    need(trace.layout.top_k > 1, "top-2 or more")
    batch = Batch.padded([trace], length=trace.rows + 4)
    expanded = expand(trace, clean.shard, batch=batch)
    for tensor in expanded.tensors:
        tensor[expanded.padding_mask] = 0
    return Specimen((trace,), clean.shard, {"batch": batch, "tensors": expanded.tensors})


def unbalanced_padding(clean: Clean) -> Specimen:
    trace, layout = clean.first, clean.first.layout
    ranks = next(
        (n for n in (8, 4, 2) if layout.num_experts % n == 0 and layout.num_experts // n >= layout.top_k), 1
    )
    need(ranks > 1, "experts for two expert-parallel ranks")
    need(ranks > 2 or layout.top_k * 2 < layout.num_experts, "more experts")
    batch = Batch.padded([trace], length=trace.rows + 64)
    shard = dataclasses.replace(clean.shard, expert_size=ranks)
    expanded = expand(trace, shard, batch=batch)
    for tensor in expanded.tensors:
        tensor[expanded.padding_mask] = np.arange(layout.top_k)
    return Specimen((trace,), shard, {"batch": batch, "tensors": expanded.tensors})


def repeated_turns(clean: Clean) -> Specimen:
    """Three turns, each of which brings the rows of all turns before it again."""
    trace = clean.first
    need(trace.rows >= 24, "24 rows or more")
    thirds = [trace.rows // 3, 2 * trace.rows // 3, trace.rows]
    tensors = [
        np.concatenate([trace.routed_experts[:stop, n - 1] for stop in thirds])
        for n in clean.shard.router_layer_numbers
    ]
    return Specimen((trace,), clean.shard, {"tensors": tensors})


def prompt_alignment(clean: Clean) -> Specimen:
    """Prompts end and completions begin at one column; routes begin at the first."""
    traces = clean.traces
    need(len({trace.prompt_tokens for trace in traces}) > 1, "prompts of different lengths")
    batch = meeting(traces)
    wrong = Batch.padded(traces, length=batch.row.shape[1])
    tensors = expand(traces, clean.shard, batch=wrong).tensors
    return Specimen(tuple(traces), clean.shard, {"batch": batch, "tensors": tensors})


def off_by_one(clean: Clean) -> Specimen:
    trace = clean.first
    batch = Batch.padded([trace], length=trace.rows + 1)
    wrong = Batch.padded([trace], length=trace.rows + 1, side="left")
    tensors = expand(trace, clean.shard, batch=wrong).tensors
    return Specimen((trace,), clean.shard, {"batch": batch, "tensors": tensors})
