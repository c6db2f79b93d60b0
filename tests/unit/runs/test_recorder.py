"""A run's record: its content, and its updates while the run continues."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hopsgpu.attempts.rank_table import RankTable
from hopsgpu.core.end_reason import EndReason
from hopsgpu.core.gang import GangExecutor, GangState, assign_ranks
from hopsgpu.core.run_record import parse
from hopsgpu.core.spec import ExecutorShape, GangSpec, LaunchPlan
from hopsgpu.core.wait_reasons import WaitReason
from hopsgpu.display.progress import progress_of
from hopsgpu.errors import StoreError
from hopsgpu.runs.active_run import ActiveRun
from hopsgpu.runs.recorder import Recording, RecordingIntervals
from hopsgpu.runs.run_details import RunDetails, environment, packages, write
from hopsgpu.runs.status_board import GangBoard
from hopsgpu.storage.background import Background, Work
from hopsgpu.storage.lake import LakePath
from tests.bounds import HANG_SECONDS
from tests.conftest import until
from tests.unit.records import record_of

SHAPE = ExecutorShape(1, 1, 512, 4608)
OFTEN = RecordingIntervals(0.01, 0.01, 0.01, 0.01)


def plan_for(spec: GangSpec, root: str = "file:///lake") -> LaunchPlan:
    return LaunchPlan(spec, spec.workers, 1, SHAPE, "default", {}, {"run": f"{root}/runs/fit-1"})


def test_the_packages_of_this_process_are_listed() -> None:
    found = packages()
    assert found["click"] and found["hopsgpu"]
    assert list(found) == sorted(found, key=str.lower)


def test_the_commit_of_the_working_directory_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site: Any = SimpleNamespace(versions={})
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    assert (environment(site).commit, environment(site).has_changes) == ("", False)

    def git(*arguments: str) -> str:
        settings = ("-c", "user.name=alice", "-c", "user.email=alice@example.com")
        command = ["git", *settings, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "--quiet")
    (tmp_path / "train.py").write_text("x = 1")
    git("add", "train.py")
    assert environment(site).commit == ""
    git("commit", "--quiet", "--message", "begin")
    (tmp_path / "notes").write_text("untracked")
    found = environment(site)
    assert (found.commit, found.has_changes) == (git("rev-parse", "HEAD"), False)
    (tmp_path / "train.py").write_text("x = 2")
    assert environment(site).has_changes


def test_record_that_the_lake_refuses_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=f"record .*{tmp_path}/file"):
        write(LakePath(f"file://{tmp_path}/file"), record_of("fit-1"))


class Attempt:
    """The logs of an attempt."""

    def __init__(self) -> None:
        self.brought: list[str] = []
        self.urls = ["file:///lake/rank-0.log"]

    def grown_logs(self) -> Sequence[tuple[str, Work]]:
        return [(url, lambda url=url: self.brought.append(url)) for url in self.urls]  # type: ignore[misc]

    def log_sizes(self) -> Mapping[str, int]:
        return {"logs/rank-0.log": 5}


class Recorded:
    """A run with a record."""

    def __init__(
        self,
        directory: Path,
        spec: GangSpec = GangSpec("fit"),  # noqa: B008
        intervals: RecordingIntervals = OFTEN,
    ) -> None:
        self.file = directory / "run.json"
        self.now = 1e9
        self.board = GangBoard("fit-1", 1, 1, progress_of("off"))
        self.background = Background("records")
        self.cancelled = threading.Event()
        lake = LakePath(f"file://{directory}")
        lake.make()
        site: Any = SimpleNamespace(id="application_1", user="alice", versions={})
        plan = replace(plan_for(spec), paths={"run": lake.url})
        active = ActiveRun(plan, site, self.board, self.cancelled, self.background)
        self.recording = Recording(active, RunDetails, lambda: self.now, intervals=intervals)

    @property
    def fields(self) -> dict[str, Any]:
        return dict(json.loads(self.file.read_bytes())) if self.file.exists() else {}


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Recorded]:
    recorded = Recorded(tmp_path / "fit-1")
    yield recorded
    # No work may continue during the next test.
    recorded.background.flush(HANG_SECONDS)


def watch_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.endswith("-watch")]


def test_record_has_no_secrets(tmp_path: Path) -> None:
    spec = GangSpec("fit", env_vars={"API_TOKEN": "s3cret", "MODE": "fast"})
    recorded = Recorded(tmp_path / "fit-1", spec)
    recorded.recording.put("requested")
    recorded.background.flush(HANG_SECONDS)
    record = parse(recorded.file.read_bytes())
    assert record.spec.env_vars == {"API_TOKEN": "(redacted)", "MODE": "fast"}
    assert record.environment.packages == packages()


def test_record_follows_the_run(recorded: Recorded) -> None:
    attempt = Attempt()
    recorded.recording.put("requested")
    recorded.background.flush(HANG_SECONDS)
    assert (recorded.fields["state"], recorded.fields["ranks"]) == ("requested", [])
    with recorded.recording.watching():
        recorded.board.state(GangState.WAITING)
        assert until(lambda: recorded.fields["state"] == "waiting")
        first = recorded.fields["updated"]
        recorded.now += 1.0
        assert until(lambda: recorded.fields["updated"] > first)
        for state in (GangState.GRANTED, GangState.READY, GangState.STARTING, GangState.RUNNING):
            recorded.board.state(state)
        ranks = RankTable(assign_ranks([GangExecutor(0, "c0", "node1", "10.0.0.1", ())], 1))
        recorded.board.record_placement(ranks)
        ranks.record_start(0, 42)
        with recorded.recording.following(attempt):
            recorded.board.record_metrics([{"loss": 0.25}])
            assert until(lambda: recorded.fields.get("metrics") == [{"loss": 0.25}])
            assert until(lambda: bool(attempt.brought))
        recorded.background.flush(HANG_SECONDS)
        brought = len(attempt.brought)
        assert (
            recorded.fields["ranks"][0] | {"pid": 42, "ended": False} == recorded.fields["ranks"][0]
        )
        assert until(lambda: recorded.fields["state"] == "running")
    recorded.board.state(GangState.RELEASING)
    recorded.recording.put("failed", "boom", EndReason.USER_ERROR)
    recorded.background.flush(HANG_SECONDS)
    last = recorded.fields
    assert (last["state"], last["error"], last["logs"]) == (
        "failed",
        "boom",
        {"logs/rank-0.log": 5},
    )
    assert len(attempt.brought) == brought
    assert until(lambda: not watch_threads())
    assert recorded.fields == last
    assert recorded.background.problems() == ()


def test_record_keeps_why_the_run_waited(recorded: Recorded) -> None:
    with recorded.recording.watching():
        for why in ("Needs 4 GPUs, 0 are free", "Needs 4 GPUs, 2 are free"):
            reason = WaitReason(why, ("used by x",), "GPUs of x")
            recorded.board.state(GangState.WAITING, why=reason)
            assert until(lambda why=why: recorded.fields.get("waiting_for") == why)
            assert recorded.fields["waiting_details"] == ["used by x"]
            recorded.now += 10.0
        recorded.board.state(GangState.GRANTED)
        assert until(lambda: recorded.fields["state"] == "granted")
    waits = recorded.fields["waits"]
    assert recorded.fields["waiting_for"] == ""
    assert [wait["why"] for wait in waits] == ["Needs 4 GPUs, 2 are free"]
    assert waits[0]["seconds"] >= 10.0


def test_short_run_has_its_first_and_last_record_and_no_logs_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The poll takes longer than the run, however slow this machine is.
    recorded = Recorded(tmp_path / "fit-1", intervals=RecordingIntervals(poll=HANG_SECONDS))
    calls: list[str] = []

    def noting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: LakePath, *args: Any) -> Any:
            # A thread that a test of another file has left behind does not count.
            if str(recorded.file.parent) in self.url:
                calls.append(name)
            return real(self, *args)

        return call

    for name in ("replace", "append", "exists", "stat", "create"):
        monkeypatch.setattr(LakePath, name, noting(name, getattr(LakePath, name)))
    recorded.recording.put("requested")
    recorded.background.flush(HANG_SECONDS)
    with recorded.recording.watching(), recorded.recording.following(Attempt()):
        pass
    recorded.recording.put("succeeded")
    recorded.background.flush(HANG_SECONDS)
    assert calls == ["replace", "replace"]


def test_cancel_request_on_the_lake_cancels_the_run(recorded: Recorded) -> None:
    with recorded.recording.watching():
        assert not recorded.cancelled.wait(0.1)
        (recorded.file.parent / "cancel").touch()
        assert recorded.cancelled.wait(HANG_SECONDS)
    assert recorded.background.problems() == ()


def test_failed_check_for_a_cancel_request_ends_nothing(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = threading.Semaphore(0)

    def refuse(self: LakePath) -> bool:
        checks.release()
        raise StoreError("the NameNode is away", kind="unreachable")

    monkeypatch.setattr(LakePath, "exists", refuse)
    with recorded.recording.watching():
        assert checks.acquire(timeout=HANG_SECONDS) and checks.acquire(timeout=HANG_SECONDS)
    recorded.background.flush(HANG_SECONDS)
    assert not recorded.cancelled.is_set()
    assert recorded.background.problems() == ()


def test_all_logs_are_appended_although_the_lake_is_busy(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = Attempt()
    attempt.urls = [f"file:///lake/rank-{rank}.log" for rank in range(5)]
    try_put = recorded.background.try_put
    room = [2]

    def tight(key: str, work: Work) -> bool:
        if not key.startswith("file:"):
            return try_put(key, work)
        room[0] -= 1
        if room[0] < 0:
            room[0] = 2
            return False
        return try_put(key, work)

    monkeypatch.setattr(recorded.background, "try_put", tight)
    with recorded.recording.watching(), recorded.recording.following(attempt):
        assert until(lambda: set(attempt.brought) == set(attempt.urls))
