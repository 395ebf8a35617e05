"""A block manager after nano-vllm's design as a worker: see manager_worker.py. It stands for nano-vllm, of which PyPI
has forks only, and is not its code.

What is taken from there (https://github.com/GeeeekExplorer/nano-vllm, nanovllm/engine/block_manager.py, 2025): one
call a sequence; tokens in Python lists, cut block by block; a chain of 64-bit xxHashes over them, and equal tokens as
the proof of a hit; free blocks in one deque, the head of which is handed out next and forgets its content only then,
while a free block that is found is removed from wherever it stands, which takes a walk through the deque; a prompt is
admitted if it fits without any hit, and may be found up to its last token.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import xxhash
from manager_worker import Job, Request, Times, serve

NO_HASH = -1


@dataclass
class Block:
    ref_count: int = 0
    hash: int = NO_HASH  # of its tokens and all before them, once it is full
    tokens: list[int] = field(default_factory=list)


@dataclass
class Sequence:
    tokens: list[int]
    table: list[int] = field(default_factory=list)
    num_slots: int = 0


def chained_hash(previous: int, tokens: list[int]) -> int:
    state = xxhash.xxh64()
    if previous != NO_HASH:
        state.update(previous.to_bytes(8, "little"))
    state.update(np.array(tokens).tobytes())
    return state.intdigest()


class NanoMemory:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks = [Block() for _ in range(num_blocks)]
        self.free = deque(range(num_blocks))
        self.used: set[int] = set()
        self.found: dict[int, int] = {}  # hash: block
        self.sequences: dict[Job, Sequence] = {}
        self.times = Times()
        self.num_prompt_blocks = 0
        self._spent = 0.0  # in decode steps that found no room

    def fits(self, request: Request) -> bool:
        return -(-request.num_tokens // self.block_size) <= len(self.blocks)

    def admit(self, job: Job) -> int | None:
        sequence = Sequence(job.tokens().tolist())
        with self.times.of("prompt"):
            num_blocks = -(-len(sequence.tokens) // self.block_size)
            if num_blocks > len(self.free):
                return None
            num_cached = self._allocate(sequence, num_blocks)
        self.sequences[job] = sequence
        self.num_prompt_blocks += num_blocks - num_cached
        return num_cached * self.block_size

    def decode(self, jobs: list[Job]) -> bool:
        steps = [
            (self.sequences[job], job.next_token(), job.request.prompt_len + job.generated + 1)
            for job in jobs
        ]
        started = time.thread_time()
        for sequence, token, length in steps:
            # A sequence that found no room, or stood before one that didn't, has its token already.
            if len(sequence.tokens) < length:
                sequence.tokens.append(token)
            if sequence.num_slots < length and not self._append(sequence):
                self._spent += time.thread_time() - started
                return False
        self.times.decode.append((self._spent + time.thread_time() - started, len(jobs)))
        self._spent = 0.0
        return True

    def preempt(self, job: Job) -> None:
        self.finish(job)

    def finish(self, job: Job) -> None:
        with self.times.of("release"):
            for block_id in reversed(self.sequences.pop(job).table):
                block = self.blocks[block_id]
                block.ref_count -= 1
                if not block.ref_count:
                    self.used.remove(block_id)
                    self.free.append(block_id)

    def _allocate(self, sequence: Sequence, num_blocks: int) -> int:
        """Blocks for all tokens; tells how many were found."""
        size, digest, num_found, missed = self.block_size, NO_HASH, 0, False
        for start in range(0, num_blocks * size, size):
            tokens = sequence.tokens[start : start + size]
            digest = chained_hash(digest, tokens) if len(tokens) == size else NO_HASH
            block_id = self.found.get(digest)
            missed = missed or block_id is None or self.blocks[block_id].tokens != tokens
            if missed:
                block_id = self.free[0]
                self._take(block_id)
            else:
                num_found += 1
                if block_id in self.used:
                    self.blocks[block_id].ref_count += 1
                else:
                    self._take(block_id)
            if digest != NO_HASH:
                self._name(block_id, digest, tokens)
            sequence.table.append(block_id)
        sequence.num_slots = len(sequence.tokens)
        return num_found

    def _append(self, sequence: Sequence) -> bool:
        """A slot for the last token, and the hash of its block if that is full by it. False: no room."""
        size, length = self.block_size, len(sequence.tokens)
        place = (length - 1) // size
        if place == len(sequence.table):
            if not self.free:
                return False
            sequence.table.append(self.free[0])
            self._take(self.free[0])
        if not length % size:
            previous = self.blocks[sequence.table[place - 1]].hash if place else NO_HASH
            tokens = sequence.tokens[place * size :]
            self._name(sequence.table[place], chained_hash(previous, tokens), tokens)
        sequence.num_slots = length
        return True

    def _take(self, block_id: int) -> None:
        block = self.blocks[block_id]
        block.ref_count, block.hash, block.tokens = 1, NO_HASH, []
        self.free.remove(block_id)
        self.used.add(block_id)

    def _name(self, block_id: int, digest: int, tokens: list[int]) -> None:
        block = self.blocks[block_id]
        block.hash, block.tokens = digest, tokens
        self.found[digest] = block_id


serve(f"after its design of 2025, xxhash {xxhash.VERSION}", NanoMemory)
