"""Filters in the Log4j of a real JVM, as PySpark starts it; no Spark application."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.java_gateway import launch_gateway

from hopsgpu.backends.spark.log4j import CapturedLog, suppressed
from hopsgpu.backends.spark.release_messages import KilledExecutor, ReleaseMessages
from tests.bounds import HANG_SECONDS

CLIENT = "org.apache.spark.network.client.TransportClient"
SCHEDULER = "org.apache.spark.scheduler.cluster.YarnScheduler"
TASKS = "org.apache.spark.scheduler.TaskSetManager"
KILLED = KilledExecutor("2", "127.0.0.1:41326")
SENT = "Failed to send RPC RPC 8463212264467679630 to /127.0.0.1:"
REMOVED = "Lost an executor {} (already removed): Executor killed by driver."


class DriverLog:
    """A JVM with Spark's own configuration of Log4j, and what it has logged."""

    def __init__(self, jvm: Any, errors: Path) -> None:
        self.jvm = jvm
        self._errors = errors

    def warn(self, logger: str, message: str) -> bool:
        """Log a message with a stack trace; return whether it, and no part of it, was logged."""
        before = self._errors.stat().st_size
        error = self.jvm.java.io.IOException("Broken pipe")
        self.jvm.org.slf4j.LoggerFactory.getLogger(logger).warn(message, error)
        added = self._errors.read_bytes()[before:].decode()
        assert ("java.io.IOException: Broken pipe" in added) == (message in added), added
        return message in added

    def filters(self) -> dict[str, str]:
        """Return the filters in the configuration of each logger that has one of its own."""
        return {
            str(name): "" if (found := config.getFilter()) is None else str(found.toString())
            for name, config in self._configuration().getLoggers().items()
        }

    def root(self) -> Any:
        return self._configuration().getRootLogger()

    def _configuration(self) -> Any:
        return self.jvm.org.apache.logging.log4j.LogManager.getContext(False).getConfiguration()


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DriverLog]:
    errors = tmp_path_factory.mktemp("log") / "stderr"
    with errors.open("wb") as file:
        launch: Any = launch_gateway
        gateway = launch(popen_kwargs={"stderr": file})
    # A logger that a user has configured.
    log4j = gateway.jvm.org.apache.logging.log4j
    log4j.core.config.Configurator.setLevel("org.apache.spark.network", log4j.Level.INFO)
    try:
        yield DriverLog(gateway.jvm, errors)
    finally:
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(HANG_SECONDS)


def test_what_follows_from_a_release_is_not_logged_and_all_else_is(driver: DriverLog) -> None:
    loggers = driver.filters().keys()
    assert driver.warn(CLIENT, f"{SENT}41326")
    messages = ReleaseMessages(seconds=HANG_SECONDS)
    messages.suppress(driver.jvm, [KILLED, "hopsgpu-fit-1-agents-0a"])
    assert not driver.warn(CLIENT, f"{SENT}41326")
    assert not driver.warn(SCHEDULER, REMOVED.format(2))
    task = "Lost task 0.0 in stage 1.0 (TID 0) (node2 executor 2): "
    killed = f"{task}TaskKilled (Stage cancelled: Job 1 cancelled part of cancelled job tags"
    assert not driver.warn(TASKS, f"{killed} hopsgpu-fit-1-agents-0a SQLSTATE: XXKDA)")
    assert driver.warn(TASKS, f"{killed} of-a-user)")
    assert driver.warn(TASKS, f"{task}java.lang.IllegalStateException")
    assert driver.warn(CLIENT, f"{SENT}41327")
    assert driver.warn(SCHEDULER, REMOVED.format(3))
    assert driver.warn(SCHEDULER, "Lost executor 2 on node2: Container killed by YARN")
    # Another executor is released meanwhile.
    messages.suppress(driver.jvm, [KilledExecutor("3")])
    assert not driver.warn(SCHEDULER, REMOVED.format(3))
    assert not driver.warn(SCHEDULER, REMOVED.format(2))
    # A configuration for a logger alone would change its level.
    assert driver.filters().keys() == loggers


def test_a_later_release_ends_the_suppression_of_earlier_ones(driver: DriverLog) -> None:
    log4j = driver.jvm.org.apache.logging.log4j
    results = log4j.core.Filter.Result
    own = log4j.core.filter.ThresholdFilter.createFilter(
        log4j.Level.INFO, results.NEUTRAL, results.DENY
    )
    driver.root().addFilter(own)
    before = driver.filters()
    messages = ReleaseMessages(seconds=0.0)
    messages.suppress(driver.jvm, [KilledExecutor("12", "127.0.0.1:50001")])
    assert not driver.warn(CLIENT, f"{SENT}50001")
    first = driver.filters()
    assert first != before
    messages.suppress(driver.jvm, [KilledExecutor("13")])
    assert len(driver.filters()) == len(first)
    assert driver.warn(CLIENT, f"{SENT}50001")
    assert driver.warn(SCHEDULER, REMOVED.format(12))
    assert not driver.warn(SCHEDULER, REMOVED.format(13))


def test_messages_are_suppressed_whatever_their_cause_while_hopsgpu_says_it_itself(
    driver: DriverLog,
) -> None:
    before = driver.filters()
    with suppressed(driver.jvm, SCHEDULER, "Initial job (1) has not"):
        assert not driver.warn(SCHEDULER, "Initial job (1) has not accepted any resources")
        assert driver.warn(SCHEDULER, "Initial job 1 has not accepted any resources")
    assert driver.filters() == before


class NoLog4j:
    """A JVM without Log4j 2: py4j takes a missing class for a package, which cannot be called."""

    def __getattr__(self, name: str) -> Any:
        return NoLog4j()


def test_without_log4j_2_nothing_changes() -> None:
    ReleaseMessages(seconds=0.0).suppress(NoLog4j(), [KILLED])
    with suppressed(NoLog4j(), SCHEDULER, "Initial job"):
        pass


def test_messages_of_one_logger_are_read_while_they_are_captured(driver: DriverLog) -> None:
    endpoint = "org.apache.spark.scheduler.cluster.YarnSchedulerBackend$YarnSchedulerEndpoint"
    removal = "Requesting driver to remove executor 1 for reason exit 29: \x1f\u00e9\nsecond line"
    appenders = driver.root().getAppenders().size()
    with CapturedLog(driver.jvm, endpoint, "Requesting driver to remove executor ") as captured:
        assert driver.warn(endpoint, removal)
        assert driver.warn(endpoint, "another message")
        assert captured.drain() == [removal]
        assert captured.drain() == []
    assert driver.warn(endpoint, removal)
    assert captured.drain() == []
    assert driver.root().getAppenders().size() == appenders
