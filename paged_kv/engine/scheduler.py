"""Decides which tokens are computed in the next step, and gives them their slots.

    waiting   no blocks, first come first served; a preempted request goes back to the front
    running   holds blocks, in order of admission

A step has a budget of tokens. Running requests come first: those that wait for one token only (decodes),
then those with more (chunks of prompts), each kind in order of admission. What is left goes to waiting
requests. When blocks run out, the newest running request is preempted: it gives back its blocks, keeps its
tokens, and computes them again later.

Why this ends: the oldest running request is never preempted for another, and alone it fits the pool, because
no request may be longer than the pool. So it finishes, and then the next one is the oldest.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from ..errors import OutOfBlocksError
from ..manager import AdmissionStatus, PagedKVCacheManager
from .request import Request

__all__ = ["ScheduledStep", "Scheduler"]


@dataclass
class ScheduledStep:
    """What to compute: `counts[i]` next tokens of `requests[i]`, packed in this order.

    slot_mapping: `[T]` int64, where the tokens' keys and values go.
    block_copies: (source, destination) blocks to copy before anything is written.
    """

    requests: list[Request] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    slots: list[np.ndarray] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def slot_mapping(self) -> np.ndarray:
        return np.concatenate(self.slots)

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)


class Scheduler:
    """Args:
    manager: gives out the blocks.
    max_batch_tokens: budget of a step, in tokens.
    max_num_seqs: most requests that run at once.
    """

    def __init__(self, manager: PagedKVCacheManager, max_batch_tokens: int, max_num_seqs: int) -> None:
        self.manager = manager
        self.max_batch_tokens = max_batch_tokens
        self.max_num_seqs = max_num_seqs
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def schedule(self) -> ScheduledStep:
        """Plans a step and reserves its slots. Without requests the step is empty."""
        step = ScheduledStep()
        num_preempted = self._schedule_running(step)
        if not num_preempted:  # blocks are short: who just lost them must not take them back at once
            self._admit_waiting(step)
        return step

    def release(self, request: Request) -> None:
        """Takes a finished or aborted request out; its blocks are free at once."""
        if request in self.running:
            self.running.remove(request)
            self.manager.free(request.request_id)
        else:
            self.waiting.remove(request)

    def requeue_all(self) -> None:
        """Takes the blocks of all running requests, whatever their state, and puts them first in line."""
        while self.running:
            self._requeue(self.running[-1])

    def _requeue(self, request: Request) -> None:
        self.running.remove(request)
        self.manager.free(request.request_id)
        request.num_computed = 0
        self.waiting.appendleft(request)

    def _schedule_running(self, step: ScheduledStep) -> int:
        num_preempted = 0
        while self.running:
            budget, requests, counts = self.max_batch_tokens, [], []
            for request in sorted(self.running, key=lambda request: request.num_pending > 1):
                if count := min(request.num_pending, budget):
                    requests.append(request)
                    counts.append(count)
                    budget -= count
            try:
                self._append(step, requests, counts)
                break
            except OutOfBlocksError:
                if len(self.running) == 1:
                    raise
                newest = self.running[-1]
                newest.num_preemptions += 1
                self._requeue(newest)
                num_preempted += 1
        self.num_preemptions += num_preempted
        return num_preempted

    def _admit_waiting(self, step: ScheduledStep) -> None:
        while self.waiting and len(self.running) < self.max_num_seqs:
            budget = self.max_batch_tokens - step.num_tokens
            request = self.waiting[0]
            if not budget or not self._leaves_room(request):
                break
            admission = self.manager.admit(request.request_id, request.token_ids)
            if admission.status is not AdmissionStatus.ADMITTED:
                if not self.running:  # others than requests hold the blocks: no step would bring them back
                    needed = -(-len(request.token_ids) // self.manager.block_size)
                    raise OutOfBlocksError(needed, self.manager.num_available_blocks)
                break
            self.running.append(self.waiting.popleft())
            request.num_computed = admission.num_cached_tokens
            self._append(step, [request], [min(request.num_pending, budget)])

    def _leaves_room(self, request: Request) -> bool:
        """Whether the running requests can still compute all their tokens and one more beside this one.

        Admission alone sees only blocks that are held, so without this a prompt would move in on blocks that
        a half-computed prompt or the next decode needs, and be preempted again soon.
        """
        size = self.manager.block_size

        def growth(tokens: int, held: int) -> int:
            return -(-tokens // size) - -(-held // size)

        promised = sum(growth(len(r.token_ids) + 1, self.manager.seq_len(r.request_id)) for r in self.running)
        return (
            growth(len(request.token_ids), 0) + promised <= self.manager.num_available_blocks
            or not self.running
        )

    def _append(self, step: ScheduledStep, requests: list[Request], counts: list[int]) -> None:
        tokens = [
            r.token_ids[r.num_computed : r.num_computed + n] for r, n in zip(requests, counts, strict=True)
        ]
        reserved = self.manager.append([r.request_id for r in requests], tokens)
        step.requests += requests
        step.counts += counts
        step.slots.append(reserved.slot_mapping)
        step.block_copies += reserved.block_copies
