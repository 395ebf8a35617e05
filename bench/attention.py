"""paged_attention beside vLLM's CPU attention, PyTorch's own on contiguous keys, and a plain read of the same blocks.

    python -m bench.attention [--filter TEXT] [--seconds S] [--json FILE]

Every contender computes the same inputs and is checked before it is timed; then they take turns, and the medians over
all turns are compared. Threads = cores. Block tables are scattered: a random permutation, as after long serving; or
runs: a sequence's blocks lie one after the other.
"""

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import paged_kv

from .common import PlainRead, machine, spread, time_calls
from .peers import Peer, start_peers

ROUNDS = 5  # turns that each contender takes


@dataclass(frozen=True)
class Shape:
    num_seqs: int
    seq_len: int
    query_len: int = 1
    heads: tuple[int, int] = (32, 8)  # query heads, key/value heads
    head_dim: int = 128
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    tables: str = "scattered"
    layout: str = "HND"

    @property
    def kind(self) -> str:
        return "decode" if self.query_len == 1 else "prefill" if self.query_len == self.seq_len else "chunk"

    def __str__(self) -> str:
        length = f"{self.query_len} on {self.seq_len}" if self.kind == "chunk" else str(self.seq_len)
        dtype = str(self.dtype).removeprefix("torch.")
        heads = f"{self.heads[0]}/{self.heads[1]} heads D {self.head_dim}"
        placed = f"block {self.block_size} {self.tables} {self.layout}"
        return f"{self.kind} {self.num_seqs} x {length} {dtype} {heads} {placed}"

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that have to be read."""
        return 2 * self.num_seqs * self.seq_len * self.heads[1] * self.head_dim * self.dtype.itemsize

    @property
    def flops(self) -> int:
        """Floating-point operations of both products, each pair of a query and a key it sees counted once."""
        pairs = sum(range(self.seq_len - self.query_len + 1, self.seq_len + 1))
        return 4 * self.num_seqs * pairs * self.heads[0] * self.head_dim


F32 = torch.float32
SHAPES = [
    Shape(16, 2048),
    Shape(16, 2048, block_size=32),
    Shape(16, 2048, block_size=32, tables="runs", layout="head_major"),
    Shape(1, 32768, block_size=32),
    Shape(64, 1024, heads=(12, 12), head_dim=64, block_size=32),
    Shape(16, 2048, block_size=32, dtype=F32),
    Shape(1, 1024, query_len=1024, block_size=32),
    Shape(1, 4096, query_len=256, block_size=32),
]


class Inputs:
    """The same random keys, values and queries for every contender."""

    def __init__(self, shape: Shape) -> None:
        num_kv_heads, block_size = shape.heads[1], shape.block_size
        generator = torch.Generator().manual_seed(0)
        rows = (shape.seq_len, num_kv_heads, shape.head_dim)

        def random(*size: int) -> Tensor:
            return torch.randn(size, generator=generator).to(shape.dtype)

        self.shape = shape
        self.keys = [random(*rows) for _ in range(shape.num_seqs)]
        self.values = [random(*rows) for _ in range(shape.num_seqs)]
        self.query = random(shape.num_seqs * shape.query_len, shape.heads[0], shape.head_dim)
        width = -(-shape.seq_len // block_size)
        num_blocks = shape.num_seqs * width
        order = torch.arange(num_blocks)
        if shape.tables == "scattered":
            order = torch.randperm(num_blocks, generator=generator)
        self.block_tables = order.to(torch.int32).view(shape.num_seqs, width)
        self.seq_lens = torch.full((shape.num_seqs,), shape.seq_len, dtype=torch.int32)
        starts = range(0, (shape.num_seqs + 1) * shape.query_len, shape.query_len)
        self.query_start_loc = torch.tensor(starts, dtype=torch.int32)
        self.cache_shape = (num_blocks, num_kv_heads, block_size, shape.head_dim)
        self.scale = shape.head_dim**-0.5

    def save(self, path: Path) -> str:
        names = (
            "query",
            "keys",
            "values",
            "block_tables",
            "seq_lens",
            "query_start_loc",
            "cache_shape",
            "scale",
        )
        torch.save({name: getattr(self, name) for name in names}, path)
        return str(path)


class Ours:
    """paged_attention on a PagedKVCache, as a user of the library has it."""

    def __init__(self, inputs: Inputs) -> None:
        shape = inputs.shape
        cache = paged_kv.PagedKVCache(
            1,
            shape.heads[1],
            shape.head_dim,
            shape.dtype,
            shape.block_size,
            num_blocks=inputs.cache_shape[0],
            layout=shape.layout,
        )
        self.key_cache, self.value_cache = cache[0].key, cache[0].value
        token = torch.arange(shape.seq_len)
        slots = inputs.block_tables.long()[:, token // shape.block_size] * shape.block_size
        slots = (slots + token % shape.block_size).flatten()
        paged_kv.ops.reshape_and_cache(
            torch.cat(inputs.keys), torch.cat(inputs.values), self.key_cache, self.value_cache, slots
        )
        self.args = (inputs.query, self.key_cache, self.value_cache, inputs.block_tables)
        self.args += (inputs.seq_lens, inputs.query_start_loc)
        self.bounds = {"max_query_len": shape.query_len, "max_seq_len": shape.seq_len, "scale": inputs.scale}
        self.out = torch.empty_like(inputs.query)
        self.lse = torch.empty(inputs.query.shape[:2])

    def __call__(self) -> Tensor:
        paged_kv.ops.paged_attention(*self.args, **self.bounds, out=self.out, lse=self.lse)
        return self.out


class Contiguous:
    """scaled_dot_product_attention on keys and values [S, H, L, D] that need no block table."""

    def __init__(self, inputs: Inputs, dtype: torch.dtype | None = None) -> None:
        shape, dtype = inputs.shape, dtype or inputs.shape.dtype
        self.key = torch.stack(inputs.keys).transpose(1, 2).to(dtype).contiguous()
        self.value = torch.stack(inputs.values).transpose(1, 2).to(dtype).contiguous()
        packed = inputs.query.view(shape.num_seqs, shape.query_len, shape.heads[0], shape.head_dim)
        self.query = packed.transpose(1, 2).to(dtype)
        self.options = {"scale": inputs.scale, "enable_gqa": shape.heads[0] != shape.heads[1]}
        if shape.kind == "prefill":
            self.options["is_causal"] = True
        elif shape.kind == "chunk":
            positions = torch.arange(shape.seq_len - shape.query_len, shape.seq_len)
            self.options["attn_mask"] = torch.arange(shape.seq_len) <= positions[:, None]

    def __call__(self) -> Tensor:
        out = scaled_dot_product_attention(self.query, self.key, self.value, **self.options)
        return out.transpose(1, 2).flatten(0, 1)


def check(name: str, shape: Shape, out: Tensor, exact: Tensor) -> None:
    """A contender that computes something else is not one."""
    error = float((out.double() - exact).abs().max() / exact.abs().max())
    allowed = 1e-5 if shape.dtype == F32 else 2e-2
    if not error <= allowed:
        raise SystemExit(
            f"{shape}: {name} is wrong: error {error:.1e} of the largest output, allowed {allowed:.0e}"
        )


def measure(shape: Shape, peers: list[Peer], plain_read: PlainRead, seconds: float, folder: Path) -> dict:
    inputs = Inputs(shape)
    ours, contiguous = Ours(inputs), Contiguous(inputs)
    exact = Contiguous(inputs, torch.float64)()
    path = inputs.save(folder / "case.pt")
    choices = {peer.name: peer.ask("load", path) for peer in peers}
    check("paged_kv", shape, ours(), exact)
    check("torch SDPA", shape, contiguous(), exact)
    for peer in peers:
        check(peer.name, shape, torch.load(peer.ask("run", str(folder / "out.pt"))), exact)

    read, bytes_read = plain_read.of_blocks([ours.key_cache, ours.value_cache], inputs.block_tables.flatten())
    assert bytes_read == shape.kv_bytes
    contenders = {
        "paged_kv": lambda: time_calls(ours, seconds),
        "plain read": lambda: time_calls(read, seconds),
        **{peer.name: lambda peer=peer: peer.ask("time", seconds) for peer in peers},
        "torch SDPA": lambda: time_calls(contiguous, seconds),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, turn in contenders.items():
            time.sleep(0.05)  # until the threads of the one before have stopped spinning
            times[name] += turn()
    results = {
        name: dict(zip(("median", "low", "high"), spread(t), strict=True)) for name, t in times.items()
    }
    return {
        "case": str(shape),
        "kv_bytes": shape.kv_bytes,
        "flops": shape.flops,
        "chosen": choices,
        "seconds": results,
    }


def line(shape: Shape, result: dict) -> str:
    seconds = {name: figures["median"] for name, figures in result["seconds"].items()}
    ours = seconds.pop("paged_kv")
    read = seconds.pop("plain read")
    if shape.kind == "decode":
        rate = f"{shape.kv_bytes / ours / 1e9:5.1f} GB/s, {read / ours:4.0%} of a plain read"
    else:
        rate = f"{shape.flops / ours / 1e9:5.0f} GFLOP/s"
    others = "".join(
        f" | {name}{'[' + result['chosen'][name] + ']' if name in result['chosen'] else ''}"
        f" {t * 1e3:.2f} ms, x{t / ours:.2f}"
        for name, t in seconds.items()
    )
    spread_of_ours = result["seconds"]["paged_kv"]
    quartiles = f"{spread_of_ours['low'] * 1e3:.2f}-{spread_of_ours['high'] * 1e3:.2f}"
    return f"{shape!s:78} {ours * 1e3:8.2f} ms ({quartiles}) {rate}{others}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--filter", default="", help="only cases whose line contains this text")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each contender's turn, %(default)s")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()

    facts = machine() | {"paged_kv isa": paged_kv.build_info().isa}
    torch.set_num_threads(facts["cores"])
    peers = start_peers(facts["cores"])
    facts |= {peer.name: peer.version for peer in peers}
    print(", ".join(f"{name}: {value}" for name, value in facts.items()))
    plain_read, results = PlainRead(), []
    with tempfile.TemporaryDirectory(prefix="paged_kv_bench_") as folder:
        for shape in SHAPES:
            if options.filter in str(shape):
                results.append(measure(shape, peers, plain_read, options.seconds, Path(folder)))
                print(line(shape, results[-1]), flush=True)
    for peer in peers:
        peer.close()
    if options.json:
        options.json.write_text(json.dumps({"machine": facts, "results": results}, indent=1))


if __name__ == "__main__":
    main()
