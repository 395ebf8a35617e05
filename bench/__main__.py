"""`python -m bench`: attention, the block manager and replays. Each also runs alone: `python -m bench.attention --help`."""

from . import attention, manager, manager_peers, replay

for benchmark in (attention, manager, manager_peers, replay):
    benchmark.main()
