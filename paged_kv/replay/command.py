"""`paged-kv replay`: options, progress bar, output."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..manager.arguments import MAX_COUNT
from .report import table
from .run import DTYPE_BYTES, ModelShape, Options, run
from .traces import Request, TraceError, read_trace, synthetic_trace

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "trace",
        nargs="?",
        type=Path,
        metavar="TRACE",
        help="Mooncake JSON lines, Azure CSV or ShareGPT JSON (default: a made-up chat service)",
    )
    add("--requests", type=_positive, metavar="N", help="the first N requests only (made-up ones: 1000)")
    add("--max-output", type=_positive, metavar="N", help="cut answers to N tokens")
    add("--block-size", type=_positive, default=16, metavar="B", help="token slots in a block (default: 16)")
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--num-blocks", type=_positive, metavar="N", help="blocks in the pool (default: 32768, made-up: 8192)"
    )
    size.add_argument("--memory", type=_bytes, metavar="SIZE", help="bytes of the pool instead, as 40GiB")
    shape = ModelShape()
    add(
        "--layers",
        type=_positive,
        default=shape.num_layers,
        metavar="N",
        help="layers of the model (default: %(default)s)",
    )
    add(
        "--kv-heads",
        type=_positive,
        default=shape.num_kv_heads,
        metavar="N",
        help="its key/value heads (default: %(default)s)",
    )
    add(
        "--head-size",
        type=_positive,
        default=shape.head_dim,
        metavar="N",
        help="its head size (default: %(default)s)",
    )
    add("--dtype", choices=DTYPE_BYTES, default=shape.dtype, help="of the cache (default: %(default)s)")
    add("--max-running", type=_positive, metavar="N", help="most requests at once (default: what fits)")
    add("--no-prefix-cache", action="store_true", help="compute every prompt from its first token")
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--samples", type=_positive, default=1, metavar="N", help="answers sampled for each request"
    )
    group.add_argument(
        "--beam-width", type=_positive, default=1, metavar="N", help="beam search over answers"
    )
    add(
        "--step-ms",
        type=float,
        default=0.0,
        metavar="MS",
        help="let requests come at their time, a step taking MS of it (default: all are there from the start)",
    )
    add("--json", action="store_true", help="print the figures as JSON")
    add("--plot", type=Path, metavar="FILE.png", help="draw the use of memory and a map of the pool")


def replay_command(args: argparse.Namespace) -> int:
    """Runs the command. Raises TraceError, ImportError or OSError for what the user gave and cannot be used."""
    if not 0 <= args.step_ms < math.inf:
        raise TraceError(f"argument --step-ms: expected a finite number of at least 0, got {args.step_ms}")
    if args.plot is not None:
        from . import plot  # before the work is done, not after

        plot.check_target(args.plot)
    requests = _requests(args)
    options = _options(args, args.trace.name if args.trace else "made-up chat service")
    with _progress(3 * len(requests)) as on_progress:
        figures, runs = run(requests, options, on_progress=on_progress, with_map=args.plot is not None)
    print(json.dumps(figures, indent=2) if args.json else table(figures))
    if args.plot is not None:
        plot.draw(args.plot, options, runs)
        print(f"drawn to {args.plot}", file=sys.stderr)
    return 0


def _requests(args: argparse.Namespace) -> list[Request]:
    requests = read_trace(args.trace) if args.trace else synthetic_trace(args.requests or 1000)
    requests = requests[: args.requests]
    if args.max_output:
        requests = [request.cut(args.max_output) for request in requests]
    return requests


def _options(args: argparse.Namespace, name: str) -> Options:
    shape = ModelShape(args.layers, args.kv_heads, args.head_size, args.dtype)
    # The made-up requests would all fit into more at once, and show nothing of what fits.
    num_blocks = args.num_blocks or (32768 if args.trace else 8192)
    if args.memory:
        block_bytes = args.block_size * shape.bytes_per_token
        num_blocks = args.memory // block_bytes
        if not 1 <= num_blocks <= MAX_COUNT:
            least = "at least" if num_blocks == 0 else f"at most {MAX_COUNT} times"
            raise TraceError(
                f"argument --memory: expected {least} the {block_bytes} bytes of one block, got {args.memory}"
            )
    return Options(
        name=name,
        num_blocks=num_blocks,
        block_size=args.block_size,
        shape=shape,
        max_running=args.max_running,
        prefix_cache=not args.no_prefix_cache,
        group_size=max(args.samples, args.beam_width),
        beams=args.beam_width > 1,
        step_seconds=args.step_ms / 1000,
    )


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, where tqdm is installed; takes how many requests of a run have come to an end."""
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        yield lambda finished: None
        return
    with tqdm(total=total, unit=" requests", disable=not sys.stderr.isatty()) as bar:
        last = 0

        def on_progress(finished: int) -> None:
            nonlocal last
            if finished != last:
                bar.update(finished - last if finished > last else finished)  # less than before: the next run
                last = finished

        yield on_progress


def _positive(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_COUNT:
        raise argparse.ArgumentTypeError(f"expected an integer from 1 to {MAX_COUNT}, got {text!r}")
    return int(text)


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)(?:i?B)?", text, re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected bytes, as 512MiB or 40GiB, got {text!r}")
    size = float(match[1]) * UNITS[match[2].upper()]
    if math.isinf(size):
        raise argparse.ArgumentTypeError(f"expected bytes, as 512MiB or 40GiB, got {text!r}")
    return int(size)
