"""What attention workers (see peers.py) share: they run in environments of their own, without this package."""

import json
import os
import sys
from collections.abc import Callable

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what libraries print must not mix with the answers

import torch  # noqa: E402
from common import slots_of, time_calls  # noqa: E402

__all__ = ["serve", "slots_of"]

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


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
