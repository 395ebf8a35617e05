"""Computes one scheduled step: packs its tokens, runs the model. Moves blocks when the manager asks for it."""

from __future__ import annotations

from itertools import chain

import numpy as np
import torch
from torch import Tensor

from ..cache import PagedKVCache
from ..integrations.transformers import PagedBatch, PagedModel
from ..manager import PagedKVCacheManager
from .scheduler import Pairs, ScheduledStep

__all__ = ["ModelRunner"]


class ModelRunner:
    def __init__(
        self,
        model: PagedModel,
        cache: PagedKVCache,
        host_cache: PagedKVCache | None,
        manager: PagedKVCacheManager,
    ) -> None:
        self.model = model
        self.cache = cache
        self.host_cache = host_cache
        self.manager = manager

    def run(self, step: ScheduledStep) -> Tensor:
        """Logits `[R, vocab_size]` of the step's R tokens that need them, in the order of its work."""
        work = step.work
        counts = np.array([each.count for each in work])
        computed = np.array([each.sequence.num_computed for each in work])
        num_rows = np.array([each.num_rows for each in work])
        ends = counts.cumsum()
        tokens = list(
            chain.from_iterable(
                w.sequence.token_ids[w.sequence.num_computed : w.sequence.num_computed + w.count]
                + w.sequence.drafts
                for w in work
            )
        )
        positions = np.arange(len(tokens)) + np.repeat(computed - (ends - counts), counts)
        rows = np.arange(num_rows.sum()) + np.repeat(ends - num_rows.cumsum(), num_rows)
        seq_lens = computed + counts
        batch = PagedBatch(
            slot_mapping=self._tensor(step.slot_mapping),
            block_tables=self._tensor(self.manager.block_tables([w.sequence.seq_id for w in work])),
            seq_lens=self._tensor(seq_lens.astype(np.int32)),
            query_start_loc=self._tensor(np.concatenate([[0], ends]).astype(np.int32)),
            max_query_len=int(counts.max()),
            max_seq_len=int(seq_lens.max()),
            cache=self.cache,
        )
        return self.model.forward(
            self._tensor(np.array(tokens)), self._tensor(positions), batch, self._tensor(rows)
        )

    def copy(self, pairs: Pairs) -> None:
        self.cache.copy_blocks(pairs)

    def swap_out(self, pairs: Pairs) -> None:
        self.cache.swap_blocks(self.host_cache, pairs)

    def swap_in(self, pairs: Pairs) -> None:
        self.host_cache.swap_blocks(self.cache, pairs)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.model.device)
