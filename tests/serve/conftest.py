from __future__ import annotations

from pathlib import Path

import pytest

from rtk.serve import shipped


@pytest.fixture(scope="session")
def engine(model_folder: Path):
    from rtk.serve.engine import Engine

    return Engine(model_folder)


@pytest.fixture(scope="session")
def tiny_engine():
    """The model that comes with rtk: its tokenizer and its length are those of the captured vLLM answers."""
    pytest.importorskip("transformers", reason="needs moe-rtk[embedded]")
    from rtk.serve.engine import Engine

    return Engine(shipped.find("tiny_moe"), max_model_len=512)
