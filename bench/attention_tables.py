"""Block tables as a server has them: those of the sequences that run at one moment of a replayed trace.

By then the block manager has handed out and taken back each block many times. It gives runs of neighbouring blocks
where it can; what that is worth shows beside the same tables over other placements. A placement is an order of the
pool's blocks, so that what sequences share, they share in each:

manager    where the manager put them
scattered  any block anywhere: what a manager ends up with that hands out whichever block was let go last
runs       numbered in the order in which the tables name them: better than any manager can know to do
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paged_kv.replay.driver import Outcome, replay
from paged_kv.replay.memory import Job, PagedMemory
from paged_kv.replay.traces import Request

from .attention_cases import Group, Shape


@dataclass(frozen=True)
class Moment:
    """The running sequences' tables in a pool of `num_blocks`, with how many requests had finished by then."""

    num_blocks: int
    block_size: int
    num_finished: int
    seq_lens: list[int]
    tables: list[Tensor]  # of each sequence, [ceil(seq_len / block_size)] int64

    @property
    def num_entries(self) -> int:
        return sum(len(table) for table in self.tables)

    @property
    def num_distinct(self) -> int:
        return len(torch.cat(self.tables).unique())

    def placed(self, order: Tensor) -> list[Tensor]:
        """The tables when block b lies at order[b]. order: [num_blocks] int64, a permutation."""
        return [order[table] for table in self.tables]

    def shape(self, tables: str, layout: str) -> Shape:
        """One decode step of the sequences; `tables` is the placement's name."""
        first, *others = (Group(1, 1, length) for length in self.seq_lens)
        return Shape(
            1,
            first.seq_len,
            block_size=self.block_size,
            tables=tables,
            layout=layout,
            others=tuple(others),
        )


def moment_of(requests: list[Request], num_blocks: int, block_size: int) -> Moment:
    """The step in which half of the requests have come to an end. Raises ValueError if nothing runs by then."""
    memory = PagedMemory(num_blocks, block_size)
    found: list[Moment] = []

    def look(outcome: Outcome, running: list[Job]) -> None:
        if running and not found and outcome.finished + outcome.refused >= len(requests) / 2:
            seq_ids = [job.index for job in running]
            lens = memory.manager.seq_lens(seq_ids).tolist()
            rows = torch.from_numpy(memory.manager.block_tables(seq_ids)).long()
            tables = [row[: -(-length // block_size)].clone() for row, length in zip(rows, lens, strict=True)]
            found.append(Moment(num_blocks, block_size, outcome.finished, lens, tables))

    replay(requests, memory, on_step=look)
    if not found:
        raise ValueError(
            f"expected a sequence that runs after half of {len(requests)} requests in {num_blocks} blocks, got none"
        )
    return found[0]


def _scattered(moment: Moment) -> Tensor:
    return torch.randperm(moment.num_blocks, generator=torch.Generator().manual_seed(0))


def _runs(moment: Moment) -> Tensor:
    named = list(dict.fromkeys(torch.cat(moment.tables).tolist()))
    rest = sorted(set(range(moment.num_blocks)) - set(named))
    order = torch.empty(moment.num_blocks, dtype=torch.int64)
    order[named + rest] = torch.arange(moment.num_blocks)
    return order


PLACEMENTS: dict[str, Callable[[Moment], Tensor]] = {
    "manager": lambda moment: torch.arange(moment.num_blocks),
    "scattered": _scattered,
    "runs": _runs,
}


def neighbours(tables: list[Tensor]) -> float:
    """Of the blocks that have one before them in their table, the share that lies right behind it in memory."""
    follow = sum(int((table.diff() == 1).sum()) for table in tables)
    return follow / max(1, sum(len(table) - 1 for table in tables))
