"""How well a model predicts a text through a cache: what a quantised cache costs."""

import math
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from paged_kv.engine.request import Sequence as TokenSequence
from paged_kv.engine.runner import run_model
from paged_kv.engine.scheduler import ScheduledStep, Work
from paged_kv.integrations.transformers import PagedModel
from paged_kv.manager import PagedKVCacheManager

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
    paged, total, ids = PagedModel(model), 0.0, torch.tensor(token_ids)
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    cache = paged.new_cache(BLOCK_SIZE, num_blocks=num_blocks, dtype=cache_dtype)
    manager = PagedKVCacheManager(num_blocks, BLOCK_SIZE, prefix_cache=False)
    sequence = TokenSequence((0, 0), list(token_ids), num_prompt=len(token_ids), seed=0)
    manager.admit(sequence.seq_id, len(token_ids))
    while left := len(token_ids) - sequence.num_computed:
        count = min(chunk, left)
        slots = manager.append([sequence.seq_id], [count]).slot_mapping
        step = ScheduledStep([Work(None, sequence, count, num_rows=count)], [slots])
        logits = run_model(paged, cache, manager, step).float()
        sequence.num_computed += count
        targets = ids[sequence.num_computed - count + 1 :][:count].to(logits.device)
        logits = logits[: len(targets)]  # nothing follows the last token
        total += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
    return math.exp(total / (len(token_ids) - 1))
