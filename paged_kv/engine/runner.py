"""Computes one scheduled step: packs its tokens, copies blocks, runs the model."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..cache import PagedKVCache
from ..integrations.transformers import PagedBatch, PagedModel
from ..manager import PagedKVCacheManager
from .scheduler import ScheduledStep

__all__ = ["ModelRunner"]


class ModelRunner:
    def __init__(self, model: PagedModel, cache: PagedKVCache, manager: PagedKVCacheManager) -> None:
        self.model = model
        self.cache = cache
        self.manager = manager

    def run(self, step: ScheduledStep) -> Tensor:
        """Logits `[R, vocab_size]` of the R requests whose last token is computed in this step."""
        requests, counts = step.requests, np.array(step.counts)
        computed = np.array([request.num_computed for request in requests])
        ends = counts.cumsum()
        tokens = [
            token
            for request, count in zip(requests, step.counts, strict=True)
            for token in request.token_ids[request.num_computed : request.num_computed + count]
        ]
        positions = np.arange(len(tokens)) + np.repeat(computed - (ends - counts), counts)
        complete = np.array([r.num_pending == n for r, n in zip(requests, step.counts, strict=True)])
        seq_lens = computed + counts

        if step.block_copies:
            self.cache.copy_blocks(step.block_copies)
        batch = PagedBatch(
            slot_mapping=self._tensor(step.slot_mapping),
            block_tables=self._tensor(self.manager.block_tables([r.request_id for r in requests])),
            seq_lens=self._tensor(seq_lens.astype(np.int32)),
            query_start_loc=self._tensor(np.concatenate([[0], ends]).astype(np.int32)),
            max_query_len=int(counts.max()),
            max_seq_len=int(seq_lens.max()),
            cache=self.cache,
        )
        rows = self._tensor(ends[complete] - 1)
        return self.model.forward(self._tensor(np.array(tokens)), self._tensor(positions), batch, rows)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.model.device)
