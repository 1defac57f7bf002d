"""A random model of the tiny model's architecture, so that these tests need no trained one."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the embedded server needs rtk[embedded]")
transformers = pytest.importorskip("transformers", reason="the embedded server needs rtk[embedded]")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers of which 0 and 2 are dense, eight experts, top-2, a vocabulary of single bytes."""
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
def engine(model_folder: Path):
    from rtk.serve.engine import Engine

    return Engine(model_folder)


@pytest.fixture(scope="session")
def reference(model_folder: Path):
    """transformers' own model, as the independent implementation."""
    return transformers.Qwen3MoeForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
