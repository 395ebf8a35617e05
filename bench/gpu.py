"""The CUDA kernels on a GPU, beside what the device can do at best and what a user would pick instead.

    python -m bench.gpu [--filter TEXT] [--seconds S] [--json FILE]

Every contender computes the same inputs and is checked before it is timed. Times are those of the device, between two
events around one call; before each call the L2 cache is overwritten, as the rest of a model would. Medians. The limits
are measured in the same run: a copy of 1 GiB within the device (read and written bytes counted) and a square bfloat16
product. Beside ours: FlashInfer, flash-attn and vLLM where they are installed, and PyTorch's attention on contiguous
keys in any case. Block tables are random permutations.

`--rehearse` runs all of it on the CPU in small sizes: it shows that this program works, and its times mean nothing.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

import paged_kv
from paged_kv import ops, reference

from .attention_cases import Shape
from .gpu_peers import PEERS

BF16, F32, E4M3, INT8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8
LAYERS = 32  # of the caches whose blocks are copied
LAYOUT = "NHD"  # which every peer reads


ATTENTION = [
    replace(shape, layout=LAYOUT)
    for shape in (
        Shape(1, 32768),
        Shape(16, 2048),
        Shape(16, 2048, block_size=32),
        Shape(16, 2048, block_size=256),
        Shape(64, 1024, heads=(12, 12), head_dim=64),
        Shape(16, 2048, block_size=32, dtype=F32),
        Shape(16, 2048, block_size=32, stored=E4M3),
        Shape(64, 8192),  # 2 GiB of keys and values
        Shape(64, 8192, block_size=32),
        Shape(64, 8192, stored=E4M3),
        Shape(64, 8192, stored=INT8),
        Shape(256, 1024, heads=(32, 32)),  # 4 GiB; a query head for each key head
        Shape(1, 1024, query_len=1024),
        Shape(1, 4096, query_len=256),
        Shape(1, 16384, query_len=16384),
        Shape(8, 4096, query_len=4096),
    )
]


class Device:
    """Where it all runs: a clock, and a way to empty the caches."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_gpu = name == "cuda"
        l2 = torch.cuda.get_device_properties(0).L2_cache_size if self.is_gpu else 1 << 16
        self.scratch = torch.empty(max(4 * l2, 1 << 16), dtype=torch.uint8, device=name)

    def times(self, call: Callable[[], object], seconds: float) -> list[float]:
        """Seconds that each call takes on the device, over about so many seconds, after two that are not counted."""
        call()
        call()
        times, end = [], time.perf_counter() + seconds
        while len(times) < 5 or time.perf_counter() < end:
            times += [self._time(call) for _ in range(5)]
        return times

    def _time(self, call: Callable[[], object]) -> float:
        self.scratch.zero_()  # and while it runs, the call is queued behind it: no time of the host's is measured
        if not self.is_gpu:
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def describe(self) -> dict[str, str]:
        facts = {"torch": torch.__version__, "device": "cpu, a rehearsal"}
        if self.is_gpu:
            properties = torch.cuda.get_device_properties(0)
            facts["device"] = f"{properties.name}, sm_{properties.major}{properties.minor}"
            facts["multiprocessors"] = str(properties.multi_processor_count)
            facts["cuda"] = torch.version.cuda
        return facts


@dataclass(frozen=True)
class Limits:
    copy: float  # bytes a second, read and written
    host_copy: float  # bytes a second from the device to pinned memory
    matmul: float  # floating-point operations a second, bfloat16


def measure_limits(device: Device, seconds: float) -> Limits:
    size, n = (1 << 30, 8192) if device.is_gpu else (1 << 20, 128)
    source = torch.empty(size, dtype=torch.uint8, device=device.name)
    target = torch.empty_like(source)
    host = torch.empty(size // 4, dtype=torch.uint8, pin_memory=device.is_gpu)
    a, b = (torch.randn(n, n, device=device.name).to(BF16) for _ in "ab")
    copy = statistics.median(device.times(lambda: target.copy_(source), seconds))
    part = source[: len(host)]
    host_copy = statistics.median(device.times(lambda: host.copy_(part, non_blocking=True), seconds))
    matmul = statistics.median(device.times(lambda: a @ b, seconds))
    return Limits(2 * size / copy, len(host) / host_copy, 2 * n**3 / matmul)


class Inputs:
    """Query, caches and tables of one case, on the device; the keys and values also contiguous [S, Hkv, L, D]."""

    def __init__(self, shape: Shape, device: str) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def random(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=device, dtype=F32)

        width = -(-shape.seq_len // shape.block_size)
        num_blocks = shape.num_seqs * width
        cache = paged_kv.PagedKVCache(
            1,
            shape.heads[1],
            shape.head_dim,
            shape.cache_dtype,
            shape.block_size,
            num_blocks=num_blocks,
            device=device,
            layout=LAYOUT,
            scales=None if shape.stored is None else "tensor",
        )
        self.shape, self.cache = shape, cache[0]
        self.query = random(shape.num_seqs * shape.query_len, shape.heads[0], shape.head_dim).to(shape.dtype)
        order = torch.randperm(num_blocks, generator=generator, device=device)
        self.block_tables = order.to(torch.int32).view(shape.num_seqs, width)
        self.seq_lens = torch.full((shape.num_seqs,), shape.seq_len, dtype=torch.int32, device=device)
        starts = torch.arange(shape.num_seqs + 1, device=device) * shape.query_len
        self.query_start_loc = starts.to(torch.int32)
        self.scale = shape.head_dim**-0.5
        token = torch.arange(shape.seq_len, device=device)
        self.key, self.value = (
            torch.empty(
                shape.num_seqs,
                shape.heads[1],
                shape.seq_len,
                shape.head_dim,
                dtype=shape.dtype,
                device=device,
            )
            for _ in "kv"
        )
        for seq in range(shape.num_seqs):  # one after the other, so that few float32 rows exist at a time
            slots = self.block_tables[seq, token // shape.block_size].long() * shape.block_size
            slots += token % shape.block_size
            rows = [random(shape.seq_len, shape.heads[1], shape.head_dim).to(shape.dtype) for _ in "kv"]
            cache.write(0, *rows, slots)
            lens = self.seq_lens[seq : seq + 1]
            scales = {"k_scale": self.cache.k_scale, "v_scale": self.cache.v_scale}
            tables = self.block_tables[seq : seq + 1]
            stored = ops.gather_kv(self.cache.key, self.cache.value, tables, lens, **scales)
            for dense, part in zip((self.key, self.value), stored, strict=True):
                dense[seq] = part.transpose(0, 1)

    def ours(self) -> Callable[[], Tensor]:
        shape = self.shape
        out, lse = torch.empty_like(self.query), self.query.new_empty(self.query.shape[:2], dtype=F32)
        args = (
            self.query,
            self.cache.key,
            self.cache.value,
            self.block_tables,
            self.seq_lens,
            self.query_start_loc,
        )
        options = {"max_query_len": shape.query_len, "max_seq_len": shape.seq_len, "scale": self.scale}
        options |= {"k_scale": self.cache.k_scale, "v_scale": self.cache.v_scale, "out": out, "lse": lse}

        def call() -> Tensor:
            ops.paged_attention(*args, **options)
            return out

        return call

    def contiguous(self, dtype: torch.dtype | None = None) -> Callable[[], Tensor]:
        """PyTorch's attention, which needs no block table; in float32 the measure of the others."""
        shape = self.shape
        packed = self.query.view(shape.num_seqs, shape.query_len, shape.heads[0], shape.head_dim)
        query, key, value = packed.transpose(1, 2), self.key, self.value
        options = {"scale": self.scale, "enable_gqa": shape.heads[0] != shape.heads[1]}
        if shape.query_len > 1:
            options["attn_mask"] = causal_lower_right(shape.query_len, shape.seq_len)
        if dtype is not None:
            query, key, value = (x.to(dtype) for x in (query, key, value))

        def call() -> Tensor:
            return scaled_dot_product_attention(query, key, value, **options).transpose(1, 2).flatten(0, 1)

        return call


def exact_rows(inputs: Inputs) -> tuple[list[int], Tensor]:
    """Some rows of the result in float64, by the definition: first and last tokens of first and last sequences."""
    shape = inputs.shape
    group = shape.heads[0] // shape.heads[1]
    rows, results = [], []
    for seq in sorted({0, shape.num_seqs - 1}):
        key, value = (x[seq].double().repeat_interleave(group, 0) for x in (inputs.key, inputs.value))
        for token in sorted({0, shape.query_len // 2, shape.query_len - 1}):
            seen = shape.seq_len - shape.query_len + token + 1
            row = seq * shape.query_len + token
            scores = (key[:, :seen] @ inputs.query[row].double()[:, :, None]).squeeze(2) * inputs.scale
            results.append((scores.softmax(1)[:, None] @ value[:, :seen]).squeeze(1))
            rows.append(row)
    return rows, torch.stack(results)


def check(shape: Shape, name: str, out: Tensor, rows: list[int], exact: Tensor) -> str:
    """Empty, or what is wrong: who computes something else is no contender."""
    error = float((out[rows].double() - exact).abs().max() / exact.abs().max())
    allowed = 1e-4 if shape.dtype == F32 and shape.stored is None else 2e-2
    return (
        "" if error <= allowed else f"{name}: error {error:.1e} of the largest output, allowed {allowed:.0e}"
    )


def measure_attention(shape: Shape, device: Device, limits: Limits, seconds: float) -> dict:
    inputs = Inputs(shape, device.name)
    rows, exact = exact_rows(inputs)
    ours, wrong, times = inputs.ours(), [], {}
    if problem := check(shape, "paged_kv", ours(), rows, exact):
        raise SystemExit(f"bench.gpu: {shape}: {problem}")
    contenders = {"paged_kv": ours, "torch SDPA": inputs.contiguous()}
    for name, peer in PEERS.items():
        try:
            if call := peer(inputs):
                contenders[name] = call
        except Exception as error:  # whatever a peer of another version does: it is left out, and said so
            wrong.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
    for name, call in contenders.items():
        try:
            if problem := check(shape, name, call(), rows, exact):
                wrong.append(problem)
            else:
                times[name] = statistics.median(device.times(call, seconds))
        except Exception as error:
            if name == "paged_kv":
                raise
            wrong.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
    time_of_ours = times["paged_kv"]
    if shape.kind == "decode":
        rate, unit, share = (
            shape.kv_bytes / time_of_ours / 1e9,
            "GB/s",
            shape.kv_bytes / time_of_ours / limits.copy,
        )
    else:
        flops = shape.flops / time_of_ours
        rate, unit, share = flops / 1e12, "TFLOP/s", flops / limits.matmul
    return result(str(shape), times, rate, unit, share, wrong)


def result(
    name: str, times: dict[str, float], rate: float, unit: str, share: float, wrong: list[str]
) -> dict:
    return {
        "case": name,
        "seconds": times,
        "rate": rate,
        "unit": unit,
        "share_of_limit": share,
        "left_out": wrong,
    }


def measure_write(device: Device, limits: Limits, seconds: float, dtype: torch.dtype) -> dict:
    """reshape_and_cache of 8192 tokens to random slots."""
    num_tokens, heads, dim = (8192, 8, 128) if device.is_gpu else (64, 2, 16)
    rows = [torch.randn(num_tokens, heads, dim, device=device.name).to(BF16) for _ in "kv"]
    caches = [torch.zeros(num_tokens // 16, heads, 16, dim, device=device.name).to(dtype) for _ in "kv"]
    slots = torch.randperm(num_tokens, device=device.name)
    given = {}
    if dtype != BF16:
        given = {name: torch.full((1,), 0.05, device=device.name) for name in ("k_scale", "v_scale")}
    call = lambda: ops.reshape_and_cache(*rows, *caches, slots, **given)  # noqa: E731
    call()
    flat = caches[0].transpose(1, 2).flatten(0, 1)
    expected = rows[0] if not given else reference.quantise(rows[0], dtype, given["k_scale"])
    if not torch.equal(flat[slots].float(), expected.float()):
        raise SystemExit("bench.gpu: reshape_and_cache wrote something else")
    moved = sum(t.nbytes for t in (*rows, *caches))
    median = statistics.median(device.times(call, seconds))
    name = f"write {num_tokens} tokens to {str(dtype).removeprefix('torch.')}"
    return result(name, {"paged_kv": median}, moved / median / 1e9, "GB/s", moved / median / limits.copy, [])


def measure_copy(device: Device, limits: Limits, seconds: float) -> dict:
    """copy_blocks of 64 pairs over all layers, beside index_select and index_copy_ on each tensor."""
    pairs, layers, heads, dim = (64, LAYERS, 8, 128) if device.is_gpu else (8, 2, 2, 16)
    shape = (4 * pairs, heads, 16, dim)
    keys, values = ([torch.randn(shape, device=device.name).to(BF16) for _ in range(layers)] for _ in "kv")
    order = torch.randperm(4 * pairs, device=device.name)
    mapping = torch.stack([order[:pairs], order[pairs : 2 * pairs]], 1)

    def plain() -> None:
        for cache in (*keys, *values):
            cache.index_copy_(0, mapping[:, 1], cache.index_select(0, mapping[:, 0]))

    call = lambda: ops.copy_blocks(keys, values, mapping)  # noqa: E731
    call()
    if not all(torch.equal(cache[mapping[:, 0]], cache[mapping[:, 1]]) for cache in (*keys, *values)):
        raise SystemExit("bench.gpu: copy_blocks copied something else")
    moved = 2 * pairs * keys[0][0].nbytes * 2 * layers
    times = {"paged_kv": statistics.median(device.times(call, seconds))}
    times["torch index_copy_"] = statistics.median(device.times(plain, seconds))
    rate = moved / times["paged_kv"]
    return result(
        f"copy {pairs} blocks of {layers} layers", times, rate / 1e9, "GB/s", rate / limits.copy, []
    )


def measure_swap(device: Device, limits: Limits, seconds: float, runs: bool) -> dict:
    """swap_blocks of 256 blocks to pinned host memory; the limit is one plain copy of as many bytes."""
    pairs, heads, dim = (256, 8, 128) if device.is_gpu else (8, 2, 16)
    cache = torch.randn(4 * pairs, heads, 16, dim, device=device.name).to(BF16)
    host = torch.zeros((pairs, heads, 16, dim), dtype=BF16, pin_memory=device.is_gpu)
    order = torch.randperm(4 * pairs)[:pairs]
    source = order.sort().values.clone() if not runs else torch.arange(pairs) + pairs
    mapping = torch.stack([source, torch.arange(pairs)], 1)
    call = lambda: ops.swap_blocks(cache, host, mapping)  # noqa: E731
    call()
    if device.is_gpu:
        torch.cuda.synchronize()
    if not torch.equal(host, cache.cpu()[source]):
        raise SystemExit("bench.gpu: swap_blocks copied something else")
    median = statistics.median(device.times(call, seconds))
    rate = host.nbytes / median
    name = f"swap {pairs} blocks to pinned memory, {'neighbours' if runs else 'scattered'}"
    return result(name, {"paged_kv": median}, rate / 1e9, "GB/s", rate / limits.host_copy, [])


def line(row: dict) -> str:
    times = dict(row["seconds"])
    ours = times.pop("paged_kv")
    others = "".join(f" | {name} {t * 1e6:.0f} us, x{t / ours:.2f}" for name, t in times.items())
    left_out = "".join(f" | left out: {text}" for text in row["left_out"])
    return (
        f"{row['case']:70} {ours * 1e6:9.1f} us {row['rate']:8.1f} {row['unit']:8}"
        f"{row['share_of_limit']:5.0%} of the limit{others}{left_out}"
    )


def shrink(shape: Shape) -> Shape:
    """One of the same kind that the CPU computes in no time."""
    length = max(64, shape.seq_len // 64)
    query_len = {"decode": 1, "prefill": length, "chunk": length // 4}[shape.kind]
    return replace(shape, num_seqs=min(2, shape.num_seqs), seq_len=length, query_len=query_len)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--filter", default="", help="only cases whose line contains this text")
    parser.add_argument("--seconds", type=float, default=0.3, help="for each contender, %(default)s")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, in small sizes")
    options = parser.parse_args()
    if not options.rehearse and not torch.cuda.is_available():
        sys.exit("bench.gpu: expected a CUDA GPU, found none; --rehearse runs without one")
    if not options.rehearse and not paged_kv.build_info().cuda_archs:
        sys.exit(
            f"bench.gpu: expected a build with CUDA, got one without: {paged_kv.build_info().cuda_reason}"
        )

    device = Device("cpu" if options.rehearse else "cuda")
    seconds = 0.0 if options.rehearse else options.seconds
    facts = device.describe()
    limits = measure_limits(device, seconds)
    facts |= {
        "copy": f"{limits.copy / 1e9:.0f} GB/s",
        "copy to the host": f"{limits.host_copy / 1e9:.1f} GB/s",
        "bfloat16 product": f"{limits.matmul / 1e12:.0f} TFLOP/s",
    }
    print(", ".join(f"{name}: {value}" for name, value in facts.items()), flush=True)

    cases: list[tuple[str, Callable[[], dict]]] = []
    for shape in ATTENTION:
        small = shrink(shape) if options.rehearse else shape
        cases.append((str(small), lambda small=small: measure_attention(small, device, limits, seconds)))
    cases += [
        (f"write {dtype}", lambda dtype=dtype: measure_write(device, limits, seconds, dtype))
        for dtype in (BF16, E4M3)
    ]
    cases.append(("copy", lambda: measure_copy(device, limits, seconds)))
    cases += [
        (f"swap {runs}", lambda runs=runs: measure_swap(device, limits, seconds, runs))
        for runs in (True, False)
    ]

    results = []
    for name, call in cases:
        if options.filter in name:
            results.append(call())
            print(line(results[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"machine": facts, "results": results}, indent=1))


if __name__ == "__main__":
    main()
