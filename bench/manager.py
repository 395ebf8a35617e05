"""What the block manager costs: `python -m bench.manager`. One line a figure, the limit it has to keep beside it.

Tables and slots are compared with a plain numpy gather of the same size; append and free in a small pool with those in
a pool a thousand times as large. Times are medians of many calls, on one core.
"""

import statistics
import time
from collections.abc import Callable

import numpy as np

from paged_kv import PagedKVCacheManager
from paged_kv.replay.beams import Beams

BLOCK_SIZE = 16


def microseconds(call: Callable[[], object], repeat: int = 200) -> float:
    """Median time of a call."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def report(name: str, value: float, unit: str, limit: str = "") -> None:
    print(f"{name:58} {value:10.2f} {unit:5} {limit}")


def tables_and_slots(num_seqs: int = 256, num_tokens: int = 4096) -> None:
    manager = PagedKVCacheManager(num_seqs * num_tokens // BLOCK_SIZE + num_seqs, BLOCK_SIZE)
    seq_ids = list(range(num_seqs))
    for seq_id in seq_ids:
        manager.admit(seq_id, num_tokens)
        manager.append([seq_id], [num_tokens])
    what = f"{num_seqs} sequences of {num_tokens} tokens"
    for name, call in (("tables", manager.block_tables), ("slots", manager.slots)):
        result = call(seq_ids)
        source, index = result.reshape(-1).copy(), np.arange(result.size)
        gather = microseconds(lambda s=source, i=index, r=result: np.take(s, i).reshape(r.shape), 30)
        ours = microseconds(lambda c=call: c(seq_ids), 30)
        report(f"{name} of {what}: times a plain gather", ours / gather, "x", "at most 5")


def pool_sizes(sizes: tuple[int, int] = (1_000, 1_000_000), prompt: int = 4096) -> None:
    """Appending and freeing a prompt, whose blocks are evicted in the next turn but one."""
    costs = []
    for num_blocks in sizes:
        manager = PagedKVCacheManager(num_blocks, BLOCK_SIZE)
        filler = num_blocks - 3 * prompt // BLOCK_SIZE
        manager.admit("filler", filler * BLOCK_SIZE)
        manager.append(["filler"], [filler * BLOCK_SIZE])
        append, free = [], []
        for turn in range(60):
            tokens = np.arange(prompt, dtype=np.int32) + turn * prompt
            manager.admit(turn, tokens)
            start = time.perf_counter()
            manager.append([turn], [tokens])
            append.append(time.perf_counter() - start)
            manager.commit([turn])
            start = time.perf_counter()
            manager.free(turn)
            free.append(time.perf_counter() - start)
        costs.append((statistics.median(append[10:]), statistics.median(free[10:])))
    for name, small, large in zip(("append", "free"), *costs, strict=True):
        report(
            f"{name} of {prompt} tokens: pool of {sizes[1]:,} over {sizes[0]:,}",
            large / small,
            "x",
            "at most 2",
        )


def prefill(prompt: int = 8192, num_blocks: int = 8192) -> None:
    """A prompt's whole way, hashing included, in a pool whose blocks are all cached."""
    manager = PagedKVCacheManager(num_blocks, BLOCK_SIZE)
    times = []
    for turn in range(60):
        tokens = np.arange(prompt, dtype=np.int32) + turn * prompt
        start = time.perf_counter()
        manager.admit(turn, tokens)
        manager.append([turn], [tokens])
        manager.commit([turn])
        manager.free(turn)
        times.append(time.perf_counter() - start)
    report(
        "admit, append, commit, free, per allocated block",
        statistics.median(times[30:]) * 1e6 * BLOCK_SIZE / prompt,
        "us",
    )


def decode(num_seqs: int, steps: int = 320) -> None:
    manager = PagedKVCacheManager(num_seqs * 64, BLOCK_SIZE)
    seq_ids = list(range(num_seqs))
    for seq_id in seq_ids:
        tokens = np.arange(200 + seq_id % BLOCK_SIZE) + seq_id * 1000
        manager.admit(seq_id, tokens)
        manager.append([seq_id], [tokens])
    tokens = np.zeros((num_seqs, 1), np.int32)

    def step() -> None:
        manager.append(seq_ids, tokens)
        manager.commit(seq_ids)

    report(
        f"append and commit, per decode slot, {num_seqs} sequences",
        microseconds(step, steps) / num_seqs,
        "us",
    )


def beam_search(num_requests: int = 16, width: int = 4, prompt: int = 512, steps: int = 160) -> None:
    """Beam steps of many requests in one call: what the beam that survived for each has is its own from then on."""
    manager = PagedKVCacheManager(
        num_requests * (prompt // BLOCK_SIZE + width * (steps // BLOCK_SIZE + 2)), BLOCK_SIZE
    )
    beams, seq_ids = Beams(width), list(range(num_requests * width))
    for request in range(num_requests):
        first, *others = seq_ids[request * width : (request + 1) * width]
        tokens = np.arange(prompt) + request * prompt
        manager.admit(first, tokens)
        manager.append([first], [tokens])
        for other in others:
            manager.fork(first, other)
    tokens = np.arange(len(seq_ids), dtype=np.int32)[:, None]
    append, reorder = [], []
    for _ in range(steps):
        parents = [seq_ids[parent] for parent in beams.choose(list(range(num_requests)))]
        start = time.perf_counter()
        manager.append(seq_ids, tokens)
        manager.commit(seq_ids)
        middle = time.perf_counter()
        manager.reorder(seq_ids, parents)
        append.append(middle - start)
        reorder.append(time.perf_counter() - middle)
    what = f"{num_requests} requests of {width} beams"
    for name, times in (("append and commit", append), ("reorder", reorder)):
        report(f"{name}, per beam, {what}", statistics.median(times) * 1e6 / len(seq_ids), "us")


def main() -> None:
    tables_and_slots()
    pool_sizes()
    prefill()
    for num_seqs in (16, 64, 256):
        decode(num_seqs)
    for num_requests in (1, 16, 64):
        beam_search(num_requests)


if __name__ == "__main__":
    main()
