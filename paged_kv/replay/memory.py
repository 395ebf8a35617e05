"""What a replay drives: the block manager, and the contiguous allocators that it is compared with.

A `Job` is a request on its way; it becomes one sequence, or `group_size` of them (samples, beams) after its prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from ..errors import OutOfBlocksError
from ..manager import AdmissionStatus, PagedKVCacheManager
from .beams import Beams
from .traces import ID_RANGE, Request

SAMPLE_STRIDE = 16_777_259  # between the answers of a request's samples, which are never the same tokens


@dataclass(eq=False)
class Job:
    """A request, and how much of its answer has been computed so far."""

    index: int
    request: Request
    generated: int = 0
    admissions: int = 0
    num_steps: int = field(
        init=False
    )  # the prompt's step gives a token too, and the last is never computed on

    def __post_init__(self) -> None:
        self.num_steps = self.request.answer.length - 1

    def tokens(self) -> np.ndarray:
        """The prompt and what has been generated, [n] int32."""
        prompt = self.request.prompt_tokens()
        if not self.generated:
            return prompt
        return np.concatenate([prompt, self.request.answer.tokens()[: self.generated]])

    def next_token(self, sample: int = 0) -> int:
        return (self.request.answer.start + self.generated + sample * SAMPLE_STRIDE) % ID_RANGE


class Usage(NamedTuple):
    """What the slots are used for now."""

    tokens: int  # slots holding a token of a running sequence; a shared one counts once
    waste: int  # allocated slots holding no token
    cached: int  # slots of evictable blocks
    free: int
    saved: int = 0  # slots that sharing saves
    num_sequences: int = 0


class Memory(Protocol):
    """What the replay asks of a cache."""

    def fits(self, request: Request) -> bool:
        """Whether the request could be finished if it were alone."""

    def admit(self, job: Job) -> int | None:
        """Takes the job in with its prompt computed: tokens found in the prefix cache. None: not now."""

    def decode(self, jobs: list[Job]) -> bool:
        """One more token for each sequence of all running jobs. False: no room, and nothing was done."""

    def preempt(self, job: Job) -> None:
        """Takes back what the job holds, to be admitted again."""

    def finish(self, job: Job) -> None:
        """Takes back what the job holds, for good."""

    def usage(self) -> Usage: ...


@dataclass
class Times:
    """Seconds of CPU time spent in calls of the manager: what else runs on the machine does not count."""

    prompt: float = 0.0  # admission, slots for the prompt, publishing it, forks
    decode: list[tuple[float, int]] = field(default_factory=list)  # of each decode step, with its sequences
    release: float = 0.0  # free, preempt

    @property
    def per_slot(self) -> float | None:
        """Median over all slots of what each took: its step's time over the step's sequences."""
        if not self.decode:
            return None
        seconds, counts = np.array(sorted((s / n, n) for s, n in self.decode)).T
        return float(seconds[np.searchsorted(counts.cumsum(), counts.sum() / 2)])

    def per_prompt_block(self, num_blocks: int) -> float | None:
        """With release, at which what is put off while a prompt runs, such as hashing, is done at the latest."""
        return (self.prompt + self.release) / num_blocks if num_blocks else None

    @contextmanager
    def of(self, kind: str) -> Iterator[None]:
        started = time.thread_time()
        try:
            yield
        finally:
            setattr(self, kind, getattr(self, kind) + time.thread_time() - started)


class PagedMemory:
    """The block manager. Single sequences are preempted by recomputation, groups by swapping, as in vLLM's paper."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_cache: bool = True,
        group_size: int = 1,
        beams: bool = False,
    ) -> None:
        # Many groups can be out at once, each as large as it had grown by then.
        num_host_blocks = 8 * num_blocks if group_size > 1 else 0
        self.manager = PagedKVCacheManager(
            num_blocks, block_size, prefix_cache=prefix_cache, num_host_blocks=num_host_blocks
        )
        self.group_size = group_size
        self.beams = Beams(group_size) if beams else None
        self.times = Times()
        self.num_prompt_blocks = 0  # allocated for prompts
        self.most_shared_blocks = 0  # by more than one holder, at a moment when usage was asked for
        self.num_table_entries = self.num_runs = 0  # of finished sequences' block tables
        self._jobs: list[Job] = []  # of the last decode step, whose seq_ids are
        self._seq_ids: list[int] = []
        self._swapped: set[Job] = set()
        self._refused: Job | None = None  # is asked for again at once after every step
        self._refused_tokens = np.zeros(0, np.int32)

    def seq_ids(self, job: Job) -> list[int]:
        return list(range(job.index * self.group_size, (job.index + 1) * self.group_size))

    def num_blocks(self, request: Request) -> int:
        """Blocks that the request takes at its end, alone."""
        size = self.manager.block_size
        shared = request.prompt_len // size if self.group_size > 1 else 0
        own = -(-request.num_tokens // size) - shared
        return shared + own * self.group_size

    def fits(self, request: Request) -> bool:
        return self.num_blocks(request) <= self.manager.num_blocks

    def admit(self, job: Job) -> int | None:
        if job in self._swapped:
            return self._swap_in(job)
        manager, size = self.manager, self.manager.block_size
        tokens = self._refused_tokens if job is self._refused else job.tokens()
        seq_id, *children = self.seq_ids(job)
        with self.times.of("prompt"):
            admission = manager.admit(seq_id, tokens)
            if admission.status is not AdmissionStatus.ADMITTED:
                self._refused, self._refused_tokens = job, tokens
                return None
            manager.append([seq_id], [tokens[admission.num_cached_tokens :]])
            manager.commit([seq_id])
            for child in children:
                manager.fork(seq_id, child)
        self.num_prompt_blocks += -(-len(tokens) // size) - admission.num_cached_tokens // size
        return admission.num_cached_tokens

    def decode(self, jobs: list[Job]) -> bool:
        if jobs != self._jobs:
            self._jobs = list(jobs)
            self._seq_ids = [seq_id for job in jobs for seq_id in self.seq_ids(job)]
        seq_ids, manager = self._seq_ids, self.manager
        tokens = np.array(
            [[job.next_token(sample)] for job in jobs for sample in range(self.group_size)], np.int32
        )
        started = time.thread_time()
        try:
            manager.append(seq_ids, tokens)
        except OutOfBlocksError:
            return False
        manager.commit(seq_ids)
        seconds = time.thread_time() - started
        if self.beams is not None:
            parents = [seq_ids[parent] for parent in self.beams.choose([job.index for job in jobs])]
            started = time.thread_time()
            manager.reorder(seq_ids, parents)
            seconds += time.thread_time() - started
        self.times.decode.append((seconds, len(seq_ids)))
        return True

    def preempt(self, job: Job) -> None:
        with self.times.of("release"):
            if self.group_size == 1:
                self.manager.preempt(job.index)
            else:
                self.manager.swap_out(self.seq_ids(job))
                self._swapped.add(job)

    def _swap_in(self, job: Job) -> int | None:
        with self.times.of("release"):
            try:
                self.manager.swap_in(self.seq_ids(job))
            except OutOfBlocksError:
                return None
        self._swapped.remove(job)
        return 0

    def finish(self, job: Job) -> None:
        seq_ids = self.seq_ids(job)
        for seq_id in seq_ids:
            self._note_runs(self.manager.block_tables([seq_id])[0])
        with self.times.of("release"):
            for seq_id in seq_ids:
                self.manager.free(seq_id)
        if self.beams is not None:
            self.beams.forget(job.index)

    def _note_runs(self, table: np.ndarray) -> None:
        self.num_table_entries += len(table)
        self.num_runs += 1 + int(np.count_nonzero(np.diff(table) != 1))

    def usage(self) -> Usage:
        stats = self.manager.stats()
        self.most_shared_blocks = max(self.most_shared_blocks, stats.num_shared_blocks)
        size = self.manager.block_size
        return Usage(
            tokens=stats.num_held_tokens,
            waste=stats.num_used_slots - stats.num_held_tokens,
            cached=stats.num_evictable_blocks * size,
            free=stats.num_free_blocks * size,
            saved=stats.num_saved_blocks * size,
            num_sequences=stats.num_sequences,
        )


class ContiguousMemory:
    """Reserves a contiguous region for every sequence's whole life: `reserve` gives its slots.

    Only sizes are counted, as if regions never left gaps between them: real ones do better at no time.
    """

    def __init__(self, num_slots: int, reserve: Callable[[Request], int], *, group_size: int = 1) -> None:
        self.num_slots = num_slots
        self.reserve = reserve
        self.group_size = group_size
        self._reserved = self._tokens = self._num_sequences = 0

    def _slots(self, job: Job) -> tuple[int, int]:
        """Reserved, and holding a token."""
        return self.group_size * self.reserve(job.request), self.group_size * (
            job.request.prompt_len + job.generated
        )

    def fits(self, request: Request) -> bool:
        return self.group_size * self.reserve(request) <= self.num_slots

    def admit(self, job: Job) -> int | None:
        reserved, tokens = self._slots(job)
        if self._reserved + reserved > self.num_slots:
            return None
        self._reserved += reserved
        self._tokens += tokens
        self._num_sequences += self.group_size
        return 0

    def decode(self, jobs: list[Job]) -> bool:
        self._tokens += self.group_size * len(jobs)
        return True

    def preempt(self, job: Job) -> None:
        raise AssertionError("what is reserved for a whole life is never short of room")

    def finish(self, job: Job) -> None:
        reserved, tokens = self._slots(job)
        self._reserved -= reserved
        self._tokens -= tokens
        self._num_sequences -= self.group_size

    def usage(self) -> Usage:
        return Usage(
            tokens=self._tokens,
            waste=self._reserved - self._tokens,
            cached=0,
            free=self.num_slots - self._reserved,
            num_sequences=self._num_sequences,
        )
