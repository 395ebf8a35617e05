"""Computes one scheduled step: packs its tokens and runs the model."""

from __future__ import annotations

from itertools import chain

import numpy as np
import torch
from torch import Tensor

from ..cache import PagedKVCache
from ..integrations.transformers import PagedBatch, PagedModel
from ..manager import PagedKVCacheManager
from .scheduler import ScheduledStep

__all__ = ["run_model"]


def run_model(
    model: PagedModel, cache: PagedKVCache, manager: PagedKVCacheManager, step: ScheduledStep
) -> Tensor:
    """Logits `[R, vocab_size]` of the step's R tokens that need them, in the order of its work."""

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(model.device)

    counts = np.array([work.count for work in step.work])
    computed = np.array([work.sequence.num_computed for work in step.work])
    num_rows = np.array([work.num_rows for work in step.work])
    ends, seq_lens = counts.cumsum(), computed + counts
    tokens = np.array(list(chain.from_iterable(work.tokens for work in step.work)))
    positions = np.arange(len(tokens)) + np.repeat(computed - (ends - counts), counts)
    rows = np.arange(num_rows.sum()) + np.repeat(ends - num_rows.cumsum(), num_rows)
    batch = PagedBatch(
        slot_mapping=tensor(step.slot_mapping),
        block_tables=tensor(manager.block_tables([work.sequence.seq_id for work in step.work])),
        seq_lens=tensor(seq_lens.astype(np.int32)),
        query_start_loc=tensor(np.concatenate([[0], ends]).astype(np.int32)),
        max_query_len=int(counts.max()),
        max_seq_len=int(seq_lens.max()),
        cache=cache,
    )
    return model.forward(tensor(tokens), tensor(positions), batch, tensor(rows))
