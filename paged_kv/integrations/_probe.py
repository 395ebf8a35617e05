"""Proves, on a few tokens, that a model means what `paged_attention` does and that packing is safe.

The model computes one short sequence alone, and once more behind another one. Meanwhile each of its attention
layers is compared with the model's own attention function, and afterwards the keys of both runs: whatever
besides attention mixes tokens (a state-space layer, a convolution) shows there.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import ops
from ..errors import UnsupportedModelError
from ._attention import AttentionLayer, Mask, mask, read_layer

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["Probe", "attend_probe", "mask_probe", "probe"]

NUM_TOKENS = 6  # per sequence: long enough for a mask and a rotation to matter


Compute = Callable[[Tensor, Tensor | None, "Probe"], object]


class Probe:
    """Collects the layers of one forward pass, and their keys, over `num_seqs` equally long sequences."""

    def __init__(self, num_seqs: int) -> None:
        self.num_seqs = num_seqs
        self.layers: list[AttentionLayer] = []
        self.keys: list[Tensor] = []  # per layer, those of the last sequence: [Hkv, NUM_TOKENS, D]


def probe(compute: Compute, config: PretrainedConfig, device: torch.device) -> list[AttentionLayer]:
    """Runs a short sequence alone and behind another one, and returns what the layers ask for.

    Args:
        compute: runs the model on `[T]` token ids, with or without `[T]` positions, with the functions
            below in place.
        config: of the model.
        device: of the model.

    Raises:
        UnsupportedModelError: a layer, or packing, would not compute what the model means.
    """
    step = max(1, config.vocab_size // (2 * NUM_TOKENS))
    ids = torch.arange(2 * NUM_TOKENS, device=device) * step % config.vocab_size
    positions = torch.arange(NUM_TOKENS, device=device).repeat(2)
    alone, packed = Probe(1), Probe(2)
    with torch.inference_mode():
        compute(ids[NUM_TOKENS:], None, alone)
        compute(ids, positions, packed)
    _check_layers(packed.layers, config)
    for layer, before, after in zip(packed.layers, alone.keys, packed.keys, strict=True):
        # The median over tokens forgives a token that rounding sends to another expert.
        error = (after - before).abs().amax((0, 2)) / before.abs().max()
        if error.median() > _tolerance(before.dtype):
            raise UnsupportedModelError(
                f"layer {layer.index} computes other keys for a sequence when another one stands before it: "
                "something besides attention mixes tokens"
            )
    return sorted(packed.layers, key=lambda layer: layer.index)


def _check_layers(layers: list[AttentionLayer], config: PretrainedConfig) -> None:
    expected = list(range(config.num_hidden_layers))
    if sorted(layer.index for layer in layers) != expected:
        raise UnsupportedModelError(
            f"{len(layers)} attention layers answered where its config tells {len(expected)} layers; the "
            "others keep their state elsewhere (state-space or linear attention)"
        )
    if len(dtypes := {str(layer.dtype) for layer in layers}) > 1:
        raise UnsupportedModelError(f"its layers differ in dtype: {', '.join(sorted(dtypes))}")


def _tolerance(dtype: torch.dtype) -> float:
    return 1e-4 if dtype == torch.float32 else 20 * torch.finfo(dtype).eps


def mask_probe(**kwargs: Any) -> Mask:  # noqa: ANN401
    """Tells what `mask` tells, checked at two positions, and the model's mask itself."""
    from transformers.masking_utils import eager_mask

    told = mask(**kwargs)
    if told.window > 0:
        # A query at position W sees keys 1 ... W through a window; a chunk of W tokens would begin at W.
        zero, window = torch.tensor(0), torch.tensor(told.window)
        sees = [bool(kwargs["mask_function"](zero, zero, window, key)) for key in (zero, zero + 1)]
        if sees != [False, True]:
            raise UnsupportedModelError("its local attention is not a sliding window")
    return Mask(told.window, eager_mask(**kwargs))


def attend_probe(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask,
    paged_batch: Probe | None = None,
    **kwargs: Any,  # noqa: ANN401
) -> tuple[Tensor, None]:
    """Lets each sequence attend through the op, after comparing the op with the model's own function."""
    if paged_batch is None:
        raise UnsupportedModelError("its layers do not hand keyword arguments on to attention")
    if not hasattr(module, "layer_idx"):
        raise UnsupportedModelError("its attention layers have no layer_idx")
    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if own is None:
        raise UnsupportedModelError("its module has no eager_attention_forward to compare with")
    layer = read_layer(module, query, key, value, attention_mask, **kwargs)
    paged_batch.layers.append(layer)
    paged_batch.keys.append(key[0, :, -NUM_TOKENS:].clone())

    # Made-up rows whose scores spread over several units, so that a scale or a softcap shows.
    noise = torch.Generator().manual_seed(layer.index)
    spread = 4 / (abs(layer.scale) * math.sqrt(layer.head_dim))
    shapes = (
        (1, layer.num_q_heads, NUM_TOKENS, layer.head_dim),
        (1, *key.shape[1:2], NUM_TOKENS, key.shape[3]),
    )
    made_query = torch.randn(shapes[0], generator=noise).mul(spread).to(query.device)
    made_key, made_value = (torch.randn(shapes[1], generator=noise).to(query.device) for _ in range(2))
    mask = attention_mask.dense[..., :NUM_TOKENS, :NUM_TOKENS].float()
    theirs, _ = own(module, made_query, made_key, made_value, mask, **kwargs)
    ours = _attend_contiguous(layer, made_query, made_key, made_value, 1)
    if not torch.allclose(ours.float(), theirs.float(), rtol=1e-3, atol=1e-3):
        raise UnsupportedModelError(f"layer {layer.index} attends otherwise than paged_attention")
    return _attend_contiguous(layer, query, key, value, paged_batch.num_seqs), None


def _attend_contiguous(
    layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor, num_seqs: int
) -> Tensor:
    """Attention of `[1, heads, T, D]` rows of equally long sequences, each one block of a cache."""
    length = query.shape[2] // num_seqs
    counts = torch.arange(num_seqs + 1, dtype=torch.int32, device=query.device)
    out, _ = ops.paged_attention(
        query[0].transpose(0, 1),
        key[0].unflatten(1, (num_seqs, length)).transpose(0, 1),
        value[0].unflatten(1, (num_seqs, length)).transpose(0, 1),
        counts[:num_seqs, None],
        torch.full_like(counts[1:], length),
        counts * length,
        max_query_len=length,
        max_seq_len=length,
        scale=layer.scale,
        window=layer.window,
        softcap=layer.softcap,
        sinks=layer.sinks,
    )
    return out[None]
