"""What the replays of recorded traces show: waste, batch and sharing. One line a figure, the target beside it.

    python -m bench.replay [--traces FOLDER]

Block size 16, 32,768 blocks, as many requests at once as fit; the first 1,000 requests of Mooncake with answers of
at most 128 tokens, all of Azure. Samples and beams: 64 requests of 512 prompt and 128 new tokens. The paper is Kwon et
al. (2023), figure 16: most of its prompts are shorter than their answers, and the prompt is what samples share.
"""

import argparse
from pathlib import Path

from paged_kv.replay.run import Options, run
from paged_kv.replay.traces import Piece, Request, read_trace

from .common import TRACE_FOLDER

NUM_BLOCKS = 32768
TRACES = {  # file: (requests, most tokens of an answer)
    "mooncake_conversation.jsonl": (1000, 128),
    "azure_code_2023.csv": (None, None),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--traces", type=Path, default=TRACE_FOLDER)
    folder = parser.parse_args().traces
    for file, (num_requests, max_output) in TRACES.items():
        if not (folder / file).exists():
            print(f"{file}: not replayed, it is not in {folder}")
            continue
        requests = read_trace(folder / file)[:num_requests]
        if max_output:
            requests = [request.cut(max_output) for request in requests]
        replay_trace(file, requests)
    share_prompts()


def replay_trace(name: str, requests: list[Request]) -> None:
    figures, _ = run(requests, Options(name, NUM_BLOCKS))
    print(name)
    for allocator, use in figures["allocators"].items():
        limit = "target: under 4 %" if allocator == "paged" else ""
        _print(f"waste, {allocator}", f"{use['waste_mean']:.2%}", limit)
    for allocator, use in figures["allocators"].items():
        ratio = figures["batch_ratio"].get(allocator)
        _print(
            f"batch, {allocator}",
            f"{use['sustained_batch']:.1f}",
            f"paged: {ratio:.1f} times as many (target: 2 to 4)" if ratio else "",
        )


def share_prompts() -> None:
    requests = [
        Request(0.0, (Piece(1000 * index, 512),), Piece(1000 * index + 512, 128)) for index in range(64)
    ]
    print("4 sequences for each prompt of 512 tokens, 128 new tokens each")
    for beams, kind, paper in ((False, "samples", "6 to 30 %"), (True, "beams", "37 to 66 %")):
        figures, _ = run(requests, Options(kind, 65536, group_size=4, beams=beams))
        saved = figures["sharing"]["memory_saved_mean"]
        _print(f"memory saved by sharing, {kind}", f"{saved:.1%}", f"paper: {paper}")


def _print(label: str, value: str, remark: str) -> None:
    print(f"  {label:<40} {value:>8}   {remark}".rstrip())


if __name__ == "__main__":
    main()
