"""Stand-ins that let megatron-core 0.16 run forward and backward passes where there is no CUDA.

They change torch and megatron for the whole process, so they are applied in the child processes of
`rtk.replay.verify` and in tests, and do nothing on a machine with CUDA.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel import random
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.moe import moe_utils


class _NoStream:
    """Stands for a CUDA stream: work on a CPU is in order anyway."""


def apply() -> None:
    """Apply the stand-ins, unless CUDA is there to do the real thing."""
    if torch.cuda.is_available():
        return
    cpu = torch.device("cpu")
    # Rotary embeddings and routers ask where to put their buffers, and take the answer as a device.
    torch.cuda.current_device = lambda: cpu  # type: ignore[assignment,return-value]
    # The all-to-all dispatcher makes one for copies to the host when it is built. It cannot run here, but a
    # model that has it can then be built, and its routers read.
    torch.cuda.Stream = _NoStream  # type: ignore[assignment,misc]
    # Attention runs its dropout, of probability 0 too, under a CUDA generator, and there is none.
    CudaRNGStatesTracker.fork = _no_fork
    # Activation recompute puts this generator's state back before it runs a layer again.
    random._get_cuda_rng_state = _no_state
    random._set_cuda_rng_state = _no_state
    # Without Transformer Engine the module never defines the name that its router then looks up.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


@contextlib.contextmanager
def _no_fork(_tracker: Any, *_names: Any) -> Iterator[None]:
    yield


def _no_state(*_state: Any, **_options: Any) -> None:
    return None
