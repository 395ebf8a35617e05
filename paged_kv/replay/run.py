"""One replay from options to figures: the paged run and, in the same memory, those of the contiguous allocators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .driver import Outcome, replay
from .memory import ContiguousMemory, Job, Memory, PagedMemory
from .report import Figures, figures
from .timeline import Timeline
from .traces import Request, TraceError, unlimited_hits

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1}


@dataclass(frozen=True)
class ModelShape:
    """What a token's keys and values take."""

    num_layers: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    def __str__(self) -> str:
        return (
            f"{self.num_layers} layers, {self.num_kv_heads} kv heads, head size {self.head_dim}, {self.dtype}"
        )


@dataclass(frozen=True)
class Options:
    """How to replay. `group_size` sequences a request: samples or, with `beams`, the width of its beam search."""

    name: str
    num_blocks: int
    block_size: int = 16
    shape: ModelShape = ModelShape()
    max_running: int | None = None
    prefix_cache: bool = True
    group_size: int = 1
    beams: bool = False
    step_seconds: float = 0.0

    @property
    def bytes_per_block(self) -> int:
        return self.block_size * self.shape.bytes_per_token


@dataclass
class PoolMap:
    """The pool at one moment. owner: [num_blocks] request that holds the block, -1 cached only, -2 free.

    holders: [num_blocks] sequences that hold it.
    """

    step: int
    owner: np.ndarray
    holders: np.ndarray


@dataclass
class Run:
    """What one allocator did."""

    name: str
    memory: Memory
    outcome: Outcome
    timeline: Timeline
    half_way: PoolMap | None = None


def run(
    requests: list[Request],
    options: Options,
    *,
    on_progress: Callable[[int], None] = lambda finished: None,
    with_map: bool = False,
) -> tuple[Figures, list[Run]]:
    """Replays the requests; `on_progress` hears how many have come to an end, over all runs.

    with_map: keep a map of the pool at the step that ends the first half of the requests.

    Raises TraceError where no request fits the pool: there would be nothing to tell.
    """
    slots = options.num_blocks * options.block_size
    longest = max(request.num_tokens for request in requests)
    runs = [
        _run_paged(requests, options, on_progress, with_map),
        *(
            _run_contiguous(requests, options, name, slots, reserve, on_progress)
            for name, reserve in (
                ("next power of two", lambda request: 1 << (request.num_tokens - 1).bit_length()),
                (f"maximum length ({longest:,})", lambda request: longest),
            )
        ),
    ]
    bound = unlimited_hits(requests, options.block_size) / sum(request.prompt_len for request in requests)
    return figures(options, runs, bound), runs


def _run_paged(
    requests: list[Request], options: Options, on_progress: Callable[[int], None], with_map: bool
) -> Run:
    memory = PagedMemory(
        options.num_blocks,
        options.block_size,
        prefix_cache=options.prefix_cache,
        group_size=options.group_size,
        beams=options.beams,
    )
    least = min(map(memory.num_blocks, requests))
    if least > options.num_blocks:
        raise TraceError(
            f"no request fits the pool of {options.num_blocks} blocks of {options.block_size} slots: "
            f"the smallest needs {least}"
        )
    result = Run("paged", memory, Outcome(), Timeline())

    def on_step(outcome: Outcome, running: list[Job]) -> None:
        result.timeline.record(memory.usage())
        num_ended = outcome.finished + outcome.refused
        if with_map and result.half_way is None and num_ended >= len(requests) / 2:
            result.half_way = _pool_map(memory, running, outcome.steps)
        on_progress(num_ended)

    result.outcome = _drive(requests, memory, options, on_step)
    return result


def _run_contiguous(
    requests: list[Request],
    options: Options,
    name: str,
    num_slots: int,
    reserve: Callable[[Request], int],
    on_progress: Callable[[int], None],
) -> Run:
    memory = ContiguousMemory(num_slots, reserve, group_size=options.group_size)
    timeline = Timeline()

    def on_step(outcome: Outcome, running: list[Job]) -> None:
        timeline.record(memory.usage())
        on_progress(outcome.finished + outcome.refused)

    return Run(name, memory, _drive(requests, memory, options, on_step), timeline)


def _drive(
    requests: list[Request],
    memory: Memory,
    options: Options,
    on_step: Callable[[Outcome, list[Job]], None],
) -> Outcome:
    return replay(
        requests,
        memory,
        max_running=options.max_running,
        step_seconds=options.step_seconds,
        on_step=on_step,
    )


def _pool_map(memory: PagedMemory, running: list[Job], step: int) -> PoolMap:
    holders = memory.manager.holders()
    owner = np.where(holders < 0, -2, -1)
    for job in running:
        for seq_id in memory.seq_ids(job):
            length = memory.manager.seq_len(seq_id)
            table = memory.manager.block_tables([seq_id])[0]
            owner[table[: -(-length // memory.manager.block_size)]] = job.index
    return PoolMap(step, owner, np.maximum(holders, 0))
