"""rtk: see which expert did what in a Mixture-of-Experts language model, and replay it.

    session = rtk.connect("http://127.0.0.1:8000")
    sample = session.sample("def fibonacci(n):")
    rtk.usage.heatmap(sample.trace)

Layers are counted as the routed_experts axis and Hugging Face checkpoints count them: from 0, dense
layers included. Only `rtk.replay` speaks of Megatron's layer numbers, which count from 1.
"""

import lazy_loader

__version__ = "0.1.0"

# aiohttp, and with the widgets IPython, take longer to import than all of rtk; who only replays or counts need not
# wait for them. The names stand in __init__.pyi, where type checkers and editors read them too.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
