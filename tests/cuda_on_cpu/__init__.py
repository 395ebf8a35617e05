"""The CUDA backend, executed on the CPU: the same functions as `paged_kv.ops`, over kernels that run on fibers."""

import ctypes
import importlib.util
import json
import os
from pathlib import Path
from types import ModuleType

import torch

import paged_kv.ops
from paged_kv.build_info import native

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("CUDA_ON_CPU_FOLDER", ROOT / "build" / "cuda_on_cpu"))  # of the libraries
PLAIN, CHECKED = "paged_kv_cuda_on_cpu", "paged_kv_cuda_checked"


def load_ops(name: str = PLAIN, folder: Path = FOLDER) -> ModuleType:
    """A second copy of the module `paged_kv.ops`, which calls the ops of ``torch.ops.<name>`` instead."""
    torch.ops.load_library(folder / f"lib{name}.so")
    spec = importlib.util.spec_from_file_location(f"paged_kv._{name}_ops", paged_kv.ops.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module._ops = getattr(torch.ops, name)
    module._reshape_and_cache, module._paged_attention = native.direct_calls(name)
    return module


class Checker:
    """What the checked build has counted since the last reset, by kernel; see checker.cpp for the words."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self.shared_object = ctypes.CDLL(str(folder / f"lib{CHECKED}.so"))
        self.shared_object.cuda_on_cpu_report.restype = ctypes.c_char_p
        self.shared_object.cuda_on_cpu_watch.argtypes = [ctypes.c_size_t, ctypes.c_size_t]

    def reset(self, *watched: torch.Tensor) -> None:
        """Forgets all counts; reads of the storages of these tensors are counted apart from now on."""
        self.shared_object.cuda_on_cpu_reset()
        storages = (tensor.untyped_storage() for tensor in watched)
        for storage in {storage.data_ptr(): storage for storage in storages}.values():  # one may hold several
            self.shared_object.cuda_on_cpu_watch(storage.data_ptr(), storage.data_ptr() + storage.nbytes())

    def report(self) -> dict[str, dict]:
        return json.loads(self.shared_object.cuda_on_cpu_report())
