"""What attention workers (see peers.py) share: they run in environments of their own, without this package."""

import os
from collections.abc import Callable

import worker  # first: it keeps stdout for the answers

import torch  # isort: skip
from common import slots_of, time_calls  # isort: skip

__all__ = ["serve", "slots_of"]

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def serve(version: str, make_work: Callable[[dict], Callable[[], None]]) -> None:
    """Answers commands until stdin ends. `make_work(case)` makes what is timed, with `chosen` and `out`."""
    work = None

    def load(path: str) -> str:
        nonlocal work
        work = None  # gives the last case's memory back first
        work = make_work(torch.load(path, mmap=True))
        return work.chosen

    def run(path: str) -> str:
        work()
        torch.save(work.out, path)
        return path

    worker.serve(version, {"load": load, "run": run, "time": lambda seconds: time_calls(work, seconds)})
