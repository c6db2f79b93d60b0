"""How long a rank was blocked, as it counts it and as its agent reads it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hopsgpu.core.gpu_losses import RankLosses
from hopsgpu.rank.blocked_time import BlockedTime, RankBlockedTime


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def in_session(act: Callable[[], None]) -> None:
    """Do something in a child that leads its session, as a rank does."""
    if (child := os.fork()) == 0:
        try:
            os.setsid()
            act()
        except BaseException:  # noqa: BLE001 - told by the exit code
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_each_purpose_has_its_sum(tmp_path: Path) -> None:
    clock = Clock()
    agent = BlockedTime(tmp_path, clock)
    assert agent.read() == RankLosses()

    def act() -> None:
        rank = RankBlockedTime(tmp_path, clock)
        for seconds in (2.0, 0.5):
            with rank.data:
                clock.now += seconds
            clock.now += 10.0
        with pytest.raises(KeyboardInterrupt), rank.checkpoints:
            clock.now += 4.0
            raise KeyboardInterrupt

    in_session(act)
    assert agent.read() == RankLosses(2.5, 4.0)


def test_a_block_that_lasts_is_seen(tmp_path: Path) -> None:
    """A rank that is killed while it waits has waited."""
    clock = Clock()
    agent = BlockedTime(tmp_path, clock)

    def act() -> None:
        RankBlockedTime(tmp_path, clock).data.__enter__()

    in_session(act)
    clock.now += 7.0
    assert agent.read() == RankLosses(7.0)


def test_threads_and_children_keep_no_training_waiting(tmp_path: Path) -> None:
    clock = Clock()
    agent = BlockedTime(tmp_path, clock)

    def act() -> None:
        rank = RankBlockedTime(tmp_path, clock)

        def wait() -> None:
            with rank.data:
                clock.now += 3.0

        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
        if (child := os.fork()) == 0:
            wait()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    in_session(act)
    assert agent.read() == RankLosses()
