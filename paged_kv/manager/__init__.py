"""The block manager. One idea a file:

pool.py      which blocks are free, evictable or in use, and who is next
tables.py    which block holds which position of which sequence
manager.py   the calls
"""

from .manager import Admission, AdmissionStatus, PagedKVCacheManager, Stats, Step

__all__ = ["Admission", "AdmissionStatus", "PagedKVCacheManager", "Stats", "Step"]
