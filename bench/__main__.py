"""`python -m bench`: every benchmark, one after another, and how long each takes. Each also runs alone: `python -m
bench.attention --help`. Each is a process of its own, so that none finds the memory or the threads that another left,
and one that fails does not keep the others from running.
"""

import subprocess
import sys
import time

failed = []
for name in ("attention", "manager", "manager_peers", "replay", "serving"):
    print(f"---- bench.{name}", flush=True)
    start = time.perf_counter()
    if subprocess.run([sys.executable, "-m", f"bench.{name}"]).returncode:
        failed.append(f"bench.{name}")
    print(f"---- bench.{name}: {(time.perf_counter() - start) / 60:.1f} minutes", flush=True)
if failed:
    sys.exit(f"failed: {', '.join(failed)}")
