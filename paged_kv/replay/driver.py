"""The replay: requests arrive, are admitted first come first served, decode one token a step, and leave.

A step first decodes all that run. Where there is no room for that, the one admitted last is preempted and waits at
the head of the queue; where there was, waiting requests are admitted as far as they fit. So the one admitted first
always goes on, and every request that fits at all comes to its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from .memory import Job, Memory
from .traces import Request


@dataclass
class Outcome:
    """What happened, in requests and tokens."""

    finished: int = 0
    refused: int = 0  # cannot be finished in the whole memory
    preemptions: int = 0
    steps: int = 0
    prompt_tokens: int = 0  # of all admitted requests
    cached_tokens: int = (
        0  # of these, found in the prefix cache; without what a preempted request finds again
    )
    new_tokens: int = 0  # of finished requests, one sequence each
    largest_batch: int = 0  # requests running at once
    batch_sum: int = 0  # requests that ran, over all steps
    crowded_steps: int = 0  # steps that left requests waiting
    crowded_batch_sum: int = 0

    @property
    def sustained_batch(self) -> float:
        """Mean number of requests running at once while others waited; over all steps, if none ever did."""
        if self.crowded_steps:
            return self.crowded_batch_sum / self.crowded_steps
        return self.batch_sum / self.steps if self.steps else 0.0

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def replay(
    requests: list[Request],
    memory: Memory,
    *,
    max_running: int | None = None,
    step_seconds: float = 0.0,
    on_step: Callable[[Outcome, list[Job]], None] = lambda outcome, running: None,
) -> Outcome:
    """Serves `requests`, which come in order of arrival.

    max_running: most requests at once.
    step_seconds: of the trace's time, that a step takes; with 0, every request is there from the beginning.
    on_step: called after each step, while what the step computed is still held.
    """
    outcome = Outcome()
    arriving = deque(Job(index, request) for index, request in enumerate(requests))
    waiting: deque[Job] = deque()
    running: list[Job] = []
    now = 0.0
    while arriving or waiting or running:
        if arriving and not waiting and not running:
            now = max(now, arriving[0].request.arrival)
        while arriving and (not step_seconds or arriving[0].request.arrival <= now):
            waiting.append(arriving.popleft())
        preempted = _decode(running, waiting, memory, outcome)
        if not preempted:
            _admit(running, waiting, memory, outcome, max_running)
        outcome.steps += bool(running)
        outcome.batch_sum += len(running)
        outcome.largest_batch = max(outcome.largest_batch, len(running))
        if waiting:
            outcome.crowded_steps += 1
            outcome.crowded_batch_sum += len(running)
        done = [job for job in running if job.generated == job.num_steps]
        outcome.finished += len(done)
        outcome.new_tokens += sum(job.request.answer.length for job in done)
        on_step(outcome, running)
        for job in done:
            memory.finish(job)
        if done:
            running = [job for job in running if job.generated < job.num_steps]
        now += step_seconds
    return outcome


def _decode(running: list[Job], waiting: deque[Job], memory: Memory, outcome: Outcome) -> bool:
    """A token for each running job; tells whether some had to be preempted for it."""
    preempted = False
    while running and not memory.decode(running):
        job = running.pop()
        memory.preempt(job)
        waiting.appendleft(job)
        outcome.preemptions += 1
        preempted = True
    for job in running:
        job.generated += 1
    return preempted


def _admit(
    running: list[Job], waiting: deque[Job], memory: Memory, outcome: Outcome, max_running: int | None
) -> None:
    while waiting and (max_running is None or len(running) < max_running):
        job = waiting[0]
        if not memory.fits(job.request):
            waiting.popleft()
            outcome.refused += 1
            continue
        num_cached = memory.admit(job)
        if num_cached is None:
            return
        waiting.popleft()
        running.append(job)
        if not job.admissions:
            outcome.prompt_tokens += job.request.prompt_len
            outcome.cached_tokens += num_cached
        job.admissions += 1
