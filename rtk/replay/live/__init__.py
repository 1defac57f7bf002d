"""All that touches megatron-core. Nothing else in `rtk.replay` imports torch."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submodules={"megatron"})
