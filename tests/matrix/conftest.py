"""One corner of the matrix: this interpreter's PySpark on a cluster of the Hadoop asked for."""

from __future__ import annotations

import datetime
import platform
import re
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest

from hopsgpu.devcluster.hadoop_jars import hadoop_version, pyspark_home
from hopsgpu.devcluster.java import find_java
from tests.matrix.behaviours import BEHAVIOURS, WORKS, Corner, Seen, first_line, record

HERE = Path(__file__).parent
_SEEN = pytest.StashKey[dict[str, Seen]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--spark", default="", help="series of PySpark that must be installed: 3.5")
    parser.addoption("--hadoop", default="", help="version of the daemons; PySpark's by default")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_SEEN] = {}
    series = config.getoption("spark", "")
    if series and not f"{pyspark.__version__}.".startswith(f"{series}."):
        raise pytest.UsageError(f"--spark {series}: PySpark {pyspark.__version__} is installed")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.matrix)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    name = item.name.removeprefix("test_")
    if item.path.is_relative_to(HERE):
        assert name in BEHAVIOURS, f"tests/matrix/behaviours.py lacks {name}"
        seen = item.config.stash[_SEEN]
        before = seen.get(name, Seen(WORKS, 0.0))
        outcome = before.outcome
        if call.excinfo is not None and outcome == WORKS:
            outcome = first_line(f"{call.excinfo.typename}: {call.excinfo.value}")
        # What gives back afterwards takes none of the user's time.
        seconds = 0.0 if call.when == "teardown" else call.duration
        seen[name] = Seen(outcome, round(before.seconds + seconds, 1))
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if config.getoption("record", False) and config.stash[_SEEN]:
        record(
            Corner(
                spark=pyspark.__version__,
                hadoop=config.getoption("hadoop", "") or hadoop_version(pyspark_home()),
                python=platform.python_version(),
                java=_java(),
                date=datetime.datetime.now(datetime.UTC).date().isoformat(),
                seen=config.stash[_SEEN],
            )
        )


def _java() -> str:
    """The whole version of the JDK."""
    release = (find_java().home / "release").read_text(encoding="utf-8")
    found = re.search(r'^JAVA_VERSION="(.+)"', release, re.MULTILINE)
    return found[1] if found else str(find_java().version)


@pytest.fixture(scope="session")
def hadoop(pytestconfig: pytest.Config) -> str | None:
    """The daemons' version."""
    return pytestconfig.getoption("hadoop", "") or None
