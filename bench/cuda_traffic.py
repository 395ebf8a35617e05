"""The memory traffic of the CUDA kernels, counted while they run on the CPU: ``make cuda-traffic``. No GPU needed.

    python -m bench.cuda_traffic [--filter TEXT] [--json FILE]

The checked build of tests/cuda_on_cpu sees every access that a kernel makes. For the shapes of the speed comparison
this prints, for paged_attention's main kernel:

- K/V read / needed: bytes of keys and values that the kernel reads over those that it has to read. A decode kernel
  that reads each key and value once has 1.00; in a prefill each tile of rows reads the keys before it again (on a GPU
  mostly from the L2 cache), so there the figure tells how many rows share a read.
- sectors: of the 32-byte sectors that K/V reads touch, the share of bytes that was asked for.
- conflicts: passes over the banks of shared memory beyond those that the accesses would need without conflicts, for
  each access of a warp. Some are of this build alone: g++ stores a pair of floats as two words, which meet in a bank
  where nvcc's one 64-bit store does not.
- other: all other sectors of global memory, read or written by it and by the merge kernel, over K/V bytes needed: block
  tables (a sector of them, each time that a warp looks one up), queries, partial and final results.
- warp instructions: products on tensor cores and the loads of their operands, shuffles, votes.

All key/value heads and sequences of a batch do the same work in blocks of their own, so some shapes run here with
fewer of them, in a cache with the strides of the whole; the table says with how many. Lengths are never shortened.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import paged_kv

from .attention_cases import E4M3, F32, INT8, Shape

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import cuda_on_cpu

MAX_READ, MIN_SECTORS = 1.02, 0.95  # of decode; of every kernel


@dataclass(frozen=True)
class Case:
    """A batch of equal sequences, and how much of it is executed."""

    shape: Shape
    num_seqs: int = 1
    num_kv_heads: int = 1

    @property
    def executed(self) -> str:
        parts = []
        if self.num_seqs < self.shape.num_seqs:
            parts.append(f"{self.num_seqs} of {self.shape.num_seqs} sequences")
        if self.num_kv_heads < self.shape.heads[1]:
            parts.append(f"{self.num_kv_heads} of {self.shape.heads[1]} kv heads")
        return ", ".join(parts) or "all"

    @property
    def bytes_needed(self) -> int:
        """Of the keys and values of the part that is executed, each once."""
        shape = self.shape
        return shape.kv_bytes // (shape.num_seqs * shape.heads[1]) * self.num_seqs * self.num_kv_heads


CASES = [
    Case(Shape(1, 32768)),
    Case(Shape(1, 32768, block_size=32)),
    Case(Shape(16, 2048), num_kv_heads=2),
    Case(Shape(16, 2048, block_size=32), num_kv_heads=2),
    Case(Shape(16, 2048, block_size=32, layout="NHD"), num_kv_heads=2),
    Case(Shape(64, 1024, heads=(12, 12), head_dim=64), num_kv_heads=2),
    Case(Shape(64, 1024, heads=(12, 12), head_dim=64, block_size=32), num_kv_heads=2),
    Case(Shape(16, 2048, block_size=32, dtype=F32)),
    Case(Shape(16, 2048, block_size=32, stored=E4M3), num_kv_heads=2),
    Case(Shape(16, 2048, block_size=32, stored=INT8), num_kv_heads=2),
    Case(Shape(1, 1024, query_len=1024, block_size=32)),
    Case(Shape(1, 4352, query_len=256, block_size=32)),
]


def inputs_of(case: Case) -> dict[str, object]:
    """Arguments of one call, over randomly placed blocks of a cache with all heads, of which some are shown."""
    generator = torch.Generator().manual_seed(0)
    shape, num_seqs, num_kv_heads = case.shape, case.num_seqs, case.num_kv_heads
    width = -(-shape.seq_len // shape.block_size)
    cache = paged_kv.PagedKVCache(
        1,
        shape.heads[1],
        shape.head_dim,
        shape.cache_dtype,
        shape.block_size,
        num_blocks=num_seqs * width,
        layout=shape.layout,
        scales="head" if shape.stored else None,
    )
    views = [view[:, :num_kv_heads] for view in (cache[0].key, cache[0].value)]
    for view in views:
        view.copy_(torch.randn(view.shape, generator=generator).clamp(-3, 3).to(view.dtype))
    scales = {name: torch.ones(num_kv_heads) for name in ("k_scale", "v_scale")} if shape.stored else {}
    order = torch.randperm(num_seqs * width, generator=generator).to(torch.int32)
    rows, num_q_heads = num_seqs * shape.query_len, num_kv_heads * shape.heads[0] // shape.heads[1]
    starts = torch.arange(num_seqs + 1) * shape.query_len
    return {
        "query": torch.randn(rows, num_q_heads, shape.head_dim, generator=generator).to(shape.dtype),
        "key_cache": views[0],
        "value_cache": views[1],
        "block_tables": order.view(num_seqs, width),
        "seq_lens": torch.full((num_seqs,), shape.seq_len, dtype=torch.int32),
        "query_start_loc": starts.to(torch.int32),
        "max_query_len": shape.query_len,
        "max_seq_len": shape.seq_len,
        "scale": shape.head_dim**-0.5,
        **scales,
    }


def check(shape: Shape, out: Tensor, expected: Tensor) -> None:
    """Traffic of a wrong result is worth nothing."""
    error = float((out.double() - expected.double()).abs().max() / expected.double().abs().max())
    allowed = 1e-5 if shape.dtype == F32 else 2e-2
    if not error <= allowed:
        raise SystemExit(f"cuda_traffic: {shape}: error {error:.1e} of the largest output, allowed {allowed}")


def measure(case: Case, ops: object, checker: cuda_on_cpu.Checker) -> dict:
    args = inputs_of(case)
    checker.reset(args["key_cache"], args["value_cache"])
    start = time.perf_counter()
    out, _ = ops.paged_attention(**args)
    seconds = time.perf_counter() - start
    kernels = checker.report()
    check(case.shape, out, paged_kv.ops.paged_attention(**args)[0])
    main = next(counts for name, counts in kernels.items() if "_kernel_of<" in name)
    watched, needed = main["watched"], case.bytes_needed
    sectors = sum(counts[way]["sectors"] for counts in kernels.values() for way in ("read", "written"))
    shared = main["shared"].values()
    extra = sum(kind["wavefronts"] - kind["ideal_wavefronts"] for kind in shared)
    return {
        "case": str(case.shape),
        "executed": case.executed,
        "kv_bytes_needed": needed,
        "kv_read_over_needed": watched["bytes"] / needed,
        "sector_efficiency": watched["bytes"] / (32 * watched["sectors"]),
        "conflicts_per_shared_access": extra / sum(kind["instructions"] for kind in shared),
        "other_sectors_over_needed": 32 * (sectors - watched["sectors"]) / needed,
        "instructions": main["warp_operations"],
        "kernels": kernels,
        "seconds_on_cpu": seconds,
    }


def misses(shape: Shape, result: dict) -> list[str]:
    found = []
    if shape.kind == "decode" and result["kv_read_over_needed"] > MAX_READ:
        found.append(
            f"{shape}: reads {result['kv_read_over_needed']:.3f} of the needed K/V bytes, at most {MAX_READ}"
        )
    if result["sector_efficiency"] < MIN_SECTORS:
        found.append(
            f"{shape}: sector efficiency {result['sector_efficiency']:.1%}, at least {MIN_SECTORS:.0%}"
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--filter", default="", help="only shapes whose line contains this text")
    parser.add_argument("--json", type=Path, help="write all counts to this file")
    options = parser.parse_args()
    library = cuda_on_cpu.FOLDER / f"lib{cuda_on_cpu.CHECKED}.so"
    if not library.exists():
        sys.exit(f"cuda_traffic: {library} is not built; `make cuda-traffic` builds it")

    ops, checker = cuda_on_cpu.load_ops(cuda_on_cpu.CHECKED), cuda_on_cpu.Checker()
    print(
        f"{'shape':70} {'executed':34} {'K/V read':>8} {'sectors':>7} {'conflicts':>9} {'other':>6}  instructions"
    )
    results, found = [], []
    for case in CASES:
        if options.filter not in str(case.shape):
            continue
        result = measure(case, ops, checker)
        instructions = ", ".join(f"{count} {name}" for name, count in result["instructions"].items())
        print(
            f"{result['case']:70} {case.executed:34} {result['kv_read_over_needed']:8.3f} "
            f"{result['sector_efficiency']:7.1%} {result['conflicts_per_shared_access']:9.3f} "
            f"{result['other_sectors_over_needed']:6.1%}  {instructions}",
            flush=True,
        )
        results.append(result)
        found += misses(case.shape, result)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    for miss in found:
        print(f"cuda_traffic: {miss}", file=sys.stderr)
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
