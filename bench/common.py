"""What benchmarks share: timing, the machine's description, and how fast its memory can be read at best.

Attention workers import it too, in environments without this package.
"""

import ctypes
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

# Where recorded traffic is looked for by default.
TRACE_FOLDER = Path(os.environ.get("PAGED_KV_TRACES", Path(__file__).resolve().parents[1] / "traces"))


class PlainRead:
    """Reads given pieces of memory in order, doing nothing with them: the limit for a kernel that has to read them."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="paged_kv_bench_")
        library = Path(self._folder.name, "read.so")
        source = Path(__file__).parent / "cpp/plain_read.cpp"
        flags = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
        subprocess.run(["c++", *flags, "-o", str(library), str(source)], check=True)
        self._read = ctypes.CDLL(str(library)).read_pieces
        self._read.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int]

    def of_blocks(self, caches: list[Tensor], blocks: Tensor, threads: int) -> tuple[Callable[[], None], int]:
        """A function that reads these blocks of every cache [N, Hkv, B, D], and how many bytes that is.

        The blocks are read in the order given, keys and values in turn; where heads are not neighbours in memory, one
        head after the other.
        """
        starts = []
        for cache in caches:
            _, num_heads, block_size, head_dim = cache.shape
            size = cache.element_size()
            in_one_piece = cache.stride(0) == num_heads * block_size * head_dim
            heads = torch.zeros(1, dtype=torch.int64) if in_one_piece else torch.arange(num_heads)
            offsets = heads[:, None] * cache.stride(1) + blocks.long() * cache.stride(0)
            starts.append(cache.data_ptr() + offsets * size)
            piece = (num_heads if in_one_piece else 1) * block_size * head_dim * size
        pieces = torch.stack(starts, dim=2).flatten().contiguous()  # [heads, blocks, caches]
        assert piece % 256 == 0, "pieces of a multiple of 256 bytes"
        return lambda: self._read(pieces.data_ptr(), pieces.numel(), piece, threads), pieces.numel() * piece


def time_calls(call: Callable[[], object], seconds: float) -> list[float]:
    """Seconds that each call takes, over about so many seconds, after one that is not counted."""
    call()
    times, end = [], time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def slots_of(blocks: Tensor, num_tokens: int, block_size: int) -> Tensor:
    """The slots, [num_tokens] int64, of a sequence's tokens in its `blocks`."""
    token = torch.arange(num_tokens)
    return blocks.long()[token // block_size] * block_size + token % block_size


def spread(times: list[float]) -> tuple[float, float, float]:
    """Median, lower and upper quartile."""
    if len(times) < 2:
        return times[0], times[0], times[0]
    low, median, high = statistics.quantiles(times, n=4)
    return median, low, high


def machine() -> dict[str, str | int]:
    """What a reader needs to know about the machine to compare figures."""
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        names = [
            line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0].split(":", 1)[1].strip() if names else model
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30,
        "torch": torch.__version__,
        "isa": torch.backends.cpu.get_cpu_capability(),
    }
