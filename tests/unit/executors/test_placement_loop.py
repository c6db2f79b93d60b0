"""The thread of a search, and those of its trials, beside threads that compute."""

from __future__ import annotations

import sys

from hopsgpu.executors.placement_loop import quick_switching


def test_threads_take_turns_quickly_until_the_last_search_ends() -> None:
    before = sys.getswitchinterval()
    with quick_switching():
        quick = sys.getswitchinterval()
        assert quick < before
        with quick_switching():
            assert sys.getswitchinterval() == quick
        assert sys.getswitchinterval() == quick
    assert sys.getswitchinterval() == before
