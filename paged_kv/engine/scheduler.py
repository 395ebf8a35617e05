"""Decides which tokens are computed in the next step, and gives them their slots.

    waiting   no blocks, or swapped to the host; in order of priority, then first come first served
    running   holds blocks, in the same order

A step has a budget of tokens. Running requests come first: the sequences that wait for one token only
(decodes), then those with more (chunks of prompts), and guesses take what is left of that. The rest goes to
waiting requests. When blocks run out, guesses are dropped, and then the last running request is preempted: its
blocks go to the host if there is room, or are given back and computed again later. Its tokens stay.

Why this ends: the first of the running requests is never preempted for another, and alone it fits the pool,
because no request may need more than the pool. So each step brings it on, it finishes, and another is the first.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..cache import PagedKVCache
from ..errors import OutOfBlocksError, OutOfHostBlocksError
from ..manager import AdmissionStatus, PagedKVCacheManager
from ..manager.chain import ContentKey
from .request import Request, Sequence

__all__ = ["ScheduledStep", "Scheduler", "Work"]


class Work(NamedTuple):
    """The next `count` tokens of a sequence, its guesses included; the last `num_rows` of them need logits."""

    request: Request
    sequence: Sequence
    count: int
    num_rows: int

    @property
    def tokens(self) -> list[int]:
        start = self.sequence.num_computed
        return self.sequence.token_ids[start : start + self.count] + self.sequence.drafts


@dataclass
class ScheduledStep:
    """What to compute, packed in this order, and `[T]` int64 slots where keys and values go."""

    work: list[Work] = field(default_factory=list)
    slots: list[np.ndarray] = field(default_factory=list)

    @property
    def slot_mapping(self) -> np.ndarray:
        return self.slots[0] if len(self.slots) == 1 else np.concatenate(self.slots)

    @property
    def num_tokens(self) -> int:
        return sum(work.count for work in self.work)


class Scheduler:
    """Args:
    manager: gives out the blocks.
    cache, host_cache: where its copies and swaps are carried out, at once.
    max_batch_tokens: budget of a step, in tokens.
    max_num_seqs: most sequences that run at once.
    """

    def __init__(
        self,
        manager: PagedKVCacheManager,
        cache: PagedKVCache,
        host_cache: PagedKVCache | None,
        max_batch_tokens: int,
        max_num_seqs: int,
    ) -> None:
        self.manager = manager
        self.cache = cache
        self.host_cache = host_cache
        self.max_batch_tokens = max_batch_tokens
        self.max_num_seqs = max_num_seqs
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_recomputed = 0  # preemptions that gave the blocks back
        self.num_swapped = 0  # and those that moved them to the host

    @property
    def num_preemptions(self) -> int:
        return self.num_recomputed + self.num_swapped

    def add(self, request: Request) -> None:
        insort(self.waiting, request, key=lambda other: other.order)

    def schedule(self) -> ScheduledStep:
        """Plans a step and reserves its slots. Without requests the step is empty.

        Raises OutOfBlocksError where blocks that others than requests hold keep the first request from running.
        """
        step = ScheduledStep()
        num_preempted = self._schedule_running(step)
        if not num_preempted:  # blocks are short: who just lost them must not take them back at once
            self._admit_waiting(step)
        return step

    def fork(self, request: Request) -> None:
        """The prompt is computed: the other unfinished sequences go on from the stem."""
        stem, *others = request.live
        for sequence in others:
            self.manager.fork(stem.seq_id, sequence.seq_id)
            sequence.num_computed = stem.num_computed
        request.forked = True

    def release(self, request: Request, sequence: Sequence) -> None:
        """Frees a sequence that has just finished, and takes out its request when it was the last."""
        request.live.remove(sequence)
        if sequence.seq_id in self.manager:
            self.manager.free(sequence.seq_id)
        if not request.live:
            self.running.remove(request)

    def remove(self, request: Request) -> None:
        """Takes out a request, wherever it is; its blocks are free at once."""
        (self.running if request in self.running else self.waiting).remove(request)
        self._free(request)

    def requeue_all(self) -> None:
        """Takes all blocks of all requests, whatever their state, and lets the unfinished ones wait."""
        for request in self.waiting:
            self._free(request)
        for request in self.running:
            self._free(request)
            request.live = [sequence for sequence in request.live if not sequence.finished]
            if request.live:
                self.add(request)
        self.running.clear()

    def _free(self, request: Request) -> None:
        for sequence in request.sequences:
            if sequence.seq_id in self.manager:
                self.manager.free(sequence.seq_id)
            sequence.num_computed = 0
        request.forked = request.swapped = False

    # Those that run

    def _schedule_running(self, step: ScheduledStep) -> int:
        num_preempted, drafting = 0, True
        while self.running:
            work = self._plan(drafting)
            try:
                self._append(step, work)
                break
            except OutOfBlocksError:
                if drafting and any(each.sequence.drafts for each in work):
                    drafting = False
                elif len(self.running) > 1:
                    self._preempt(self.running.pop())
                    num_preempted += 1
                else:
                    raise
        return num_preempted

    def _plan(self, drafting: bool) -> list[Work]:
        budget = self.max_batch_tokens
        decodes: list[tuple[Request, Sequence]] = []
        prompts: list[tuple[Request, Sequence, int]] = []
        for request in self.running:
            wants = request.wants()
            ready = [(request, sequence) for sequence, count in wants if count == 1]
            prompts += [(request, sequence, count) for sequence, count in wants if count > 1]
            if request.beams and len(ready) > budget:  # all or none
                continue
            decodes += ready[:budget]
            budget -= len(ready[:budget])
        chunks = []
        for request, sequence, count in prompts:
            if count := min(count, budget):
                chunks.append(self._work(request, sequence, count))
                budget -= count
        work = []
        for request, sequence in decodes:
            guesses = []
            if drafting and sequence.lookup is not None and sequence.num_new_tokens and budget:
                left = request.max_len - len(sequence.token_ids) - 1  # the last token is never a guess
                most = min(request.params.draft_tokens, left, budget)
                guesses = sequence.lookup.guess(sequence.token_ids, most)
                budget -= len(guesses)
            work.append(self._work(request, sequence, 1, guesses))
        return work + chunks

    @staticmethod
    def _work(request: Request, sequence: Sequence, count: int, guesses: Iterable[int] = ()) -> Work:
        complete = sequence.num_computed + count == len(sequence.token_ids)
        sequence.drafts = list(guesses) if complete else []
        num_drafts = len(sequence.drafts)
        return Work(request, sequence, count + num_drafts, 1 + num_drafts if complete else 0)

    def _append(self, step: ScheduledStep, work: list[Work]) -> None:
        if not work:
            return
        tokens = [each.tokens for each in work]
        if all(each.count == 1 for each in work):
            tokens = np.array(tokens, np.int32)  # quicker
        reserved = self.manager.append([each.sequence.seq_id for each in work], tokens)
        if reserved.block_copies:
            self.cache.copy_blocks(reserved.block_copies)
        step.work += work
        step.slots.append(reserved.slot_mapping)

    def _preempt(self, request: Request) -> None:
        request.num_preemptions += 1
        seq_ids = [sequence.seq_id for sequence in request.resident]
        try:
            if self.host_cache is not None:
                self.cache.swap_blocks(self.host_cache, self.manager.swap_out(seq_ids))
                request.swapped = True
                self.num_swapped += 1
        except OutOfHostBlocksError:
            pass
        if not request.swapped:
            self.num_recomputed += 1
            self.manager.preempt(seq_ids[0])
            self._free(request)
        self.add(request)

    # Those that wait

    def _admit_waiting(self, step: ScheduledStep) -> None:
        while self.waiting:
            request = self.waiting[0]
            budget = self.max_batch_tokens - step.num_tokens
            num_seqs = sum(len(running.live) for running in self.running)
            if not budget or (self.running and num_seqs + len(request.live) > self.max_num_seqs):
                break
            if not self._leaves_room(request):
                break
            if not (self._swap_in(request) if request.swapped else self._admit(request)):
                break
            self.waiting.remove(request)
            insort(self.running, request, key=lambda other: other.order)
            if request.swapped:
                request.swapped = False  # its next tokens are computed with those of the others
                if not step.work:
                    self._schedule_running(step)
                continue
            sequence, count = request.wants()[0]
            try:
                self._append(step, [self._work(request, sequence, min(count, budget))])
            except OutOfBlocksError:  # what admission promised is gone, to a pin for instance
                self.running.remove(request)
                self._free(request)
                self.add(request)
                break

    def _admit(self, request: Request) -> bool:
        stem = request.live[0]
        prompt = request.prompt_ids if len(request.live) > 1 else stem.token_ids
        keys = [] if request.salt is None else [ContentKey("salt", request.salt)]
        admission = self.manager.admit(stem.seq_id, prompt, keys=keys)
        if admission.status is not AdmissionStatus.ADMITTED:
            if not self.running:  # others than requests hold the blocks: no step would bring them back
                needed = -(-len(prompt) // self.manager.block_size)
                raise OutOfBlocksError(needed, self.manager.num_available_blocks)
            return False
        stem.num_computed = admission.num_cached_tokens
        if not request.num_preemptions:
            request.num_cached_tokens = admission.num_cached_tokens
        return True

    def _swap_in(self, request: Request) -> bool:
        try:
            pairs = self.manager.swap_in([sequence.seq_id for sequence in request.resident])
        except OutOfBlocksError:
            if not self.running:
                raise
            return False
        self.host_cache.swap_blocks(self.cache, pairs)
        return True

    def _leaves_room(self, request: Request) -> bool:
        """Whether the running requests can still compute all their tokens and one more beside this one.

        Admission alone sees only blocks that are held, so without this a prompt would move in on blocks that
        a half-computed prompt or the next decode needs, and be preempted again soon.
        """
        if not self.running:
            return True
        promised = sum(self._num_blocks(other, held=True) for other in self.running)
        return self._num_blocks(request, held=False) + promised <= self.manager.num_available_blocks

    def _num_blocks(self, request: Request, held: bool) -> int:
        """Blocks for all tokens of a request, beyond those that it has."""
        size = self.manager.block_size
        shared = len(request.prompt_ids) // size if len(request.live) > 1 else 0

        def num_blocks(lens: Iterable[int]) -> int:
            return shared + sum(-(-length // size) - shared for length in lens)

        if not held:
            return num_blocks(len(sequence.token_ids) for sequence in request.live)
        # One that runs gets room for one more token.
        return num_blocks(len(sequence.token_ids) + 1 for sequence in request.live) - num_blocks(
            self.manager.seq_len(sequence.seq_id) for sequence in request.resident
        )
