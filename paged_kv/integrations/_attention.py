"""What transformers calls in place of its own attention and masks.

The attention function gets its arguments in transformers' words; `read_layer` says the same in those of
`paged_attention`, or refuses. The mask function builds no mask: it only tells how far a layer looks back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..cache import PagedKVCache
from ..errors import UnsupportedModelError

__all__ = ["AttentionLayer", "Mask", "PagedBatch", "attend", "mask", "read_layer"]

MAX_HEAD_DIM = 256

# Keyword arguments of attention functions that change nothing here: positions are already in the keys.
_HARMLESS = {"position_ids", "cache_position", "use_cache", "output_attentions", "output_router_logits"}


@dataclass(frozen=True)
class AttentionLayer:
    """What one attention layer of a model asks of the cache and of `paged_attention`."""

    index: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    scale: float
    softcap: float  # 0: none
    window: int  # -1: none
    sinks: Tensor | None = field(repr=False)  # [num_q_heads] float32


@dataclass(frozen=True)
class PagedBatch:
    """T new tokens packed over S sequences, and where their keys and values live; one for all layers."""

    slot_mapping: Tensor  # [T] int64
    block_tables: Tensor  # [S, M] int32
    seq_lens: Tensor  # [S] int32, the new tokens included
    query_start_loc: Tensor  # [S + 1] int32
    max_query_len: int
    max_seq_len: int
    cache: PagedKVCache


@dataclass(frozen=True)
class Mask:
    """Stands where a model hands its layers a mask tensor: whatever else a model puts there is refused."""

    window: int
    dense: Tensor | None = None  # [1, 1, T, T] additive, only while probing


def attend(
    module: nn.Module,
    query: Tensor,  # [1, Hq, T, D]
    key: Tensor,  # [1, Hkv, T, D]
    value: Tensor,
    attention_mask: Mask,
    paged_batch: PagedBatch,
    **kwargs: Any,  # noqa: ANN401 - whatever the model's own attention function takes
) -> tuple[Tensor, None]:
    layer = read_layer(module, query, key, value, attention_mask, **kwargs)
    query, key, value = (rows[0].transpose(0, 1) for rows in (query, key, value))  # [T, heads, D], views
    paged_batch.cache.write(layer.index, key, value, paged_batch.slot_mapping)
    stored = paged_batch.cache[layer.index]
    out, _ = ops.paged_attention(
        query,
        stored.key,
        stored.value,
        paged_batch.block_tables,
        paged_batch.seq_lens,
        paged_batch.query_start_loc,
        max_query_len=paged_batch.max_query_len,
        max_seq_len=paged_batch.max_seq_len,
        scale=layer.scale,
        window=layer.window,
        softcap=layer.softcap,
        sinks=layer.sinks,
        k_scale=stored.k_scale,
        v_scale=stored.v_scale,
    )
    return out[None], None


def mask(
    *, local_size: int | None = None, allow_is_causal_skip: bool = True, use_vmap: bool = False, **_: object
) -> Mask:
    # Where a model adds something to the causal mask, or has none, transformers forbids skipping the mask.
    if use_vmap or not allow_is_causal_skip:
        raise UnsupportedModelError("it adds a mask of its own to the causal one")
    return Mask(-1 if local_size is None else local_size)


def read_layer(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **other: Any,  # noqa: ANN401
) -> AttentionLayer:
    """Puts the arguments of a transformers attention function into the words of `paged_attention`."""
    unknown = sorted(name for name in other if name not in _HARMLESS and other[name] is not None)
    if unknown:
        raise UnsupportedModelError(f"its attention takes arguments unknown here: {', '.join(unknown)}")
    if not isinstance(attention_mask, Mask):
        raise UnsupportedModelError("its attention layers get a mask that the model makes by itself")
    if dropout:
        raise UnsupportedModelError(f"attention dropout is {dropout}: call model.eval() first")
    if is_causal is False or not getattr(module, "is_causal", True):
        raise UnsupportedModelError("its attention is not causal")
    if sliding_window is not None and sliding_window != attention_mask.window:
        raise UnsupportedModelError(
            f"a layer asks for a window of {sliding_window} under a mask with a window of "
            f"{attention_mask.window}"
        )
    if key.shape != value.shape:
        raise UnsupportedModelError(
            f"keys and values differ in shape, {tuple(key.shape)} and {tuple(value.shape)}, as in multi-head "
            "latent attention"
        )
    if key.shape[3] > MAX_HEAD_DIM:
        raise UnsupportedModelError(f"its head size is {key.shape[3]}; up to {MAX_HEAD_DIM} is supported")
    return AttentionLayer(
        index=module.layer_idx,
        num_q_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=key.shape[3],
        dtype=key.dtype,
        scale=1 / math.sqrt(query.shape[3]) if scaling is None else float(scaling),
        softcap=softcap or 0.0,
        window=attention_mask.window,
        sinks=None if s_aux is None else s_aux.float(),
    )
