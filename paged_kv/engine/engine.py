"""The loop: add requests at any time, call `step` until nothing is left.

add_request -> Scheduler (which tokens, which slots) -> run_model (logits) -> sample -> the sequences' tokens
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

from torch import Tensor

from .._arguments import check_instance, check_integer, check_token_ids
from ..cache import PagedKVCache
from ..integrations.transformers import PagedModel
from ..interrupts import interrupts_wait
from ..manager import PagedKVCacheManager
from .beams import BeamSearch
from .detokenizer import TextStream
from .drafts import PromptLookup
from .metrics import CacheUse, EngineMetrics
from .request import FinishReason, Request, Sequence
from .runner import run_model
from .sampler import ProcessorError, new_processors, process, sample, tell_logprobs
from .sampling_params import SamplingParams
from .scheduler import ScheduledStep, Scheduler
from .tracing import StepTrace

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Engine"]


class Engine:
    """Continuous batching of token ids; `LLM` is this with text around it. Not for several threads at once.

    Args:
        model: computes the logits.
        cache: the blocks of all layers.
        manager: who holds which of them; as many blocks, of the same size.
        host_cache: blocks to swap preempted requests to, as many as the manager's host blocks.
        eos_token_ids: tokens that end a sequence unless its request ignores them.
        tokenizer: makes text of tokens, and finds stop texts in it.
        max_model_len: tokens a sequence may have, the prompt included; None for as many as the model's
            context and the pool allow.
        max_batch_tokens: tokens computed in one step; longer prompts are computed in chunks.
        max_num_seqs: most sequences computed at once.

    Attributes:
        metrics, cache_use: what was done so far.
        trace: set it to a StepTrace to have the steps recorded.
    """

    def __init__(
        self,
        model: PagedModel,
        cache: PagedKVCache,
        manager: PagedKVCacheManager,
        *,
        host_cache: PagedKVCache | None = None,
        eos_token_ids: Collection[int] = (),
        tokenizer: PreTrainedTokenizerBase | None = None,
        max_model_len: int | None = None,
        max_batch_tokens: int = 512,
        max_num_seqs: int = 64,
    ) -> None:
        check_instance("model", model, PagedModel)
        check_instance("cache", cache, PagedKVCache)
        check_instance("manager", manager, PagedKVCacheManager)
        if host_cache is not None:
            check_instance("host_cache", host_cache, PagedKVCache)
        check_integer("max_batch_tokens", max_batch_tokens, 1)
        check_integer("max_num_seqs", max_num_seqs, 1)
        num_host_blocks = host_cache.num_blocks if host_cache else 0
        for name, got, expected in (
            ("num_blocks", cache.num_blocks, manager.num_blocks),
            ("block_size", cache.block_size, manager.block_size),
            ("host_cache", num_host_blocks, manager.stats().num_host_blocks),
        ):
            if got != expected:
                raise ValueError(f"{name}: expected {expected}, as the manager has, got {got}")
        if max_model_len is not None:
            check_integer("max_model_len", max_model_len, 2)
            if max_model_len > (model.context_length or max_model_len):
                raise ValueError(
                    f"max_model_len: expected 2 to {model.context_length} (the model's context), "
                    f"got {max_model_len}"
                )
        context = max_model_len or model.context_length
        # The last token of a sequence is never computed, so it needs no slot.
        pool = manager.num_blocks * manager.block_size + 1
        self.max_model_len = min(context, pool) if context else pool
        self.model = model
        self.cache = cache
        self.manager = manager
        self.tokenizer = tokenizer
        self.eos_token_ids = frozenset(eos_token_ids)
        self.metrics = EngineMetrics()
        self.cache_use = CacheUse(
            manager.block_size, cache.bytes_per_block // cache.block_size, context or self.max_model_len
        )
        self.trace: StepTrace | None = None
        self._scheduler = Scheduler(manager, cache, host_cache, max_batch_tokens, max_num_seqs)
        self._ids = count()

    def add_request(
        self,
        prompt_ids: SequenceOf[int],
        params: SamplingParams = SamplingParams(),  # noqa: B008 - frozen
        *,
        priority: int = 0,
        salt: str | None = None,
        on_token: Callable[[Request], None] | None = None,
    ) -> Request:
        """Queues a prompt. One that can never run comes back REFUSED, with the reason in `error`
        and one completion, an empty one.

        Args:
            prompt_ids: its tokens.
            params: how it is answered, and when that ends.
            priority: requests of a higher one are served first and preempted last.
            salt: the prefix cache is shared only among requests of the same salt.
            on_token: called after each step that brings the request on, and when it ends in a step. If it
                raises, its request ends with an error, and no other.
        """
        prompt_ids = check_token_ids("prompt_ids", prompt_ids)
        check_instance("params", params, SamplingParams)
        if not (on_token is None or callable(on_token)):
            raise TypeError(f"on_token: expected a function or None, got {on_token!r}")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise TypeError(f"priority: expected an integer, got {priority!r}")
        if not isinstance(salt, str | None):
            raise TypeError(f"salt: expected a text or None, got {salt!r}")
        if salt is not None and any("\ud800" <= character <= "\udfff" for character in salt):
            raise ValueError(f"salt: expected text that UTF-8 can encode, got {salt!r}")
        if params.stop and self.tokenizer is None:
            raise ValueError(f"stop: expected no texts where there is no tokenizer, got {params.stop!r}")
        stop = params.stop_token_ids if params.ignore_eos else self.eos_token_ids.union(params.stop_token_ids)
        # All sequences share the prompt's full blocks, and each needs its own from there on.
        shared = len(prompt_ids) // self.manager.block_size if params.num_seqs > 1 else 0
        per_seq = shared + max(0, self.manager.num_blocks - shared) // params.num_seqs
        longest = min(self.max_model_len, per_seq * self.manager.block_size + 1)
        max_len = min(len(prompt_ids) + params.max_tokens, longest)
        why = self._why_never(prompt_ids, params, longest)
        if why:  # it is answered once, however many sequences it asks for
            params = replace(params, n=1, best_of=None, beam_width=None)
        request = Request(
            next(self._ids), prompt_ids, params, stop, max_len, priority, salt=salt, on_token=on_token
        )
        if why:
            request.finish(FinishReason.REFUSED, why)
            self.metrics.finished[FinishReason.REFUSED.value] += 1
            return request
        request.processors = new_processors(params, len(prompt_ids), stop, self.model.device)
        if params.beam_width:
            request.beams = BeamSearch(request)
        for sequence in request.sequences:
            if self.tokenizer is not None:
                sequence.text_stream = TextStream(self.tokenizer, params.stop)
            if params.draft_tokens:
                sequence.lookup = PromptLookup()
        self._scheduler.add(request)
        return request

    @property
    def has_work(self) -> bool:
        return bool(self._scheduler.waiting or self._scheduler.running)

    @property
    def num_preemptions(self) -> int:
        return self._scheduler.num_preemptions

    def step(self) -> list[Request]:
        """Computes one batch. Returns the requests that got a token or ended; some are finished now.

        Where the model raises or is interrupted, every request goes back in line without blocks and the error is
        passed on: the pool is whole, and the next step starts over.
        """
        started = time.perf_counter()
        with interrupts_wait() as at_once:
            try:
                step = self._scheduler.schedule()
                if not step.work:
                    return []
                scheduled = time.perf_counter()
                self.cache_use.record(self.manager.stats())
                logits = at_once(run_model, self.model, self.cache, self.manager, step)
                computed = time.perf_counter()
                changed = self._advance(step, logits)
            except BaseException:
                self._scheduler.requeue_all()
                raise
        self._call_back(changed)
        self._note(step, started, scheduled, computed)
        return changed

    def abort(self, request: Request) -> None:
        """Ends a request now; its blocks are free at once. A finished one stays as it is."""
        check_instance("request", request, Request)
        self._end(request, FinishReason.ABORTED)

    # After the model has run

    def _advance(self, step: ScheduledStep, logits: Tensor) -> list[Request]:
        """Gives the sequences whose tokens are all computed their next ones."""
        logits = logits.float()
        best, likeliest = logits.max(-1)  # NaN where there is any
        finite, likeliest = best.isfinite().tolist(), likeliest.tolist()
        changed: dict[Request, None] = {}
        computed: dict[Sequence, None] = {}  # whose keys and values can be relied on
        beam_rows: dict[Request, list[int]] = {}
        row = 0
        for request, sequence, num_tokens, num_rows in step.work:
            rows = range(row, row + num_rows)
            row += num_rows
            if not all(finite[i] for i in rows):
                request.finish(FinishReason.ERROR, "the model's logits are not finite (NaN or infinite)")
                changed[request] = None
            if request.finished:
                continue
            sequence.num_computed += num_tokens
            computed[sequence] = None
            at_prompts_end = sequence.num_computed == len(request.prompt_ids)
            if at_prompts_end and len(request.live) > 1 and not request.forked:
                self._scheduler.fork(request)
            if not num_rows:
                continue
            changed[request] = None
            if request.beams:
                beam_rows.setdefault(request, []).append(rows[0])
                continue
            # At the end of the prompt, all sequences choose their first token.
            first = not sequence.num_new_tokens
            try:
                for each in list(request.live) if first and request.forked else [sequence]:
                    self._choose(request, each, rows, logits, likeliest)
            except ProcessorError as error:
                request.finish(FinishReason.ERROR, str(error))
        for request, rows in beam_rows.items():
            try:
                if not request.finished:
                    self._advance_beams(request, logits[rows])
            except ProcessorError as error:
                request.finish(FinishReason.ERROR, str(error))
        self._settle(changed, [sequence for sequence in computed if sequence.seq_id in self.manager])
        return list(changed)

    def _choose(
        self, request: Request, sequence: Sequence, rows: range, logits: Tensor, likeliest: list[int]
    ) -> None:
        """Adds the next token, and those after it for as long as the guesses are right."""
        params, drafts = request.params, sequence.drafts
        for i, row in enumerate(rows):
            if params.greedy and not request.processors:
                token = likeliest[row]
            else:
                token = sample(logits[row], sequence, params, request.processors)
            if params.logprobs is not None or params.best_of is not None:
                told = tell_logprobs(logits[row], token, params.logprobs or 0)
                sequence.score += told[token]
                if params.logprobs is not None:
                    sequence.logprobs.append(told)
            self._add_token(request, sequence, token)
            self.metrics.accepted_tokens += i > 0
            if sequence.finished or i == len(drafts) or token != drafts[i]:
                break
        self.metrics.drafted_tokens += len(drafts)
        if drafts:
            sequence.drafts = []
            sequence.num_computed = min(sequence.num_computed, len(sequence.token_ids) - 1)
            self.manager.rollback([sequence.seq_id], [sequence.num_computed])

    def _add_token(self, request: Request, sequence: Sequence, token: int) -> None:
        self._tell_time(request, sequence)
        sequence.token_ids.append(token)
        may_stop = sequence.num_new_tokens >= request.params.min_tokens
        stopped = sequence.text_stream is not None and sequence.text_stream.push(token, may_stop=may_stop)
        if stopped or (may_stop and token in request.stop_token_ids):
            sequence.finish(FinishReason.STOP)
        elif len(sequence.token_ids) >= request.max_len:
            sequence.finish(FinishReason.LENGTH)

    def _advance_beams(self, request: Request, logits: Tensor) -> None:
        beams, search = list(request.live), request.beams
        parents = beams[: len(logits)]  # the stem alone at first
        log_probs = logits.log_softmax(-1)
        if request.processors:
            log_probs = process(log_probs, parents, request.processors)
        next_beams = search.advance(parents, log_probs)
        self._tell_time(request, beams[0])
        if next_beams is None:
            request.finish(FinishReason.LENGTH)
            for hypothesis in search.finished if self.tokenizer is not None else []:
                hypothesis.text_stream = TextStream(self.tokenizer, ())
                for token in hypothesis.new_token_ids:
                    hypothesis.text_stream.push(token)
                hypothesis.text_stream.close()
            return
        tokens = [parents[parent].token_ids for parent, _, _ in next_beams]
        self.manager.reorder(
            [beam.seq_id for beam in beams], [parents[parent].seq_id for parent, _, _ in next_beams]
        )
        for beam, before, (_, token, score) in zip(beams, tokens, next_beams, strict=True):
            beam.token_ids = [*before, token]
            beam.score = score

    def _settle(self, changed: Collection[Request], computed: list[Sequence]) -> None:
        """Publishes what is computed, then frees what has finished."""
        if computed:
            self.manager.commit([sequence.seq_id for sequence in computed])
        for request in changed:
            for sequence in request.sequences:
                if sequence.finished and sequence.seq_id in self.manager:
                    self.metrics.finished[sequence.finish_reason.value] += 1
            if request.finished:
                self._scheduler.remove(request)
            else:
                for sequence in [sequence for sequence in request.live if sequence.finished]:
                    self._scheduler.release(request, sequence)

    def _call_back(self, changed: list[Request]) -> None:
        for request in changed:
            if request.on_token is not None:
                try:
                    request.on_token(request)
                except Exception as error:
                    self._end(request, FinishReason.ERROR, f"its callback raised {error!r}")

    def _end(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        with interrupts_wait():
            if not request.finished:
                self.metrics.finished[reason.value] += len(request.live)
                request.finish(reason, error)
                self._scheduler.remove(request)

    def _why_never(self, prompt_ids: list[int], params: SamplingParams, longest: int) -> str | None:
        scheduler = self._scheduler
        if not prompt_ids:
            return "the prompt is empty"
        if len(prompt_ids) >= longest:
            pool = self.manager.num_blocks * self.manager.block_size + 1
            limit = "the context" if longest == self.max_model_len < pool else "the whole pool of blocks"
            each = f" for each of {params.num_seqs} sequences" if params.num_seqs > 1 else ""
            return (
                f"the prompt has {len(prompt_ids)} tokens; {limit} holds {longest}{each}, "
                "at least one new token included"
            )
        if not 0 <= min(prompt_ids) <= max(prompt_ids) < self.model.vocab_size:
            place = next(i for i, token in enumerate(prompt_ids) if not 0 <= token < self.model.vocab_size)
            return (
                f"token {place} of the prompt has the id {prompt_ids[place]}; "
                f"the model's vocabulary has 0 to {self.model.vocab_size - 1}"
            )
        if params.num_seqs > scheduler.max_num_seqs:
            return f"it asks for {params.num_seqs} sequences; max_num_seqs is {scheduler.max_num_seqs}"
        if params.beam_width and params.beam_width > self.model.vocab_size:
            return f"it asks for {params.beam_width} beams; the vocabulary has {self.model.vocab_size} tokens"
        if params.beam_width and params.beam_width > scheduler.max_batch_tokens:
            return f"it asks for {params.beam_width} beams; max_batch_tokens is {scheduler.max_batch_tokens}"
        return None

    # What is told

    def _tell_time(self, request: Request, sequence: Sequence) -> None:
        now, metrics = time.perf_counter(), self.metrics
        if sequence.last_token_at is not None:
            metrics.inter_token_latency.observe(now - sequence.last_token_at)
        elif sequence is request.sequences[0]:
            metrics.time_to_first_token.observe(now - request.arrived_at)
            metrics.prompt_tokens += len(request.prompt_ids)
            metrics.cached_tokens += request.num_cached_tokens
        sequence.last_token_at = now
        metrics.new_tokens += 1

    def _note(self, step: ScheduledStep, started: float, scheduled: float, computed: float) -> None:
        metrics, scheduler, stats = self.metrics, self._scheduler, self.manager.stats()
        for work in step.work:
            if work.request.started_at is None:
                work.request.started_at = scheduled
                metrics.queue_time.observe(scheduled - work.request.arrived_at)
        preempted = scheduler.num_preemptions - metrics.recomputed - metrics.swapped
        ended = time.perf_counter()
        metrics.num_steps += 1
        metrics.step_seconds += ended - started
        metrics.model_seconds += computed - scheduled
        metrics.computed_tokens += step.num_tokens
        metrics.recomputed, metrics.swapped = scheduler.num_recomputed, scheduler.num_swapped
        metrics.num_running = sum(len(request.live) for request in scheduler.running)
        metrics.num_waiting = len(scheduler.waiting)
        metrics.cache_use = stats.num_used_blocks / stats.num_blocks
        if self.trace is None:
            return
        told = {
            "sequences": len(step.work),
            "tokens": step.num_tokens,
            "decodes": sum(work.num_rows == work.count == 1 for work in step.work),
            "chunks": [work.count for work in step.work if work.count > 1],
            "blocks": stats.num_used_blocks,
        }
        self.trace.span("step", started, ended, **told)
        self.trace.span("schedule", started, scheduled)
        self.trace.span("model", scheduled, computed)
        self.trace.span("sample", computed, ended)
        self.trace.count("sequences", ended, running=metrics.num_running, waiting=metrics.num_waiting)
        self.trace.count("blocks", ended, used=stats.num_used_blocks, evictable=stats.num_evictable_blocks)
        if preempted:
            self.trace.mark("preempted", scheduled, requests=preempted)
