"""`python -m bench`: every benchmark, one after another. Each also runs alone: `python -m bench.attention --help`."""

from . import attention, manager, manager_peers, replay, serving

for benchmark in (attention, manager, manager_peers, replay, serving):
    benchmark.main()
