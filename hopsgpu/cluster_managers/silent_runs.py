"""Reports of the cluster manager on runs whose drivers no longer write their records.

A driver that was killed, or whose node was lost, records no end. The cluster manager knows the end
of its application, usually before the record is so old that the run counts as lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from hopsgpu.artifacts.runs import StoredRun
from hopsgpu.cluster_managers.manager import ClusterManager
from hopsgpu.cluster_managers.manager_table import configured_manager, has_cluster
from hopsgpu.core.run_record import ApplicationReport, RunRecord
from hopsgpu.errors import ConfigError, HopsGpuError

log = logging.getLogger(__name__)

# Readers wait no longer than this for a connection and for an answer.
_SECONDS = (1.0, 4.0)
# The application of a silent run may have ended before the last update of the run's record, and
# clocks may be apart.
_MARGIN_SECONDS = 300.0
_ASKED_SECONDS = 86400.0


class SilentRuns:
    """Asks a cluster manager about silent runs, with one request for a list and one for each run.

    A cluster manager that does not answer, or that no longer knows an application, is no error.

    Args:
        manager: None without a cluster manager.
    """

    def __init__(self, manager: ClusterManager | None) -> None:
        self._manager = manager

    def report(self, record: RunRecord, now: float) -> ApplicationReport | None:
        """Return the report on a run's application; None if the run is not silent."""
        if self._manager is None or not record.is_silent(now):
            return None
        try:
            return self._manager.report(record.application)
        except HopsGpuError as error:
            log.info("%s does not report on %s: %s", self._manager.title, record.application, error)
            return None

    def with_report(
        self, record: RunRecord, reread: Callable[[], RunRecord], now: float
    ) -> tuple[RunRecord, ApplicationReport | None]:
        """Return a run's record with the report on its application.

        Args:
            reread: reads the record again: the driver may have recorded the end before the
                application ended.
        """
        report = self.report(record, now)
        is_over = report is not None and report.has_ended
        return (reread() if is_over else record), report

    def with_reports(
        self, runs: Sequence[StoredRun], reload: Callable[[int], StoredRun], now: float
    ) -> list[StoredRun]:
        """Return runs, and those whose applications have ended with a report.

        Runs that have been silent for over a day are not asked about: the cluster manager would
        list all applications that have ended since then.

        Args:
            reload: reads the run at an index of `runs` again: its driver may have recorded the end
                before the application ended.
        """
        silent = {
            number: run.record
            for number, run in enumerate(runs)
            if run.record is not None
            and run.record.is_silent(now)
            and now - run.record.updated <= _ASKED_SECONDS
        }
        if not silent or self._manager is None:
            return list(runs)
        since = min(record.updated for record in silent.values()) - _MARGIN_SECONDS
        try:
            reports = self._manager.ended_since(since)
        except HopsGpuError as error:
            log.info("%s does not report on silent runs: %s", self._manager.title, error)
            return list(runs)
        reported = list(runs)
        for number, record in silent.items():
            if report := reports.get(record.application):
                reported[number] = replace(reload(number), report=report)
        return reported


def silent_runs(environ: Mapping[str, str], master: str | None = None) -> SilentRuns:
    """Return what asks the cluster manager of this process's environment, if there is one.

    Args:
        master: value of `spark.master`; by default that of a new session.
    """
    if master is None and not has_cluster(environ):
        return SilentRuns(None)
    try:
        return SilentRuns(configured_manager(environ, master, _SECONDS))
    except ConfigError as error:
        # The records are readable without a cluster manager.
        log.info("no cluster manager is asked about silent runs: %s", error)
        return SilentRuns(None)
