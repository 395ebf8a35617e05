"""Fake implementations: what each op returns for given shapes and dtypes, so that `torch.compile` can trace.

They check dtypes, devices and shapes as csrc/bindings does, in its order and words. Sizes may be symbols.
Each comparison holds for every valid call, so that it guards against wrong calls alone and never
compiles anew for another length. Strides and values are checked when the compiled function runs the op.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import torch
from torch import Tensor, library

from .build_info import native  # noqa: F401  loading it defines the ops

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_QUANTISED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Checks:
    """The checks of one op. Arguments are given by the names of its schema; one that is None is left out."""

    def __init__(self, op: str) -> None:
        self.op = op

    def expect(self, condition: bool | torch.SymBool, name: str, expected: str, got: object) -> None:
        torch._check_value(condition, lambda: f"paged_kv::{self.op}: {name}: expected {expected}, got {got}")

    # dtype

    def dtype(self, *allowed: torch.dtype, **tensors: Tensor | None) -> None:
        *most, last = map(_name, allowed)
        expected = f"dtype {', '.join(most)} or {last}" if most else f"dtype {last}"
        for name, tensor in tensors.items():
            if tensor is not None:
                self.expect(tensor.dtype in allowed, name, expected, _name(tensor.dtype))

    def same_dtype(self, other: str, dtype: torch.dtype, **tensors: Tensor) -> None:
        for name, tensor in tensors.items():
            expected = f"the dtype of {other}, {_name(dtype)}"
            self.expect(tensor.dtype == dtype, name, expected, _name(tensor.dtype))

    def rows_match_cache(self, cache: Tensor, **rows: Tensor) -> None:
        self.dtype(*_FLOATS, **rows)
        self.dtype(*_FLOATS, *_QUANTISED, key_cache=cache)
        if cache.dtype not in _QUANTISED:
            self.same_dtype("key_cache", cache.dtype, **rows)

    def scales_dtype(self, cache: Tensor, **scales: Tensor | None) -> None:
        for name, scale in scales.items():
            if scale is not None:
                expected = f"None, since key_cache is not quantised ({_name(cache.dtype)})"
                self.expect(cache.dtype in _QUANTISED, name, expected, "a tensor")
                self.dtype(torch.float32, **{name: scale})

    # device

    def same_device(self, **tensors: Tensor | None) -> None:
        (other, first), *rest = tensors.items()
        for name, tensor in rest:
            if tensor is not None:
                expected = f"the device of {other}, {first.device}"
                self.expect(tensor.device == first.device, name, expected, tensor.device)

    # shape

    def dims(self, count: int, symbols: str, **tensors: Tensor) -> None:
        for name, tensor in tensors.items():
            self.expect(tensor.dim() == count, name, f"shape {symbols}", list(tensor.shape))

    def shape(self, expected: Sequence[int], symbols: str, **tensors: Tensor | None) -> None:
        for name, tensor in tensors.items():
            if tensor is not None:
                words = f"shape {symbols} = {list(expected)}"
                self.expect(tensor.dim() == len(expected), name, words, list(tensor.shape))
                for size, right in zip(tensor.shape, expected, strict=True):
                    self.expect(size == right, name, words, list(tensor.shape))

    def caches_shape(self, key_cache: Tensor, value_cache: Tensor) -> None:
        symbols = "[N, Hkv, B, D]"
        self.dims(4, symbols, key_cache=key_cache)
        _, heads, block_size, head_dim = sizes = list(key_cache.shape)
        self.expect(heads >= 1, "key_cache", f"at least 1 head in {symbols}", sizes)
        for what, size, largest in ("block size B", block_size, 1024), ("head size D", head_dim, 256):
            for right in size >= 1, size <= largest:
                self.expect(right, "key_cache", f"a {what} from 1 to {largest} in {symbols}", sizes)
        self.shape(key_cache.shape, f"of key_cache {symbols}", value_cache=value_cache)

    def scales_shape(self, cache: Tensor, **scales: Tensor | None) -> None:
        _, heads, *_ = cache.shape
        words = f"shape [1], [Hkv] = [{heads}] or [N, Hkv, B] = {list(cache.shape[:3])}"
        for name, scale in scales.items():
            if scale is None:
                continue
            got = list(scale.shape)
            self.expect(scale.dim() in (1, 3), name, words, got)
            if scale.dim() == 1:
                self.expect(scale.shape[0] == 1 or scale.shape[0] == heads, name, words, got)
            else:
                for size, right in zip(scale.shape, cache.shape[:3], strict=True):
                    self.expect(size == right, name, words, got)

    def sequences_shape(self, block_tables: Tensor, seq_lens: Tensor) -> None:
        self.dims(1, "[S]", seq_lens=seq_lens)
        self.dims(2, "[S, M]", block_tables=block_tables)
        self.shape((seq_lens.shape[0], block_tables.shape[1]), "[S, M]", block_tables=block_tables)

    def mapping_shape(self, block_mapping: Tensor) -> None:
        self.dims(2, "[K, 2]", block_mapping=block_mapping)
        self.shape((block_mapping.shape[0], 2), "[K, 2]", block_mapping=block_mapping)


def _check_write(
    checks: _Checks,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    checks.rows_match_cache(key_cache, key=key)
    checks.same_dtype("key", key.dtype, value=value)
    checks.same_dtype("key_cache", key_cache.dtype, value_cache=value_cache)
    checks.dtype(torch.int64, slot_mapping=slot_mapping)
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    checks.scales_dtype(key_cache, **scales)

    caches = {"key_cache": key_cache, "value_cache": value_cache}
    checks.same_device(key=key, value=value, slot_mapping=slot_mapping, **caches, **scales)

    checks.caches_shape(**caches)
    checks.dims(1, "[T]", slot_mapping=slot_mapping)
    checks.dims(3, "[T, Hkv, D]", key=key)
    (rows, *_), (num_tokens,) = key.shape, slot_mapping.shape
    _, num_kv_heads, _, head_dim = key_cache.shape
    expected = f"shape [T or more, Hkv, D] = {[num_tokens, num_kv_heads, head_dim]}"
    checks.expect(rows >= num_tokens, "key", expected, list(key.shape))
    checks.shape((rows, num_kv_heads, head_dim), "[T or more, Hkv, D]", key=key)
    checks.shape(key.shape, "of key [T or more, Hkv, D]", value=value)


@library.register_fake("paged_kv::reshape_and_cache")
def _reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    checks = _Checks("reshape_and_cache")
    _check_write(checks, key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)
    checks.scales_shape(key_cache, k_scale=k_scale, v_scale=v_scale)


@library.register_fake("paged_kv::reshape_and_cache_dynamic")
def _reshape_and_cache_dynamic(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    checks = _Checks("reshape_and_cache_dynamic")
    checks.dtype(*_FLOATS, key=key)
    checks.dtype(*_QUANTISED, key_cache=key_cache)
    _check_write(checks, key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)
    checks.shape(key_cache.shape[:3], "[N, Hkv, B]", k_scale=k_scale, v_scale=v_scale)


def _check_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
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
) -> None:
    checks = _Checks("paged_attention")
    checks.rows_match_cache(key_cache, query=query)
    checks.same_dtype("key_cache", key_cache.dtype, value_cache=value_cache)
    lengths = {"seq_lens": seq_lens, "query_start_loc": query_start_loc}
    checks.dtype(torch.int32, block_tables=block_tables, **lengths)
    per_head = {"alibi_slopes": alibi_slopes, "sinks": sinks}
    checks.dtype(torch.float32, **per_head)
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    checks.scales_dtype(key_cache, **scales)
    if out is not None:
        checks.same_dtype("query", query.dtype, out=out)
    checks.dtype(torch.float32, lse=lse)

    tensors = {"key_cache": key_cache, "value_cache": value_cache, "block_tables": block_tables, **lengths}
    checks.same_device(query=query, **tensors, **per_head, **scales, out=out, lse=lse)

    checks.caches_shape(key_cache, value_cache)
    checks.dims(3, "[T, Hq, D]", query=query)
    num_tokens, num_q_heads, _ = query.shape
    _, num_kv_heads, _, head_dim = key_cache.shape
    checks.shape((num_tokens, num_q_heads, head_dim), "[T, Hq, D]", query=query)
    for right in num_q_heads >= 1, num_q_heads % num_kv_heads == 0:
        heads = f"a multiple of Hkv = {num_kv_heads} heads in [T, Hq, D]"
        checks.expect(right, "query", heads, list(query.shape))
    checks.sequences_shape(block_tables, seq_lens)
    checks.shape((seq_lens.shape[0] + 1,), "[S + 1]", query_start_loc=query_start_loc)
    checks.shape((num_q_heads,), "[Hq]", **per_head)
    checks.scales_shape(key_cache, **scales)
    checks.shape(query.shape, "of query [T, Hq, D]", out=out)
    checks.shape((num_tokens, num_q_heads), "[T, Hq]", lse=lse)

    checks.expect(isfinite(scale), "scale", "a finite float32", scale)
    checks.expect(window == -1 or window >= 1, "window", "-1 (none) or at least 1", window)
    checks.expect(isfinite(softcap), "softcap", "a finite float32", softcap)
    checks.expect(softcap >= 0, "softcap", "0 (none) or a float32 above", softcap)


@library.register_fake("paged_kv::paged_attention")
def _paged_attention(query: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
    _check_attention(query, *args, **kwargs)
    return query.new_empty(query.shape), query.new_empty(query.shape[:2], dtype=torch.float32)


@library.register_fake("paged_kv::paged_attention.out")
def _paged_attention_out(*args: object, **kwargs: object) -> None:
    _check_attention(*args, **kwargs)


@library.register_fake("paged_kv::copy_blocks")
def _copy_blocks(key_caches: list[Tensor], value_caches: list[Tensor], block_mapping: Tensor) -> None:
    checks = _Checks("copy_blocks")
    checks.dtype(torch.int64, block_mapping=block_mapping)
    caches = {f"key_caches[{i}]": cache for i, cache in enumerate(key_caches)}
    caches |= {f"value_caches[{i}]": cache for i, cache in enumerate(value_caches)}
    checks.same_device(block_mapping=block_mapping, **caches)
    for name, cache in caches.items():
        checks.expect(cache.dim() >= 1, name, "a first dimension of N blocks", f"shape {list(cache.shape)}")
        other, first = next(iter(caches.items()))
        expected = f"a first dimension of N = {first.shape[0]} blocks, as {other}"
        checks.expect(cache.shape[0] == first.shape[0], name, expected, f"shape {list(cache.shape)}")
    checks.mapping_shape(block_mapping)


@library.register_fake("paged_kv::swap_blocks")
def _swap_blocks(src: Tensor, dst: Tensor, block_mapping: Tensor) -> None:
    checks = _Checks("swap_blocks")
    checks.same_dtype("src", src.dtype, dst=dst)
    checks.dtype(torch.int64, block_mapping=block_mapping)
    for name, tensor in ("src", src), ("dst", dst):
        checks.expect(tensor.dim() >= 1, name, "a first dimension of N blocks", f"shape {list(tensor.shape)}")
    ours, theirs = list(dst.shape[1:]), list(src.shape[1:])
    checks.expect(len(ours) == len(theirs), "dst", f"blocks of src's shape, {theirs}", ours)
    for size, right in zip(ours, theirs, strict=True):
        checks.expect(size == right, "dst", f"blocks of src's shape, {theirs}", ours)
    checks.mapping_shape(block_mapping)


def _check_gather(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
) -> torch.dtype:
    """Returns the dtype of the results."""
    checks = _Checks("gather_kv")
    caches = {"key_cache": key_cache, "value_cache": value_cache}
    sequences = {"block_tables": block_tables, "seq_lens": seq_lens}
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    checks.dtype(*_FLOATS, *_QUANTISED, key_cache=key_cache)
    checks.same_dtype("key_cache", key_cache.dtype, value_cache=value_cache)
    checks.dtype(torch.int32, **sequences)
    checks.scales_dtype(key_cache, **scales)
    present, missing = ("v_scale", "k_scale") if k_scale is None else ("k_scale", "v_scale")
    paired = (k_scale is None) == (v_scale is None)
    checks.expect(paired, missing, f"a tensor, as {present} is one", None)
    dtype = key_cache.dtype if k_scale is None else torch.float32
    checks.dtype(dtype, key=key, value=value)

    checks.same_device(**caches, **sequences, **scales, key=key, value=value)

    checks.caches_shape(**caches)
    checks.sequences_shape(**sequences)
    checks.scales_shape(key_cache, **scales)
    for name, rows in ("key", key), ("value", value):
        if rows is not None:
            checks.dims(3, "[sum(seq_lens), Hkv, D]", **{name: rows})
            expected = (rows.shape[0], key_cache.shape[1], key_cache.shape[3])
            checks.shape(expected, "[sum(seq_lens), Hkv, D]", **{name: rows})
    return dtype


@library.register_fake("paged_kv::gather_kv")
def _gather_kv(key_cache: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
    dtype = _check_gather(key_cache, *args, **kwargs)
    num_tokens = library.get_ctx().new_dynamic_size()  # the sum of seq_lens, which only their values tell
    shape = (num_tokens, key_cache.shape[1], key_cache.shape[3])
    return key_cache.new_empty(shape, dtype=dtype), key_cache.new_empty(shape, dtype=dtype)


@library.register_fake("paged_kv::gather_kv.out")
def _gather_kv_out(*args: object, **kwargs: object) -> None:
    _check_gather(*args, **kwargs)


def _check_merge(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> None:
    checks = _Checks("merge_attention_states")
    checks.dtype(*_FLOATS, out_a=out_a)
    checks.same_dtype("out_a", out_a.dtype, out_b=out_b)
    checks.dtype(torch.float32, lse_a=lse_a, lse_b=lse_b)
    if out is not None:
        checks.same_dtype("out_a", out_a.dtype, out=out)
    checks.dtype(torch.float32, lse=lse)

    checks.same_device(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b, out=out, lse=lse)

    checks.dims(3, "[T, Hq, D]", out_a=out_a)
    checks.shape(out_a.shape, "of out_a [T, Hq, D]", out_b=out_b)
    checks.shape(out_a.shape[:2], "[T, Hq]", lse_a=lse_a, lse_b=lse_b)
    checks.shape(out_a.shape, "of out_a [T, Hq, D]", out=out)
    checks.shape(out_a.shape[:2], "[T, Hq]", lse=lse)


@library.register_fake("paged_kv::merge_attention_states")
def _merge_attention_states(out_a: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
    _check_merge(out_a, *args, **kwargs)
    return out_a.new_empty(out_a.shape), out_a.new_empty(out_a.shape[:2], dtype=torch.float32)


@library.register_fake("paged_kv::merge_attention_states.out")
def _merge_attention_states_out(*args: object, **kwargs: object) -> None:
    _check_merge(*args, **kwargs)
