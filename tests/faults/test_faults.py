"""Each fault with each kind of launch to which it applies; tests/faults/faults.py has the table."""

from __future__ import annotations

import contextlib
import os
import re
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from hopsgpu import devcluster
from hopsgpu.cluster_managers.manager import ClusterManager
from hopsgpu.storage.lake import LakePath
from tests.bounds import HANG_SECONDS
from tests.conftest import gpus_become, until
from tests.faults.conftest import SEEN
from tests.faults.faults import (
    Case,
    Expected,
    Fault,
    GoesOn,
    Raises,
    TrialFails,
    Unharmed,
)
from tests.faults.launches import (
    KILLED,
    DriverLaunch,
    Ending,
    Kind,
    Launch,
    OwnLaunch,
)
from tests.faults.leftovers import Leftovers
from tests.faults.matrix import FAULTS
from tests.faults.page import KUBERNETES, STANDALONE, YARN, Cell, CellKey

pytestmark = [pytest.mark.usefixtures("nothing_warmed")]


def _slug(name: str) -> str:
    return re.sub(r"\W+", "_", name)


def _manager_name(config: pytest.Config) -> str:
    if config.getoption("kubernetes"):
        return KUBERNETES
    return STANDALONE if config.getoption("standalone") else YARN


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "fault" in metafunc.fixturenames:
        manager = _manager_name(metafunc.config)
        cases = [
            pytest.param(fault, kind, id=_slug(f"{fault.name} {kind.value}"))
            for fault in FAULTS
            for kind in fault.kinds_on(manager)
        ]
        metafunc.parametrize(("fault", "kind"), cases)


@pytest.fixture(autouse=True)
def root(hdfs_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[LakePath]:
    """A root of each case's own on the lake."""
    lake = LakePath(f"{hdfs_url}/tmp/faults-{uuid.uuid4().hex}")
    monkeypatch.setenv("HOPSGPU_ROOT", lake.url)
    yield lake
    lake.remove()


@pytest.fixture
def whole_cluster(cluster_dir: Path, manager: ClusterManager) -> None:
    """The cluster is whole and idle, whatever the case before has left."""
    if not devcluster.status(cluster_dir).healthy:
        devcluster.up(cluster_dir, say=lambda _: None)
        assert until(lambda: devcluster.status(cluster_dir).healthy)
    assert gpus_become(manager, 0, HANG_SECONDS)


def test_fault(
    fault: Fault,
    kind: Kind,
    whole_cluster: None,
    cluster_dir: Path,
    cluster_env: dict[str, str],
    manager: ClusterManager,
    spark: SparkSession,
    root: LakePath,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    seen = request.config.stash[SEEN]
    manager_name = _manager_name(request.config)
    key = CellKey(fault.name, kind.value, manager_name)
    seen[key] = Cell("fails")
    expected = fault.expected_on(manager_name, kind)
    leftovers = Leftovers(cluster_dir, manager, root, spark.sparkContext.applicationId)

    options = fault.options_for(kind)

    def launched() -> Launch:
        if fault.driver:
            env = {**cluster_env, **os.environ, **fault.environ}
            return DriverLaunch(kind, tmp_path, options, env, fault.conf)
        return OwnLaunch(kind, tmp_path, options)

    with contextlib.ExitStack() as stack:
        case = Case(cluster_dir, manager, spark, root)
        if fault.before:
            stack.enter_context(fault.inject(case))
        case.begun = launch = launched()
        stack.callback(launch.close)
        if not fault.early:
            launch.wait_for(fault.ranks_of(kind))
        there, began = len(launch.notes()), time.monotonic()
        if not fault.before:
            # Left before the launch is closed.
            stack.enter_context(fault.inject(case))
        after = _until_it_goes_on(launch, expected, there)
        ending = launch.ending()
        _check(ending, expected, kind)
        is_killed = ending.error == KILLED
        outcome, seconds = _told(expected, ending, after, began)
        seen[key] = Cell(f"{outcome}; GPUs are not back", seconds)
        if not fault.launches:
            back = leftovers.gpus_back(ending.at)
            seen[key] = Cell(f"{outcome}; leaves something", seconds, back)
        if not (fault.launches or fault.holds_up):
            leftovers.check(ending.version, is_driver_killed=is_killed)
    if fault.launches:
        back = leftovers.gpus_back(time.monotonic())
        seen[key] = Cell(f"{outcome}; leaves something", seconds, back)
    leftovers.check(ending.version, is_driver_killed=is_killed)
    seen[key] = Cell(outcome, seconds, back)


def _until_it_goes_on(launch: Launch, expected: Expected, there: int) -> float | None:
    """Let ranks return that go on; return when they did, if another world or try followed."""
    if isinstance(expected, GoesOn):
        assert until(lambda: len(launch.notes()) > there or launch.has_ended, step=0.02)
        at = time.monotonic()
        launch.go()
        return at
    if isinstance(expected, TrialFails):
        # The failure is there once its GPU serves nobody; the other trial waits.
        assert isinstance(launch, OwnLaunch)
        assert until(lambda: launch.failed > 0 or launch.has_ended, step=0.02)
        at = time.monotonic()
        launch.go()
        return at
    if isinstance(expected, Unharmed):
        launch.go()
    return None


def _check(ending: Ending, expected: Expected, kind: Kind) -> None:
    """Check an ending against what was expected."""
    if isinstance(expected, Raises):
        assert ending.error == expected.error, ending
        assert re.search(expected.says, ending.says), ending.says
        return
    assert ending.error == "", ending
    states = [state for state, _ in ending.trials]
    tries = [number for _, number in ending.trials]
    if isinstance(expected, TrialFails):
        assert sorted(states) == ["complete"] * (len(states) - 1) + ["failed"], ending
        assert re.search(expected.says, ending.says), ending.says
        return
    if isinstance(expected, Unharmed):
        unconfirmed = [text for text in ending.warnings if "did not confirm" in text]
        assert not unconfirmed, unconfirmed
    again = isinstance(expected, GoesOn)
    if kind is Kind.SEARCH:
        assert set(states) == {"complete"}, ending
        assert (max(tries) > 1) is again, ending
    else:
        assert ending.version == 1, ending
    if kind is Kind.ELASTIC:
        assert ending.worlds[-1] == "returned", ending
        # It grows when a further executor comes, whatever befalls it.
        assert bool({*ending.worlds[:-1]} - {"grew"}) is again, ending
    if isinstance(expected, GoesOn) and expected.says:
        assert re.search(expected.says, "\n".join(ending.warnings)), ending.warnings


def _told(
    expected: Expected, ending: Ending, after: float | None, began: float
) -> tuple[str, float | None]:
    """Return what the cell says, and the seconds that it took."""
    if isinstance(expected, Raises):
        name = "the driver ends" if ending.error == KILLED else f"`{ending.error}`"
        return name, max(ending.at - began, 0.0)
    seconds = None if after is None else after - began
    if isinstance(expected, TrialFails):
        return "the trial fails", seconds
    return ("continues" if after is not None else "not affected"), seconds
