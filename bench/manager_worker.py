"""One block manager as a worker (see peers.py), driven by the replay's own loop: paged_kv/replay/driver.py.

Commands: `load` (trace, requests, max_output), `run` (num_blocks, block_size, max_running; gives its figures) and
`memory` (num_blocks, block_size; gives the bytes that the manager takes for each block when all are cached).
"""

import gc
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import worker  # before what prints: it keeps stdout for the answers

# The package without its __init__, which loads a library built for another torch than a peer may have.
package = ModuleType("paged_kv")
package.__path__ = [str(Path(__file__).resolve().parent.parent / "paged_kv")]
sys.modules["paged_kv"] = package

from paged_kv.replay.driver import replay  # noqa: E402
from paged_kv.replay.memory import Job, PagedMemory, Times  # noqa: E402
from paged_kv.replay.traces import Piece, Request, read_trace  # noqa: E402

__all__ = ["Job", "Request", "Times", "serve"]

MakeMemory = Callable[[int, int], PagedMemory]


def serve(version: str, make_memory: MakeMemory) -> None:
    """Answers commands until stdin ends. `make_memory(num_blocks, block_size)` makes what is driven."""
    requests: list[Request] = []

    def load(argument: dict) -> int:
        trace = read_trace(Path(argument["trace"]))[: argument["requests"]]
        requests[:] = [request.cut(argument["max_output"]) for request in trace]
        return len(requests)

    commands = {
        "load": load,
        "run": lambda case: run(requests, make_memory(case["num_blocks"], case["block_size"]), case),
        "memory": lambda argument: bytes_per_block(make_memory, **argument),
    }
    worker.serve(version, commands)


def run(requests: list[Request], memory: PagedMemory, argument: dict) -> dict[str, float]:
    gc.collect()
    outcome = replay(requests, memory, max_running=argument["max_running"])
    return {
        "hit_rate": outcome.hit_rate,
        "preemptions": outcome.preemptions,
        "us_per_block": 1e6 * memory.times.per_prompt_block(memory.num_prompt_blocks),
        "us_per_slot": 1e6 * memory.times.per_slot,
        "us_per_release": 1e6 * memory.times.release / outcome.finished,
    }


def bytes_per_block(make_memory: MakeMemory, num_blocks: int, block_size: int) -> float:
    """Fills the pool with prompts of 128 blocks, which end and stay cached."""
    length = 128 * block_size + 1
    gc.collect()
    tracemalloc.start()
    memory = make_memory(num_blocks, block_size)
    for index in range(num_blocks // 129 + 2):
        job = Job(index, Request(0.0, (Piece(index * length, length),), Piece(0, 1)))
        assert memory.admit(job) == 0
        memory.finish(job)
        del job
    gc.collect()
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return taken / num_blocks


if __name__ == "__main__":
    serve("this", PagedMemory)
