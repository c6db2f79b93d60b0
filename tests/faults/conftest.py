"""The cluster of the fault matrix, and what is recorded of each cell."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.faults import HEARTBEAT_SECONDS, OTHER_QUEUE
from tests.faults.page import Cell, CellKey, record, tables

HERE = Path(__file__).parent
SEEN = pytest.StashKey[dict[CellKey, Cell]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SEEN] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.soak)
            item.add_marker(pytest.mark.faults)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if config.stash[SEEN]:
        terminalreporter.write_sep("=", "the fault matrix")
        terminalreporter.write_line(tables(config.stash[SEEN]))


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if config.getoption("record", False) and config.stash[SEEN]:
        record(config.stash[SEEN])


@pytest.fixture(scope="session")
def site_conf(
    is_standalone: bool, is_kubernetes: bool
) -> Callable[[Path], dict[str, dict[str, object]]]:
    """YARN gives a node up after 15 s, not ten minutes; a new ResourceManager knows all.

    Half of the cluster is another queue's, which gets it back at once when it asks. A standalone
    cluster and one on Kubernetes have all that by default, apart from queues. Containers of YARN
    have the TMPDIR of the tests, which are to find what is left there; so pods have it too.
    """

    def conf_of_kubernetes(directory: Path) -> dict[str, dict[str, object]]:
        return {"spark-defaults": {"spark.executorEnv.TMPDIR": tempfile.gettempdir()}}

    def conf_of_yarn(directory: Path) -> dict[str, dict[str, object]]:
        rm = "yarn.resourcemanager"
        queues, preemption = "yarn.scheduler.capacity.root", f"{rm}.monitor.capacity.preemption"
        recovery = "org.apache.hadoop.yarn.server.resourcemanager.recovery"
        return {
            "yarn-site": {
                "yarn.nm.liveness-monitor.expiry-interval-ms": "15000",
                f"{rm}.recovery.enabled": "true",
                f"{rm}.store.class": f"{recovery}.FileSystemRMStateStore",
                f"{rm}.fs.state-store.uri": f"file://{directory}/yarn/store",
                f"{rm}.work-preserving-recovery.scheduling-wait-ms": "1000",
                f"{rm}.scheduler.monitor.enable": "true",
                f"{preemption}.monitoring_interval": "1000",
                f"{preemption}.max_wait_before_kill": "1000",
                f"{preemption}.total_preemption_per_round": "1.0",
                f"{preemption}.natural_termination_factor": "1.0",
            },
            "capacity-scheduler": {
                f"{queues}.queues": f"default,{OTHER_QUEUE}",
                f"{queues}.default.capacity": "50",
                f"{queues}.default.maximum-capacity": "100",
                f"{queues}.default.user-limit-factor": "10",
                f"{queues}.{OTHER_QUEUE}.capacity": "50",
                f"{queues}.{OTHER_QUEUE}.maximum-capacity": "100",
                f"{queues}.{OTHER_QUEUE}.user-limit-factor": "10",
            },
        }

    if is_kubernetes:
        return conf_of_kubernetes
    return (lambda directory: {}) if is_standalone else conf_of_yarn


@pytest.fixture(scope="session", autouse=True)
def brief() -> Iterator[None]:
    """A peer without a heartbeat is given up after 5 s, and elastic gangs grow at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOPSGPU_HEARTBEAT", f"{HEARTBEAT_SECONDS}s")
        patch.setenv("HOPSGPU_ELASTIC_INTERVAL", "1s")
        yield
