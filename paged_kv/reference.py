"""Every op in a few lines of plain PyTorch: the definition of right that kernels are tested against.

Same names and arguments as :mod:`paged_kv.ops`, on any device PyTorch runs on, without argument checks and
without care for speed. Arithmetic is float64 and attention results stay float64, so that a test can measure
the error of a kernel instead of the error of a rounding. Nothing here calls a kernel.

Shapes: T new tokens packed over S sequences, Hq query heads, Hkv key/value heads, D head size, N blocks,
B block size, M table width. A cache is ``[N, Hkv, B, D]`` whatever its strides; a scale is ``[1]``, ``[Hkv]``
or ``[N, Hkv, B]``, and None stands for 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Largest finite value of each quantised cache dtype. int8 leaves -128 out, so that the range is symmetric.
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}

#: Smallest scale that `reshape_and_cache_dynamic` stores: below the normal range float32 loses precision.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def quantise(x: Tensor, dtype: torch.dtype, scale: Tensor | float = 1.0) -> Tensor:
    """``x / scale`` as float32, rounded to nearest even in `dtype` and clamped to its largest finite value.

    Infinities are clamped too. NaN stays NaN in float8 and becomes 0 in int8. The quotient is rounded to
    float32 first, as an IEEE float32 division does on every device, so that kernels can agree bit for bit.
    """
    quotient = (x.double() / scale).float().clamp(-LARGEST[dtype], LARGEST[dtype])
    return quotient.round().nan_to_num(nan=0.0).to(dtype) if dtype == torch.int8 else quotient.to(dtype)


def dynamic_scale(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The float32 scale of each vector ``x[..., D]``: largest finite magnitude over `dtype`'s largest value.

    A vector without a finite nonzero element gets 1; no scale is below `SMALLEST_SCALE`.
    """
    largest = x.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().amax(-1)
    scale = (largest / LARGEST[dtype]).float().clamp(min=SMALLEST_SCALE)
    return torch.where(largest == 0, 1.0, scale)


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """``cache[slot // B, :, slot % B] = key[t]`` for each new token t with ``slot = slot_mapping[t] >= 0``.

    Keys and values ``[T or more, Hkv, D]`` have the cache's dtype and are copied bit for bit, or are of a
    float dtype over a quantised cache and are divided by their scale (see :func:`quantise`). ``slot_mapping``
    is ``[T]``; a slot stands in it once.
    """
    for rows, cache, scale in (key, key_cache, k_scale), (value, value_cache, v_scale):
        for token, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                block, offset = divmod(slot, cache.shape[2])
                row = rows[token]
                if row.dtype != cache.dtype:
                    row = quantise(row, cache.dtype, _scale_at(scale, block, offset))
                cache[block, :, offset].copy_(row)


def reshape_and_cache_dynamic(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    """:func:`reshape_and_cache` with a scale per token and head (:func:`dynamic_scale`), which is stored too.

    ``k_scale`` and ``v_scale`` are ``[N, Hkv, B]``.
    """
    for rows, cache, scale in (key, key_cache, k_scale), (value, value_cache, v_scale):
        for token, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                block, offset = divmod(slot, cache.shape[2])
                scale[block, :, offset] = dynamic_scale(rows[token], cache.dtype)
    reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)


def paged_attention(
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
) -> tuple[Tensor, Tensor]:
    """Attention of packed queries ``[T, Hq, D]``: ``(out[T, Hq, D], lse[T, Hq])``, both float64.

    Row i of a sequence stands at ``pos = seq_len - query_len + i`` and sees the keys j with ``j <= pos`` if
    causal and ``j > pos - window`` if there is a window. For query head h, which reads kv head
    ``h // (Hq // Hkv)``::

        s_j = cap(q . k_j * k_scale_j * scale) + alibi_slope * (j - pos)
        lse = log(exp(sink) + sum_j exp(s_j))
        out = sum_j exp(s_j - lse) * v_j * v_scale_j

    where ``cap(x) = softcap * tanh(x / softcap)`` if softcap > 0, and the terms of an absent slope or sink
    are left out. A row that sees no key gives 0 and an LSE of -inf, with a sink too. Keys and values that a
    row does not see take no part. ``max_query_len`` and ``max_seq_len`` bound launch shapes elsewhere and
    change no result.
    """
    (num_tokens, num_q_heads, head_dim), num_kv_heads = query.shape, key_cache.shape[1]
    group = num_q_heads // num_kv_heads
    out = torch.zeros(num_tokens, num_q_heads, head_dim, dtype=torch.float64, device=query.device)
    lse = torch.full((num_tokens, num_q_heads), -torch.inf, dtype=torch.float64, device=query.device)
    starts = query_start_loc.tolist()
    for seq, seq_len in enumerate(seq_lens.tolist()):
        query_len = starts[seq + 1] - starts[seq]
        lowest = max(0, seq_len - query_len - window + 1) if window > 0 else 0
        positions = torch.arange(lowest, seq_len, device=query.device)
        keys = _read(key_cache, block_tables[seq], positions, k_scale).repeat_interleave(group, dim=1)
        values = _read(value_cache, block_tables[seq], positions, v_scale).repeat_interleave(group, dim=1)
        for row in range(query_len):
            token, pos = starts[seq] + row, seq_len - query_len + row
            first, last = max(lowest, pos - window + 1) if window > 0 else 0, pos if causal else seq_len - 1
            if first > last:
                continue
            seen = slice(first - lowest, last - lowest + 1)
            scores = torch.einsum("hd,nhd->hn", query[token].double(), keys[seen]) * scale  # [Hq, seen keys]
            if softcap > 0:
                scores = softcap * torch.tanh(scores / softcap)
            if alibi_slopes is not None:
                scores = scores + alibi_slopes.double()[:, None] * (positions[seen] - pos)
            lse[token] = scores.logsumexp(-1)
            if sinks is not None:
                lse[token] = torch.logaddexp(lse[token], sinks.double())
            out[token] = torch.einsum("hn,nhd->hd", (scores - lse[token, :, None]).exp(), values[seen])
    return out, lse


def copy_blocks(key_caches: list[Tensor], value_caches: list[Tensor], block_mapping: Tensor) -> None:
    """``tensor[d] = tensor[s]`` in every tensor given, for each row (s, d) of ``block_mapping[K, 2]``."""
    for tensor in [*key_caches, *value_caches]:
        swap_blocks(tensor, tensor, block_mapping)


def swap_blocks(src: Tensor, dst: Tensor, block_mapping: Tensor) -> None:
    """``dst[d] = src[s]`` for each row (s, d) of ``block_mapping[K, 2]``, from one device to another too."""
    for source, destination in block_mapping.tolist():
        dst[destination].copy_(src[source])


def gather_kv(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Keys and values of all sequences, one after another: two tensors ``[sum(seq_lens), Hkv, D]``.

    In the cache's dtype, bit for bit; with both scales ``cache * scale`` in float32.
    """
    gathered = []
    for cache, scale in (key_cache, k_scale), (value_cache, v_scale):
        rows = [
            _read(cache, table, torch.arange(length, device=cache.device), scale)
            if scale is not None
            else cache[_locate(table, torch.arange(length, device=cache.device), cache.shape[2])]
            for table, length in zip(block_tables, seq_lens.tolist(), strict=True)
        ]
        dtype = cache.dtype if scale is None else torch.float32
        empty = torch.empty(0, cache.shape[1], cache.shape[3], dtype=dtype, device=cache.device)
        gathered.append(torch.cat([empty, *(r.to(dtype) for r in rows)]))
    return gathered[0], gathered[1]


def merge_attention_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint key sets from that over each: ``(out[T, H, D], lse[T, H])``, both float64.

    ``lse = log(exp(lse_a) + exp(lse_b))``, ``out = out_a * exp(lse_a - lse) + out_b * exp(lse_b - lse)``. A
    state whose LSE is -inf is empty: the result is the other one bit for bit, whatever the empty one holds.
    """
    out_a, lse_a, out_b, lse_b = (x.double() for x in (out_a, lse_a, out_b, lse_b))
    lse = torch.logaddexp(lse_a, lse_b)
    out = out_a * (lse_a - lse).exp()[..., None] + out_b * (lse_b - lse).exp()[..., None]
    out = torch.where(lse_b.isneginf()[..., None], out_a, out)
    return torch.where(lse_a.isneginf()[..., None], out_b, out), lse


def _locate(table: Tensor, positions: Tensor, block_size: int) -> tuple[Tensor, slice, Tensor]:
    """The index of a sequence's tokens at `positions` in a cache ``[N, Hkv, B, D]`` gives ``[n, Hkv, D]``."""
    return table[positions // block_size].long(), slice(None), positions % block_size


def _read(cache: Tensor, table: Tensor, positions: Tensor, scale: Tensor | None) -> Tensor:
    """Tokens of one sequence, dequantised: float64 ``[n, Hkv, D]``."""
    blocks, heads, offsets = _locate(table, positions, cache.shape[2])
    return cache[blocks, heads, offsets].double() * _scale_at(scale, blocks, offsets)


def _scale_at(scale: Tensor | None, block: Tensor | int, offset: Tensor | int) -> Tensor | float:
    """A scale of any granularity, float64, shaped to multiply ``[..., Hkv, D]``."""
    if scale is None:
        return 1.0
    return (scale.double() if scale.dim() == 1 else scale[block, :, offset].double())[..., None]
