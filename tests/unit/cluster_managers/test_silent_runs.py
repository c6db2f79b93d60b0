"""What YARN says about runs whose drivers are silent: few requests, and no errors."""

from __future__ import annotations

from typing import Any

from hopsgpu.artifacts.runs import StoredRun
from hopsgpu.cluster_managers.silent_runs import SilentRuns, silent_runs
from hopsgpu.cluster_managers.yarn.manager import YarnManager
from hopsgpu.core.run_record import ApplicationReport, RunRecord
from tests.unit.records import record_of
from tests.unit.rest import Daemon, serving

APPS = "/ws/v1/cluster/apps"
ID = "application_1_0001"
LOST_NODE = (
    "AM Container exited with exitCode: -100 Diagnostics: Container released on a *lost* node"
)
APP = {"id": ID, "state": "FAILED", "finalStatus": "FAILED", "diagnostics": LOST_NODE}
SECONDS = (10.0, 30.0)
NOW = 1_000_000.0


def asking(daemon: Daemon) -> SilentRuns:
    setting = {"yarn.resourcemanager.webapp.address": daemon.address}.get
    return SilentRuns(YarnManager(setting, seconds=SECONDS))


def run(silent: float, state: str = "running", application: str = ID) -> StoredRun:
    record = record_of("run-1", state, NOW - silent, application=application)
    return StoredRun("run-1", record)


def record(silent: float, **changes: Any) -> RunRecord:
    found = run(silent, **changes).record
    assert found is not None
    return found


def test_a_silent_run_has_yarns_report() -> None:
    with serving({f"{APPS}/{ID}": {"app": APP}}) as daemon:
        report = asking(daemon).report(record(30.0), NOW)
        assert report == ApplicationReport("FAILED", LOST_NODE, has_ended=True)
        assert len(daemon.asked) == 1


def test_yarn_is_asked_about_no_other_run() -> None:
    with serving() as daemon:
        for other in (
            record(20.0),
            record(300.0, state="failed"),
            record(300.0, application="local-17"),
        ):
            assert asking(daemon).report(other, NOW) is None
        assert SilentRuns(None).report(record(30.0), NOW) is None
        assert daemon.asked == []
        # YARN forgets applications.
        assert asking(daemon).report(record(30.0), NOW) is None
        assert len(daemon.asked) == 1


def test_a_record_is_read_again_once_the_application_has_ended() -> None:
    before, after = record(30.0), record(0.0, state="succeeded")
    with serving({f"{APPS}/{ID}": {"app": APP}}) as daemon:
        found, report = asking(daemon).with_report(before, lambda: after, NOW)
    assert found is after and report is not None
    assert StoredRun("run-1", found, report=report).state_at(NOW) == "succeeded"


def test_a_list_costs_one_request_and_only_if_a_run_is_silent() -> None:
    with serving({APPS: {"apps": {"app": [APP]}}}) as daemon:
        runs = [run(5.0), run(90_000.0), run(300.0, "failed")]
        assert asking(daemon).with_reports(runs, lambda number: runs[number], NOW) == runs
        assert daemon.asked == []
        runs = [run(30.0), run(5.0), run(40.0, application="application_1_0002"), run(500.0)]
        found = asking(daemon).with_reports(runs, lambda number: runs[number], NOW)
        assert [one.state_at(NOW) for one in found] == ["lost", "running", "running", "lost"]
        assert found[3].report is not None and found[3].report.state == "FAILED"
        (asked,) = daemon.asked
        assert "states=FINISHED,FAILED,KILLED&finishedTimeBegin=999200000" in asked


def test_a_run_that_recorded_its_end_meanwhile_is_not_lost() -> None:
    with serving({APPS: {"apps": {"app": [APP]}}}) as daemon:
        found = asking(daemon).with_reports([run(30.0)], lambda number: run(0.0, "failed"), NOW)
    assert [one.state_at(NOW) for one in found] == ["failed"]


def test_runs_are_shown_without_a_resource_manager() -> None:
    runs = [run(30.0)]
    with serving({APPS: (503, "away")}) as daemon:
        assert asking(daemon).with_reports(runs, lambda number: runs[number], NOW) == runs
    assert silent_runs({"HADOOP_CONF_DIR": "/nonexistent"}).report(record(30.0), NOW) is None


def test_yarn_is_not_asked_about_an_application_of_a_standalone_master() -> None:
    with serving() as daemon:
        other = record(30.0, application="app-20261130150338-0000")
        assert asking(daemon).report(other, NOW) is None
        assert daemon.asked == []
