"""rtk: see which expert did what in a Mixture-of-Experts language model, and replay it.

    session = rtk.connect("http://127.0.0.1:8000")
    sample = session.sample("def fibonacci(n):")
    rtk.usage.heatmap(sample.trace)

Layers are counted as the routed_experts axis and Hugging Face checkpoints count them: from 0, dense
layers included. Only `rtk.replay` speaks of Megatron's layer numbers, which count from 1.
"""

import importlib
from typing import TYPE_CHECKING, Any

from rtk import compare, errors, replay, serve, usage
from rtk.client.result import GenerateChunk, RemoteGenerateResult
from rtk.layout.model_layout import ModelLayout
from rtk.loops import allow_nested_loops
from rtk.trace.route_trace import RouteTrace, load_traces, save_traces

if TYPE_CHECKING:
    from rtk import widgets
    from rtk.client.generator import RemoteInferenceGenerator
    from rtk.client.transport import RetryPolicy, Timeouts
    from rtk.fleet.client import RemoteInferenceClient
    from rtk.session import Session, connect
    from rtk.session.many import ManySamples, SampleFailure
    from rtk.session.sample import Sample
    from rtk.session.samples_file import read_samples

__version__ = "0.1.0"

__all__ = [
    "GenerateChunk",
    "ManySamples",
    "ModelLayout",
    "RemoteGenerateResult",
    "RemoteInferenceClient",
    "RemoteInferenceGenerator",
    "RetryPolicy",
    "RouteTrace",
    "Sample",
    "SampleFailure",
    "Session",
    "Timeouts",
    "allow_nested_loops",
    "compare",
    "connect",
    "errors",
    "load_traces",
    "read_samples",
    "replay",
    "save_traces",
    "serve",
    "usage",
    "widgets",
]


# aiohttp, and with the widgets IPython, take longer to import than all of rtk; who only replays or counts
# need not wait for them.
_LATE = {
    "RemoteInferenceClient": "rtk.fleet",
    "RemoteInferenceGenerator": "rtk.client.generator",
    "RetryPolicy": "rtk.client.transport",
    "Sample": "rtk.session.sample",
    "SampleFailure": "rtk.session.many",
    "ManySamples": "rtk.session.many",
    "read_samples": "rtk.session.samples_file",
    "Session": "rtk.session",
    "Timeouts": "rtk.client.transport",
    "connect": "rtk.session",
}


def __getattr__(name: str) -> Any:
    if name == "widgets":
        return importlib.import_module("rtk.widgets")
    if name in _LATE:
        return getattr(importlib.import_module(_LATE[name]), name)
    raise AttributeError(f"module 'rtk' has no attribute {name!r}")
