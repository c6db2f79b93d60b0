"""A lake that hangs: GPUs are released before its writes, and one deadline bounds all of them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hopsgpu.agent import rank_group
from hopsgpu.agent.rank_group import RankGroup
from hopsgpu.attempts.rank_output import Outputs
from hopsgpu.core.gang import GangExecutor, assign_ranks
from hopsgpu.display.base import NoDisplay
from hopsgpu.errors import StoreError
from hopsgpu.executors.placement_loop import PlacementLoop
from hopsgpu.launcher.gang_run import GangRun
from hopsgpu.storage.background import Background
from hopsgpu.storage.bounded_calls import BoundedCall
from hopsgpu.storage.lake import LakePath
from tests.bounds import HANG_SECONDS

RANKS = 400
# Much longer than anything here takes, and much less than the waits of old.
SECONDS = 45.0


class HangingLake(LakePath):
    """A lake whose writes end when the test does."""

    answers = threading.Event()

    def make(self) -> None:
        assert self.answers.wait(HANG_SECONDS)
        raise StoreError("the lake does not answer")

    def __truediv__(self, name: str) -> HangingLake:
        return HangingLake(super().__truediv__(name).url)


@pytest.fixture
def lake(tmp_path: Any) -> Iterator[HangingLake]:
    HangingLake.answers.clear()
    yield HangingLake(f"file://{tmp_path}/logs")
    HangingLake.answers.set()


def output_of(ranks: int) -> Outputs:
    executors = [GangExecutor(n, f"container_{n}", "node", "10.0.0.1", ()) for n in range(ranks)]
    return Outputs(assign_ranks(executors, 1), NoDisplay())


class Runner:
    """An attempt whose ranks have returned; the lake hangs when its logs are uploaded."""

    result = SimpleNamespace(failure=None)

    def __init__(self, lake: LakePath, ranks: int) -> None:
        self._lake = lake
        self._ranks = ranks

    def queue_log_uploads(self, background: Background, *waits: float, **named: float) -> None:
        from hopsgpu.attempts.attempt import AttemptRunner

        with output_of(self._ranks) as outputs:
            for rank in range(self._ranks):
                outputs.add(rank, b"loss 0.5\n")
            this = SimpleNamespace(_outputs=outputs, _call=SimpleNamespace(logs=self._lake))
            AttemptRunner.queue_log_uploads(cast("Any", this), background, *waits, **named)


def test_an_attempt_of_400_ranks_returns_its_gpus_although_no_log_is_written(
    lake: HangingLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    background = Background("logs of this test")
    monkeypatch.setattr(
        "hopsgpu.launcher.gang_run.open_attempt",
        lambda *_: contextlib.nullcontext(Runner(lake, RANKS)),
    )
    monkeypatch.setattr(
        "hopsgpu.launcher.gang_run.assign_ranks",
        lambda *_: SimpleNamespace(size=RANKS, processes=()),
    )
    run: Any = SimpleNamespace(
        _plan=SimpleNamespace(
            spec=SimpleNamespace(parameter_servers=0, model=None, independent_ranks=True),
            ranks_per_executor=1,
        ),
        _active=SimpleNamespace(run_id="r", bounds=None, background=background),
        _arguments=SimpleNamespace(progress=None),
        _board=SimpleNamespace(attempt=0, state=lambda *_, **__: None, mark=lambda *_: None),
        _call=lambda _: None,
        _python_env=None,
    )
    recording: Any = SimpleNamespace(following=lambda _: contextlib.nullcontext())
    attempt = functools.partial(
        GangRun._make_attempt,
        run,
        recording,
        cast("Any", SimpleNamespace(containers=())),
        cast("Any", None),
        threading.Event(),
        run_ranks=lambda _: None,
    )
    ended = BoundedCall("attempt of this test", attempt)
    # The gang's GPUs are released when the attempt has ended.
    assert ended.wait(SECONDS)
    # What is written of the run itself does not wait behind its logs.
    background.put("the record", threading.Event().set)
    with background._changed:
        assert next(iter(background._waiting)) == "the record"
    background.flush(0.5)
    (problem,) = background.problems()
    assert "not written to the lake within 0.5 s" in problem and "more" in problem


def test_writes_that_fail_one_after_the_other_do_not_put_off_the_deadline() -> None:
    """400 logs, each of which fails after a minute, would last for hours."""
    background = Background("logs of this test")
    ended = threading.Event()

    def fail() -> None:
        if not ended.wait(0.05):
            background.put_all([(f"{threading.get_ident()} again", fail)], 0.0)
        raise StoreError("the lake does not answer")

    background.put("a log", fail)
    flushed = BoundedCall("flush of this test", lambda: background.flush(1.0))
    try:
        assert flushed.wait(SECONDS)
    finally:
        ended.set()
    problems = background.problems()
    assert any("not written to the lake within 1 s" in problem for problem in problems)
    assert len(problems) <= 22


def test_a_rank_ends_although_the_lake_does_not_take_its_value(
    lake: HangingLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_group, "_VALUE_SECONDS", 0.1)
    group: Any = SimpleNamespace(_message={"attempt": 0}, _run_url=lake)
    store = BoundedCall(
        "value of this test",
        lambda: asyncio.run(RankGroup._store_value(group, 0, bytes(2 * 2**20))),
    )
    with pytest.raises(StoreError, match=r"values/attempt-0-rank-0.pickle was not written within"):
        store.result(SECONDS)


def test_the_executors_of_a_search_do_not_wait_for_the_logs_of_its_trials() -> None:
    """One deadline for all of them, after the release."""
    order: list[str] = []
    joined: list[float] = []

    class Trial:
        def join(self, seconds: float) -> None:
            joined.append(seconds)
            order.append("join")

    loop: Any = SimpleNamespace(
        _running=(), _ending=[Trial()] * RANKS, _active=SimpleNamespace(board=SimpleNamespace())
    )
    loop._active.board.mark = order.append
    PlacementLoop._close(loop)
    assert order == ["returned"]
    with PlacementLoop.queuing_logs(loop):
        order.append("released")
    assert order[:3] == ["returned", "released", "join"]
    assert joined == sorted(joined, reverse=True) and joined[0] > joined[-1]
