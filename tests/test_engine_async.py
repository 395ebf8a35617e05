"""The asyncio front: many coroutines, one engine, cancellation at any moment."""

import asyncio
import threading
import time

import pytest
from test_engine import assert_whole, new_llm
from tiny_models import own_answers, random_prompts, tiny_model

from paged_kv.engine import AsyncEngine, SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = SamplingParams(max_tokens=10)


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def prompts():
    return random_prompts([7, 1, 12, 3, 9, 20])


@pytest.fixture(scope="module")
def expected(model, prompts):
    return own_answers(model, prompts, 10)


def test_coroutines_get_each_their_own_answer(model, prompts, expected):
    async def ask(engine, prompt, delay):
        await asyncio.sleep(delay)
        return (await engine.generate(prompt, GREEDY)).token_ids

    async def main():
        async with AsyncEngine(llm) as engine:
            asks = [ask(engine, prompt, 0.01 * i) for i, prompt in enumerate(prompts)]
            return await asyncio.gather(*asks)

    llm = new_llm(model)
    assert asyncio.run(main()) == expected
    assert_whole(llm)


def test_a_stream_tells_each_token(model, prompts, expected):
    async def main():
        async with AsyncEngine(llm) as engine:
            return [output.token_ids async for output in engine.stream(prompts[0], GREEDY)]

    llm = new_llm(model)
    assert asyncio.run(main()) == [expected[0][:i] for i in range(1, 11)]


@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize("turns", [1, 2, 3, 20])
def test_when_all_tasks_are_cancelled_nothing_is_left_and_steps_are_let_end(
    model, prompts, monkeypatch, turns, newest_first
):
    def alone(function):
        def call(*args):
            assert in_use.acquire(blocking=False)
            try:
                if function == step:
                    time.sleep(0.02)
                return function(*args)
            finally:
                in_use.release()

        return call

    async def main():
        async with AsyncEngine(llm) as engine:
            asking = [asyncio.create_task(engine.generate(prompt, GREEDY)) for prompt in prompts]
            for _ in range(turns):
                await asyncio.sleep(0)
            tasks = asyncio.all_tasks() - {asyncio.current_task(), *asking}
            for task in [*tasks, *asking] if newest_first else [*asking, *tasks]:
                task.cancel()
            answers = await asyncio.gather(*asking, return_exceptions=True)
            assert all(isinstance(answer, asyncio.CancelledError) for answer in answers)

    llm, in_use = new_llm(model), threading.Lock()
    step = llm.engine.step
    monkeypatch.setattr(llm.engine, "step", alone(step))
    monkeypatch.setattr(llm.engine, "abort", alone(llm.engine.abort))
    asyncio.run(main())
    assert not llm.engine.has_work
    assert_whole(llm)


@pytest.mark.parametrize("num_outputs", [0, 1, 4])
def test_a_cancelled_request_gives_its_blocks_back_and_the_others_go_on(
    model, prompts, expected, num_outputs
):
    async def main():
        async with AsyncEngine(llm) as engine:
            seen = asyncio.Semaphore(0)

            async def watch():
                async for _ in engine.stream(prompts[5], SamplingParams(max_tokens=400)):
                    seen.release()

            watching = asyncio.create_task(watch())
            other = asyncio.create_task(engine.generate(prompts[0], GREEDY))
            await asyncio.sleep(0)
            for _ in range(num_outputs):
                await seen.acquire()
            watching.cancel()
            with pytest.raises(asyncio.CancelledError):
                await watching
            answer = await other
            assert (await engine.generate(prompts[1], GREEDY)).token_ids == expected[1]
            assert llm.engine.manager.stats().num_sequences == 0
            return answer.token_ids

    llm = new_llm(model, num_blocks=200)
    assert asyncio.run(main()) == expected[0]
    assert llm.metrics.new_tokens < 400
    assert_whole(llm)


def test_closing_the_iterator_aborts(model, prompts):
    async def main():
        async with AsyncEngine(llm) as engine:
            outputs = engine.stream(prompts[0], SamplingParams(max_tokens=200))
            await anext(outputs)
            await outputs.aclose()
            await engine.generate(prompts[1], GREEDY)

    llm = new_llm(model)
    asyncio.run(main())
    assert llm.metrics.finished["aborted"] == 1
    assert_whole(llm)


def test_errors_reach_who_asked(model, prompts, expected, monkeypatch):
    async def main():
        async with AsyncEngine(llm) as engine:
            good = asyncio.create_task(engine.generate(prompts[0], GREEDY))
            with pytest.raises(ValueError, match="stop: expected"):
                await engine.generate(prompts[1], SamplingParams(stop="x"))
            for wrong, got in ([1, 2.5], "2.5"), (None, "None"):
                with pytest.raises(
                    TypeError, match=f"^prompt: expected token ids, which are integers, got {got}$"
                ):
                    await engine.generate(wrong, GREEDY)
            refused = await engine.generate([], GREEDY)
            assert refused.error == "the prompt is empty"
            assert (await good).token_ids == expected[0]
            with monkeypatch.context() as patch:
                patch.setattr(llm.model, "forward", lambda *args: 1 / 0)
                failed = [engine.generate(prompt, GREEDY) for prompt in prompts]
                failed = await asyncio.gather(*failed, return_exceptions=True)
                assert [type(error) for error in failed] == [ZeroDivisionError] * len(prompts)
            return (await engine.generate(prompts[2], GREEDY)).token_ids

    llm = new_llm(model)
    assert asyncio.run(main()) == expected[2]
    assert_whole(llm)


def test_closing_the_engine_ends_what_runs(model, prompts):
    async def main():
        engine = AsyncEngine(llm)
        running = asyncio.create_task(engine.generate(prompts[0], SamplingParams(max_tokens=200)))
        while not llm.metrics.new_tokens:
            await asyncio.sleep(0.001)
        await engine.close()
        with pytest.raises(RuntimeError, match="closed"):
            await running

    llm = new_llm(model)
    asyncio.run(main())
    assert_whole(llm)
