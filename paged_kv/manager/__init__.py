"""The block manager. One idea a file:

pool.py       which blocks are free, evictable or in use, and which come next
tables.py     which block holds which position of which sequence
chain.py      what a full block's content is called
prefix.py     finding blocks by that name
growth.py     where the next tokens go, and copy-on-write
beams.py      the beam step
publish.py    telling the prefix cache of full blocks, sliding windows
admission.py  whether a prompt fits, and what it finds
pins.py       prefixes kept from eviction
swap.py       sequences on the host
events.py     what happened;  stats.py  how much of it
manager.py    the calls;  arguments.py, tokens.py  what they may be given

handover.py   a sequence or a prefix cache, taken from one manager into another;  prometheus.py  figures for Prometheus
"""

from .admission import Admission, AdmissionStatus
from .chain import ContentKey
from .events import Event
from .manager import PagedKVCacheManager, Step
from .pins import Pin
from .prometheus import PrometheusCollector
from .stats import Stats

__all__ = [
    "Admission",
    "AdmissionStatus",
    "ContentKey",
    "Event",
    "PagedKVCacheManager",
    "Pin",
    "PrometheusCollector",
    "Stats",
    "Step",
]
