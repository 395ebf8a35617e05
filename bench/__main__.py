"""`python -m bench [--out FOLDER]`: every benchmark, one after another, and how long each takes. Each also runs alone:
`python -m bench.attention --help`. Each is a process of its own, so that none finds the memory or the threads that
another left, and one that fails does not keep the others from running.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser(
    "python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--out", type=Path, metavar="FOLDER", help="write figures as JSON and plots there, too")
folder = parser.parse_args().out

options: dict[str, list[str]] = {}
if folder:
    folder.mkdir(parents=True, exist_ok=True)
    for name, plot in ("attention", "decode.png"), ("serving", "serving.png"):
        options[name] = ["--json", str(folder / f"{name}.json"), "--plot", str(folder / plot)]

failed = []
for name in ("attention", "manager", "manager_peers", "replay", "serving"):
    print(f"---- bench.{name}", flush=True)
    start = time.perf_counter()
    if subprocess.run([sys.executable, "-m", f"bench.{name}", *options.get(name, [])]).returncode:
        failed.append(f"bench.{name}")
    print(f"---- bench.{name}: {(time.perf_counter() - start) / 60:.1f} minutes", flush=True)
if failed:
    sys.exit(f"failed: {', '.join(failed)}")
