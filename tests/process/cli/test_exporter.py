"""`hopsgpu exporter`: its server, its ends, and the files that it prints."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
import yaml
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from hopsgpu.cli.main import main
from hopsgpu.core.gang import GangState
from hopsgpu.monitoring.families import METRICS
from hopsgpu.storage.lake import LakePath
from tests.bounds import HANG_SECONDS
from tests.conftest import as_in_a_terminal
from tests.unit.records import RecordedRun

RUN = "fit-20261120-230000-aaaaaa"


@pytest.fixture
def root(tmp_path: Path) -> LakePath:
    return LakePath(f"file://{tmp_path}/lake")


@contextlib.contextmanager
def exporting(root: LakePath, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Runs the command where no cluster is; gives the process and the URL of the metrics."""
    command = [sys.executable, "-m", "hopsgpu.cli.main", "exporter", "--root", root.url]
    env = {n: v for n, v in os.environ.items() if n not in ("HADOOP_CONF_DIR", "YARN_CONF_DIR")}
    with subprocess.Popen(
        [*command, *(options or ("--port", "0"))],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=as_in_a_terminal,
    ) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found is not None, process.communicate()
            yield process, found[0]
        finally:
            process.kill()


def scraped(url: str) -> dict[str, float]:
    """Value of each series, by its name and the values of its labels."""
    answer = requests.get(url, timeout=HANG_SECONDS)
    assert answer.headers["Content-Type"].startswith("text/plain")
    return {
        f"{sample.name} {' '.join(sample.labels.values())}".strip(): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_it_serves_what_is_new_until_it_is_told_to_end(
    root: LakePath, number: signal.Signals, code: int
) -> None:
    with exporting(root) as (process, url):
        found = scraped(url)
        assert (found["hopsgpu_up runs"], found["hopsgpu_up resource_manager"]) == (1.0, 0.0)
        began = time.time() - 100.0
        run = RecordedRun(root, RUN, began)
        run.trains(began + 10.0, began + 20.0)
        run.ends(began + 80.0, began + 85.0, began + 86.0, GangState.SUCCEEDED)
        time.sleep(1.1)  # looks that follow sooner are one
        found = scraped(url)
        assert found["hopsgpu_gpu_seconds_total training root.default alice"] == 120.0
        assert found["hopsgpu_run_ends_total root.default succeeded"] == 1.0
        process.send_signal(number)
        out, err = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == code
    assert (out, "Traceback" in err) == ("", False)
    assert "resource_manager: HADOOP_CONF_DIR is not set" in err
    assert err.count("resource_manager") == 1


def test_it_listens_on_loopback_alone(root: LakePath) -> None:
    with exporting(root) as (_, url):
        assert url.startswith("http://127.0.0.1:")
        port = int(url.rpartition(":")[2].partition("/")[0])
        with socket.socket() as other:
            # Another address of this machine has the port free.
            other.bind(("127.0.0.2", port))


def test_a_port_that_is_taken_is_one_message(root: LakePath) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(main, ["exporter", "--root", root.url, "--port", port])
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
    assert result.stderr == (
        f"hopsgpu: cannot listen on 127.0.0.1 port {port}: Address already in use; give another"
        " --port, or another address of this machine as --host\n"
    )


def test_a_host_that_does_not_exist_is_one_message(root: LakePath) -> None:
    options = ["exporter", "--root", root.url, "--host", "192.0.2.1", "--port", "0"]
    result = CliRunner().invoke(main, options)
    assert result.exit_code == 1
    assert result.stderr.startswith("hopsgpu: cannot listen on 192.0.2.1 port 0: ")
    assert len(result.stderr.splitlines()) == 1


def test_without_the_package_it_says_which(root: LakePath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    result = CliRunner().invoke(main, ["exporter", "--root", root.url, "--port", "0"])
    assert result.exit_code == 1 and "pip install 'hopsgpu[monitoring]'" in result.stderr
    # These need it not.
    assert CliRunner().invoke(main, ["exporter", "--alerts"]).exit_code == 0


def test_it_prints_one_file_at_a_time() -> None:
    result = CliRunner().invoke(main, ["exporter", "--alerts", "--dashboard"])
    assert result.exit_code == 1 and "give one of them" in result.stderr


def queries() -> list[str]:
    rules = yaml.safe_load(CliRunner().invoke(main, ["exporter", "--alerts"]).stdout)
    dashboard = json.loads(CliRunner().invoke(main, ["exporter", "--dashboard"]).stdout)
    alerts = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    return alerts + [t["expr"] for p in dashboard["panels"] for t in p.get("targets", ())]


def test_alerts_and_dashboard_ask_for_metrics_that_there_are() -> None:
    names = {info.name for info in METRICS}
    asked = {
        re.sub(r"_(bucket|sum|count)$", "", name)
        for query in queries()
        for name in re.findall(r"\bhopsgpu_\w+", query)
    }
    assert asked <= names
    # A person sees all of them, but for the rows of a table that has others like it.
    assert names - asked == set()
