"""The scheduler over random workloads and pools, without a model: everything ends, nothing leaks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_kv.engine.request import Request
from paged_kv.engine.sampling_params import SamplingParams
from paged_kv.engine.scheduler import Scheduler
from paged_kv.errors import OutOfBlocksError
from paged_kv.manager import PagedKVCacheManager


def make_request(request_id, num_prompt, num_new):
    return Request(
        request_id,
        prompt_ids=[request_id * 100 + i for i in range(num_prompt)],
        params=SamplingParams(max_tokens=num_new),
        stop_token_ids=(),
        max_len=num_prompt + num_new,
    )


def run_step(scheduler):
    """One step without a model: each request whose tokens are all computed gets one more."""
    step = scheduler.schedule()
    for request, count in zip(step.requests, step.counts, strict=True):
        assert 1 <= count <= request.num_pending
        request.num_computed += count
        assert scheduler.manager.seq_len(request.request_id) == request.num_computed
        if not request.num_pending:
            request.add_token(len(request.token_ids))
            if request.finished:
                scheduler.release(request)
    return step


@st.composite
def workloads(draw):
    block_size = draw(st.integers(1, 5))
    requests = draw(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 8)), min_size=1, max_size=6))
    least = max(-(-(prompt + new - 1) // block_size) for prompt, new in requests)
    return {
        "block_size": block_size,
        "requests": requests,
        "arrivals": draw(st.lists(st.integers(0, 20), min_size=len(requests), max_size=len(requests))),
        "num_blocks": draw(st.integers(least, least + 8)),
        "max_batch_tokens": draw(st.integers(1, 10)),
        "max_num_seqs": draw(st.integers(1, 6)),
    }


@settings(deadline=None, max_examples=300)
@given(workloads())
def test_every_workload_ends_within_its_limits_and_returns_every_block(work):
    manager = PagedKVCacheManager(work["num_blocks"], work["block_size"])
    scheduler = Scheduler(manager, work["max_batch_tokens"], work["max_num_seqs"])
    requests = [make_request(i, prompt, new) for i, (prompt, new) in enumerate(work["requests"])]
    arriving = sorted(zip(work["arrivals"], requests, strict=True), key=lambda pair: pair[0])
    clock, oldest = 0, None
    while arriving or scheduler.waiting or scheduler.running:
        while arriving and arriving[0][0] <= clock:
            scheduler.add(arriving.pop(0)[1])
        step = run_step(scheduler)
        manager.check()
        clock += 1
        assert step.num_tokens <= work["max_batch_tokens"]
        assert len(scheduler.running) <= work["max_num_seqs"]
        if scheduler.running or step.requests:
            assert step.requests, "a step that computes nothing while someone runs would go on for ever"
        if oldest is not None and not oldest.finished:
            assert scheduler.running[0] is oldest, "the oldest running request was preempted"
        oldest = scheduler.running[0] if scheduler.running else None
        assert clock < 2000
    for request, (_, num_new) in zip(requests, work["requests"], strict=True):
        assert request.num_new_tokens == num_new
    assert manager.stats().num_used_blocks == 0
    assert scheduler.num_preemptions == sum(request.num_preemptions for request in requests)
    assert scheduler.num_preemptions <= sum(new for _, new in work["requests"])


def test_decodes_come_before_the_chunks_of_a_prompt():
    scheduler = Scheduler(PagedKVCacheManager(100, 4), max_batch_tokens=8, max_num_seqs=4)
    long, short = make_request(0, 30, 4), make_request(1, 2, 4)
    scheduler.add(short)
    run_step(scheduler)
    scheduler.add(long)
    step = run_step(scheduler)
    assert [(r.request_id, n) for r, n in zip(step.requests, step.counts, strict=True)] == [(1, 1), (0, 7)]
    assert [run_step(scheduler).counts for _ in range(4)] == [[1, 7], [1, 7], [8], [1]]
    assert long.num_computed > 20


def test_requests_start_in_the_order_they_came():
    scheduler = Scheduler(PagedKVCacheManager(4, 4), max_batch_tokens=64, max_num_seqs=4)
    for request in (make_request(0, 9, 2), make_request(1, 12, 2), make_request(2, 1, 2)):
        scheduler.add(request)
    step = run_step(scheduler)  # the second does not fit beside the first, and the third may not overtake it
    assert [request.request_id for request in step.requests] == [0]


def test_a_prompt_waits_for_blocks_that_running_prompts_still_need():
    scheduler = Scheduler(PagedKVCacheManager(8, 4), max_batch_tokens=4, max_num_seqs=4)
    first, second = make_request(0, 20, 2), make_request(1, 12, 2)
    scheduler.add(first)
    scheduler.add(second)
    while not second.finished:
        run_step(scheduler)
    assert scheduler.num_preemptions == 0


def test_the_newest_is_preempted_and_goes_on_first():
    scheduler = Scheduler(PagedKVCacheManager(4, 2), max_batch_tokens=64, max_num_seqs=4)
    first, second, third = make_request(0, 2, 5), make_request(1, 2, 5), make_request(2, 2, 5)
    for request in (first, second, third):
        scheduler.add(request)
    while not first.finished:
        run_step(scheduler)
    assert first.num_preemptions == 0
    assert second.num_preemptions == 1
    assert scheduler.waiting[0] is second or second in scheduler.running


def test_requeue_all_keeps_the_order_and_the_tokens():
    scheduler = Scheduler(PagedKVCacheManager(100, 4), max_batch_tokens=64, max_num_seqs=4)
    requests = [make_request(i, 5, 4) for i in range(3)]
    for request in requests:
        scheduler.add(request)
    run_step(scheduler)
    scheduler.requeue_all()
    assert list(scheduler.waiting) == requests
    assert [request.num_new_tokens for request in requests] == [1, 1, 1]
    assert [request.num_computed for request in requests] == [0, 0, 0]
    assert scheduler.manager.stats().num_used_blocks == 0


def test_a_request_larger_than_the_pool_raises_instead_of_running_for_ever():
    scheduler = Scheduler(PagedKVCacheManager(2, 2), max_batch_tokens=64, max_num_seqs=4)
    scheduler.add(make_request(0, 3, 5))
    run_step(scheduler)
    run_step(scheduler)
    with pytest.raises(OutOfBlocksError):
        run_step(scheduler)


def test_a_prompt_that_waits_for_blocks_of_others_raises_instead_of_waiting_for_ever():
    manager = PagedKVCacheManager(4, 2)
    manager.admit("not ours", 6)
    manager.append(["not ours"], [6])
    scheduler = Scheduler(manager, max_batch_tokens=64, max_num_seqs=4)
    request = make_request(0, 3, 1)
    scheduler.add(request)
    with pytest.raises(OutOfBlocksError):
        run_step(scheduler)
    manager.free("not ours")
    run_step(scheduler)
    assert request.finished
