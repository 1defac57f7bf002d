"""Hand-made traces that the tests of several modules share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rtk
from rtk import ModelLayout, RouteTrace
from rtk.serve import shipped
from tests import vllm

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
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of the tiny model's architecture: four layers of which 0 and 2 are dense, eight experts, top-2, a vocabulary of single bytes."""
    torch = pytest.importorskip("torch", reason="needs moe-rtk[embedded]")
    transformers = pytest.importorskip("transformers", reason="needs moe-rtk[embedded]")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("random-moe")
    torch.manual_seed(3)
    config = transformers.Qwen3MoeConfig(
        vocab_size=257, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=8, num_experts_per_tok=2,
        norm_topk_prob=True, mlp_only_layers=[0, 2], max_position_embeddings=128, tie_word_embeddings=True,
        bos_token_id=256, eos_token_id=256, initializer_range=0.3,
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)} | {"<|end|>": 256}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def reference(model_folder: Path):
    """transformers' own model, as the independent implementation."""
    import torch
    import transformers

    return transformers.Qwen3MoeForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def embedded_server() -> Iterator[rtk.serve.EmbeddedServer]:
    """The embedded server with the tiny model, one for all tests."""
    pytest.importorskip("transformers", reason="the embedded server needs moe-rtk[embedded]")
    with rtk.serve.embedded(max_model_len=512) as server:
        yield server


@pytest.fixture(scope="session")
def vllm_url() -> Iterator[str]:
    """A real vLLM with the tiny model, one for all tests; see tests/vllm.py."""
    with vllm.running(shipped.find("tiny_moe"), *vllm.ROUTES) as url:
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
