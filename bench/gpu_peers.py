"""Attention over paged caches by other libraries on a GPU, each where it is installed.

A peer takes the inputs of a case (`bench.gpu.Inputs`) and returns a function that computes it, or None where it does
not serve such a case. Planning, which a peer does once for a step of all layers, is not timed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .gpu import Inputs

Call = Callable[[], Tensor]


def flashinfer(inputs: Inputs) -> Call | None:
    shape = inputs.shape
    if shape.dtype == torch.float32 or shape.stored not in (None, torch.float8_e4m3fn):
        return None
    import flashinfer

    device = inputs.query.device
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    num_seqs, width = inputs.block_tables.shape
    indptr = torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * width
    last = torch.full(
        (num_seqs,), (shape.seq_len - 1) % shape.block_size + 1, dtype=torch.int32, device=device
    )
    pages = (indptr, inputs.block_tables.flatten(), last)
    sizes = (*shape.heads, shape.head_dim, shape.block_size)
    dtypes = {"q_data_type": shape.dtype, "kv_data_type": shape.cache_dtype, "sm_scale": inputs.scale}
    caches = tuple(view.transpose(1, 2) for view in (inputs.cache.key, inputs.cache.value))  # [N, B, Hkv, D]
    scales = {}
    if shape.stored is not None:
        scales = {"k_scale": float(inputs.cache.k_scale), "v_scale": float(inputs.cache.v_scale)}
    if shape.kind == "decode":
        grouped = shape.heads[0] // shape.heads[1] >= 4
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=grouped)
        wrapper.plan(*pages, *sizes, **dtypes)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(inputs.query_start_loc, *pages, *sizes, causal=True, **dtypes)
    return lambda: wrapper.run(inputs.query, caches, **scales)


def varlen(inputs: Inputs, function: Callable[..., Tensor], lengths: dict[str, Tensor]) -> Call:
    """flash_attn_varlen_func over pages, as flash-attn and vLLM's copy of it have it."""
    shape = inputs.shape
    caches = [view.transpose(1, 2) for view in (inputs.cache.key, inputs.cache.value)]
    options = {
        "cu_seqlens_q": inputs.query_start_loc,
        "max_seqlen_q": shape.query_len,
        "max_seqlen_k": shape.seq_len,
        "softmax_scale": inputs.scale,
        "causal": True,
        "block_table": inputs.block_tables,
        **lengths,
    }
    return lambda: function(inputs.query, *caches, **options)


def flash_attn(inputs: Inputs) -> Call | None:
    shape = inputs.shape
    if shape.stored is not None or shape.dtype == torch.float32 or shape.block_size % 256:
        return None  # its pages hold a multiple of 256 tokens
    from flash_attn import flash_attn_varlen_func

    starts = torch.arange(shape.num_seqs + 1, dtype=torch.int32, device=inputs.query.device) * shape.seq_len
    return varlen(inputs, flash_attn_varlen_func, {"cu_seqlens_k": starts})


def vllm(inputs: Inputs) -> Call | None:
    shape = inputs.shape
    if shape.stored is not None or shape.dtype == torch.float32:
        return None
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    return varlen(inputs, flash_attn_varlen_func, {"seqused_k": inputs.seq_lens})


def installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


PEERS = {
    name: peer
    for name, module, peer in (
        ("FlashInfer", "flashinfer", flashinfer),
        ("flash-attn", "flash_attn", flash_attn),
        ("vLLM", "vllm", vllm),
    )
    if installed(module)
}
