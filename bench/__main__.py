"""`python -m bench`: every benchmark with its defaults. Each also runs alone: `python -m bench.attention --help`."""

from . import attention

attention.main()
