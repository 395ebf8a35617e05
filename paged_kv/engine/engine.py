"""The loop: add requests at any time, call `step` until nothing is left.

add_request -> Scheduler (which tokens, which slots) -> ModelRunner (logits) -> sample -> the request's tokens
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import count
from operator import index

from ..cache import PagedKVCache
from ..integrations.transformers import PagedModel
from ..manager import PagedKVCacheManager
from .metrics import CacheUse
from .request import FinishReason, Request
from .runner import ModelRunner
from .sampler import sample
from .sampling_params import SamplingParams
from .scheduler import ScheduledStep, Scheduler

__all__ = ["Engine"]


class Engine:
    """Continuous batching of token ids; `LLM` is this with text around it.

    Args:
        model: computes the logits.
        cache: the blocks of all layers.
        manager: who holds which of them; as many blocks, of the same size.
        eos_token_ids: tokens that end a request unless it ignores them.
        max_model_len: tokens a sequence may have, the prompt included; None for as many as the model's
            context and the pool allow.
        max_batch_tokens: tokens computed in one step; longer prompts are computed in chunks.
        max_num_seqs: most sequences computed at once.
    """

    def __init__(
        self,
        model: PagedModel,
        cache: PagedKVCache,
        manager: PagedKVCacheManager,
        *,
        eos_token_ids: Collection[int] = (),
        max_model_len: int | None = None,
        max_batch_tokens: int = 512,
        max_num_seqs: int = 64,
    ) -> None:
        self.model = model
        self.manager = manager
        self.eos_token_ids = frozenset(eos_token_ids)
        for name, value in (("max_batch_tokens", max_batch_tokens), ("max_num_seqs", max_num_seqs)):
            if value < 1:
                raise ValueError(f"{name}: expected 1 or more, got {value}")
        if max_model_len is not None and not 2 <= max_model_len <= (model.context_length or max_model_len):
            raise ValueError(
                f"max_model_len: expected 2 to {model.context_length} (the model's context), "
                f"got {max_model_len}"
            )
        context = max_model_len or model.context_length
        # The last token of a sequence is never computed, so it needs no slot.
        pool = manager.num_blocks * manager.block_size + 1
        self.max_model_len = min(context, pool) if context else pool
        self._limit = "the whole pool of blocks" if self.max_model_len == pool else "the context"
        self._scheduler = Scheduler(manager, max_batch_tokens, max_num_seqs)
        self._runner = ModelRunner(model, cache, manager)
        self._ids = count()
        self.cache_use = CacheUse(
            block_size=manager.block_size,
            bytes_per_token=cache.bytes_per_block // cache.block_size,
            reserved_per_sequence=context or self.max_model_len,
        )

    def add_request(self, prompt_ids: Sequence[int], params: SamplingParams = SamplingParams()) -> Request:  # noqa: B008
        """Queues a prompt. One that can never run comes back REFUSED, with the reason in `error`."""
        prompt_ids = [
            index(token) for token in prompt_ids
        ]  # whatever stands for an integer, and nothing else
        stop = params.stop_token_ids if params.ignore_eos else self.eos_token_ids.union(params.stop_token_ids)
        max_len = min(len(prompt_ids) + params.max_tokens, self.max_model_len)
        request = Request(next(self._ids), prompt_ids, params, stop, max_len)
        request.error = self._why_never(prompt_ids)
        if request.error:
            request.finish_reason = FinishReason.REFUSED
        else:
            self._scheduler.add(request)
        return request

    @property
    def has_work(self) -> bool:
        return bool(self._scheduler.waiting or self._scheduler.running)

    @property
    def num_preemptions(self) -> int:
        return self._scheduler.num_preemptions

    def step(self) -> list[Request]:
        """Computes one batch. Returns the requests that got a token; some of them are finished now.

        Where the model raises, every request goes back in line without blocks and the error is passed on: the
        pool is whole, and the next step starts over.
        """
        step = self._scheduler.schedule()
        if not step.requests:
            return []
        try:
            self.cache_use.record(self.manager.stats())
            return self._compute(step)
        except BaseException:
            self._scheduler.requeue_all()
            raise

    def abort(self, request: Request) -> None:
        """Ends a request now; its blocks are free at once. A finished one stays as it is."""
        if not request.finished:
            request.finish_reason = FinishReason.ABORTED
            self._scheduler.release(request)

    def _compute(self, step: ScheduledStep) -> list[Request]:
        logits = self._runner.run(step)
        complete = []
        for request, num_tokens in zip(step.requests, step.counts, strict=True):
            request.num_computed += num_tokens
            if not request.num_pending:
                complete.append(request)
        tokens = sample(
            logits,
            [request.params for request in complete],
            [request.seed for request in complete],
            [request.num_new_tokens for request in complete],
        )
        for request, token in zip(complete, tokens, strict=True):
            request.add_token(token)
            if request.finished:
                self._scheduler.release(request)
        return complete

    def _why_never(self, prompt_ids: list[int]) -> str | None:
        if not prompt_ids:
            return "the prompt is empty"
        if len(prompt_ids) >= self.max_model_len:
            return (
                f"the prompt has {len(prompt_ids)} tokens; {self._limit} holds {self.max_model_len}, "
                "at least one new token included"
            )
        if not 0 <= min(prompt_ids) <= max(prompt_ids) < self.model.vocab_size:
            return f"the prompt has token ids outside [0, {self.model.vocab_size})"
        return None
