"""No op reads or writes a byte beside its tensors."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import paged_kv

TESTS = Path(__file__).parent


@pytest.mark.parametrize("isa", paged_kv.build_info().isas_supported)
def test_nothing_beside_a_tensor_is_touched(isa: str) -> None:
    """In a process of its own, as the proof of a fault is that it dies."""
    path = os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, str(TESTS / "fences.py")],
        env=os.environ | {"PYTHONPATH": path, "PAGED_KV_ISA": isa},
        capture_output=True,
        text=True,
    )
    last = run.stdout.splitlines()[-1] if run.stdout else "nothing"
    assert run.returncode == 0 and last == "done", (
        f"ended with {run.returncode} in {last}\n{run.stderr[-2000:]}"
    )
