"""`python -m bench`: attention and the block manager. Each also runs alone: `python -m bench.attention --help`."""

from . import attention, manager

attention.main()
manager.main()
