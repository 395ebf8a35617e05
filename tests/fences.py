"""Tensors whose memory ends, or begins, at a page that nobody may touch; and a script that calls the ops on them.

Run as a script, it calls every op that reads rows, on the instruction set of PAGED_KV_ISA: one element read or written
beside a tensor ends the process by a signal. Linux only, as mprotect is called by its number.
"""

import ctypes
import mmap
import os
from dataclasses import replace

import torch
from cases import FLOATS, QUANTISED, Case, make_inputs, poison_tensor
from torch import Tensor

from paged_kv import ops

PAGE = mmap.PAGESIZE
PROT_NONE = 0
_libc = ctypes.CDLL(None, use_errno=True)


def fence(tensor: Tensor, at_end: bool) -> Tensor:
    """A copy with the same strides, whose last element (first, if not `at_end`) touches a forbidden page."""
    count = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    size = count * tensor.element_size() if tensor.numel() else 0
    if size == 0:
        return tensor
    room = -(-size // PAGE) * PAGE
    memory = mmap.mmap(-1, room + 2 * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for forbidden in (address, address + PAGE + room):
        if _libc.mprotect(ctypes.c_void_p(forbidden), PAGE, PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect")
    start = PAGE + (room - size if at_end else 0)
    flat = torch.frombuffer(memory, dtype=torch.uint8, offset=start, count=size).view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride()).copy_(tensor)


def fenced(values: dict, at_end: bool) -> dict:
    return {name: fence(x, at_end) if isinstance(x, Tensor) else x for name, x in values.items()}


# Head sizes below, at and beside the widths of vectors, and lengths that leave a tile, a block or a pair half full.
CASES = [
    Case(seqs=((1, 5), (1, 33), (7, 21), (40, 40)), head_dim=d, dtype=dtype, cache_dtype=cache, heads=(4, 2))
    for d in (1, 7, 15, 16, 33, 72, 129)
    for dtype, cache in [(dtype, None) for dtype in FLOATS]
    + [(dtype, cache) for dtype in (torch.float32, torch.bfloat16) for cache in QUANTISED]
]


def attend(case: Case, at_end: bool) -> None:
    if case.cache_dtype:
        case = replace(case, k_scale="token", v_scale="head")
    args = fenced(make_inputs(replace(case, sinks=0.0, alibi=True)).args, at_end)
    out = fence(torch.empty_like(args["query"]), at_end)
    lse = fence(torch.empty(out.shape[:2]), at_end)
    ops.paged_attention(**args, out=out, lse=lse)
    assert out.isfinite().all() and lse.isfinite().all()
    merged, merged_lse = fence(torch.empty_like(out), at_end), fence(torch.empty_like(lse), at_end)
    ops.merge_attention_states(out, lse, out, lse, out=merged, lse=merged_lse)
    assert merged.isfinite().all()


def write_and_gather(case: Case, at_end: bool) -> None:
    shape = (3, 2, 5, case.head_dim)  # 3 blocks of 5 slots
    caches = [fence(poison_tensor(shape, case.stored_dtype, "cpu", "nan"), at_end) for _ in range(2)]
    scales = [fence(torch.ones(shape[:3]), at_end) for _ in range(2)] if case.cache_dtype else []
    rows = [fence(torch.randn(15, 2, case.head_dim).to(case.dtype), at_end) for _ in range(2)]
    slots = fence(torch.randperm(15), at_end)
    if scales:
        ops.reshape_and_cache_dynamic(*rows, *caches, slots, *scales)
    ops.reshape_and_cache(*rows, *caches, slots, **dict(zip(("k_scale", "v_scale"), scales, strict=False)))
    tables = fence(torch.tensor([[2, 0, 1]], dtype=torch.int32), at_end)
    lens = fence(torch.tensor([14], dtype=torch.int32), at_end)
    if scales:
        key, value = (fence(torch.empty(14, 2, case.head_dim), at_end) for _ in range(2))
        ops.gather_kv(*caches, tables, lens, k_scale=scales[0], v_scale=scales[1], key=key, value=value)
    key, value = (
        fence(poison_tensor((14, *rows[0].shape[1:]), case.stored_dtype, "cpu", "nan"), at_end) for _ in "kv"
    )
    ops.gather_kv(*caches, tables, lens, key=key, value=value)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for at_end in (True, False):
        for case in CASES:
            print(case, "at the end" if at_end else "at the beginning", flush=True)
            attend(case, at_end)
            write_and_gather(case, at_end)
    for at_end in (True, False):  # and that a fence works at all: the process has to end here
        if os.fork() == 0:
            x = fence(torch.zeros(10), at_end)
            ctypes.string_at(x.data_ptr() + (40 if at_end else -4), 4)
            os._exit(0)
        assert os.WIFSIGNALED(os.wait()[1]), "a fence does not hold"
    print("done")
