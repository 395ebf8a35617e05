"""Keeps an interrupt (SIGINT) waiting while the books are kept: it would leave them torn between any two operations."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

__all__ = ["interrupts_wait"]


@contextmanager
def interrupts_wait() -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Within it an interrupt waits until its end; within what the given function makes, it comes at once."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield nullcontext  # there Python raises none
        return
    came: list[tuple] = []

    def wait(*call: object) -> None:
        came.append(call)

    @contextmanager
    def at_once() -> Iterator[None]:
        signal.signal(signal.SIGINT, handler)
        try:
            if came:
                handler(*came.pop())
            yield
        finally:
            signal.signal(signal.SIGINT, wait)

    signal.signal(signal.SIGINT, wait)
    try:
        yield at_once
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came.pop())
