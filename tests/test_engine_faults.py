"""Faults put into the engine: what they do not concern finishes with the right tokens, and the pool stays whole."""

import contextlib
import dataclasses
import gc
import math
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
from test_engine import assert_whole, new_llm
from tiny_models import own_answers, random_prompts, tiny_model

import paged_kv
from paged_kv import interrupts
from paged_kv.engine import FinishReason, SamplingParams
from paged_kv.errors import OutOfBlocksError, OutOfHostBlocksError, OutOfRoomError

pytestmark = pytest.mark.usefixtures("one_thread", "interruptible")

PARAMS = [
    SamplingParams(max_tokens=8),
    SamplingParams(max_tokens=8, draft_tokens=2),
    SamplingParams(max_tokens=8, n=3, temperature=1.0, seed=1),
    SamplingParams(max_tokens=8, beam_width=2),
    SamplingParams(max_tokens=8),
]


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def prompts():
    return random_prompts([9, 12, 6, 5, 20])


@pytest.fixture(scope="module")
def expected(model, prompts):
    answers = answers_of(add_all(new_llm(model), prompts, run=True))
    assert answers[0][0] == own_answers(model, prompts[:1], 8)[0]
    return answers


def add_all(llm, prompts, run=False):
    requests = [llm.engine.add_request(*each) for each in zip(prompts, PARAMS, strict=True)]
    while run and llm.engine.has_work:
        llm.engine.step()
    return requests


def answers_of(requests):
    return [[sequence.new_token_ids for sequence in request.completions] for request in requests]


def failing(function, step, error, before):
    """`function`, but its call number `step` raises, before or after it has done its work."""
    calls = iter(range(1 << 30))

    def call(*args, **kwargs):
        fails = next(calls) == step
        if fails and before:
            raise error
        result = function(*args, **kwargs)
        if fails:
            raise error
        return result

    return call


def run_through(engine, kind):
    """Steps until all is done; returns how often a step raised an error of that kind."""
    num_raised = 0
    while engine.has_work:
        try:
            engine.step()
        except kind:
            num_raised += 1
            engine.manager.check()
            assert engine.manager.stats().num_used_blocks == 0
    return num_raised


@pytest.mark.parametrize("num_host_blocks", [0, 30])
@pytest.mark.parametrize("step", range(0, 24))
def test_blocks_run_out_at_any_step(model, prompts, expected, step, num_host_blocks, monkeypatch):
    llm = new_llm(model, num_blocks=40, num_host_blocks=num_host_blocks)
    manager = llm.engine.manager
    append = failing(manager.append, step, OutOfBlocksError(1, 0), before=True)
    monkeypatch.setattr(manager, "append", append)
    requests = add_all(llm, prompts)
    assert run_through(llm.engine, OutOfBlocksError) <= 1
    assert answers_of(requests) == expected
    assert_whole(llm)


@pytest.mark.parametrize("method", ["swap_out", "swap_in"])
@pytest.mark.parametrize("step", range(3))
def test_there_is_no_room_to_swap(model, prompts, expected, method, step, monkeypatch):
    llm = new_llm(model, num_blocks=18, num_host_blocks=30)
    manager = llm.engine.manager
    error = OutOfHostBlocksError(1, 0) if method == "swap_out" else OutOfBlocksError(1, 0)
    monkeypatch.setattr(manager, method, failing(getattr(manager, method), step, error, before=True))
    requests = add_all(llm, prompts)
    run_through(llm.engine, OutOfRoomError)
    assert llm.engine.num_preemptions > 0
    assert answers_of(requests) == expected
    assert_whole(llm)


@pytest.mark.parametrize(
    "settings", [{}, {"num_blocks": 18}, {"num_blocks": 18, "num_host_blocks": 9}], ids=str
)
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("step", [0, 1, 2, 5, 9])
def test_the_model_raises_at_any_step(model, prompts, expected, step, before, settings, monkeypatch):
    llm = new_llm(model, **settings)
    forward = failing(llm.model.forward, step, RuntimeError("injected"), before)
    monkeypatch.setattr(llm.model, "forward", forward)
    requests = add_all(llm, prompts)
    assert run_through(llm.engine, RuntimeError) == 1
    assert answers_of(requests) == expected
    assert_whole(llm)


@pytest.mark.parametrize("step", range(0, 12, 2))
def test_what_is_not_a_number_ends_its_own_request_only(model, prompts, expected, step, monkeypatch):
    llm = new_llm(model)
    forward, steps = llm.model.forward, iter(range(1 << 30))

    def poison(*args):
        logits = forward(*args).clone()
        if next(steps) == step and len(logits):
            logits[0, 7] = torch.nan
        return logits

    monkeypatch.setattr(llm.model, "forward", poison)
    requests = add_all(llm, prompts, run=True)
    broken = [request.finish_reason is FinishReason.ERROR for request in requests]
    assert sum(broken) <= 1
    for request, failed, answer in zip(requests, broken, expected, strict=True):
        if failed:
            assert "not finite" in request.error
        else:
            assert answers_of([request]) == [answer]
    assert_whole(llm)
    assert answers_of(add_all(llm, prompts, run=True)) == expected
    assert llm.metrics.finished["error"] > 0


def test_a_prompt_aborted_half_way_leaves_nothing(model, prompts, expected):
    llm = new_llm(model, max_batch_tokens=8)
    requests = add_all(llm, prompts)
    long = requests[4]
    while not 0 < long.sequences[0].num_computed < 20:
        llm.engine.step()
    llm.engine.abort(long)
    assert long.sequences[0].seq_id not in llm.engine.manager
    while llm.engine.has_work:
        llm.engine.step()
    assert answers_of(requests[:4]) == expected[:4]
    assert (long.finish_reason, long.num_new_tokens) == (FinishReason.ABORTED, 0)
    assert_whole(llm)


@pytest.mark.parametrize("settings", [{}, {"num_blocks": 18, "num_host_blocks": 30}], ids=str)
@pytest.mark.parametrize("step", range(0, 14, 2))
def test_requests_aborted_at_any_step_disturb_nobody(model, prompts, expected, step, settings):
    for aborted in range(len(prompts)):
        llm = new_llm(model, **settings)
        requests = add_all(llm, prompts)
        for _ in range(step):
            llm.engine.step()
        was_finished = requests[aborted].finished
        llm.engine.abort(requests[aborted])
        assert all(sequence.seq_id not in llm.engine.manager for sequence in requests[aborted].sequences)
        llm.engine.manager.check()
        while llm.engine.has_work:
            llm.engine.step()
        for i, request in enumerate(requests):
            if i != aborted or was_finished:
                assert answers_of([request]) == [expected[i]]
        assert llm.engine.manager.stats().num_used_host_blocks == 0
        assert_whole(llm)


@pytest.mark.parametrize("call", [0, 3, 7])
def test_a_callback_that_raises_ends_its_own_request_only(model, prompts, expected, call):
    llm = new_llm(model)
    told = []
    rude = llm.engine.add_request(
        prompts[0], PARAMS[0], on_token=failing(lambda request: None, call, ValueError("rude"), before=True)
    )
    polite = llm.engine.add_request(
        prompts[4], PARAMS[4], on_token=lambda request: told.append(request.num_new_tokens)
    )
    while llm.engine.has_work:
        llm.engine.step()
    if call < 7:
        assert rude.error == "its callback raised ValueError('rude')"
        assert rude.finish_reason is FinishReason.ERROR
    else:  # it had its last token by then
        assert rude.finish_reason is FinishReason.LENGTH
    assert rude.new_token_ids == expected[0][0][: call + 1]
    assert answers_of([polite]) == [expected[4]]
    assert told == list(range(1, 9))
    assert_whole(llm)


def test_an_interrupt_leaves_the_requests_in_line(model, prompts, expected, monkeypatch):
    llm = new_llm(model)
    requests = add_all(llm, prompts)
    forward, steps = llm.model.forward, iter(range(1 << 30))

    def interrupted(*args):
        if next(steps) == 4:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        return forward(*args)

    monkeypatch.setattr(llm.model, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        while llm.engine.has_work:
            llm.engine.step()
    assert_whole(llm)
    while llm.engine.has_work:
        llm.engine.step()
    assert answers_of(requests) == expected
    assert_whole(llm)


SHORT = [
    SamplingParams(max_tokens=5, n=2, temperature=1.0, seed=1, repetition_penalty=1.2, logprobs=1),
    SamplingParams(max_tokens=5, beam_width=3, n=2, presence_penalty=0.5),
    SamplingParams(max_tokens=5, draft_tokens=2, stop_token_ids=[1]),
]
INTERRUPTED = tuple(str(Path(paged_kv.__file__).parent / folder) for folder in ("engine", "manager"))


def run_interrupted(model, at=None):
    """Answers three requests, one of them told to a callback. Returns their answers and every line of the engine and
    of the manager that ran; the one with the number `at` is interrupted."""
    llm, lines = new_llm(model, num_blocks=14, max_batch_tokens=8), []

    def trace(frame, event, _):
        if not frame.f_code.co_filename.startswith(INTERRUPTED):
            return None
        if event == "line":
            lines.append((frame.f_code.co_filename, frame.f_lineno))
            if len(lines) - 1 == at:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return trace

    requests = [llm.engine.add_request(*each) for each in zip(random_prompts([9, 6, 7]), SHORT, strict=True)]
    interrupts = 0
    while llm.engine.has_work:
        sys.settrace(trace if not interrupts else None)
        try:
            llm.engine.step()
        except KeyboardInterrupt:
            interrupts += 1
        finally:
            sys.settrace(None)
        llm.engine.manager.check()
    assert interrupts == (at is not None)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert_whole(llm)
    return answers_of(requests), lines


@pytest.mark.parametrize("part", range(4))
def test_an_interrupt_at_any_line_of_the_bookkeeping_tears_nothing(model, part):
    expected, lines = run_interrupted(model)
    assert any(file.endswith("engine/beams.py") for file, _ in lines)
    last = {line: place for place, line in enumerate(lines)}
    ours = [place for (file, _), place in last.items() if file.startswith(INTERRUPTED[0])]
    managers = [place for (file, _), place in last.items() if file.startswith(INTERRUPTED[1])]
    for at in sorted([*ours, *managers[::5]])[part::4]:
        answers, _ = run_interrupted(model, at)
        assert answers == expected, lines[at]


def test_an_interrupt_waits_for_the_end_of_an_abort(model, prompts, monkeypatch):
    llm = new_llm(model)
    requests = add_all(llm, prompts)
    llm.engine.step()
    finish = requests[2].finish
    monkeypatch.setattr(
        requests[2], "finish", lambda *args: finish(*args) or signal.raise_signal(signal.SIGINT)
    )
    with pytest.raises(KeyboardInterrupt):
        llm.engine.abort(requests[2])
    assert requests[2].finish_reason is FinishReason.ABORTED
    for request in requests:
        llm.engine.abort(request)
    assert not llm.engine.has_work
    assert_whole(llm)


@pytest.mark.parametrize("call", ["add_request", "abort"])
def test_an_interrupted_stream_leaves_no_request_behind(model, prompts, monkeypatch, call):
    llm = new_llm(model)
    stream = llm.stream(prompts, SamplingParams(max_tokens=30))
    if call == "abort":
        next(stream)
    function = getattr(llm.engine, call)

    def interrupted(*args, **options):
        answer = function(*args, **options)
        signal.raise_signal(signal.SIGINT)
        return answer

    monkeypatch.setattr(llm.engine, call, interrupted)
    with pytest.raises(KeyboardInterrupt):
        stream.close() if call == "abort" else next(stream)
    assert not llm.engine.has_work
    assert_whole(llm)


def run_waiting(at=None):
    """Lets interrupts wait and come at once, as a step does. Returns how many instructions ran, and whether there was
    an interrupt, at the one with the number `at`."""
    files, count, interrupted = (interrupts.__file__, contextlib.__file__, __file__), 0, False

    def trace(frame, event, _):
        nonlocal count
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            if count == at:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
            count += 1
        return trace

    def step():
        with interrupts.interrupts_wait() as at_once:
            assert at_once(str, 1) == "1"

    sys.settrace(trace)
    try:
        step()
    except KeyboardInterrupt:
        interrupted = True
    finally:
        sys.settrace(None)
    return count, interrupted


def test_an_interrupt_at_any_instruction_comes_and_so_does_the_next():
    total, interrupted = run_waiting()
    assert not interrupted
    for at in range(total):
        _, interrupted = run_waiting(at)
        assert interrupted, at
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, at
    gc.collect()  # nothing that was interrupted wakes up again
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_steps_of_another_thread_leave_signals_alone(model, prompts, expected):
    requests, seen = [], []
    llm = new_llm(model)

    def serve():
        requests.extend(add_all(llm, prompts, run=True))
        seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    assert answers_of(requests) == expected
    assert seen == [signal.default_int_handler]


@pytest.mark.parametrize("asked", PARAMS[:4], ids=["greedy", "drafts", "samples", "beams"])
@pytest.mark.parametrize("call", [0, 1, 2, 7])
def test_a_logits_processor_that_raises_ends_its_own_request_only(model, prompts, expected, asked, call):
    llm = new_llm(model)
    processor = failing(lambda ids, scores: scores, call, ValueError("rude"), before=True)
    rude = llm.engine.add_request(prompts[0], dataclasses.replace(asked, logits_processors=[processor]))
    polite = add_all(llm, prompts, run=True)
    assert rude.error == "a logits processor raised ValueError('rude')"
    assert rude.finish_reason is FinishReason.ERROR
    assert answers_of(polite) == expected
    assert_whole(llm)


@pytest.mark.parametrize("asked", SHORT[:2], ids=["samples", "beams"])
@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (lambda ids, scores: None, "a logits processor: expected scores [1, 128], got None"),
        (lambda ids, scores: scores[:, :3], "a logits processor: expected scores [1, 128], got [1, 3]"),
        (
            lambda ids, scores: scores * math.nan,
            "logits processors: expected a finite score and none that is NaN",
        ),
        (lambda ids, scores: scores * 0 + math.inf, "logits processors: expected a finite score"),
        (lambda ids, scores: scores * 0 - math.inf, "logits processors: expected a finite score"),
    ],
    ids=["none", "shape", "nan", "inf", "nothing"],
)
def test_what_a_logits_processor_gives_ends_its_own_request_only(
    model, prompts, expected, asked, processor, message
):
    llm = new_llm(model)
    rude = llm.engine.add_request(prompts[0], dataclasses.replace(asked, logits_processors=[processor]))
    polite = add_all(llm, prompts, run=True)
    assert rude.error.startswith(message)
    assert answers_of(polite) == expected
    assert_whole(llm)


def test_a_logits_processor_may_write_to_what_it_gets(model, prompts):
    def in_place(ids, scores):
        scores[:, ::2] = -math.inf
        return scores

    def anew(ids, scores):
        return in_place(ids, scores.clone())

    asked = SamplingParams(max_tokens=6, n=3, temperature=1.0, seed=5, logprobs=3)
    told = [
        new_llm(model).generate(prompts[:1], dataclasses.replace(asked, logits_processors=[processor]))
        for processor in (in_place, anew)
    ]
    assert told[0] == told[1]
    assert told[0][0].error is None
