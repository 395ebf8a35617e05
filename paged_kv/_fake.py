"""Fake implementations: what each op returns for given shapes and dtypes, so that `torch.compile` can trace
it.

They check what needs no data (dtypes, devices, shapes) with the sentences of csrc/bindings/checks.cpp.
Sizes may be symbols: each comparison is one that holds for every valid call, so that it guards against
wrong calls alone and never compiles anew for another length. Strides, values and overlaps are checked when
the compiled function runs the op.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import torch
from torch import Tensor
from torch.library import get_ctx, register_fake

from .build_info import native  # noqa: F401  loading it defines the ops

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_QUANTISED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


class _Checks:
    """The checks of one op; arguments are given by the names of its schema."""

    def __init__(self, op: str) -> None:
        self.op = op

    def expect(self, condition: bool | torch.SymBool, name: str, expected: str, got: object) -> None:
        torch._check_value(condition, lambda: f"paged_kv::{self.op}: {name}: expected {expected}, got {got}")

    def dtype(self, name: str, tensor: Tensor, *allowed: torch.dtype) -> None:
        self.expect(tensor.dtype in allowed, name, f"dtype {' or '.join(map(str, allowed))}", tensor.dtype)

    def same_dtype(self, name: str, tensor: Tensor, other: str, dtype: torch.dtype) -> None:
        self.expect(tensor.dtype == dtype, name, f"the dtype of {other}, {dtype}", tensor.dtype)

    def same_device(self, **tensors: Tensor | None) -> None:
        (other, first), *rest = tensors.items()
        for name, tensor in rest:
            if tensor is not None:
                same = tensor.device == first.device
                self.expect(same, name, f"the device of {other}, {first.device}", tensor.device)

    def dims(self, name: str, tensor: Tensor, count: int, symbols: str) -> None:
        self.expect(tensor.dim() == count, name, f"shape {symbols}", list(tensor.shape))

    def shape(self, name: str, tensor: Tensor, expected: Sequence[int], symbols: str) -> None:
        self.dims(name, tensor, len(expected), symbols)
        for size, right in zip(tensor.shape, expected, strict=True):
            self.expect(size == right, name, f"shape {symbols} = {list(expected)}", list(tensor.shape))

    def caches(self, key_cache: Tensor, value_cache: Tensor, *allowed: torch.dtype) -> None:
        self.dtype("key_cache", key_cache, *allowed)
        self.same_dtype("value_cache", value_cache, "key_cache", key_cache.dtype)
        self.dims("key_cache", key_cache, 4, "[N, Hkv, B, D]")
        _, heads, block_size, head_dim = key_cache.shape
        sizes = list(key_cache.shape)
        self.expect(heads >= 1, "key_cache", "at least 1 head in [N, Hkv, B, D]", sizes)
        for symbol, size, largest in (("block size B", block_size, 1024), ("head size D", head_dim, 256)):
            expected = f"a {symbol} from 1 to {largest} in [N, Hkv, B, D]"
            self.expect(size >= 1, "key_cache", expected, sizes)
            self.expect(size <= largest, "key_cache", expected, sizes)
        self.shape("value_cache", value_cache, key_cache.shape, "of key_cache [N, Hkv, B, D]")

    def rows(self, name: str, rows: Tensor, cache: Tensor) -> None:
        self.dtype(name, rows, *_FLOATS)
        if cache.dtype not in _QUANTISED:
            self.same_dtype(name, rows, "key_cache", cache.dtype)

    def scales(self, cache: Tensor, **scales: Tensor | None) -> None:
        for name, scale in scales.items():
            if scale is None:
                continue
            quantised = cache.dtype in _QUANTISED
            self.expect(
                quantised, name, f"None, since key_cache is not quantised ({cache.dtype})", "a tensor"
            )
            self.dtype(name, scale, torch.float32)
            if scale.dim() == 3:
                self.shape(name, scale, cache.shape[:3], "[N, Hkv, B]")
            else:
                self.dims(name, scale, 1, "[1], [Hkv] or [N, Hkv, B]")
                heads = scale.shape[0]
                right = heads == 1 or heads == cache.shape[1]
                self.expect(right, name, "shape [1], [Hkv] or [N, Hkv, B]", list(scale.shape))

    def sequences(self, block_tables: Tensor, seq_lens: Tensor) -> None:
        self.dtype("block_tables", block_tables, torch.int32)
        self.dtype("seq_lens", seq_lens, torch.int32)
        self.dims("seq_lens", seq_lens, 1, "[S]")
        self.dims("block_tables", block_tables, 2, "[S, M]")
        self.shape("block_tables", block_tables, (seq_lens.shape[0], block_tables.shape[1]), "[S, M]")

    def mapping(self, block_mapping: Tensor) -> None:
        self.dtype("block_mapping", block_mapping, torch.int64)
        self.dims("block_mapping", block_mapping, 2, "[K, 2]")
        self.shape("block_mapping", block_mapping, (block_mapping.shape[0], 2), "[K, 2]")

    def written(
        self, name: str, tensor: Tensor, dtype: torch.dtype, expected: Sequence[int], symbols: str
    ) -> None:
        self.dtype(name, tensor, dtype)
        self.shape(name, tensor, expected, symbols)


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
    checks.same_device(
        key=key,
        value=value,
        key_cache=key_cache,
        value_cache=value_cache,
        slot_mapping=slot_mapping,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    checks.rows("key", key, key_cache)
    checks.same_dtype("value", value, "key", key.dtype)
    checks.dtype("slot_mapping", slot_mapping, torch.int64)
    checks.dims("slot_mapping", slot_mapping, 1, "[T]")
    checks.dims("key", key, 3, "[T, Hkv, D]")
    _, num_kv_heads, _, head_dim = key_cache.shape
    checks.shape("key", key, (key.shape[0], num_kv_heads, head_dim), "[T or more, Hkv, D]")
    enough = key.shape[0] >= slot_mapping.shape[0]
    checks.expect(enough, "key", f"shape [T or more, Hkv, D], T = {slot_mapping.shape[0]}", list(key.shape))
    checks.shape("value", value, key.shape, "of key [T or more, Hkv, D]")


@register_fake("paged_kv::reshape_and_cache")
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
    checks.caches(key_cache, value_cache, *_FLOATS, *_QUANTISED)
    _check_write(checks, key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)
    checks.scales(key_cache, k_scale=k_scale, v_scale=v_scale)


@register_fake("paged_kv::reshape_and_cache_dynamic")
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
    checks.caches(key_cache, value_cache, *_QUANTISED)
    _check_write(checks, key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)
    for name, scale in ("k_scale", k_scale), ("v_scale", v_scale):
        checks.written(name, scale, torch.float32, key_cache.shape[:3], "[N, Hkv, B]")


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
) -> _Checks:
    checks = _Checks("paged_attention")
    checks.same_device(
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        block_tables=block_tables,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    checks.caches(key_cache, value_cache, *_FLOATS, *_QUANTISED)
    checks.rows("query", query, key_cache)
    checks.dims("query", query, 3, "[T, Hq, D]")
    num_tokens, num_q_heads, _ = query.shape
    checks.shape("query", query, (num_tokens, num_q_heads, key_cache.shape[3]), "[T, Hq, D]")
    heads = f"a multiple of Hkv = {key_cache.shape[1]} heads in [T, Hq, D]"
    checks.expect(num_q_heads >= 1, "query", heads, list(query.shape))
    checks.expect(num_q_heads % key_cache.shape[1] == 0, "query", heads, list(query.shape))
    checks.sequences(block_tables, seq_lens)
    checks.dtype("query_start_loc", query_start_loc, torch.int32)
    checks.shape("query_start_loc", query_start_loc, (seq_lens.shape[0] + 1,), "[S + 1]")
    for name, per_head in ("alibi_slopes", alibi_slopes), ("sinks", sinks):
        if per_head is not None:
            checks.dtype(name, per_head, torch.float32)
            checks.shape(name, per_head, (num_q_heads,), "[Hq]")
    checks.scales(key_cache, k_scale=k_scale, v_scale=v_scale)
    checks.expect(isfinite(scale), "scale", "a finite float32", scale)
    checks.expect(window == -1 or window >= 1, "window", "-1 (none) or at least 1", window)
    checks.expect(isfinite(softcap) and softcap >= 0, "softcap", "0 (none) or a float32 above", softcap)
    return checks


@register_fake("paged_kv::paged_attention")
def _paged_attention(query: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
    _check_attention(query, *args, **kwargs)
    return query.new_empty(query.shape), query.new_empty(query.shape[:2], dtype=torch.float32)


@register_fake("paged_kv::paged_attention.out")
def _paged_attention_out(query: Tensor, *args: object, out: Tensor, lse: Tensor, **kwargs: object) -> None:
    checks = _check_attention(query, *args, **kwargs)
    checks.same_device(query=query, out=out, lse=lse)
    checks.written("out", out, query.dtype, query.shape, "of query [T, Hq, D]")
    checks.written("lse", lse, torch.float32, query.shape[:2], "[T, Hq]")


@register_fake("paged_kv::copy_blocks")
def _copy_blocks(key_caches: list[Tensor], value_caches: list[Tensor], block_mapping: Tensor) -> None:
    checks = _Checks("copy_blocks")
    checks.mapping(block_mapping)
    named = [(f"key_caches[{i}]", t) for i, t in enumerate(key_caches)]
    named += [(f"value_caches[{i}]", t) for i, t in enumerate(value_caches)]
    checks.same_device(block_mapping=block_mapping, **dict(named))
    for name, tensor in named:
        checks.expect(tensor.dim() >= 1, name, "a first dimension of N blocks", list(tensor.shape))
        num_blocks = named[0][1].shape[0]
        checks.expect(
            tensor.shape[0] == num_blocks,
            name,
            f"a first dimension of N = {num_blocks} blocks",
            f"shape {list(tensor.shape)}",
        )


@register_fake("paged_kv::swap_blocks")
def _swap_blocks(src: Tensor, dst: Tensor, block_mapping: Tensor) -> None:
    checks = _Checks("swap_blocks")
    checks.same_dtype("dst", dst, "src", src.dtype)
    checks.mapping(block_mapping)
    for name, tensor in ("src", src), ("dst", dst):
        checks.expect(tensor.dim() >= 1, name, "a first dimension of N blocks", list(tensor.shape))
    checks.shape("dst", dst, (dst.shape[0], *src.shape[1:]), "[N, blocks of src's shape]")


def _check_gather(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> tuple[_Checks, torch.dtype]:
    checks = _Checks("gather_kv")
    checks.same_device(
        key_cache=key_cache,
        value_cache=value_cache,
        block_tables=block_tables,
        seq_lens=seq_lens,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    checks.caches(key_cache, value_cache, *_FLOATS, *_QUANTISED)
    checks.sequences(block_tables, seq_lens)
    checks.scales(key_cache, k_scale=k_scale, v_scale=v_scale)
    present, missing = ("v_scale", "k_scale") if k_scale is None else ("k_scale", "v_scale")
    paired = (k_scale is None) == (v_scale is None)
    checks.expect(paired, missing, f"a tensor, as {present} is one", None)
    return checks, key_cache.dtype if k_scale is None else torch.float32


@register_fake("paged_kv::gather_kv")
def _gather_kv(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    _, dtype = _check_gather(key_cache, value_cache, block_tables, seq_lens, k_scale, v_scale)
    num_tokens = get_ctx().new_dynamic_size()  # the sum of seq_lens, which only their values tell
    shape = (num_tokens, key_cache.shape[1], key_cache.shape[3])
    return key_cache.new_empty(shape, dtype=dtype), key_cache.new_empty(shape, dtype=dtype)


@register_fake("paged_kv::gather_kv.out")
def _gather_kv_out(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    key: Tensor,
    value: Tensor,
) -> None:
    checks, dtype = _check_gather(key_cache, value_cache, block_tables, seq_lens, k_scale, v_scale)
    checks.same_device(key_cache=key_cache, key=key, value=value)
    for name, tensor in ("key", key), ("value", value):
        checks.dims(name, tensor, 3, "[sum(seq_lens), Hkv, D]")
        shape = (tensor.shape[0], key_cache.shape[1], key_cache.shape[3])
        checks.written(name, tensor, dtype, shape, "[sum(seq_lens), Hkv, D]")


def _check_merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> _Checks:
    checks = _Checks("merge_attention_states")
    checks.same_device(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    checks.dtype("out_a", out_a, *_FLOATS)
    checks.same_dtype("out_b", out_b, "out_a", out_a.dtype)
    checks.dims("out_a", out_a, 3, "[T, Hq, D]")
    checks.shape("out_b", out_b, out_a.shape, "of out_a [T, Hq, D]")
    for name, lse in ("lse_a", lse_a), ("lse_b", lse_b):
        checks.dtype(name, lse, torch.float32)
        checks.shape(name, lse, out_a.shape[:2], "[T, Hq]")
    return checks


@register_fake("paged_kv::merge_attention_states")
def _merge_attention_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    _check_merge(out_a, lse_a, out_b, lse_b)
    return out_a.new_empty(out_a.shape), out_a.new_empty(out_a.shape[:2], dtype=torch.float32)


@register_fake("paged_kv::merge_attention_states.out")
def _merge_attention_states_out(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, out: Tensor, lse: Tensor
) -> None:
    checks = _check_merge(out_a, lse_a, out_b, lse_b)
    checks.same_device(out_a=out_a, out=out, lse=lse)
    checks.written("out", out, out_a.dtype, out_a.shape, "of out_a [T, Hq, D]")
    checks.written("lse", lse, torch.float32, out_a.shape[:2], "[T, Hq]")
