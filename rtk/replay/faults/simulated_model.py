"""Clean traces of a model that does not exist, for trying a check on shapes that no small model has."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rtk.layout.model_layout import ModelLayout
from rtk.trace.route_trace import RouteTrace

_VOCABULARY = 400


def simulate(
    layout: ModelLayout, lengths: Sequence[tuple[int, int]], rng: np.random.Generator
) -> tuple[list[RouteTrace], list[npt.NDArray[np.int64]]]:
    """Traces whose routes depend on the token, on its context and on the layer, as real ones do.

    Tokens follow Zipf's law, so that common ones come again with the same or similar routes; some experts are
    more popular than others.

    Args:
        layout: the model.
        lengths: for each sequence its tokens of prompt and its generated tokens.
        rng: the source of all of it.

    Returns:
        the traces, and for each of them int `[rows, layers]`: the expert that came next in each router's order,
        which an engine with other rounding picks first.
    """
    experts, layers = layout.num_experts, layout.num_layers
    dtype = np.uint8 if experts <= 256 else np.uint16
    of_token = rng.standard_normal((layers, _VOCABULARY, experts), dtype=np.float32)
    popular = 0.5 * rng.standard_normal((layers, 1, experts), dtype=np.float32)
    weights = 1 / np.arange(1, _VOCABULARY + 1)
    traces, runners_up = [], []
    for prompt, generated in lengths:
        tokens = rng.choice(_VOCABULARY, prompt + generated, p=weights / weights.sum()).astype(np.int32)
        rows = len(tokens) - 1
        routes = np.zeros((rows, layers, layout.top_k), dtype)
        following = np.zeros((rows, layers), np.int64)
        for layer in layout.moe_layers:
            context = 0.7 * rng.standard_normal((rows, experts), dtype=np.float32)
            order = np.argsort(-(of_token[layer, tokens[:-1]] + popular[layer] + context), axis=1)
            routes[:, layer] = order[:, : layout.top_k]
            following[:, layer] = order[:, min(layout.top_k, experts - 1)]
        traces.append(
            RouteTrace(
                tokens,
                tuple(map(str, tokens.tolist())),
                prompt,
                routes,
                layout,
                source={"model": "simulated"},
            )
        )
        runners_up.append(following)
    return traces, runners_up


def other_engine(
    traces: Sequence[RouteTrace],
    runners_up: Sequence[npt.NDArray[np.int64]],
    share: float,
    rng: np.random.Generator,
) -> list[RouteTrace]:
    """The same tokens on an engine that decides a share of near ties the other way.

    In a share of all routers the last of the top-k experts gives way to the one that came next. Tokens differ in
    how close their ties are, so disagreements come in clusters: a token's share is drawn from an exponential
    distribution around the mean.
    """
    others = []
    for trace, following in zip(traces, runners_up, strict=True):
        routes = trace.routed_experts.copy()
        chance = np.minimum(rng.exponential(share, len(routes)), 0.9)
        for layer in trace.layout.moe_layers:
            if trace.layout.num_experts > trace.layout.top_k:
                rows = np.flatnonzero(rng.random(len(routes)) < chance)
                routes[rows, layer, -1] = following[rows, layer]
        others.append(dataclasses.replace(trace, routed_experts=routes))
    return others
