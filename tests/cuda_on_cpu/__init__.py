"""The CUDA backend, executed on the CPU: the same functions as `paged_kv.ops`, over kernels that run on fibers."""

import importlib.util
from pathlib import Path
from types import ModuleType

import torch

import paged_kv.ops

LIBRARY = Path(__file__).resolve().parents[2] / "build" / "cuda_on_cpu" / "libpaged_kv_cuda_on_cpu.so"


def load_ops(library: Path = LIBRARY) -> ModuleType:
    """A second copy of the module `paged_kv.ops`, which calls torch.ops.paged_kv_cuda_on_cpu instead."""
    torch.ops.load_library(library)
    spec = importlib.util.spec_from_file_location("paged_kv._cuda_on_cpu_ops", paged_kv.ops.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module._ops = torch.ops.paged_kv_cuda_on_cpu
    return module
