"""The devices that the shared op tests run on.

A test that takes the `backend` fixture runs once for each backend this machine has. It calls ops through
`backend.ops`, makes its tensors on `backend.device`, and never asks which backend it was given.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import ModuleType

import cuda_on_cpu
import pytest
import torch
from pretend_cuda import PretendCuda

import paged_kv
import paged_kv.ops


@dataclass(frozen=True)
class Backend:
    """One implementation of every op: how to call it, and where its tensors live."""

    name: str  # the test id, such as "cpu[avx2]"
    device: str = "cpu"
    isa: str | None = None  # instruction set to force while this backend is active
    ops: ModuleType = field(default=paged_kv.ops, repr=False)  # same functions as paged_kv.ops
    mode: Callable[[], AbstractContextManager] = field(default=nullcontext, repr=False)  # active with it

    @contextmanager
    def active(self) -> Iterator["Backend"]:
        before = paged_kv.build_info().isa
        if self.isa is not None:
            paged_kv.set_isa(self.isa)
        try:
            with self.mode():
                yield self
        finally:
            paged_kv.set_isa(before)


# `make test` runs the shared cases on the CUDA kernels too, executed on the CPU; they need a build of their own.
CUDA_ON_CPU = os.environ.get("PAGED_KV_TEST_CUDA_ON_CPU") == "1"
collect_ignore = [] if CUDA_ON_CPU else ["test_cuda_on_cpu.py", "test_cuda_checked.py"]

# The CUDA kernels on a GPU, where there is one that the build has kernels for; bench/gpu_check.sh runs these.
CUDA = torch.cuda.is_available() and bool(paged_kv.build_info().cuda_archs)
if not CUDA:
    collect_ignore.append("test_cuda_device.py")
if not paged_kv.build_info().cuda_archs:
    collect_ignore.append("test_cuda_build.py")
DEVICES = ["cpu", "cuda"] if CUDA else ["cpu"]  # for tests of what lies above the ops


def available_backends() -> list[Backend]:
    backends = [Backend(f"cpu[{isa}]", isa=isa) for isa in paged_kv.build_info().isas_supported]
    if CUDA_ON_CPU:
        backends.append(Backend("cuda_on_cpu", ops=cuda_on_cpu.load_ops()))
    if CUDA:
        backends.append(Backend("cuda", device="cuda"))
    if os.environ.get("PAGED_KV_TEST_PRETEND_CUDA") == "1":
        backends.append(Backend("cuda_pretended", device="cuda", mode=PretendCuda))
    return backends


@pytest.fixture(params=available_backends(), ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with request.param.active() as active:
        yield active


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For models too small to be split: waiting for other threads would take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """For tests that are interrupted, or whose child is: `nohup` and a shell's `&` start us with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
