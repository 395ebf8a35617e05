"""What all workers (see peers.py) share: commands come and answers go as lines of JSON. To be imported first."""

import json
import os
import sys
from collections.abc import Callable

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what libraries print must not mix with the answers


def serve(version: str, commands: dict[str, Callable]) -> None:
    """Answers until stdin ends: `hello` with the version, the others by a call with what came with the command."""
    for line in sys.stdin:
        command, argument = json.loads(line)
        answer = version if command == "hello" else commands[command](argument)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
