"""What attention workers (see peers.py) share: they run in environments of their own, without this package."""

import json
import os
import sys
import time
from collections.abc import Callable

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what libraries print must not mix with the answers

import torch  # noqa: E402

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def time_calls(call: Callable[[], None], seconds: float) -> list[float]:
    call()
    times, end = [], time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def slots_of(table: torch.Tensor, num_tokens: int, block_size: int) -> torch.Tensor:
    """The slots, int64, of a sequence's tokens."""
    token = torch.arange(num_tokens)
    return table.long()[token // block_size] * block_size + token % block_size


def serve(version: str, make_work: Callable[[dict], Callable[[], None]]) -> None:
    """Answers commands until stdin ends. `make_work(case)` makes what is timed, with `chosen` and `out`."""
    work = None
    for line in sys.stdin:
        command, argument = json.loads(line)
        if command == "hello":
            answer = version
        elif command == "load":
            work = None  # gives the last case's memory back first
            work = make_work(torch.load(argument, mmap=True))
            answer = work.chosen
        elif command == "run":
            work()
            torch.save(work.out, argument)
            answer = argument
        elif command == "time":
            answer = time_calls(work, argument)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
