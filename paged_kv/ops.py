"""The ops on paged keys and values, on any device: thin, documented wrappers of ``torch.ops.paged_kv``.

Keys and values lie in **blocks** of a fixed number of token slots, reached through **block tables**, as in
PagedAttention (Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", SOSP 2023). Sizes, everywhere: T new tokens packed over S sequences, Hq query heads, Hkv
key/value heads (Hq is a multiple of Hkv; query head h reads kv head ``h // (Hq // Hkv)``), D head size (1
to 256), N blocks, B slots in a block (1 to 1024), M block table width.

**Caches.** ``key_cache`` and ``value_cache`` have the shape ``[N, Hkv, B, D]`` and any strides and storage
offset with the last dimension contiguous, so that a cache of another order is a view, never a copy. Dtypes:
float32, float16, bfloat16, and the quantised float8_e4m3fn, float8_e5m2 and int8. The slot of a token is
``block_id * B + offset``.

**Scales** belong to quantised caches: float32, ``[1]`` for all, ``[Hkv]`` per head, or ``[N, Hkv, B]`` per
token and head (any strides). An element stands for ``element * scale``. Without scales a quantised cache
stands for its own values. A scale per tensor or head is finite and above 0; so is each one that
`reshape_and_cache` reads.

**Results do not depend**, in any bit, on unused slots, unused table entries, where blocks lie, the rest of
the batch, or the number of threads.

**Errors.** A wrong dtype, device, stride, shape or value raises `ValueError` with one sentence that names
the op, the argument, what was expected and what came; checks run in this order, before anything is written,
so every tensor is left as it was. What is of another Python type, such as an array where a tensor is expected
or a bool where a number is, raises `TypeError` with such a sentence (compiled code takes a bool for a number, as
torch does). Values in tensors (ids, lengths, scales) are checked on the CPU; on CUDA with
``PAGED_KV_CUDA_CHECKS=1`` in the environment only, as each call then waits for the device. Tensors of several
devices raise too, but for `swap_blocks`. A tensor that is written has every element at an address of its own
and shares none with another argument. No op has a backward: what one returns or writes while an argument wants
a gradient has a history, through which `backward()` raises `RuntimeError`.

All ops work under ``torch.compile(fullgraph=True, dynamic=True)`` without a new compilation per length. As
always there, sizes and numbers of 0 and 1 get a graph of their own.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from numbers import Number

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.compiler import is_dynamo_compiling

from . import _fake  # noqa: F401  loading it registers the ops and their fake implementations
from .build_info import native

__all__ = [
    "copy_blocks",
    "gather_kv",
    "merge_attention_states",
    "paged_attention",
    "reshape_and_cache",
    "reshape_and_cache_dynamic",
    "swap_blocks",
]

_ops = torch.ops.paged_kv
# The ops that a model calls in every layer, 2 us sooner: they answer NotImplemented where torch.ops must be called.
_reshape_and_cache, _paged_attention = native.direct_calls("paged_kv")


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Writes the keys and values of new tokens to their slots.

    A quantised cache gets ``x / scale``, rounded to nearest even and clamped to the dtype's largest finite
    value (infinities too; int8 to [-127, 127]); NaN stays NaN in float8 and becomes 0 in int8.

    Args:
        key: ``[T or more, Hkv, D]``, last dimension contiguous; rows beyond ``slot_mapping`` are ignored. The
            cache's dtype, or any of float32, float16 and bfloat16 over a quantised cache.
        value: as `key`, of the same shape and dtype.
        key_cache: ``[N, Hkv, B, D]``, written.
        value_cache: as `key_cache`, written.
        slot_mapping: int64 ``[T]``, contiguous: each token's slot, ``block_id * B + offset``. A token with
            a negative slot is skipped. A slot stands once: two tokens for one slot raise, since which of
            them would be left depended on chance.
        k_scale: scale of a quantised `key_cache`, read; None: 1.
        v_scale: scale of a quantised `value_cache`, read; None: 1.

    Raises:
        ValueError: an argument is not as said, a slot is ``N * B`` or above or stands twice, or a scale
            that is read is not finite and above 0. Nothing has been written.
    """
    args = (key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)
    if is_dynamo_compiling() or _reshape_and_cache(*args) is NotImplemented:
        _call(_ops.reshape_and_cache.default, *args)


def reshape_and_cache_dynamic(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    """`reshape_and_cache` into a quantised cache without calibration: each token and head gets its own scale.

    The scale is the vector's largest finite magnitude over the dtype's largest finite value, and 1 for a
    vector with none but zero. It is written to its slot in `k_scale` and `v_scale`, for `paged_attention`
    and `gather_kv` to read.

    Args:
        key: float32, float16 or bfloat16 ``[T or more, Hkv, D]``, last dimension contiguous.
        value: as `key`, of the same shape and dtype.
        key_cache: float8_e4m3fn, float8_e5m2 or int8 ``[N, Hkv, B, D]``, written.
        value_cache: as `key_cache`, written.
        slot_mapping: int64 ``[T]``, as in `reshape_and_cache`.
        k_scale: float32 ``[N, Hkv, B]``, any strides, written.
        v_scale: as `k_scale`, written.

    Raises:
        ValueError: as in `reshape_and_cache`.
    """
    op = _ops.reshape_and_cache_dynamic.default
    _call(op, key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    causal: bool = True,
    window: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over paged keys and values: decode, prefill and chunked prefill, mixed in one batch.

    Row i of a sequence's queries stands at position ``pos = seq_len - query_len + i`` and sees the keys at
    positions j with ``j <= pos`` if `causal` and ``j > pos - window`` if there is a window. Over the keys
    it sees::

        s_j = cap(q . k_j * scale) + alibi_slope * (j - pos)        cap(x) = softcap * tanh(x / softcap)
        lse = log(exp(sink) + sum_j exp(s_j))
        out = sum_j exp(s_j - lse) * v_j

    where keys and values of a quantised cache are multiplied by their scales, and what is not given is left
    out. A row that sees no key gives output 0 and LSE -inf, with a sink too. The softmax is computed in one
    pass (online normalizer: Milakov & Gimelshein, "Online normalizer calculation for softmax", 2018) over
    tiles of keys (FlashAttention: Dao et al., NeurIPS 2022); long sequences are split over threads and the
    partial results merged (Flash-Decoding: Dao et al., 2023). Softcap as in Gemma 2 (2024), ALiBi: Press et
    al., ICLR 2022, sinks as in gpt-oss (2025).

    Products are of the inputs' exact values, summed in float32, but for decode with bfloat16 queries over an
    int8 cache: where a CPU kernel multiplies 16-bit integers, elements below 1/128 of their query row's
    largest are rounded to 2^-14 of it at most.

    Args:
        query: ``[T, Hq, D]``, last dimension contiguous. The cache's dtype, or any of float32, float16 and
            bfloat16 over a quantised cache.
        key_cache: ``[N, Hkv, B, D]``.
        value_cache: as `key_cache`; the two may share memory.
        block_tables: int32 ``[S, M]``, any strides: each sequence's block ids in order. Only the entries in
            use are read: those of blocks that hold keys, from the first key that the window lets any row
            see.
        seq_lens: int32 ``[S]``, contiguous: keys in the cache, the new tokens included; 0 to ``M * B``. With
            fewer keys than queries, as in a part of the keys whose result will be merged, the first rows
            stand before all keys.
        query_start_loc: int32 ``[S + 1]``, contiguous: prefix sums of the query lengths, 0 first and T
            last. A sequence may have no query.
        max_query_len: at least the longest query. It may be larger, and changes no result.
        max_seq_len: at least the longest sequence. It may be larger, and changes no result.
        scale: multiplies ``q . k``; finite.
        causal: whether a row is blind to later positions.
        window: how many keys a causal row sees at most, its own among them; -1: no window.
        softcap: cap of the scores' magnitude; 0: none.
        alibi_slopes: float32 ``[Hq]``, contiguous.
        sinks: float32 ``[Hq]``, contiguous: a logit for each head that takes part in the softmax without a
            value.
        k_scale: scale of a quantised `key_cache`.
        v_scale: scale of a quantised `value_cache`.
        out: where to write the output: ``[T, Hq, D]`` of `query`'s dtype, last dimension contiguous. With
            `lse` only.
        lse: where to write the LSE: float32 ``[T, Hq]``, any strides. With `out` only.

    Returns:
        ``(out, lse)``: the output ``[T, Hq, D]`` in `query`'s dtype, and the log-sum-exp of each row's
        scores, in natural log, float32 ``[T, Hq]``.

    Raises:
        ValueError: an argument is not as said, or on the CPU: a length is negative or beyond the table, a
            maximum is too small, or a table entry in use is no block's id.
    """
    args = (query, key_cache, value_cache, block_tables, seq_lens, query_start_loc)
    args += (
        max_query_len,
        max_seq_len,
        scale,
        causal,
        window,
        softcap,
        alibi_slopes,
        sinks,
        k_scale,
        v_scale,
    )
    if not is_dynamo_compiling():
        result = _paged_attention(*args, out, lse)
        if result is not NotImplemented:
            return result
        _check_types(None, _ops.paged_attention.default, args)
    if out is None and lse is None:
        return _call(_ops.paged_attention.default, *args)
    _expect_both("paged_attention", out=out, lse=lse)
    _call(_ops.paged_attention.out, *args, out=out, lse=lse)
    return out, lse


def copy_blocks(key_caches: Sequence[Tensor], value_caches: Sequence[Tensor], block_mapping: Tensor) -> None:
    """Copies blocks within each of many tensors, such as the caches of all layers: the copies of
    copy-on-write.

    Args:
        key_caches: tensors of any dtype whose first dimension is N, written; per-token scales may be among
            them. Strides may differ; a block has at most four dimensions after those that are contiguous
            are joined.
        value_caches: more of them; how many stand in which of the two lists makes no difference.
        block_mapping: int64 ``[K, 2]``, contiguous: (source, destination) block ids. A source may serve
            several copies; a destination stands once and is no source, so the order of the rows makes no
            difference.

    Raises:
        ValueError: an argument is not as said, or an id is not from 0 to N - 1. Nothing has been copied.
    """
    for name, caches in ("key_caches", key_caches), ("value_caches", value_caches):
        # A tensor's elements would be taken for caches, each with heads for blocks.
        if isinstance(caches, Tensor) or not isinstance(caches, Iterable):
            raise _wrong_type("copy_blocks", name, "List[Tensor]", caches)
    key_caches, value_caches = list(key_caches), list(value_caches)
    _call(_ops.copy_blocks.default, key_caches, value_caches, block_mapping)


def swap_blocks(src: Tensor, dst: Tensor, block_mapping: Tensor) -> None:
    """Copies blocks from one tensor to another, from device to host and back included.

    Args:
        src: ``[N, ...]``, any dtype, device and strides; a cache or per-token scales.
        dst: ``[N', ...]``, the same dtype and shape of a block, written. It may be a view of the same
            buffer as `src` but shares no element with it. A block has at most four dimensions after those
            that are contiguous are joined.
        block_mapping: int64 ``[K, 2]`` on the CPU, contiguous: (block of `src`, block of `dst`). A
            destination stands once.

    Raises:
        ValueError: an argument is not as said, or an id is out of range. Nothing has been copied.
    """
    _call(_ops.swap_blocks.default, src, dst, block_mapping)


def gather_kv(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Keys and values of all sequences as contiguous tensors, one sequence after another.

    Args:
        key_cache: ``[N, Hkv, B, D]``.
        value_cache: as `key_cache`; the two may share memory.
        block_tables: int32 ``[S, M]``, any strides; the first ``ceil(seq_len / B)`` entries of a sequence
            are read.
        seq_lens: int32 ``[S]``, contiguous; 0 to ``M * B``. On a GPU this op waits for them.
        k_scale: scale of a quantised `key_cache`. With `v_scale` only.
        v_scale: scale of a quantised `value_cache`. With `k_scale` only.
        key: where to write the keys, as returned. With `value` only.
        value: where to write the values, as returned. With `key` only.

    Returns:
        ``(key, value)``, each ``[sum(seq_lens), Hkv, D]``: in the cache's dtype, bit for bit; with scales
        ``cache * scale`` in float32.

    Raises:
        ValueError: an argument is not as said, a length is negative or beyond the table, or a table entry
            in use is no block's id.
    """
    args = (key_cache, value_cache, block_tables, seq_lens, k_scale, v_scale)
    if key is None and value is None:
        return _call(_ops.gather_kv.default, *args)
    _expect_both("gather_kv", key=key, value=value)
    _call(_ops.gather_kv.out, *args, key=key, value=value)
    return key, value


def merge_attention_states(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint key sets, from the results over each.

    ``lse = log(exp(lse_a) + exp(lse_b))``, ``out = out_a * exp(lse_a - lse) + out_b * exp(lse_b - lse)``
    (Milakov & Gimelshein 2018). A state whose LSE is -inf is empty: the other one is returned bit for bit.

    Args:
        out_a: float32, float16 or bfloat16 ``[T, Hq, D]``, last dimension contiguous.
        lse_a: float32 ``[T, Hq]``, natural log, any strides.
        out_b: as `out_a`, of the same shape and dtype.
        lse_b: as `lse_a`.
        out: where to write the output, as `out_a`, but sharing no element with an input. With `lse` only.
        lse: where to write the LSE, as `lse_a`, but sharing no element with an input. With `out` only.

    Returns:
        ``(out, lse)``: ``[T, Hq, D]`` in `out_a`'s dtype, and float32 ``[T, Hq]``.

    Raises:
        ValueError: an argument is not as said.
    """
    args = (out_a, lse_a, out_b, lse_b)
    if out is None and lse is None:
        return _call(_ops.merge_attention_states.default, *args)
    _expect_both("merge_attention_states", out=out, lse=lse)
    _call(_ops.merge_attention_states.out, *args, out=out, lse=lse)
    return out, lse


def _expect_both(op: str, **given: Tensor | None) -> None:
    """Of two tensors to write into, which are given together, neither is missing."""
    (first, a), (second, b) = given.items()
    if a is None or b is None:
        present, missing = (second, first) if a is None else (first, second)
        raise ValueError(f"paged_kv::{op}: {missing}: expected a tensor, as {present} is one, got None")


def _call(op: OpOverload, *args: object, **written: Tensor) -> object:
    """Calls an op of torch.ops; `args` are those of its schema by position, none left out."""
    try:
        return op(*args, **written)
    except RuntimeError as error:
        _check_types(error, op, args, **written)
        raise


_TYPES = {
    "Tensor": "a tensor",
    "Optional[Tensor]": "a tensor or None",
    "List[Tensor]": "a sequence of tensors",
    "int": "a 64-bit integer",
    "float": "a number",
    "bool": "True or False",
}
"""What the types of the schemas are called in errors."""

_BOUNDS = {"int": "a 64-bit integer", "float": "a finite float32"}
"""What torch can't make of an integer is out of these."""


def _check_types(
    error: RuntimeError | None, op: OpOverload, args: Sequence[object], **written: Tensor
) -> None:
    """Of a call that raised `error`, or is to be made, which argument is of a wrong type is told in our words.

    Torch's own are a page, and for None, which it takes for a tensor, it has none. Only afterwards, or where the
    direct call has declined, as looking at each argument before the call would take as long as handing them over.
    """
    name = op._schema.name.rpartition("::")[2]
    for argument, value in zip(op._schema.arguments, (*args, *written.values()), strict=True):
        kind = str(argument.type)
        if kind == "List[Tensor]":
            for place, tensor in enumerate(value):
                if not isinstance(tensor, Tensor):
                    raise _wrong_type(name, f"{argument.name}[{place}]", "Tensor", tensor) from None
        refused = f" for argument '{argument.name}' " in str(error)
        if refused and kind in _BOUNDS and isinstance(value, int):
            words = f"expected {_BOUNDS[kind]}, got {reprlib.repr(value)}"
            raise ValueError(f"paged_kv::{name}: {argument.name}: {words}") from None
        # What torch takes, too: True for 1, 1 for True, and None for False or for a tensor.
        if kind == "bool":
            refused |= value is None or (isinstance(value, int | float) and not isinstance(value, bool))
        elif kind in ("int", "float"):
            refused |= isinstance(value, bool)
        if refused or (value is None and kind == "Tensor"):
            raise _wrong_type(name, argument.name, kind, value) from None


def _wrong_type(op: str, name: str, kind: str, value: object) -> TypeError:
    scalar = value is None or isinstance(value, str | Number | np.generic)
    got = repr(value) if scalar else type(value).__name__
    return TypeError(f"paged_kv::{op}: {name}: expected {_TYPES.get(kind, kind)}, got {got}")
