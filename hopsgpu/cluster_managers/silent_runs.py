"""YARN's reports on runs whose drivers no longer write their records.

A driver that was killed, or whose node was lost, records no end. YARN knows the end of its
application, usually before the record is so old that the run counts as lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from hopsgpu.artifacts.runs import StoredRun
from hopsgpu.cluster_managers.yarn.application_state import ApplicationState
from hopsgpu.cluster_managers.yarn.resource_manager import ResourceManager, web_addresses
from hopsgpu.core.run_record import APPLICATION_ID, ApplicationReport, RunRecord
from hopsgpu.errors import ConfigError, HopsGpuError
from hopsgpu.storage.hadoop_conf import HadoopConf, is_configured

log = logging.getLogger(__name__)

# Readers wait no longer than this for a connection and for an answer.
_SECONDS = (1.0, 4.0)
# The application of a silent run may have ended before the last update of the run's record, and
# clocks may be apart.
_MARGIN_SECONDS = 300.0
_ASKED_SECONDS = 86400.0


class SilentRuns:
    """Asks YARN about silent runs, with one request for a list of runs and one for a single run.

    A ResourceManager that does not answer, or that no longer knows an application, is no error.

    Args:
        manager: None without YARN.
    """

    def __init__(self, manager: ResourceManager | None) -> None:
        self._manager = manager

    def report(self, record: RunRecord, now: float) -> ApplicationReport | None:
        """Return YARN's report on a run's application; None if the run is not silent."""
        is_known = APPLICATION_ID.fullmatch(record.application) and record.is_silent(now)
        if self._manager is None or not is_known:
            return None
        try:
            return _report_of(self._manager.application_state(record.application))
        except HopsGpuError as error:
            log.info("YARN does not report on %s: %s", record.application, error)
            return None

    def with_report(
        self, record: RunRecord, reread: Callable[[], RunRecord], now: float
    ) -> tuple[RunRecord, ApplicationReport | None]:
        """Return a run's record with YARN's report on its application.

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
        """Return runs, and those whose applications have ended with YARN's report.

        Runs that have been silent for over a day are not asked about: the ResourceManager would
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
            states = {state.id: state for state in self._manager.ended_since(since)}
        except HopsGpuError as error:
            log.info("YARN does not report on silent runs: %s", error)
            return list(runs)
        reported = list(runs)
        for number, record in silent.items():
            if state := states.get(record.application):
                reported[number] = replace(reload(number), report=_report_of(state))
        return reported


def _report_of(state: ApplicationState) -> ApplicationReport:
    return ApplicationReport(state.state, state.diagnostics, state.has_ended)


def silent_runs(environ: Mapping[str, str]) -> SilentRuns:
    """Return what asks the YARN of this process's environment, if there is one."""
    if not is_configured(environ):
        return SilentRuns(None)
    try:
        addresses = web_addresses(HadoopConf.load(environ).get)
    except ConfigError as error:
        # The records are readable without YARN.
        log.info("YARN is not asked about silent runs: %s", error)
        return SilentRuns(None)
    return SilentRuns(ResourceManager(addresses, _SECONDS) if addresses else None)
