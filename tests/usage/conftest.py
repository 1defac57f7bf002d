"""Traces that are random, but as uneven as those of a real router."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from rtk import ModelLayout, RouteTrace

LAYOUT = ModelLayout(num_layers=5, moe_layers=(0, 2, 4), num_experts=11, top_k=3)


def random_trace(rng: np.random.Generator, layout: ModelLayout, tokens: int, prompt: int) -> RouteTrace:
    """Rows of distinct experts, of which low ids are more likely; ids of six tokens."""
    routes = np.zeros((tokens - 1, layout.num_layers, layout.top_k), np.uint16)
    wish = np.linspace(2, 0, layout.num_experts)
    scores = rng.gumbel(size=(tokens - 1, layout.num_layers, layout.num_experts)) + wish
    best = np.argsort(-scores, axis=-1)[..., : layout.top_k]
    moe = list(layout.moe_layers)
    routes[:, moe] = best[:, moe]
    return RouteTrace(rng.integers(0, 6, tokens), ("x",) * tokens, prompt, routes, layout)


@pytest.fixture
def random_traces() -> Callable[[int], list[RouteTrace]]:
    """So many traces of different lengths and prompts."""

    def make(number: int, seed: int = 0) -> list[RouteTrace]:
        rng = np.random.default_rng(seed)
        lengths = [(int(rng.integers(12, 30)), int(rng.integers(3, 10))) for _ in range(number)]
        return [random_trace(rng, LAYOUT, tokens, prompt) for tokens, prompt in lengths]

    return make
