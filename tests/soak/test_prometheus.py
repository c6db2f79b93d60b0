"""`hopsgpu exporter` with the real Prometheus: what it reads, its alerts, the dashboard's queries.

It takes Debian's package prometheus, which has promtool too.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml
from click.testing import CliRunner
from pyspark.sql import SparkSession

import hopsgpu
from hopsgpu.cli.main import main
from hopsgpu.cluster_managers.manager import ClusterManager
from hopsgpu.core.gang import GangState
from hopsgpu.storage.lake import LakePath
from tests.bounds import HANG_SECONDS
from tests.conftest import until
from tests.unit.records import RecordedRun

# What Grafana puts in.
VARIABLES = {"$__rate_interval": "1m", "$__range": "1h"}
TRAINS, ENDED = "fit-20261120-230000-aaaaaa", "fit-20261121-100000-bbbbbb"


def printed(option: str) -> str:
    result = CliRunner().invoke(main, ["exporter", option])
    assert result.exit_code == 0, result.output
    return result.stdout


def program(name: str) -> str:
    """The path of a program of Debian's package."""
    found = shutil.which(name)
    assert found is not None, f"{name} is not installed: apt-get install prometheus"
    return found


@contextlib.contextmanager
def started(command: list[str], pattern: str, **more: Any) -> Iterator[re.Match[str]]:
    """Runs a server; gives what of its output says where it listens."""
    found: list[re.Match[str]] = []
    ready = threading.Event()
    lines: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **more
    ) as process:

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                if (match := re.search(pattern, line)) is not None:
                    found.append(match)
                    ready.set()
            ready.set()

        reader = threading.Thread(target=read)
        reader.start()
        try:
            assert ready.wait(HANG_SECONDS) and found, lines
            yield found[0]
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(HANG_SECONDS)
            finally:
                process.kill()
                reader.join()


@contextlib.contextmanager
def exporting(*options: str, env: Mapping[str, str]) -> Iterator[str]:
    """Runs the exporter; gives host and port."""
    command = [sys.executable, "-m", "hopsgpu.cli.main", "exporter", "--port", "0", *options]
    with started(command, r"http://(\S+)/metrics", env=dict(env)) as found:
        yield found[1]


class Prometheus:
    """A Prometheus that reads one exporter.

    Attributes:
        url: where it answers.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, query: str) -> list[tuple[Mapping[str, str], float]]:
        """Labels and value of each series of a query's answer."""
        answer = requests.get(
            f"{self.url}/api/v1/query", {"query": query}, timeout=HANG_SECONDS
        ).json()
        assert answer["status"] == "success", (query, answer)
        found = answer["data"]["result"]
        assert answer["data"]["resultType"] == "vector", (query, answer)
        return [(one["metric"], float(one["value"][1])) for one in found]

    def number(self, query: str) -> float | None:
        """The only value of a query's answer; None if there is none."""
        found = self.ask(query)
        assert len(found) <= 1, found
        return found[0][1] if found else None


@contextlib.contextmanager
def reading(target: str, directory: Path) -> Iterator[Prometheus]:
    """Runs Prometheus, which asks an exporter every second, with the alert rules."""
    (directory / "alerts.yml").write_text(printed("--alerts"))
    # A look may take longer than a second on a busy machine.
    config = {
        "global": {"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "2s"},
        "rule_files": [str(directory / "alerts.yml")],
        "scrape_configs": [{"job_name": "hopsgpu", "static_configs": [{"targets": [target]}]}],
    }
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    subprocess.run(
        [program("promtool"), "check", "config", str(directory / "prometheus.yml")],
        check=True,
        capture_output=True,
        timeout=HANG_SECONDS,
    )
    command = [
        program("prometheus"),
        f"--config.file={directory}/prometheus.yml",
        f"--storage.tsdb.path={directory}/data",
        "--web.listen-address=127.0.0.1:0",
    ]
    with started(command, r'msg="Listening on" address=(\S+)') as found:
        prometheus = Prometheus(f"http://{found[1]}")

        def answers() -> bool:
            with contextlib.suppress(requests.ConnectionError):
                return requests.get(f"{prometheus.url}/-/ready", timeout=HANG_SECONDS).ok
            return False

        assert until(answers)
        yield prometheus


def dashboard_queries() -> list[str]:
    panels = json.loads(printed("--dashboard"))["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    for name, value in VARIABLES.items():
        queries = [query.replace(name, value) for query in queries]
    return queries


def put_runs(root: LakePath) -> RecordedRun:
    """Writes a run that trains, with samples of its GPUs, and gives it."""
    began = time.time() - 60.0
    run = RecordedRun(root, TRAINS, began)
    run.trains(began + 10.0, began + 20.0)
    content = json.loads((root / "runs" / TRAINS / "run.json").read())
    content["ranks"] = [
        {"rank": rank, "role": "worker", "host": "node1", "pid": 7, "gpus": [f"GPU-{rank}"]}
        for rank in (0, 1)
    ]
    sample = {"utilisation": 0.75, "memory_used": 2.0**30, "memory_total": 2.0**34, "power": 300.0}
    content["metrics"] = [{f"gpu.0.{name}": value for name, value in sample.items()}] * 2
    content["updated"] = time.time()
    (root / "runs" / TRAINS / "run.json").replace(json.dumps(content).encode())
    return run


def test_prometheus_reads_what_records_say(tmp_path: Path) -> None:
    root = LakePath(f"file://{tmp_path}/lake")
    env = {n: v for n, v in os.environ.items() if n not in ("HADOOP_CONF_DIR", "YARN_CONF_DIR")}
    put_runs(root)
    with exporting("--root", root.url, env=env) as target, reading(target, tmp_path) as prometheus:
        text = requests.get(f"http://{target}/metrics", timeout=HANG_SECONDS).text
        checked = subprocess.run(
            [program("promtool"), "check", "metrics"],
            input=text,
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
        )
        assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
        assert until(lambda: prometheus.number('hopsgpu_up{source="runs"}') == 1.0)
        assert prometheus.number("avg(hopsgpu_gpu_utilisation_ratio)") == 0.75
        assert prometheus.number("sum(hopsgpu_gpu_power_watts)") == 600.0
        assert prometheus.number('sum(hopsgpu_runs{state="running"})') == 1.0
        unsaved = prometheus.number("hopsgpu_run_unsaved_seconds")
        assert unsaved is not None and 0.0 < unsaved < 600.0
        began = time.time() - 100.0
        run = RecordedRun(root, ENDED, began, user="bob")
        run.trains(began + 10.0, began + 20.0)
        run.ends(began + 80.0, began + 85.0, began + 86.0, GangState.SUCCEEDED)
        trained = 'hopsgpu_gpu_seconds_total{user="bob", kind="training"}'
        assert until(lambda: prometheus.number(trained) == 120.0)
        held = 'sum(hopsgpu_ended_gpu_seconds_total{user="bob", state="succeeded"})'
        assert prometheus.number(held) == pytest.approx(152.0)
        assert prometheus.number('sum(hopsgpu_run_ends_total{reason="succeeded"})') == 1.0
        assert prometheus.number('hopsgpu_waiting_seconds_bucket{le="15.0"}') == 1.0
        assert prometheus.number("sum(hopsgpu_starting_seconds_sum)") == 10.0
        for query in dashboard_queries():
            prometheus.ask(query)
        rules = requests.get(f"{prometheus.url}/api/v1/rules", timeout=HANG_SECONDS).json()
        health = {r["name"]: r["health"] for g in rules["data"]["groups"] for r in g["rules"]}
        assert set(health.values()) == {"ok"} and len(health) == 9


def sums_by(found: list[tuple[Mapping[str, str], float]], *names: str) -> dict[Any, float]:
    sums: Counter[tuple[str, ...]] = Counter()
    for labels, value in found:
        sums[tuple(labels.get(name, "") for name in names)] += int(value)
    return {key: value for key, value in sums.items() if value}


@pytest.mark.usefixtures("nothing_warmed")
def test_queries_give_the_numbers_of_the_resource_manager(
    spark: SparkSession,
    manager: ClusterManager,
    cluster_env: dict[str, str],
    gpus_back: Callable[[], int],
    tmp_path: Path,
) -> None:
    with exporting(env=cluster_env) as target, reading(target, tmp_path) as prometheus:
        assert until(lambda: prometheus.number("sum(hopsgpu_up)") == 4.0)

        def states() -> dict[Any, float]:
            return sums_by(prometheus.ask("hopsgpu_gpus"), "node", "state")

        def of_yarn() -> dict[Any, float]:
            found = {}
            for node in hopsgpu.inventory().nodes:
                found |= {(node.host, "used"): node.used, (node.host, "free"): node.free}
            return {key: float(value) for key, value in found.items() if value}

        assert until(lambda: states() == of_yarn()), (states(), of_yarn())
        used, total = manager.gpus()
        assert prometheus.number("sum(hopsgpu_gpus)") == total
        with hopsgpu.hold(workers=2, placement="spread", progress="off") as gang:
            assert until(lambda: prometheus.number('sum(hopsgpu_gpus{state="used"})') == used + 2)
            assert states() == of_yarn()
            assert manager.gpus()[0] == used + 2
            in_queue = 'sum(hopsgpu_queue_gpus_used{queue="root.default"})'
            assert prometheus.number(in_queue) == used + 2
            user = spark.sparkContext.sparkUser()
            assert prometheus.number(f'sum(hopsgpu_user_gpus{{user="{user}"}})') == used + 2
            types = {labels["type"] for labels, _ in prometheus.ask("hopsgpu_gpus")}
            assert types == {kind.name for kind in hopsgpu.inventory().types}
            result = gang.launch(time.sleep, (5.0,), progress="off")
            training = 'sum(hopsgpu_gpu_seconds_total{kind="training"})'
            assert until(
                lambda: (
                    prometheus.number(training)
                    == pytest.approx(result.gpu_seconds.training, abs=0.01)
                ),
            ), prometheus.number(training)
            ends = 'sum(hopsgpu_run_ends_total{reason="succeeded"})'
            assert until(lambda: prometheus.number(ends) == 1.0)
            # The gang holds them between its launches.
            idle = 'sum(hopsgpu_gpu_seconds_total{kind="idle"})'
            before = prometheus.number(idle) or 0.0
            assert until(lambda: (prometheus.number(idle) or 0.0) > before + 5.0)
        assert until(lambda: prometheus.number('sum(hopsgpu_gpus{state="free"})') == total - used)
        with pytest.raises(hopsgpu.RankFailed):
            hopsgpu.launch(divmod, args=(1, 0), progress="off")
        ends = 'sum(hopsgpu_run_ends_total{reason="user_error"})'
        assert until(lambda: prometheus.number(ends) == 1.0)
        assert prometheus.number("sum(hopsgpu_waiting_seconds_count)") == 2.0
        # One more gang than there are GPUs: it waits in the queue of gangs.
        no_gang = prometheus.ask("hopsgpu_waiting_gangs")
        assert no_gang and not any(value for _, value in no_gang)
        with hopsgpu.hold(workers=int(total), progress="off"):
            run = hopsgpu.submit(time.sleep, args=(0,), progress="off")
            waiting = 'sum(hopsgpu_waiting_gang_gpus{kind="start"})'
            assert until(lambda: prometheus.number(waiting) == 1.0)
            assert until(
                lambda: (
                    prometheus.number(f'hopsgpu_run_waiting_seconds{{run="{run.run_id}"}} > 0')
                    is not None
                ),
            )
            run.cancel()
            assert run.wait(HANG_SECONDS)
        for query in dashboard_queries():
            prometheus.ask(query)


Case = tuple[str, str, str, int, int, dict[str, str], str]

RUN_LABELS = {"run": "fit-1", "user": "alice", "queue": "root.a"}
GPU_LABELS = {"run": "fit-1", "rank": "0", "node": "node1", "gpu": "GPU-a"}
GANG_LABELS = {"queue": "root.a", "kind": "start", "bound": "cluster", "state": "queued"}
# Alert; metric; its values, one a minute; a minute at which it does not fire yet, and one at which
# it does; labels; the value as the annotations show it.
CASES: list[Case] = [
    ("HopsgpuGpuIdle", "hopsgpu_gpu_utilisation_ratio", "0.01x30", 14, 16, GPU_LABELS, ""),
    (
        "HopsgpuGpusHeldIdle",
        "hopsgpu_gpu_seconds_total",
        "0+120x60",
        20,
        50,
        {"user": "alice", "queue": "root.a", "kind": "idle"},
        "2.0",
    ),
    (
        "HopsgpuGangWaitsLong",
        "hopsgpu_waiting_gang_oldest_seconds",
        "14401x10",
        4,
        6,
        GANG_LABELS,
        "4h 0m 1s",
    ),
    (
        "HopsgpuRunWaitsLong",
        "hopsgpu_run_waiting_seconds",
        "14401x10",
        4,
        6,
        RUN_LABELS,
        "4h 0m 1s",
    ),
    (
        "HopsgpuGpuUnhealthy",
        "hopsgpu_gpus",
        "2x10",
        4,
        6,
        {"node": "node1", "type": "A100", "label": "", "queue": "", "state": "unhealthy"},
        "2",
    ),
    (
        "HopsgpuRunWithoutCheckpoint",
        "hopsgpu_run_unsaved_seconds",
        "21601x10",
        4,
        6,
        RUN_LABELS,
        "6h 0m 1s",
    ),
    (
        "HopsgpuRunsLost",
        "hopsgpu_run_ends_total",
        "0x5 1x10",
        4,
        8,
        {"queue": "root.a", "reason": "lost"},
        "",
    ),
    ("HopsgpuSourceDown", "hopsgpu_up", "0x20", 9, 11, {"source": "line"}, ""),
    ("HopsgpuExporterDown", "unrelated", "0x20", 9, 11, {}, ""),
]
# What keeps an alert from firing at all.
WELL = {
    "HopsgpuGpuIdle": "0.06x30",
    "HopsgpuGpusHeldIdle": "0+30x60",
    "HopsgpuGangWaitsLong": "14400x10",
    "HopsgpuRunWaitsLong": "14400x10",
    "HopsgpuGpuUnhealthy": "0x10",
    "HopsgpuRunWithoutCheckpoint": "21600x10",
    "HopsgpuRunsLost": "1x15",
    "HopsgpuSourceDown": "1x20",
}


def kept_labels(rule: Mapping[str, Any], labels: Mapping[str, str]) -> dict[str, str]:
    """The labels that an alert has of its series."""
    summed = re.search(r"sum by \(([\w, ]+)\)", rule["expr"])
    names = summed[1].split(", ") if summed is not None else list(labels)
    return {name: labels[name] for name in names if labels[name]}


def expected(rule: Mapping[str, Any], labels: Mapping[str, str], value: str) -> dict[str, Any]:
    """The alert, as promtool wants it told."""
    texts = {}
    for name, text in rule["annotations"].items():
        text = re.sub(r"{{ \$labels\.(\w+) }}", lambda found: labels[found[1]], text)
        texts[name] = re.sub(r"{{ \$value.*? }}", value, text)
        assert "{{" not in texts[name]
    return {"exp_labels": {**rule["labels"], **labels}, "exp_annotations": texts}


def rule_test(
    alert: str, rule: Mapping[str, Any], series: str, values: str, minutes: Mapping[int, bool],
    labels: Mapping[str, str], value: str,
) -> dict[str, Any]:  # fmt: skip
    named = ",".join(f'{name}="{text}"' for name, text in labels.items())
    alerts = [expected(rule, kept_labels(rule, labels), value)]
    return {
        "interval": "1m",
        "input_series": [{"series": f"{series}{{{named}}}", "values": values}],
        "alert_rule_test": [
            {"eval_time": f"{at}m", "alertname": alert, "exp_alerts": alerts if fires else []}
            for at, fires in minutes.items()
        ],
    }


def test_alerts_fire_when_they_should_and_not_before(tmp_path: Path) -> None:
    (tmp_path / "alerts.yml").write_text(printed("--alerts"))
    rules = {
        rule["alert"]: rule
        for group in yaml.safe_load(printed("--alerts"))["groups"]
        for rule in group["rules"]
    }
    assert rules.keys() == {case[0] for case in CASES}
    tests = []
    for alert, series, values, before, after, labels, value in CASES:
        rule, minutes = rules[alert], {before: False, after: True}
        tests.append(rule_test(alert, rule, series, values, minutes, labels, value))
        if alert in WELL:
            never = {before: False, after: False}
            tests.append(rule_test(alert, rule, series, WELL[alert], never, labels, value))
    # An exporter that answers is not down.
    up = {"source": "runs"}
    silent = {9: False, 11: False}
    rule = rules["HopsgpuExporterDown"]
    tests.append(rule_test("HopsgpuExporterDown", rule, "hopsgpu_up", "1x20", silent, up, ""))
    file = {"rule_files": ["alerts.yml"], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "tests.yml").write_text(yaml.safe_dump(file))
    checked = subprocess.run(
        [program("promtool"), "test", "rules", "tests.yml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
