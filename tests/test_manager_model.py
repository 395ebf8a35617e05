"""Random walks over every call of the manager, against the slow model; `make fuzz` walks much further."""

import os

from hypothesis import HealthCheck, settings
from manager_machine import ManagerMachine

TestManager = ManagerMachine.TestCase
TestManager.settings = settings(
    max_examples=int(os.environ.get("PAGED_KV_FUZZ_WALKS", "60")),
    stateful_step_count=50,
    derandomize="PAGED_KV_FUZZ_WALKS" not in os.environ,  # tests repeat their walks, make fuzz takes new ones
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
