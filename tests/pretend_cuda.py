"""A CUDA device that is only pretended, to rehearse the tests that are for one: ``PAGED_KV_TEST_PRETEND_CUDA=1``.

Its tensors say that they lie on cuda:0, and lie in host memory, where the CPU's ops compute. So it shows nothing about
the CUDA kernels, but finds what a test does wrong with devices: PyTorch's rules hold, of all tensors in a call on one
device but for scalars and indices, of no NumPy array, storage or pointer that is taken for host memory.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

# Calls that PyTorch allows on tensors of two devices: copies, and indexing by tensors in host memory.
MIXED = ("aten::copy_", "aten::_to_copy", "aten::index", "aten::index_put_", "paged_kv::swap_blocks")
ON_INNER = ("untyped_storage", "data_ptr", "tolist")
# Calls that make a tensor of a list or a number on the device, or ask for its kernels, before any mode sees it.
MAKES_TENSORS = ("__getitem__", "where", "scaled_dot_product_attention")
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


class PretendedTensor(Tensor):
    """Says it lies on cuda:0; `inner` is in host memory."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> PretendedTensor:
        return Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=CUDA,
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def set_(self, *args: object) -> PretendedTensor:  # which PyTorch lets no mode see
        return PretendedTensor(self.inner.set_(*args))

    def __repr__(self) -> str:
        return f"pretended to be on {CUDA}: {self.inner!r}"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = function.name().partition(".")[0]
        if name not in MIXED:
            tree_map_only(Tensor, lambda t: check_device(t, name), (args, kwargs))
        to_host = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"
        if kwargs.get("device") is not None:
            kwargs["device"] = CPU
        inner_args, inner_kwargs = tree_map_only(PretendedTensor, lambda t: t.inner, (args, kwargs))
        result = function(*inner_args, **inner_kwargs)
        if any(
            argument.alias_info and argument.alias_info.is_write for argument in function._schema.arguments
        ):
            written = args[0] if args else None
            return written if isinstance(result, Tensor) else result
        return result if to_host else tree_map_only(Tensor, PretendedTensor, result)


def check_device(tensor: Tensor, name: str) -> None:
    if not isinstance(tensor, PretendedTensor) and tensor.dim() > 0:
        raise RuntimeError(f"{name}: expected all tensors on one device, got cuda:0 and {tensor.device}")


def wants_cuda(device: object) -> bool:
    return isinstance(device, str | torch.device) and torch.device(device).type == "cuda"


class PretendCuda(TorchFunctionMode):
    """While active, tensors made on "cuda" or moved to it are pretended ones."""

    def __enter__(self) -> PretendCuda:
        torch._C._ensureCUDADeviceGuardSet()  # one that does nothing, where PyTorch has no CUDA; as for fake tensors
        return super().__enter__()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = function.__name__
        if name in MAKES_TENSORS and any(isinstance(argument, PretendedTensor) for argument in args):
            inner_args, inner_kwargs = tree_map_only(PretendedTensor, lambda t: t.inner, (args, kwargs))
            return PretendedTensor(function(*inner_args, **inner_kwargs))
        if name in ON_INNER and isinstance(args[0], PretendedTensor):
            return function(args[0].inner, **kwargs)
        if name == "to" and any(wants_cuda(a) for a in (*args[1:], *kwargs.values())):
            tensor = args[0].inner if isinstance(args[0], PretendedTensor) else args[0]
            rest = [CPU if wants_cuda(a) else a for a in args[1:]]
            return PretendedTensor(
                tensor.to(*rest, **kwargs | ({"device": CPU} if "device" in kwargs else {}))
            )
        if name == "cuda":
            return PretendedTensor(args[0].clone())
        if wants_cuda(kwargs.get("device")):
            return PretendedTensor(function(*args, **kwargs | {"device": CPU}))
        return function(*args, **kwargs)
