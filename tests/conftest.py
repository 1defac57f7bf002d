"""Hand-made traces that the tests of several modules share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rtk
from rtk import ModelLayout, RouteTrace, _shipped

from . import vllm

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture
def vllm_answers() -> dict[str, Any]:
    """Answers of a real vLLM 0.30, as they came over the wire."""
    answers: dict[str, Any] = json.loads((FIXTURES / "vllm_0_30_generate.json").read_text())
    return answers


@pytest.fixture
def layout() -> ModelLayout:
    """Four layers, of which 0 and 2 are dense; four experts, top-2."""
    return ModelLayout(num_layers=4, moe_layers=(1, 3), num_experts=4, top_k=2)


@pytest.fixture
def trace(layout: ModelLayout) -> RouteTrace:
    """Three prompt tokens and two generated ones, with routes small enough to count by hand."""
    routes = np.zeros((4, 4, 2), dtype=np.uint8)
    routes[:, 1] = [[0, 1], [1, 0], [0, 1], [3, 0]]
    routes[:, 3] = [[2, 3], [3, 1], [2, 0], [1, 2]]
    return RouteTrace(
        token_ids=np.array([11, 12, 13, 14, 15]),
        token_text=("The", " cat", " <b>", " sat", "\ufffd"),
        prompt_tokens=3,
        routed_experts=routes,
        layout=layout,
        logprobs=np.array([-0.5, -1.25]),
        source={"model": "hand-made", "seed": 7},
    )


@pytest.fixture(scope="session")
def embedded_server() -> Iterator[rtk.serve.EmbeddedServer]:
    """The embedded server with the tiny model, one for all tests."""
    pytest.importorskip("transformers", reason="the embedded server needs rtk[embedded]")
    with rtk.serve.embedded(max_model_len=512) as server:
        yield server


@pytest.fixture(scope="session")
def vllm_url() -> Iterator[str]:
    """A real vLLM with the tiny model, one for all tests; see tests/vllm.py."""
    with vllm.running(_shipped.find("tiny_moe"), *vllm.ROUTES) as url:
        yield url


@pytest.fixture(params=["embedded", pytest.param("vllm", marks=pytest.mark.vllm)])
def url(request: pytest.FixtureRequest) -> str:
    """Each kind of server in turn: what holds for one must hold for the other."""
    if request.param == "vllm":
        return request.getfixturevalue("vllm_url")
    return request.getfixturevalue("embedded_server").url


@pytest.fixture
def session(url: str) -> Iterator[rtk.Session]:
    with rtk.connect(url) as session:
        yield session
