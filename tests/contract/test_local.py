"""One script on a local master, as on a laptop: what it does on a cluster, and nothing is left."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hopsgpu.agent.tmpdir_links import SHARED
from tests import local_scripts
from tests.conftest import gone, until
from tests.local_scripts import local_environ, running, simulate_gpus
from tests.travelling import PYTHON

DRIVER = Path(__file__).with_name("local_driver.py")
UUIDS = local_scripts.UUIDS[1:]


class Told:
    """What the script has told so far."""

    def __init__(self, process: subprocess.Popen[str], errors: Path) -> None:
        self.process = process
        self.errors = errors
        self._steps: list[dict[str, Any]] = []

    def __call__(self, step: str) -> list[dict[str, Any]]:
        """All that it told of a step; reads on until there is something."""
        assert self.process.stdout is not None
        while step not in [told["step"] for told in self._steps]:
            line = self.process.stdout.readline()
            assert line, f"the script ended before {step!r}: {self.errors.read_text()[-3000:]}"
            if line.startswith("TOLD "):
                self._steps.append(json.loads(line.removeprefix("TOLD ")))
        return [told for told in self._steps if told["step"] == step]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def told(home: Path) -> Iterator[Told]:
    none = simulate_gpus(home / "no-gpus", ())
    smi = simulate_gpus(home / "nvidia-smi", UUIDS)
    # Whatever GPUs this machine has count for nothing here.
    environ = local_environ(home, none, DRIVER.parents[2])
    with running(DRIVER, home, environ, smi) as process:
        yield Told(process, home / "errors")


def test_the_same_launch_trains_and_publishes_without_a_cluster(told: Told, home: Path) -> None:
    launch = told("launch")[0]
    assert launch["values"] == [[3.0, []], [3.0, []]]
    assert launch["url"] == f"file://{home}/hopsgpu/models/sum/1"
    assert launch["files"] == ["part-0", "part-1"]
    assert launch["warnings"] == ["this machine has no GPU, so the ranks run on its CPUs"]
    assert launch["released"] and launch["metrics"] == [{"loss": 0.5, "step": 1}] * 2


def test_what_differs_is_said_in_one_line(told: Told, home: Path) -> None:
    told("launch")
    said = [line for line in told.errors.read_text().splitlines() if "spark.master is" in line]
    assert len(said) == 1 and said[0].startswith("hopsgpu: spark.master is local[*], so gangs run")
    assert "no GPU; ranks run on its CPUs): no YARN" in said[0]
    assert f"file://{home}/hopsgpu" in said[0]


def test_ranks_and_trials_can_bind_sockets_in_tmpdir(told: Told) -> None:
    assert told("shared")[0]["value"] == [3, [0, 1, 2, 3], [str(DRIVER)]]
    assert told("searched")[0]["values"] == [3.0, 3.0]


def test_a_dataframe_is_written_read_by_the_ranks_and_removed(told: Told, home: Path) -> None:
    data = told("data")[0]
    first, second = data["values"]
    assert len(first) == len(second) == 50 and sorted(first + second) == list(range(100))
    run = home / "hopsgpu" / "runs" / data["run"]
    reference = json.loads((run / "run.json").read_text())["data"]["data"]
    assert (reference["url"], reference["rows"]) == (f"file://{run}/data/data", 100)
    assert not (run / "data").exists()


def test_python_environments_travel_to_ranks_of_this_machine(told: Told, home: Path) -> None:
    told("failure")  # all before it
    modules, whole = told("environment")
    assert modules["values"] == [["modules", sys.executable]] * 2
    for value, executable in whole["values"]:
        assert value == "whole" and Path(executable).is_relative_to(home / "tmp")
    record = json.loads((home / "hopsgpu" / "runs" / whole["run"] / "run.json").read_text())
    assert record["python_env"]["interpreter"] == f"bin/{PYTHON}"


def test_the_first_failure_has_its_words(told: Told) -> None:
    failure = told("failure")[0]
    assert failure["rank"] == 1 and "ValueError: no such batch" in failure["said"]
    assert any("attempt 0 failed" in text for text in failure["warnings"])


def test_a_held_gang_is_launched_on_at_once(told: Told) -> None:
    seconds = told("held")[0]["seconds"]
    print("held launches", seconds)
    assert min(seconds[1:]) < 5


def test_what_ranks_could_not_load_is_refused(told: Told, home: Path) -> None:
    told("held")
    refusals = {refusal["call"]: refusal["said"] for refusal in told("unloadable")}
    assert refusals.keys() == {"launch", "held", "search", "score"}
    for said in refusals.values():
        assert "'wrapped' is a __main__.Delegating, which can be pickled, but not loaded" in said
    assert not list((home / "hopsgpu" / "runs").glob("use-*"))


def test_a_cancelled_run_leaves_no_rank(told: Told) -> None:
    cancelled = told("cancelled")[0]
    assert "was cancelled" in cancelled["said"] and not cancelled["alive"]


def test_gpus_are_leased_to_one_gang_at_a_time(told: Told) -> None:
    assert "needs 3 GPUs, and this machine has 2" in told("too many")[0]["said"]
    waited = told("waited")[0]["waited"]
    assert any("leased to another gang" in text for text in waited)
    runs = sorted(told("gpus"), key=lambda run: run["times"])
    assert runs[0]["times"][1] <= runs[1]["times"][0]
    for run in runs:
        assert run["values"] == [[[uuid], ",".join(UUIDS)] for uuid in UUIDS]


def test_usage_is_what_the_records_say(told: Told, home: Path) -> None:
    usage = told("usage")[0]
    rows = {row["run"]: row for row in usage["rows"]}
    records = {
        path.parent.name: json.loads(path.read_text())
        for path in (home / "hopsgpu" / "runs").glob("*/run.json")
    }
    assert set(rows) <= set(records) and usage["problems"] == []
    with_gpus = [run for run, row in rows.items() if row["gpu_hours_training"]]
    assert len(with_gpus) == 2
    assert {row["state"] for row in rows.values()} == {"succeeded", "failed", "cancelled"}
    for run, row in rows.items():
        seconds, ended = records[run]["gpu_seconds"], records[run]["use"][-1]
        assert row["gpu_hours_held"] * 3600 == pytest.approx(seconds["held"], abs=0.01)
        assert row["gpu_hours_training"] * 3600 == pytest.approx(seconds["training"], abs=0.01)
        assert (ended["held"], ended["training"]) == pytest.approx(
            (seconds["held"], seconds["training"]), abs=0.01
        )
    # The other gang had the GPUs meanwhile.
    assert sum(rows[run]["gpu_hours_waited"] for run in with_gpus) * 3600 > 1.0


def test_a_killed_driver_leaves_no_process_and_no_directory(told: Told, home: Path) -> None:
    pids = told("hanging")[0]["pids"]
    numbers = [int(one.name) for one in Path("/proc").glob("[0-9]*")]
    left = [pid for pid in numbers if of(pid, home)]
    assert set(pids) < set(left)
    assert links_into(home)
    told.process.kill()
    told.process.wait()
    assert until(lambda: all(map(gone, left))), [pid for pid in left if not gone(pid)]
    assert until(lambda: not list((home / "tmp").glob("hopsgpu-*")))
    assert until(lambda: not links_into(home))


def links_into(home: Path) -> list[Path]:
    """Links in /tmp that lead to files of the script's gangs."""
    links = [path for path in SHARED.glob("hopsgpu-tmp-*/*") if path.is_symlink()]
    return [link for link in links if link.readlink().is_relative_to(home)]


def of(pid: int, home: Path) -> bool:
    """Whether a process is of the script's gangs."""
    try:
        return Path(f"/proc/{pid}/cwd").readlink().is_relative_to(home / "tmp")
    except OSError:
        return False
