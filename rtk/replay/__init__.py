"""Bring a rollout's routes to a Megatron shard's routers, and check that they line up.

Rollout routing replay (R3, arXiv 2510.11370) makes the trainer's routers use the experts that the
rollout's routers chose. `expand` prepares the tensors, `check` says whether they fit the shard, and
`verify` tries them on real stages, in processes of their own. `session` replays them in a training loop.
Live megatron-core modules are met in `session` and `rtk.replay.megatron` alone, which import torch and
megatron-core.
"""

import lazy_loader

# The names stand in __init__.pyi. `session` and `megatron` import torch, which nobody else here should wait for.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
