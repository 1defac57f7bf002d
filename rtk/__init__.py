"""rtk: see which expert did what in a Mixture-of-Experts language model, and replay it.

    session = rtk.connect("http://127.0.0.1:8000")
    sample = session.sample("def fibonacci(n):")
    rtk.usage.heatmap(sample.trace)

Layers are counted as the routed_experts axis and Hugging Face checkpoints count them: from 0, dense
layers included. Only `rtk.replay` speaks of Megatron's layer numbers, which count from 1.
"""

import importlib
from types import ModuleType

from rtk import compare, errors, replay, serve, usage
from rtk.generator import RemoteInferenceGenerator, RetryPolicy
from rtk.layout import ModelLayout
from rtk.loops import allow_nested_loops
from rtk.result import GenerateChunk, RemoteGenerateResult
from rtk.session import Sample, Session, connect
from rtk.trace import RouteTrace, load_traces, save_traces

__version__ = "0.1.0"

__all__ = [
    "GenerateChunk",
    "ModelLayout",
    "RemoteGenerateResult",
    "RemoteInferenceGenerator",
    "RetryPolicy",
    "RouteTrace",
    "Sample",
    "Session",
    "allow_nested_loops",
    "compare",
    "connect",
    "errors",
    "load_traces",
    "replay",
    "save_traces",
    "serve",
    "usage",
    "widgets",
]


def __getattr__(name: str) -> ModuleType:
    # ipywidgets brings IPython along, half a second that a training script need not pay.
    if name == "widgets":
        return importlib.import_module("rtk.widgets")
    raise AttributeError(f"module 'rtk' has no attribute {name!r}")
