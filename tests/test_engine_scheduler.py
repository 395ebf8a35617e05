"""The scheduler over random workloads and pools, without a model: everything ends, nothing leaks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_kv.engine.request import FinishReason, Request
from paged_kv.engine.sampling_params import SamplingParams
from paged_kv.engine.scheduler import Scheduler
from paged_kv.errors import OutOfBlocksError
from paged_kv.manager import PagedKVCacheManager


class Blocks(list):
    """What each block holds, slot by slot, moved as the tensors would be; a token stands for its keys."""

    def __init__(self, num_blocks, block_size):
        super().__init__([None] * block_size for _ in range(num_blocks))

    def copy_blocks(self, pairs):
        self.swap_blocks(self, pairs)

    def swap_blocks(self, destination, pairs):
        for source, target in pairs:
            destination[target] = list(self[source])


def new_scheduler(num_blocks, block_size, max_batch_tokens=64, max_num_seqs=4, num_host_blocks=0, cache=True):
    manager = PagedKVCacheManager(num_blocks, block_size, num_host_blocks=num_host_blocks, prefix_cache=cache)
    host_blocks = Blocks(num_host_blocks, block_size) if num_host_blocks else None
    return Scheduler(manager, Blocks(num_blocks, block_size), host_blocks, max_batch_tokens, max_num_seqs)


def make_request(request_id, num_prompt, num_new, n=1, priority=0):
    return Request(
        request_id,
        prompt_ids=[request_id * 100 + i for i in range(num_prompt)],
        params=SamplingParams(max_tokens=num_new, n=n),
        stop_token_ids=(),
        max_len=num_prompt + num_new,
        priority=priority,
    )


def run_step(scheduler):
    """One step without a model: writes the tokens to their slots, checks all that each token would read, and gives
    each sequence whose tokens are all computed one more."""
    step, manager, blocks = scheduler.schedule(), scheduler.manager, scheduler.cache
    size, slots = manager.block_size, iter(step.slot_mapping.tolist() if step.work else ())
    for _, sequence, count, _ in step.work:
        assert count >= 1
        for token in sequence.token_ids[sequence.num_computed : sequence.num_computed + count]:
            slot = next(slots)
            blocks[slot // size][slot % size] = token
        sequence.num_computed += count
        assert manager.seq_len(sequence.seq_id) == sequence.num_computed
    for request, sequence, _, num_rows in step.work:
        table = manager.block_tables([sequence.seq_id])[0]
        held = [token for block in table for token in blocks[block]]
        assert held[: sequence.num_computed] == sequence.token_ids[: sequence.num_computed]
        if len(request.live) > 1 and not request.forked and sequence.num_computed == len(request.prompt_ids):
            scheduler.fork(request)
        first = not sequence.num_new_tokens
        if num_rows:
            for each in list(request.live) if first and request.forked else [sequence]:
                each.token_ids.append(len(each.token_ids) * 1000 + each.seq_id[1])
                if len(each.token_ids) >= request.max_len:
                    each.finish(FinishReason.LENGTH)
    manager.commit([work.sequence.seq_id for work in step.work])
    for request in {work.request: None for work in step.work}:
        for sequence in [sequence for sequence in request.live if sequence.finished]:
            scheduler.release(request, sequence)
    return step


def counts(step):
    return [(work.request.request_id, work.count) for work in step.work]


def least_pool(prompt, new, n, block_size):
    shared = prompt // block_size if n > 1 else 0
    return shared + n * (-(-(prompt + new - 1) // block_size) - shared)


@st.composite
def workloads(draw):
    block_size = draw(st.integers(1, 5))
    request = st.tuples(st.integers(1, 12), st.integers(1, 8), st.sampled_from([1, 1, 1, 2, 8]))
    requests = draw(st.lists(request, min_size=1, max_size=6))
    least = max(least_pool(*request, block_size) for request in requests)
    return {
        "block_size": block_size,
        "requests": requests,
        "priorities": draw(st.lists(st.integers(0, 1), min_size=len(requests), max_size=len(requests))),
        "arrivals": draw(st.lists(st.integers(0, 20), min_size=len(requests), max_size=len(requests))),
        "num_blocks": least + draw(st.sampled_from([0, 0, 0, 1, 2, 5, 8])),
        "num_host_blocks": draw(st.sampled_from([0, 4, 40])),
        "max_batch_tokens": draw(st.integers(1, 10)),
        "max_num_seqs": draw(st.integers(max(n for *_, n in requests), 12)),
        "cache": draw(st.booleans()),
    }


@settings(deadline=None, max_examples=300)
@given(workloads())
def test_every_workload_ends_within_its_limits_and_returns_every_block(work):
    scheduler = new_scheduler(
        *(work[name] for name in ("num_blocks", "block_size", "max_batch_tokens", "max_num_seqs")),
        *(work[name] for name in ("num_host_blocks", "cache")),
    )
    manager = scheduler.manager
    requests = [
        make_request(i, *request, priority)
        for i, (request, priority) in enumerate(zip(work["requests"], work["priorities"], strict=True))
    ]
    arriving = sorted(zip(work["arrivals"], requests, strict=True), key=lambda pair: pair[0])
    clock = 0
    while arriving or scheduler.waiting or scheduler.running:
        while arriving and arriving[0][0] <= clock:
            scheduler.add(arriving.pop(0)[1])
        first = scheduler.running[0] if scheduler.running else None
        preemptions_before = first.num_preemptions if first else 0
        step = run_step(scheduler)
        manager.check()
        clock += 1
        assert step.num_tokens <= work["max_batch_tokens"]
        assert sum(len(request.live) for request in scheduler.running) <= work["max_num_seqs"]
        if scheduler.running:
            assert step.work, "a step that computes nothing while someone runs would go on for ever"
        if first is not None:
            assert first.num_preemptions == preemptions_before, "the first running request was preempted"
        assert clock < 3000
    for request, (_, num_new, _) in zip(requests, work["requests"], strict=True):
        assert [sequence.num_new_tokens for sequence in request.sequences] == [num_new] * len(
            request.sequences
        )
    stats = manager.stats()
    assert (stats.num_used_blocks, stats.num_used_host_blocks, stats.num_sequences) == (0, 0, 0)
    assert scheduler.num_preemptions == sum(request.num_preemptions for request in requests)
    assert scheduler.num_preemptions <= sum(new * n for _, new, n in work["requests"])


@pytest.mark.parametrize("num_host_blocks", [0, 4])
def test_eight_samples_in_the_least_pool_finish_in_few_preemptions(num_host_blocks):
    scheduler = new_scheduler(least_pool(9, 12, 8, 4), 4, 16, 16, num_host_blocks)
    requests = [make_request(i, 9, 12, 8) for i in range(3)]
    for request in requests:
        scheduler.add(request)
    for _ in range(300):
        run_step(scheduler)
    assert all(request.finished for request in requests)
    assert scheduler.num_preemptions <= 6
    assert scheduler.manager.stats().num_used_blocks == 0


def test_decodes_come_before_the_chunks_of_a_prompt():
    scheduler = new_scheduler(100, 4, max_batch_tokens=8)
    long, short = make_request(0, 30, 4), make_request(1, 2, 4)
    scheduler.add(short)
    run_step(scheduler)
    scheduler.add(long)
    assert counts(run_step(scheduler)) == [(1, 1), (0, 7)]
    assert [counts(run_step(scheduler)) for _ in range(4)] == [
        [(1, 1), (0, 7)],
        [(1, 1), (0, 7)],
        [(0, 8)],
        [(0, 1)],
    ]


def test_requests_start_in_the_order_they_came():
    scheduler = new_scheduler(4, 4)
    for request in (make_request(0, 9, 2), make_request(1, 12, 2), make_request(2, 1, 2)):
        scheduler.add(request)
    # The second does not fit beside the first, and the third may not overtake it.
    assert [number for number, _ in counts(run_step(scheduler))] == [0]


def test_a_higher_priority_is_served_first_and_preempted_last():
    scheduler = new_scheduler(4, 2, max_num_seqs=2)
    low, high, higher = make_request(0, 2, 5), make_request(1, 2, 5, priority=1), make_request(2, 2, 5, 1, 2)
    for request in (low, high, higher):
        scheduler.add(request)
    assert [number for number, _ in counts(run_step(scheduler))] == [2, 1]
    while not low.finished:
        run_step(scheduler)
    assert (higher.num_preemptions, high.num_preemptions) == (0, 1)


def test_a_prompt_waits_for_blocks_that_running_prompts_still_need():
    scheduler = new_scheduler(8, 4, max_batch_tokens=4)
    first, second = make_request(0, 20, 2), make_request(1, 12, 2)
    scheduler.add(first)
    scheduler.add(second)
    while not second.finished:
        run_step(scheduler)
    assert scheduler.num_preemptions == 0


@pytest.mark.parametrize("num_host_blocks", [0, 4])
def test_the_newest_is_preempted_and_goes_on_first(num_host_blocks):
    scheduler = new_scheduler(4, 2, num_host_blocks=num_host_blocks)
    first, second, third = make_request(0, 2, 5), make_request(1, 2, 5), make_request(2, 2, 5)
    for request in (first, second, third):
        scheduler.add(request)
    while not first.finished:
        run_step(scheduler)
    assert first.num_preemptions == 0
    assert second.num_preemptions == 1
    assert scheduler.waiting[0] is second or second in scheduler.running
    assert (scheduler.num_swapped > 0) == (num_host_blocks > 0)


def test_what_was_swapped_is_not_computed_again():
    scheduler = new_scheduler(4, 2, num_host_blocks=40, cache=False)
    requests = [make_request(i, 2, 5) for i in range(3)]
    for request in requests:
        scheduler.add(request)
    num_tokens = 0
    while scheduler.waiting or scheduler.running:
        num_tokens += run_step(scheduler).num_tokens
    assert scheduler.num_swapped == scheduler.num_preemptions > 0
    assert num_tokens == 3 * (2 + 4)


def test_samples_compute_the_prompt_once_and_share_it_after_a_preemption():
    scheduler = new_scheduler(100, 4, max_num_seqs=8, cache=False)
    request = make_request(0, 8, 4, n=4)
    scheduler.add(request)
    assert counts(run_step(scheduler)) == [(0, 8)]
    assert counts(run_step(scheduler)) == [(0, 1)] * 4
    assert scheduler.manager.stats().num_used_blocks == 2 + 4
    scheduler.requeue_all()
    assert counts(run_step(scheduler)) == [(0, 8)]
    assert counts(run_step(scheduler)) == [(0, 2)] * 4
    assert scheduler.manager.stats().num_used_blocks == 2 + 4


def test_requeue_all_keeps_the_order_and_the_tokens():
    scheduler = new_scheduler(100, 4)
    requests = [make_request(i, 5, 4) for i in range(3)]
    for request in requests:
        scheduler.add(request)
    run_step(scheduler)
    scheduler.requeue_all()
    assert list(scheduler.waiting) == requests
    assert [request.num_new_tokens for request in requests] == [1, 1, 1]
    assert [request.sequences[0].num_computed for request in requests] == [0, 0, 0]
    assert scheduler.manager.stats().num_used_blocks == 0


def test_a_request_larger_than_the_pool_raises_instead_of_running_for_ever():
    scheduler = new_scheduler(2, 2)
    scheduler.add(make_request(0, 3, 5))
    run_step(scheduler)
    run_step(scheduler)
    with pytest.raises(OutOfBlocksError):
        run_step(scheduler)


def test_a_prompt_that_waits_for_blocks_of_others_raises_instead_of_waiting_for_ever():
    scheduler = new_scheduler(4, 2)
    manager = scheduler.manager
    manager.admit("not ours", 6)
    manager.append(["not ours"], [6])
    request = make_request(0, 3, 1)
    scheduler.add(request)
    with pytest.raises(OutOfBlocksError):
        run_step(scheduler)
    manager.free("not ours")
    run_step(scheduler)
    assert request.finished
