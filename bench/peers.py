"""Peers, each in a Python environment of its own, driven as worker processes through lines of JSON.

An attention worker answers three commands: `load` (the path of a case's tensors; gives what the peer chose to do with
it), `run` (computes once and saves the result to a path) and `time` (gives the seconds of each call). Those of a block
manager are in manager_worker.py.
"""

import json
import os
import subprocess
from pathlib import Path

FOLDER = Path(__file__).parent


class Peer:
    """A running worker. It is ready once it is made: it takes no time from what is measured but when asked."""

    def __init__(self, name: str, python: Path, script: str, threads: int) -> None:
        self.name = name
        # Importing Intel's extension starts processes for Inductor to compile in, which take two seconds of a core
        # after the worker has answered; 1: none.
        env = os.environ | {"OMP_NUM_THREADS": str(threads), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        self._process = subprocess.Popen(
            [str(python), str(FOLDER / script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
            cwd=FOLDER,  # so that the peer does not import this package from the working folder
        )
        self.version = self.ask("hello")

    def ask(self, command: str, argument: str | float | dict | None = None) -> object:
        self._process.stdin.write(json.dumps([command, argument]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(
                f"{self.name} ended during {command!r}:\n{self._process.stderr.read()[-2000:]}"
            )
        return json.loads(answer)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=60)


def start_peers(threads: int, scripts: dict[str, str]) -> list[Peer]:
    """Of the peers named, each whose environment has been set up: `make bench-peers` puts .venv-NAME beside the
    project; NAME_VENV in the environment, as VLLM_CPU_VENV, tells another place.
    """
    peers = []
    for name, script in scripts.items():
        variable = name.upper().replace("-", "_") + "_VENV"
        venv = Path(os.environ.get(variable, FOLDER.parent / f".venv-{name}"))
        if (venv / "bin/python").exists():
            peers.append(Peer(name, venv / "bin/python", script, threads))
        else:
            print(f"{name}: not measured, no environment at {venv}")
    return peers
