"""A run's data: when it is written, what is told of it, and that it goes with the run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
from pyarrow import parquet

from hopsgpu.backends.gang_application import GangApplication
from hopsgpu.backends.spark.dataframe_writer import WriteProgress
from hopsgpu.core.gang import GangState
from hopsgpu.core.run_record import DataRecord
from hopsgpu.core.run_values import RunStatus
from hopsgpu.core.spec import ExecutorShape, GangSpec, LaunchPlan
from hopsgpu.core.wait_reasons import writing_data
from hopsgpu.data.argument import Data, datasets_of
from hopsgpu.data.position import Leg, Position
from hopsgpu.data.rank_shards import RankShards
from hopsgpu.display.base import NoDisplay
from hopsgpu.display.progress import Shielded, progress_of
from hopsgpu.errors import Cancelled, ConfigError, HopsGpuError, StoreError
from hopsgpu.launcher import data_staging
from hopsgpu.launcher.data_staging import StagedData
from hopsgpu.runs.status_board import GangBoard
from hopsgpu.storage.lake import LakePath
from hopsgpu.storage.local import Local
from tests.bounds import HANG_SECONDS


class Frame:
    """Stands for a DataFrame of so many rows; fails to be written with an error."""

    def __init__(self, rows: int, error: Exception | None = None) -> None:
        self.rows = rows
        self.error = error


class Told(NoDisplay):
    def __init__(self) -> None:
        self.states: list[tuple[str, str]] = []
        self.boards: list[GangBoard] = []

    def status(self, status: RunStatus) -> None:
        self.states.append((status.state, status.waiting_for))


Make = Callable[..., StagedData]


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The run's directory."""
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def feed(home: Path, told: Told, monkeypatch: pytest.MonkeyPatch) -> Make:
    def write(application: Any, frame: Frame, url: str, *, report: Any, **_: Any) -> None:
        report(WriteProgress(1, 1, 2))
        directory = Path(url.removeprefix("file://"))
        directory.mkdir()
        parquet.write_table(pa.table({"n": range(frame.rows)}), directory / "part-0.parquet")
        if frame.error is not None:
            raise frame.error

    monkeypatch.setattr(data_staging, "write_frame", write)

    def make(
        data: Any,
        workers: int = 2,
        keeps: bool = False,
        cancelled: threading.Event | None = None,
    ) -> StagedData:
        datasets = datasets_of(data, lambda value: isinstance(value, Frame))
        paths: Mapping[str, str] = {"run": f"file://{home}"}
        if datasets is not None:
            places = datasets.places(paths["run"], None)
            paths = {**paths, **{datasets.label(n): url for n, url in places.items()}}
        shape = ExecutorShape(1, 1, 512, 4608)
        plan = LaunchPlan(GangSpec("fit", workers=workers), workers, 1, shape, "q", {}, paths)
        application = cast(GangApplication, SimpleNamespace(should_keep_data=keeps, user="alice"))
        board = GangBoard("fit-1", workers, 1, Shielded(told))
        told.boards.append(board)
        return StagedData(datasets, plan, application, board, cancelled or threading.Event())

    return make


def test_without_data_nothing_is_done(feed: Make, home: Path, told: Told) -> None:
    one = feed(None)
    with one.ready():
        assert one.shards == () and one.reference is None
    assert not told.states and not [*home.iterdir()]


def test_the_next_world_has_shards_of_its_own(feed: Make) -> None:
    one = feed({"train": Data(Frame(12), "keep"), "test": Frame(8)})
    legs = {"train": (Leg(2, batches=3, size=1),)}
    with one.ready():
        digests = RankShards.load(one.shards[0]).position.digests
        trained = Position(legs, digests).as_fields()
        whole = [RankShards.load(part) for part in one.shards_for(2)]
        assert whole == [RankShards.load(part) for part in one.shards]
        assert not any(mine.rests for mine in whole)
        parts = [RankShards.load(part) for part in one.shards_for(4, [trained, trained])]
    assert [mine.ranks for mine in parts] == [4] * 4
    assert [mine.shards["train"].num_rows for mine in parts] == [3] * 4
    assert sum(mine.rests["train"].num_rows for mine in parts) == 12 - 2 * 3
    assert [mine.shards["test"].num_rows for mine in parts] == [2] * 4
    assert all("test" not in mine.rests for mine in parts)
    assert feed(None).shards_for(3) == ()


def test_other_data_than_the_checkpoints_begins_anew_and_is_told_of(feed: Make, told: Told) -> None:
    one = feed({"train": Data(Frame(12), "keep"), "test": Frame(8)})
    legs = {"train": (Leg(2, epoch=3, batches=3, size=1),)}
    with one.ready():
        digests = RankShards.load(one.shards[0]).position.digests
        trained = Position(legs, {**digests, "train": "other"}).as_fields()
        parts = [RankShards.load(part) for part in one.shards_for(2, [trained])]
    assert all(mine.epochs["train"] == 0 and not mine.rests for mine in parts)
    (warning,) = told.boards[0].warnings
    assert warning.startswith("data.train (file://") and "is other data" in warning


def test_what_is_written_is_dealt_told_of_and_removed(feed: Make, home: Path, told: Told) -> None:
    one = feed({"train": Data(Frame(7), "keep", 5), "test": Frame(4)})
    with one.ready():
        assert (home / "data").stat().st_mode & 0o777 == 0o700
        shards = [RankShards.load(part).shards for part in one.shards]
        assert sorted(s["train"].num_rows for s in shards) == [3, 4]
    assert not (home / "data").exists()
    assert told.states == [
        ("preparing", "Writing data.train: 1 of 2 tasks"),
        ("preparing", "Writing data.test: 1 of 2 tasks"),
        ("preparing", "Reading the footers of data.train"),
        ("preparing", "Reading the footers of data.test"),
    ]
    assert one.reference is not None
    size = one.reference["train"].bytes
    assert size > 0
    assert one.reference["train"] == DataRecord(
        url=f"file://{home}/data/train",
        written=True,
        kept=False,
        rows=7,
        bytes=size,
        files=1,
        schema={"n": "int64"},
        more_columns=0,
        remainder="keep",
        seed=5,
    )


def test_it_is_kept_where_that_is_asked_for(feed: Make, home: Path) -> None:
    one = feed(Frame(4), keeps=True)
    with one.ready():
        pass
    assert (home / "data" / "data" / "part-0.parquet").exists()
    assert one.reference is not None and one.reference["data"].kept


def test_what_is_read_in_place_stays(feed: Make, home: Path, tmp_path: Path) -> None:
    parquet.write_table(pa.table({"n": range(4)}), tmp_path / "x.parquet")
    one = feed(f"file://{tmp_path}/x.parquet")
    with one.ready():
        assert not (home / "data").exists()
    assert (tmp_path / "x.parquet").exists()
    assert one.reference is not None
    assert (one.reference["data"].written, one.reference["data"].kept) == (False, True)


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (Frame(1), ConfigError, "data .*1 row for 2 ranks"),
        (Frame(0), ConfigError, "Parquet files, but no rows"),
        (Frame(9, HopsGpuError("boom")), HopsGpuError, "boom"),
        ({"a": Frame(9), "b": Frame(9, Cancelled("no"))}, Cancelled, "no"),
    ],
)
def test_nothing_is_left_where_it_fails(
    feed: Make, home: Path, data: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words), feed(data).ready():
        raise AssertionError("it is not ready")
    assert not (home / "data").exists()


def test_a_run_that_fails_takes_it_along(feed: Make, home: Path) -> None:
    with pytest.raises(LookupError), feed(Frame(9)).ready():
        assert (home / "data" / "data").exists()
        raise LookupError
    assert not (home / "data").exists()


def test_a_cancelled_run_writes_and_reads_no_more(feed: Make, home: Path, tmp_path: Path) -> None:
    parquet.write_table(pa.table({"n": range(4)}), tmp_path / "x.parquet")
    cancelled = threading.Event()
    cancelled.set()
    for data, words in (
        (Frame(9), "attempt to create .* was cancelled"),
        (f"file://{tmp_path}/x.parquet", "while the footers of data were read"),
    ):
        with (
            pytest.raises(Cancelled, match=words),
            feed(data, cancelled=cancelled).ready(),
        ):
            raise AssertionError("it is not ready")
    assert not (home / "data").exists()


class Away:
    """A lake that does not answer: at once, or not before it is told to."""

    def __init__(self, hangs: bool) -> None:
        self._hangs = hangs
        self.asked = threading.Event()
        self.answers = threading.Event()

    def __call__(self, *_: Any) -> Any:
        self.asked.set()
        if self._hangs:
            self.answers.wait(HANG_SECONDS)
        raise OSError("it does not answer")


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("call", ["stat", "read"])
def test_a_cancelled_run_does_not_wait_for_a_lake_that_is_away(
    feed: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool, call: str
) -> None:
    for number in range(40):
        parquet.write_table(pa.table({"n": range(4)}), tmp_path / f"{number}.parquet")
    away, cancelled = Away(hangs), threading.Event()
    monkeypatch.setattr(Local, call, away)

    def cancel() -> None:
        away.asked.wait(HANG_SECONDS)
        cancelled.set()

    threading.Thread(target=cancel, daemon=True).start()
    began = time.monotonic()
    with (
        pytest.raises(Cancelled, match="footers of data"),
        feed(f"file://{tmp_path}", cancelled=cancelled).ready(),
    ):
        raise AssertionError("it is not ready")
    assert time.monotonic() - began < 30  # a minute is what it waits for a lake that is away
    away.answers.set()
    mine = [t for t in threading.enumerate() if "-footers" in t.name]
    for thread in mine:
        thread.join(HANG_SECONDS)
    assert not any(thread.is_alive() for thread in mine)


def test_a_lake_that_keeps_it_is_a_warning(feed: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(lake: LakePath) -> None:
        raise StoreError(f"cannot remove {lake.url}: safe mode")

    one = feed(Frame(4))
    with one.ready():
        monkeypatch.setattr(LakePath, "remove", refuse)
    (warning,) = one._board.result().warnings
    assert "`hopsgpu runs prune`" in warning


def test_a_wide_table_is_told_of_in_bounds(feed: Make, tmp_path: Path) -> None:
    wide = pa.table({f"c{n}": [1, 2] for n in range(250)})
    parquet.write_table(wide, tmp_path / "wide.parquet")
    one = feed(f"file://{tmp_path}/wide.parquet")
    with one.ready():
        assert one.reference is not None
        assert len(one.reference["data"].schema) == 200
        assert one.reference["data"].more_columns == 50


def test_states_of_data_come_before_the_wait() -> None:
    board = GangBoard("fit-1", 1, 1, progress_of("off"))
    board.state(GangState.PREPARING, why=writing_data("data", 1, 1, 2))
    assert board.status().waiting_for == "Writing data: 1 of 2 tasks"
    board.state(GangState.WAITING)
    with pytest.raises(HopsGpuError, match="cannot go from"):
        board.state(GangState.PREPARING)
