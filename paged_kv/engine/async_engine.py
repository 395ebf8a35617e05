"""The engine for asyncio: requests come and go while a thread of its own computes the steps.

The engine itself is not for several threads. Whatever is asked of it, adding a request or aborting one, waits in line
and is done between two steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from .._arguments import check_token_ids
from .llm import LLM, RequestOutput, Teller
from .sampling_params import SamplingParams

__all__ = ["AsyncEngine"]


class _Ticket:
    """One request, as the coroutine that waits for it and the engine see it."""

    def __init__(self) -> None:
        self.outputs: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()
        self.teller: Teller | None = None  # once the request was added
        self.cancelled = False


class AsyncEngine:
    """Args:
        llm: answers the prompts; nobody else may use it meanwhile.

    Example:
        async with AsyncEngine(llm) as engine:
            async for output in engine.stream("Once upon a time"):
                print(output.new_text, end="")
    """

    def __init__(self, llm: LLM) -> None:
        if not isinstance(llm, LLM):
            raise TypeError(f"llm: expected an LLM, got {type(llm).__name__}")
        self.llm = llm
        self._thread = ThreadPoolExecutor(1, "paged_kv")
        self._calls: list[Callable[[], None]] = []
        self._tickets: set[_Ticket] = set()
        self._driver: asyncio.Task | None = None

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Aborts what runs and ends the thread."""
        self._fail_all(RuntimeError("the engine was closed"))
        while self._calls or self.llm.engine.has_work:
            self._wake()
            await asyncio.wait([self._driver])
        self._thread.shutdown()

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams = SamplingParams(),  # noqa: B008 - frozen
        *,
        priority: int = 0,
        salt: str | None = None,
    ) -> RequestOutput:
        """The final output of one prompt. Cancelling the coroutine aborts the request."""
        outputs = [output async for output in self.stream(prompt, params, priority=priority, salt=salt)]
        return outputs[-1]

    async def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams = SamplingParams(),  # noqa: B008 - frozen
        *,
        priority: int = 0,
        salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yields an output for each step that brings the prompt on.

        Cancelling who waits here, or closing the iterator, aborts the request; its blocks are free after the step
        that runs. A step that fails raises here, for every request.
        """
        ids = self.llm.encode(prompt) if isinstance(prompt, str) else check_token_ids("prompt", prompt)
        ticket = _Ticket()

        def add() -> None:
            try:
                if not ticket.cancelled:
                    request = self.llm.engine.add_request(ids, params, priority=priority, salt=salt)
                    ticket.teller = Teller(request)
            except Exception as error:
                ticket.outputs.put_nowait(error)

        self._tickets.add(ticket)
        self._call(add)
        try:
            while True:
                output = await ticket.outputs.get()
                if isinstance(output, Exception):
                    raise output
                yield output
                if output.finished:
                    return
        finally:
            self._drop(ticket)

    def _drop(self, ticket: _Ticket) -> None:
        ticket.cancelled = True
        self._tickets.discard(ticket)

        def abort() -> None:
            if ticket.teller is not None:
                self.llm.engine.abort(ticket.teller.request)

        self._call(abort)

    def _call(self, function: Callable[[], None]) -> None:
        """Has it called between two steps, soon."""
        self._calls.append(function)
        self._wake()

    def _wake(self) -> None:
        if self._driver is None or self._driver.done():
            self._driver = asyncio.get_running_loop().create_task(self._drive())

    def _fail_all(self, error: Exception) -> None:
        for ticket in list(self._tickets):
            self._drop(ticket)
            ticket.outputs.put_nowait(error)

    async def _drive(self) -> None:
        """Computes steps for as long as there is work."""
        engine, loop = self.llm.engine, asyncio.get_running_loop()
        while self._calls or engine.has_work:
            while self._calls:
                self._calls.pop(0)()
            self._tell()
            if not engine.has_work:
                continue
            try:
                await self._end_of(loop.run_in_executor(self._thread, engine.step))
            except Exception as error:
                self._fail_all(error)
            self._tell()

    async def _end_of(self, step: asyncio.Future) -> None:
        """Waits for it even when cancelled, with all other tasks for instance: until then the engine is in use."""
        while not step.done():
            try:
                await asyncio.wait([step])
            except asyncio.CancelledError:
                self._fail_all(RuntimeError("the engine's task was cancelled"))
        step.result()

    def _tell(self) -> None:
        for ticket in self._tickets:
            if ticket.teller is not None and ticket.teller.has_news:
                ticket.outputs.put_nowait(ticket.teller.output())
