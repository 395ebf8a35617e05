"""Every call that can fail is made to fail, and the whole state is the same before and after."""

import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from manager_machine import snapshot

import paged_kv
from paged_kv import errors, interrupts_wait
from paged_kv.manager import AdmissionStatus, ContentKey, PagedKVCacheManager

TOKENS = list(range(10))


def made():
    """A fork with a shared tail, a pin, a swapped sequence, cached blocks, and 3 blocks that could be handed out."""
    m = PagedKVCacheManager(12, 4, windows=(None,), num_host_blocks=4, pin_budget=3, partial_hits=True)
    for seq_id, tokens in (("gone", TOKENS[::-1]), ("a", TOKENS), ("away", [7] * 9)):
        cached = m.admit(seq_id, tokens).num_cached_tokens
        m.append([seq_id], [tokens[cached:]])
        m.commit([seq_id])
    m.fork("a", "b")
    m.free("gone")
    m.pin(TOKENS[:8])
    m.swap_out(["away"])
    m.admit("big", 16)
    m.append(["big"], [16])
    stats = m.stats()
    assert (stats.num_free_blocks, stats.num_evictable_blocks, stats.num_shared_blocks) == (1, 4, 3)
    m.admit("more", 8)
    m.append(["more"], [8])
    m.check()
    return m


fixture_m = pytest.fixture(made, name="m")

UNKNOWN = errors.UnknownSequenceError
AWAY = errors.SwappedSequenceError
TWICE = errors.DuplicateSequenceError

FAILURES = [
    (errors.OutOfBlocksError, lambda m: m.append(["a", "b"], [[1] * 8, [1] * 8])),
    (errors.OutOfBlocksError, lambda m: m.append(["a", "b", "big", "more"], np.ones((4, 4), int))),
    (errors.OutOfBlocksError, lambda m: m.append(["a"], [[1]], lookahead=12)),
    (errors.OutOfBlocksError, lambda m: m.append(["more"], [10**9])),
    (errors.OutOfBlocksError, lambda m: m.append(["more"], [2**63])),
    (UNKNOWN, lambda m: m.append(["a", "nobody"], [[1], [1]])),
    (AWAY, lambda m: m.append(["a", "away"], [[1], [1]])),
    (TWICE, lambda m: m.append(["a", "a"], [[1], [1]])),
    (ValueError, lambda m: m.append(["a"], [[1], [1]])),
    (ValueError, lambda m: m.append(["a"], [-1])),
    (ValueError, lambda m: m.append(["a"], [[1]], lookahead=-1)),
    (ValueError, lambda m: m.append(["a", "b"], [[1], [2**40]])),
    (TypeError, lambda m: m.append(["a", "b"], [[1], [0.5]])),
    (ValueError, lambda m: m.append(["a"], [np.ones((1, 3), int)])),  # a batch of one row, as models take it
    (ValueError, lambda m: m.append(["a"], [[[1, 2], [3, 4]]])),
    (ValueError, lambda m: m.append(["a"], np.ones((1, 2, 3), int))),
    (ValueError, lambda m: m.admit("new", np.ones((1, 7), int))),
    (ValueError, lambda m: m.admit("new", 5, chunk_size=0)),
    (TWICE, lambda m: m.admit("a", TOKENS)),
    (TWICE, lambda m: m.admit("away", TOKENS)),
    (TypeError, lambda m: m.admit("new", ["x"])),
    (ValueError, lambda m: m.admit("new", -1)),
    (UNKNOWN, lambda m: m.fork("nobody", "new")),
    (TWICE, lambda m: m.fork("a", "b")),
    (TWICE, lambda m: m.fork("a", "away")),
    (UNKNOWN, lambda m: m.reorder(["a", "b"], ["b", "nobody"])),
    (TWICE, lambda m: m.reorder(["a", "a"], ["b", "b"])),
    (ValueError, lambda m: m.reorder(["a", "b"], ["b"])),
    (UNKNOWN, lambda m: m.free("nobody")),
    (UNKNOWN, lambda m: m.preempt("nobody")),
    (AWAY, lambda m: m.preempt("away")),
    (UNKNOWN, lambda m: m.commit(["a", "nobody"])),
    (ValueError, lambda m: m.commit(["a", "b"], [10, 11])),
    (ValueError, lambda m: m.commit(["a", "b"], [10, 9])),
    (ValueError, lambda m: m.commit(["a", "b"], [10])),
    (errors.RollbackError, lambda m: m.rollback(["a", "b"], [5, 11])),
    (errors.RollbackError, lambda m: m.rollback(["a", "b"], [5, -1])),
    (UNKNOWN, lambda m: m.rollback(["a", "nobody"], [5, 5])),
    (TypeError, lambda m: m.rollback(["a", "b"], [0.5, 1.5])),
    (errors.SharedBlockError, lambda m: m.allocate_token_slot("a", 11)),
    (ValueError, lambda m: m.allocate_token_slot("a", 12)),
    (ValueError, lambda m: m.allocate_token_slot("a", 0)),
    (TypeError, lambda m: m.allocate_token_slot("more", 9.0)),
    (errors.OutOfHostBlocksError, lambda m: m.swap_out(["big"])),
    (UNKNOWN, lambda m: m.swap_out(["big", "nobody"])),
    (AWAY, lambda m: m.swap_out(["away"])),
    (UNKNOWN, lambda m: m.swap_in(["away", "nobody"])),
    (errors.ResidentSequenceError, lambda m: m.swap_in(["a"])),
    (TWICE, lambda m: m.swap_in(["away", "away"])),
    (errors.PinBudgetError, lambda m: m.pin([7] * 8)),
]


@pytest.mark.parametrize(("error", "call"), FAILURES)
def test_a_call_that_raises_changes_nothing(m, error, call):
    before = snapshot(m)
    with pytest.raises(error):
        call(m)
    assert snapshot(m) == before
    m.check()


@pytest.mark.parametrize(
    ("status", "tokens", "options"),
    [
        (AdmissionStatus.LATER, [*TOKENS, *range(20)], {}),
        (AdmissionStatus.LATER, 16, {}),
        (AdmissionStatus.LATER, [7] * 20, {"keys": [ContentKey("salt", "x")]}),
        (AdmissionStatus.NEVER, 49, {}),
        (AdmissionStatus.NEVER, list(range(60)), {"chunk_size": 4}),
    ],
)
def test_a_refusal_changes_nothing(m, status, tokens, options):
    before = snapshot(m)
    for _ in range(2):
        assert m.admit("new", tokens, **options).status is status
        assert snapshot(m) == before
    m.check()


def test_a_swap_in_that_does_not_fit_changes_nothing(m):
    m.admit("last", 12)
    m.append(["last"], [12])
    before = snapshot(m)
    with pytest.raises(errors.OutOfBlocksError):
        m.swap_in(["away"])
    assert snapshot(m) == before


def test_the_smallest_call_that_does_not_fit_changes_nothing(m):
    m.admit("last", 12)
    m.append(["last"], [12])
    before = snapshot(m)
    for seq_id, number in (("new", 1), ("last", 13)):
        with pytest.raises(errors.OutOfBlocksError):
            m.allocate_token_slot(seq_id, number)
        assert snapshot(m) == before


MANAGER = str(Path(paged_kv.__file__).parent / "manager")


def take_a_step(m, at=None):
    """Makes the calls of a step; the line of the manager with the number `at` is interrupted. Tells how many ran."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        if not frame.f_code.co_filename.startswith(MANAGER):
            return None
        if event == "line":
            if count == at:
                signal.raise_signal(signal.SIGINT)
            count += 1
        return trace

    sys.settrace(trace)
    try:
        with interrupts_wait():
            m.append(["a", "b"], [[1], [2]])
            m.commit(["a", "b"])
            m.free("b")
            m.swap_in(["away"])
            m.preempt("a")
    finally:
        sys.settrace(None)
    return count


@pytest.mark.usefixtures("interruptible")
def test_calls_within_interrupts_wait_are_not_torn(m):
    assert take_a_step(m) > 100
    expected = snapshot(m)
    for at in range(0, take_a_step(made()), 3):
        interrupted = made()
        with pytest.raises(KeyboardInterrupt):
            take_a_step(interrupted, at)
        interrupted.check()
        assert snapshot(interrupted) == expected, at
