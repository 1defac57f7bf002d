"""A Triton backend named "cpu" that only says what it is, for vLLM 0.32 and newer on a CPU.

`--enable-return-routed-experts` wants vLLM's Model Runner V2, which wants Triton with an active driver. No CPU backend
of Triton is on PyPI, but its interpreter (TRITON_INTERPRET=1) runs kernels as NumPy and needs of a driver only the
answers below. Python imports a module of this name at start from PYTHONPATH, so every process of the server has it.
"""

import importlib.abc
import importlib.util
import sys


def _add(backends):
    import torch
    from triton.backends.compiler import GPUTarget

    class Cpu:
        """What Triton asks of a driver, answered for a CPU."""

        @staticmethod
        def is_active():
            return True

        def get_current_device(self):
            return 0

        def get_current_stream(self, device=None):
            return 0

        def set_current_device(self, device):
            pass

        def get_active_torch_device(self):
            return torch.device("cpu")

        def get_device_interface(self):
            return torch.cpu

        def get_current_target(self):
            return GPUTarget("cpu", 0, 1)

        def get_benchmarker(self):
            return lambda kernel, quantiles=(0.5,), **options: [0.0] * len(quantiles)

        def get_empty_cache_for_benchmark(self):
            return None

        def clear_cache(self, cache):
            pass

    backends.backends["cpu"] = backends.Backend(compiler=None, driver=Cpu)


class _AfterTriton(importlib.abc.MetaPathFinder):
    """Adds the backend when Triton's own are imported; importing Triton here would slow every start of Python."""

    def find_spec(self, name, path=None, target=None):
        if name != "triton.backends":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            _add(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _AfterTriton())
