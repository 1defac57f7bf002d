from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def engine(model_folder: Path):
    from rtk.serve.engine import Engine

    return Engine(model_folder)
