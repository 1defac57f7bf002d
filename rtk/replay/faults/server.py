"""Faults of the server: the trace itself is wrong."""

from __future__ import annotations

import numpy as np

from rtk.replay.faults.case import Clean, Specimen, changed, need


def not_captured(clean: Clean) -> Specimen:
    return Specimen((changed(clean.first, np.zeros_like(clean.first.routed_experts)),), clean.shard)


def out_of_range(clean: Clean) -> Specimen:
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
    need(int(routes.max()) >= experts, "more rows, so that a redundant expert is used")
    return Specimen((changed(trace, routes),), clean.shard)


def permuted(clean: Clean) -> Specimen:
    trace, experts = clean.first, clean.first.layout.num_experts
    need(experts > 2, "more than two experts")
    routes = trace.routed_experts.copy()
    for layer in trace.layout.moe_layers:
        order = clean.rng.permutation(experts)
        if (order == np.arange(experts)).all():  # one in 24 of four experts, and no fault
            order = order[::-1]
        routes[:, layer] = order.astype(routes.dtype)[routes[:, layer]]
    return Specimen((changed(trace, routes),), clean.shard, {"recorded": clean.record()})


def prompt_zero(clean: Clean) -> Specimen:
    trace = clean.first
    need(trace.rows > trace.prompt_tokens, "generated tokens with routes")
    routes = trace.routed_experts.copy()
    routes[: trace.prompt_tokens] = 0
    return Specimen((changed(trace, routes),), clean.shard)


def chunk_offset(clean: Clean) -> Specimen:
    """The slots of a chunk are read after the step has moved on, so a prompt's rows are one chunk late."""
    trace = clean.first
    need(trace.prompt_tokens >= 24, "a prompt of 24 tokens or more")
    chunk = max(trace.prompt_tokens // 6, 3)
    routes = trace.routed_experts.copy()
    end = min(trace.prompt_tokens, trace.rows)
    routes[: end - chunk] = trace.routed_experts[chunk:end]
    return Specimen((changed(trace, routes),), clean.shard, {"recorded": clean.record()})


def stale_rows(clean: Clean) -> Specimen:
    trace = clean.first
    need(trace.rows >= 64, "64 rows or more")
    start = int(clean.rng.integers(8, trace.rows // 2))
    stop = min(start + max(trace.rows // 3, 32), trace.rows)
    routes = trace.routed_experts.copy()
    routes[start:stop] = routes[start - 1]
    return Specimen((changed(trace, routes),), clean.shard)


def other_weights(clean: Clean) -> Specimen:
    """Half of the routers in a span choose at least one other expert, as after a weight update."""
    trace, layout = clean.first, clean.first.layout
    need(trace.rows >= 64 and layout.num_experts > layout.top_k, "64 rows or more, and a choice of experts")
    start = int(clean.rng.integers(0, trace.rows // 2))
    stop = start + trace.rows // 3
    routes = trace.routed_experts.copy()
    for layer in layout.moe_layers:
        for row in np.flatnonzero(clean.rng.random(stop - start) < 0.55) + start:
            left = np.setdiff1d(np.arange(layout.num_experts), routes[row, layer])
            routes[row, layer, clean.rng.integers(layout.top_k)] = clean.rng.choice(left)
    return Specimen((changed(trace, routes),), clean.shard, {"recorded": clean.record()})


def wrapped_trace(clean: Clean) -> Specimen:
    trace = clean.first
    need(trace.layout.num_experts > 256, "more than 256 experts")
    return Specimen((changed(trace, (trace.routed_experts % 256).astype(np.uint8)),), clean.shard)
