"""How well a model predicts a text through a cache: what a quantised cache costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..integrations.transformers import PagedBatch, PagedModel
from ..manager import PagedKVCacheManager

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["perplexity"]

BLOCK_SIZE = 16


def perplexity(
    model: PreTrainedModel,
    token_ids: Sequence[int],
    *,
    cache_dtype: torch.dtype | None = None,
    chunk: int = 256,
) -> float:
    """exp of the mean negative log-likelihood of `token_ids[1:]`, each given all tokens before it.

    Args:
        model: a supported transformers model; the text has to fit its context.
        token_ids: two or more.
        cache_dtype: of keys and values; the model's own by default. Every key is read from the cache, those of a
            token's own chunk too.
        chunk: tokens computed at a time.
    """
    if len(token_ids) < 2:
        raise ValueError(f"token_ids: expected two or more, got {len(token_ids)}")
    paged = PagedModel(model)
    ids = torch.tensor(token_ids, device=paged.device)
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    cache = paged.new_cache(BLOCK_SIZE, num_blocks=num_blocks, dtype=cache_dtype)
    manager = PagedKVCacheManager(num_blocks, BLOCK_SIZE, prefix_cache=False)
    manager.admit(0, len(token_ids))
    total = 0.0
    for start in range(0, len(token_ids), chunk):
        stop = min(start + chunk, len(token_ids))
        step = manager.append([0], [stop - start])
        batch = PagedBatch(
            slot_mapping=_tensor(step.slot_mapping, ids),
            block_tables=_tensor(manager.block_tables([0]), ids),
            seq_lens=_tensor(np.array([stop], np.int32), ids),
            query_start_loc=_tensor(np.array([0, stop - start], np.int32), ids),
            max_query_len=stop - start,
            max_seq_len=stop,
            cache=cache,
        )
        positions = torch.arange(start, stop, device=ids.device)
        rows = torch.arange(min(stop, len(ids) - 1) - start, device=ids.device)
        logits = paged.forward(ids[start:stop], positions, batch, rows).float()
        total += torch.nn.functional.cross_entropy(
            logits, ids[start + 1 : start + 1 + len(rows)], reduction="sum"
        ).item()
    return math.exp(total / (len(token_ids) - 1))


def _tensor(array: np.ndarray, beside: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(beside.device)
