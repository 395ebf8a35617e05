"""The package's face: what it exports, what it was built with, and how it fails where that does not fit."""

import paged_kv


def test_all_is_sorted_and_complete():
    assert list(paged_kv.__all__) == sorted(paged_kv.__all__)
    for name in paged_kv.__all__:
        assert getattr(paged_kv, name) is not None
