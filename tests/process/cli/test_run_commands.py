"""`hopsgpu runs`, `logs` and `tensorboard`, on a local directory that stands for the lake."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hopsgpu.artifacts.runs import RunStore
from hopsgpu.cli import logs as logs_module
from hopsgpu.cli import run_commands as runs_module
from hopsgpu.cli.main import main
from hopsgpu.cli.run_tables import LIST_LAYOUT, comparison_table, run_rows
from hopsgpu.cli.tables import align
from hopsgpu.core import run_record as stored_runs
from hopsgpu.core.formats import duration, local_time, size
from hopsgpu.display.run_comparison import ComparisonGroup, ComparisonRow, RunComparison
from hopsgpu.display.run_view import summary_of
from hopsgpu.errors import ConfigError
from hopsgpu.storage.lake_root import default_root
from tests.bounds import HANG_SECONDS
from tests.conftest import as_in_a_terminal, gone, until
from tests.unit.records import DATA, NEW, OLD, put_run, root
from tests.unit.rest import serving

__all__ = ["root"]


def call(*words: str) -> Result:
    return CliRunner().invoke(main, words)


def told(result: Result) -> str:
    """What was said where it was to be refused, without a traceback."""
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
    return result.stderr


def test_runs_are_listed_the_newest_first(root: Path) -> None:
    assert call("runs").output == f"no runs in file://{root}/runs\n"
    assert json.loads(call("runs", "--json").output) == []
    put_run(root, OLD, "running", updated=-120.0)
    put_run(root, NEW, model="hdfs://lake/models/digits/3")
    (root / "runs" / "odd").mkdir()
    os.utime(root / "runs" / "odd", (0, 0))
    lines = call("runs").output.splitlines()
    assert " ".join(lines[0].split()) == "RUN STATE REQUESTED TOOK RANKS GPUS RESULT"
    assert lines[1].split()[:2] == [NEW, "succeeded"]
    assert lines[1].split()[4:] == ["1m15s", "2", "2", "digits", "3"]
    assert lines[2].split()[:2] == [OLD, "lost"]
    assert lines[3].split()[:2] == ["odd", "unreadable"]
    assert lines[4].startswith("odd: cannot read file://")
    found = json.loads(call("runs", "--json").output)
    states = {run["run_id"]: run["state"] for run in found}
    assert states == {NEW: "succeeded", OLD: "lost", "odd": "unreadable"}
    assert (found[0]["gpus"], found[0]["workers"], found[0]["user"]) == (2, 2, "alice")
    assert [run["run_id"] for run in json.loads(call("runs", "--limit", "1", "--json").output)] == [
        NEW
    ]


def test_a_list_fits_the_terminal_and_its_ids_can_be_typed(root: Path) -> None:
    put_run(root, OLD, "failed", error="ValueError: no batch of this size is left in the table")
    put_run(root, NEW, model="hdfs://lake/models/digits/3")
    runs = [summary_of(run, time.time()) for run in RunStore(f"file://{root}").read([NEW, OLD])]

    def shown(width: int) -> list[str]:
        return [line.plain for line in align([*run_rows(runs)], LIST_LAYOUT, "utf-8", width)]

    at_80, at_200 = shown(80), shown(200)
    assert max(map(len, at_80)) <= 80
    assert [line.split()[0] for line in at_80] == ["RUN", NEW, OLD]
    assert at_80[0].split() == ["RUN", "STATE", "TOOK", "GPUS", "RESULT"]
    assert "digits 3" in at_80[1] and "ValueError: no b" in at_80[2]
    assert "RANKS" in at_200[0] and at_200[2].endswith(
        "ValueError: no batch of this size is left in the table"
    )


def test_an_application_stands_for_its_newest_run(root: Path) -> None:
    put_run(root, OLD, application="application_1_0007")
    put_run(root, NEW, application="application_1_0008")
    for application, run_id in (("application_1_0007", OLD), ("application_1_0008", NEW)):
        assert json.loads(call("runs", "show", application, "--json").output)["run_id"] == run_id
    missing = told(call("runs", "cancel", "application_1_0009"))
    assert f"application_1_0009 has no run in file://{root}/runs: it has one once" in missing


def test_runs_are_compared_side_by_side(root: Path) -> None:
    put_run(root, OLD, "failed", error="ValueError: no", spec={"workers": 1}, executors=1)
    put_run(root, NEW, model="hdfs://lake/models/digits/3")
    lines = call("runs", "compare", OLD, "last").output.splitlines()
    assert lines[:4] == [f"A  {OLD}", f"B  {NEW}", "", lines[3]]
    assert lines[3].split() == ["FACT", "A", "B"]
    assert "outcome" in lines and any(line.startswith("environment (") for line in lines)
    facts = {tuple(line.split()) for line in lines}
    assert {("*", "state", "failed", "succeeded"), ("*", "GPUs", "1", "2")} <= facts
    assert ("*", "model", "-", "digits", "3") in facts and ("user", "alice", "alice") in facts
    found = json.loads(call("runs", "compare", "--json", OLD, NEW).output)
    assert found["runs"] == [OLD, NEW] and found["outcome"]["GPUs"] == ["1", "2"]
    assert "1 run to compare: name 2 to 6" in told(call("runs", "compare", OLD))


def test_a_comparison_fits_the_terminal() -> None:
    rows = tuple(ComparisonRow(f"parameter {n}", (f"'{'x' * 90}{n}'", str(n))) for n in range(3))
    comparison = RunComparison((OLD, NEW), (ComparisonGroup("parameters", rows, equal=2),))
    table, layout = comparison_table(comparison)
    lines = [line.plain for line in align(table, layout, "utf-8", 80)]
    assert max(map(len, lines)) <= 80
    assert lines[4:6] == ["parameters (2 equal)", f"* parameter 0  '{'x' * 60}…  0"]


def test_logs_wait_for_the_first_run_of_an_application(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs_module, "_POLL_SECONDS", 0.02)
    application, (state, ended) = "application_1_0007", ("RUNNING", "FINISHED")
    asked = 0

    def answer() -> tuple[int, str]:
        nonlocal asked
        asked += 1
        if asked == 2:
            log = {"logs/rank-0.log": 4}
            put_log(put_run(root, NEW, logs=log, application=application), "rank-0.log", b"one\n")
        app = {"id": application, "name": "job", "user": "alice", "queue": "a"}
        app["state"] = state if asked < 4 else ended
        return 200, json.dumps({"app": app})

    with serving(
        {f"/ws/v1/cluster/apps/{name}": answer for name in (application, "application_1_0008")}
    ) as daemon:
        monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path / "conf"))
        monkeypatch.delenv("YARN_CONF_DIR", raising=False)
        (tmp_path / "conf").mkdir()
        (tmp_path / "conf" / "yarn-site.xml").write_text(
            "<configuration><property><name>yarn.resourcemanager.webapp.address</name>"
            f"<value>{daemon.address}</value></property></configuration>"
        )
        result = call("logs", "-f", application)
        asked = 4
        never = told(call("logs", "-f", "application_1_0008"))
    assert result.stdout == "[rank 0 node1] one\n"
    assert (
        result.stderr.splitlines()[0]
        == f"hopsgpu: {application} has no run yet; waiting for its first one"
    )
    assert "application_1_0008 has no run in " in never


def test_a_record_with_a_time_that_is_none_hides_no_other(root: Path) -> None:
    put_run(root, OLD, timeline={"requested": float("nan")})
    put_run(root, NEW, gpu_seconds={"held": 10**400})
    put_run(root, "whole-20261123-120000-cccccc")
    result = call("runs")
    assert result.exit_code == 0
    states = [line.split()[1] for line in result.output.splitlines()[1:4]]
    assert states == ["succeeded", "unreadable", "unreadable"]
    listed = call("runs", "--json").output
    assert [run["state"] for run in json.loads(listed)] == states
    assert "NaN is not JSON" in listed
    assert "is not a record of a run" in told(call("runs", "show", NEW))


def test_a_run_is_shown(root: Path) -> None:
    put_run(root, NEW, "failed", error="rank 1 failed\nValueError: no", warnings=["idle \x1b[31m"])
    output = call("runs", "show", "last").output
    for text in (
        f"run          {NEW}\n",
        "state        failed\n",
        "gang         2 ranks, 2 GPUs\n",
        "environment  hopsgpu 0.7, python 3.11.9, spark 4.0.1, hadoop 3.4.1 on laptop\n",
        "error        rank 1 failed\n             ValueError: no\n",
        "warning      idle ?[31m\n",
        "time         waited 15.0 s\n",
        "GPU seconds  held 120.0, training 100.0, idle 20.0\n",
    ):
        assert text in output
    # Advice is for runs that succeeded.
    assert "not spent training" not in output
    first, second = (line.split() for line in output.splitlines()[-2:])
    assert first[:6] == ["0", "worker", "node1", "71", "returned", "88%"]
    assert first[6:] == ["3.0GiB", "step=9,", "loss=0.1235"]
    assert second == ["1", "worker", "node2", "72", "lost", "-", "-", "-"]
    put_run(root, OLD, "running", updated=-90.0, spec={"workers": 1}, executors=1)
    output = call("runs", "show", OLD).output
    assert "gang         1 rank, 1 GPU\n" in output
    assert "lost         its driver on laptop was last heard from 1m30s ago\n" in output
    assert [line.split()[4] for line in output.splitlines()[-2:]] == ["returned", "-"]
    shown = json.loads(call("runs", "show", NEW[:15], "--json").output)
    assert shown["state"] == "failed" and shown["environment"]["packages"] == {"torch": "2.9"}
    assert shown["url"] == f"file://{root}/runs/{NEW}"


def test_what_the_gpus_of_a_run_did_is_shown(root: Path) -> None:
    seconds = {"held": 2400.0, "training": 2000.0, "publishing": 100.0, "idle": 300.0}
    seconds |= {"waiting_for_data": 720.0, "starting": 60.0, "of a later version": 1.0}
    put_run(root, NEW, gpu_seconds=seconds)
    output = call("runs", "show", NEW).output
    assert (
        "GPU seconds  held 2400.0, training 1280.0, waiting for data 720.0, publishing 100.0,"
        " starting 60.0, idle 240.0\n"
    ) in output
    assert (
        "\n             GPU time not spent training: 12 of 40 GPU minutes waited for data: "
        in output
    )
    put_run(root, OLD, gpu_seconds={"held": 100.0, "training": 99.0, "publishing": 0, "idle": 1})
    assert "GPU time not spent training" not in call("runs", "show", OLD).output


def test_what_a_run_waits_for_is_shown_as_long_as_it_runs(root: Path) -> None:
    put_run(root, NEW, "running", waiting_for="Gives 2 GPUs \x1b[31m", waiting_details=["a", "b"])
    put_run(root, OLD, "failed", waiting_for="gives 2 GPUs")
    assert re.search(
        r"now +Gives 2 GPUs \?\[31m\ndetails +a; b\n", call("runs", "show", NEW).output
    )
    assert "gives 2 GPUs" not in call("runs", "show", OLD).output


def test_the_worlds_of_an_elastic_gang_are_shown(root: Path) -> None:
    worlds = [
        {"generation": 0, "ranks": 2, "hosts": ["a", "b"], "began": 1010.0, "started": 1012.0}
        | {"ended": 1030.0, "end": "lost", "why": "node2 \x1b[31m", "resize_seconds": None}
        | {"gpu_seconds": 40.0, "of_a_later_version": 1},
        {"generation": 1, "ranks": 3, "hosts": ["a"] * 3, "began": 1031.0, "resize_seconds": 5.5}
        | {"gpu_seconds": 9.0},
    ]
    timeline = {"requested": 1000.0, "granted": 1010.0}
    spec = {"workers": 4, "least_workers": 2}
    put_run(root, NEW, "running", worlds=worlds, timeline=timeline, spec=spec, executors=4)
    put_run(root, OLD)
    output = call("runs", "show", NEW).output
    for text in (
        "gang         2 to 4 ranks, at most 4 GPUs\n",
        "worlds       world 0: 2 ranks, 10.0 s to 30.0 s, 40.0 GPU seconds, lost: node2 ?[31m\n",
        "             world 1: 3 ranks, 31.0 s to now, resize 5.5 s, 9.0 GPU seconds\n",
    ):
        assert text in output
    assert "attempt" not in output
    listed = {line.split()[0]: line.split() for line in call("runs").output.splitlines()}
    assert "2-4" in listed[NEW] and "2" in listed[OLD]
    assert "world 0" not in call("runs", "show", OLD).output
    sizes = {
        run["run_id"]: run["least_workers"] for run in json.loads(call("runs", "--json").output)
    }
    assert sizes == {NEW: 2, OLD: None}
    found = json.loads(call("runs", "show", NEW, "--json").output)["worlds"]
    assert [(one["generation"], one["end"]) for one in found] == [(0, "lost"), (1, "")]


def test_runs_of_another_version_are_told_of_once(root: Path) -> None:
    for number in range(3):
        put_run(root, f"old-{number}", schema=1, state="released")
    put_run(root, NEW)
    lines = call("runs").output.splitlines()
    assert sorted(line.split()[1] for line in lines[1:5]) == ["succeeded", *["unreadable"] * 3]
    (told_of,) = lines[5:]
    assert re.match(r"old-\d: file://.*/run.json was written by another version of", told_of)
    assert told_of.endswith("(the same for 2 more runs)")
    assert {run["state"] for run in json.loads(call("runs", "--json").output)} == {
        "succeeded",
        "unreadable",
    }
    for words in (("show", "old-1"), ("cancel", "old-1")):
        assert "it has schema 1, and this version reads schema 3" in told(call("runs", *words))
    assert "Traceback" not in call("logs", "old-1").output
    assert json.loads(call("runs", "prune", "--keep", "0", "--json").stdout) == [NEW]


def test_a_runs_data_is_shown(root: Path) -> None:
    put_run(root, NEW, data={"data": DATA, "test": {**DATA, "kept": True}})
    shown = call("runs", "show", NEW).output
    assert "data         7 rows, 2.0 KiB of hdfs://lake/x, removed at the end of the run\n" in shown
    assert "data test    7 rows, 2.0 KiB of hdfs://lake/x\n" in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("runs", "show", "nothing"), "there is no run 'nothing'"),
        (("runs", "show", "../etc"), "is not a run id"),
        (("runs", "show", "broken"), "not a record of a run"),
        (("runs", "cancel", "broken"), "not a record of a run"),
        (("runs", "prune"), "--older-than 30d, --keep 100, or both"),
        (("runs", "prune", "--older-than", "soon"), "must be a duration above zero"),
        (("logs", "broken"), "there are no logs in"),
        (("logs", "broken", "--rank", "3", "--attempt", "1"), "no logs of rank 3 in attempt 1 in"),
        (("runs", "--root", "http://lake/"), "cannot hold runs and models"),
        (("tensorboard", "nothing"), "hopsgpu: "),
    ],
)
def test_errors_have_no_traceback(root: Path, words: tuple[str, ...], said: str) -> None:
    (put_run(root, "broken") / "run.json").write_text("{}")
    assert said in told(call(*words))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), f"{NEW} is cancelled\n"),
        (("--json",), json.dumps({"run_id": NEW, "state": "cancelled"}, indent=2) + "\n"),
    ],
)
def test_a_run_is_cancelled(
    root: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.setattr(runs_module, "_POLL_SECONDS", 0.02)
    directory = put_run(root, NEW, "running")

    def drive() -> None:
        assert until((directory / "cancel").exists)
        record = json.loads((directory / "run.json").read_text()) | {
            **{"state": "cancelled", "reason": "cancelled"}
        }
        (directory / "new.json").write_text(json.dumps(record))
        (directory / "new.json").rename(directory / "run.json")

    driver = threading.Thread(target=drive)
    driver.start()
    result = call("runs", "cancel", "last", *words)
    driver.join()
    assert (result.exit_code, result.output) == (0, said)
    assert f"{NEW} has ended already: cancelled" in told(call("runs", "cancel", NEW))


def test_a_run_that_does_not_end_is_told(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_module, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(runs_module, "_CANCEL_SECONDS", 0.05)
    directory = put_run(root, NEW, "running")
    assert "has not ended within 0.05 s; it is running" in told(call("runs", "cancel", NEW))
    assert (directory / "cancel").exists()


def test_a_lost_run_is_not_asked(root: Path) -> None:
    directory = put_run(root, NEW, "running", updated=-90.0)
    said = told(call("runs", "cancel", NEW))
    words = r"is lost: its driver was last heard from 1m[3-5]\ds ago, when it was running"
    assert re.search(words, said)
    assert "application_1_0001" in said
    assert not (directory / "cancel").exists()


def test_runs_are_pruned(root: Path) -> None:
    old = put_run(root, OLD, "failed", updated=-90_000.0)
    going, new = put_run(root, "a-run", "running"), put_run(root, NEW)
    words = ("runs", "prune", "--older-than", "1d")
    result = call(*words, "--dry-run")
    assert (result.stdout, result.stderr) == (f"{OLD}\n", "1 run would be removed\n")
    assert old.exists()
    assert json.loads(call(*words, "--dry-run", "--json").stdout) == [OLD]
    assert json.loads(call(*words, "--keep", "3", "--json").stdout) == []
    assert call(*words, "--keep", "3").stdout == ""
    assert call(*words).stdout == f"{OLD}\n"
    assert not old.exists()
    assert call("runs", "prune", "--keep", "0").stdout == f"{NEW}\n"
    assert not new.exists() and going.exists()


def put_log(directory: Path, name: str, content: bytes) -> None:
    file = directory / "logs" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as opened:
        opened.write(content)


def test_logs_of_several_ranks_bear_their_rank_and_node(root: Path) -> None:
    directory = put_run(root, NEW)
    put_log(directory, "rank-0.log", b"zero\nno end")
    put_log(directory, "rank-1.log", b"one \xff\n")
    result = call("logs", "last")
    assert result.stdout_bytes == (
        b"[rank 0 node1] zero\n[rank 0 node1] no end\n[rank 1 node2] one \xff\n"
    )
    assert call("logs", NEW, "--rank", "0").stdout_bytes == b"zero\nno end"
    lines = call("logs", NEW, "--rank", "1", "--json").output.splitlines()
    assert [json.loads(line) for line in lines] == [
        {"attempt": 0, "rank": 1, "host": "node2", "line": "one \\xff"}
    ]
    put_log(directory, "attempt-1/rank-0.log", b"again\n")
    assert call("logs", NEW).output == "[rank 0 node1] again\n"
    assert call("logs", NEW, "--attempt", "0", "--rank", "0").output == "zero\nno end"
    (directory / "run.json").unlink()
    assert call("logs", NEW).output == "[rank 0] again\n"


SCORE = {
    **{"output": "hdfs://lake/scored", "is_complete": False, "kept_in": "hdfs://lake/.scored-1"},
    **{"model": "hdfs://lake/models/digits/3", "max_concurrent": 8, "gpus_per_worker": 1},
    **{"rows": 10000, "scored": 2500, "parts": 4, "done": 1, "rate": 1234.5, "seconds_left": 6.0},
    "failed_parts": [
        {"first": 0, "rows": 10, "place": "rows 0 to 9 of hdfs://lake/t", "tries": 3, "error": ""}
    ],
}


def test_a_score_is_shown_with_its_rows_and_its_output(root: Path) -> None:
    put_run(root, NEW, score=SCORE, ranks=[])
    output = call("runs", "show", NEW).output
    for text in (
        "rows         2,500 of 10,000 rows (25 %)\n",
        "parts        1 of 4\n",
        "at a time    at most 8 executors, each with 1 GPU\n",
        "output       hdfs://lake/scored is not there yet; parts are in hdfs://lake/.scored-1\n",
        "left out     rows 0 to 9 of hdfs://lake/t\n",
    ):
        assert text in output, output
    going = "score-20261123-120000-eeeeee"
    put_run(root, going, "running", score=SCORE, ranks=[])
    assert "rate         1,234 rows/s\ntime left    6" in call("runs", "show", going).output
    put_run(root, OLD, score={**SCORE, "is_complete": True, "kept_in": None}, ranks=[])
    assert "output       hdfs://lake/scored\n" in call("runs", "show", OLD).output


def test_logs_of_a_worker(root: Path) -> None:
    logs = put_run(root, NEW, score=SCORE, ranks=[]) / "workers" / "3" / "logs"
    logs.mkdir(parents=True)
    (logs / "rank-0.log").write_text("loading\n")
    assert call("logs", NEW, "--worker", "3").output == "[rank 0] loading\n"
    assert "for a score, name a worker with --worker N" in told(call("logs", NEW))
    assert "--follow cannot be combined with --worker" in told(
        call("logs", NEW, "--worker", "3", "-f")
    )
    both = told(call("logs", NEW, "--worker", "3", "--trial", "1"))
    assert "--trial is for a search" in both


def test_logs_of_a_trial(root: Path) -> None:
    trials = [
        {"number": number, "host": host, "tries": tries, "params": {}, "state": "complete"}
        for number, host, tries in ((0, "node1", 1), (7, "node2", 2), (8, "node1,node2", 1))
    ]
    directory = put_run(root, NEW, search={"workers_per_trial": 2, "trials": trials}, ranks=[])
    for trial in (7, 8):
        logs = directory / "trials" / str(trial) / "logs"
        logs.mkdir(parents=True)
        (logs / "rank-0.log").write_text(f"of {trial}\n")
        (logs / "rank-1.log").write_text("two\n")
    (directory / "trials/7/logs/attempt-1").mkdir()
    (directory / "trials/7/logs/attempt-1/rank-0.log").write_text("again\n")
    assert call("logs", NEW, "--trial", "7").output == "[rank 0 node2] again\n"
    first = call("logs", NEW, "--trial", "7", "--attempt", "0").output
    assert first == "[rank 0] of 7\n[rank 1] two\n"  # its node may have been another
    assert call("logs", NEW, "--trial", "8").output == "[rank 0] of 8\n[rank 1] two\n"
    assert call("logs", NEW, "--trial", "8", "--rank", "1").output == "two\n"
    missing = told(call("logs", NEW, "--trial", "0"))
    assert "trials/0/logs: a trial's logs appear when it has ended" in missing
    assert "/logs: for a search, name a trial with --trial N" in told(call("logs", NEW))
    both = told(call("logs", NEW, "--trial", "7", "-f"))
    assert "--follow cannot be combined with --trial" in both


def test_logs_of_a_trial_are_shown_without_a_record(root: Path) -> None:
    logs = put_run(root, NEW, search=7) / "trials" / "7" / "logs"
    logs.mkdir(parents=True)
    (logs / "rank-0.log").write_text("seven\n")
    result = call("logs", NEW, "--trial", "7")
    assert (result.exit_code, result.stdout) == (0, "[rank 0] seven\n")


@pytest.mark.parametrize("words", [(), ("--follow",)])
def test_logs_that_are_empty_are_told(root: Path, words: tuple[str, ...]) -> None:
    put_log(put_run(root, NEW, logs={"logs/rank-0.log": 0}), "rank-0.log", b"")
    result = call("logs", NEW, *words)
    assert (result.exit_code, result.stdout) == (0, "")
    assert f"its ranks have written nothing (metrics: `hopsgpu runs show {NEW}`)" in result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--rank", "99"), "there are no logs of rank 99 in "),
        (("--attempt", "3", "--rank", "0"), "there are no logs of rank 0 in attempt 3 in "),
    ],
)
def test_logs_that_are_none_of_those_wanted_are_an_error(
    root: Path, words: tuple[str, ...], said: str
) -> None:
    put_log(put_run(root, NEW, logs={"logs/rank-0.log": 3}), "rank-0.log", b"one")
    for how in ((), ("--follow",)):
        result = call("logs", NEW, *words, *how)
        assert said in told(result)
        assert result.stdout == ""


def test_a_log_of_one_endless_line_is_cut(root: Path) -> None:
    directory = put_run(root, NEW)
    put_log(directory, "rank-0.log", b"x" * (3 * 2**20))
    output = call("logs", NEW).stdout_bytes
    assert output.replace(b"[rank 0 node1] ", b"").replace(b"\n", b"") == b"x" * (3 * 2**20)
    assert output.count(b"\n") <= 3


def test_logs_are_followed_to_their_end(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs_module, "_POLL_SECONDS", 0.02)
    monkeypatch.setattr(logs_module, "_REST_SECONDS", HANG_SECONDS)
    directory = put_run(root, NEW, "running", logs={})
    record = json.loads((directory / "run.json").read_text())
    done: list[Result] = []
    follower = threading.Thread(target=lambda: done.append(call("logs", NEW, "--follow")))
    follower.start()
    put_log(directory, "rank-0.log", b"one\ntw")
    threading.Event().wait(0.1)
    put_log(directory, "rank-0.log", b"o\n")
    put_log(directory, "attempt-1/rank-1.log", b"again\n")
    threading.Event().wait(0.1)
    # The record comes before the rest of the logs.
    sizes = {"logs/rank-0.log": 12, "logs/attempt-1/rank-1.log": 6, "logs/metrics-0.jsonl": 99}
    (directory / "new.json").write_text(
        json.dumps(record | {"state": "failed", "reason": "other", "logs": sizes})
    )
    (directory / "new.json").rename(directory / "run.json")
    threading.Event().wait(0.1)
    assert not done
    put_log(directory, "rank-0.log", b"last")
    follower.join(HANG_SECONDS)
    (result,) = done
    assert sorted(result.stdout.splitlines()) == [
        "[rank 0 node1] last",
        "[rank 0 node1] one",
        "[rank 0 node1] two",
        "[rank 1 node2] again",
    ]
    assert result.stderr.splitlines()[-1] == f"hopsgpu: {NEW}: failed"
    assert result.exit_code == 0


def test_following_a_lost_run_ends(root: Path) -> None:
    directory = put_run(root, NEW, "running", updated=-90.0, logs={"logs/rank-0.log": 100})
    put_log(directory, "rank-0.log", b"all that came")
    result = call("logs", NEW, "--follow")
    assert result.stdout == "[rank 0 node1] all that came\n"
    assert result.stderr == f"hopsgpu: {NEW}: lost; the end of its logs is missing\n"


def test_following_what_has_no_record_that_can_be_read_ends(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs_module, "_POLL_SECONDS", 0.02)
    monkeypatch.setattr(stored_runs, "LOST_SECONDS", 0.2)
    directory = put_run(root, NEW)
    put_log(directory, "rank-0.log", b"all that came")
    (directory / "run.json").write_text("{")
    result = call("logs", NEW, "--follow")
    assert result.stdout == "[rank 0] all that came\n"
    first, last = told(result).splitlines()
    assert "is not a record of a run" in first
    assert "this command ends once no output has arrived for 0.2 s" in first
    assert last.startswith(f"hopsgpu: {NEW}: no output has arrived for 0.2 s, and it is not")


STAND_IN = """
import http.server, pathlib, sys
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
import os, time
print("TensorBoard at", words["--host"], words["--logdir"], os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.fixture
def tensorboard(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment with a package that stands for TensorBoard."""
    package = tmp_path / "packages" / "tensorboard"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "main.py").write_text(STAND_IN)
    path = os.pathsep.join([str(tmp_path / "packages"), *sys.path])
    yield {**os.environ, "PYTHONPATH": path}


def test_tensorboard_is_shown_what_comes_until_ctrl_c(
    root: Path, tensorboard: dict[str, str]
) -> None:
    directory = put_run(root, NEW, "running")
    files = directory / "tensorboard" / "train"
    files.mkdir(parents=True)
    (files / "events").write_bytes(b"one")
    command = [sys.executable, "-m", "hopsgpu.cli.main", "tensorboard", "last", "--port", "0"]
    with subprocess.Popen(
        command,
        env=tensorboard,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=as_in_a_terminal,
    ) as process:
        assert process.stdout is not None
        words = process.stdout.readline().split()
        assert words[:3] == ["TensorBoard", "at", "127.0.0.1"]
        copy = Path(words[3])
        assert (copy / "train" / "events").read_bytes() == b"one"
        assert copy.stat().st_mode & 0o077 == 0
        (files / "events").write_bytes(b"one two")
        assert until(lambda: (copy / "train" / "events").read_bytes() == b"one two")
        process.send_signal(signal.SIGINT)
        assert process.wait(HANG_SECONDS) == 0
    assert not copy.exists()


def test_tensorboard_ends_with_the_command(root: Path, tensorboard: dict[str, str]) -> None:
    put_run(root, NEW, "running")
    command = [sys.executable, "-m", "hopsgpu.cli.main", "tensorboard", "last", "--port", "0"]
    with subprocess.Popen(command, env=tensorboard, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        *_, copy, server = process.stdout.readline().split()
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG_SECONDS) == 128 + signal.SIGTERM
    assert gone(int(server))
    assert not Path(copy).exists()


def test_tensorboard_that_is_not_there_is_told(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_run(root, NEW)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert "pip install 'hopsgpu[tensorboard]'" in told(call("tensorboard", "last"))


def test_the_root_is_where_a_session_has_it(tmp_path: Path) -> None:
    site = "<configuration><property><name>fs.defaultFS</name><value>hdfs://lake/</value></property></configuration>"
    (tmp_path / "core-site.xml").write_text(site)
    (tmp_path / "yarn-site.xml").write_text("<configuration/>")
    environ = {"HADOOP_CONF_DIR": str(tmp_path), "HADOOP_USER_NAME": "alice"}
    assert default_root(environ) == "hdfs://lake/user/alice/hopsgpu"
    environ["HOPSGPU_ROOT"] = "hdfs://lake/team/"
    assert default_root(environ) == "hdfs://lake/team"
    (tmp_path / "spark-defaults.conf").write_text("spark.hopsgpu.root  hdfs://lake/all\n")
    assert default_root({**environ, "SPARK_CONF_DIR": str(tmp_path)}) == "hdfs://lake/all"
    (tmp_path / "yarn-site.xml").unlink()
    del environ["HOPSGPU_ROOT"]
    # A standalone cluster has HDFS without YARN.
    assert default_root(environ) == "hdfs://lake/user/alice/hopsgpu"
    (tmp_path / "core-site.xml").unlink()
    with pytest.raises(ConfigError, match="pass --root URL, or set HOPSGPU_ROOT .*HADOOP_CONF_DIR"):
        default_root(environ)


def test_without_a_cluster_the_root_is_in_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_root({}) == f"file://{tmp_path}/hopsgpu"


@pytest.mark.parametrize("what", ["runs", "models"])
def test_where_nothing_is_found_and_nothing_tells_of_a_cluster_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    for name in ("HOPSGPU_ROOT", "HADOOP_CONF_DIR", "YARN_CONF_DIR", "SPARK_CONF_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    hint = (
        " (HADOOP_CONF_DIR is not set: for a cluster, set it; for the development cluster:"
        ' eval "$(hopsgpu cluster env)")'
    )
    assert call(what).output == f"no {what} in file://{tmp_path}/hopsgpu/{what}{hint}\n"
    for words in (("runs", "show", "last"), ("logs", "last"), ("models", "show", "digits")):
        assert told(call(*words)).endswith(f"{hint}\n"), words
    given = f"file://{tmp_path}/other"
    assert "HADOOP_CONF_DIR" not in told(call("runs", "show", "last", "--root", given))
    assert call(what, "--root", given).output == f"no {what} in {given}/{what}\n"
    assert json.loads(call(what, "--json").output) == []


def test_a_stopped_cluster_of_this_machine_is_reported_at_once() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        root = f"hdfs://127.0.0.1:{unused.getsockname()[1]}/user/ann"
        for words in (("runs",), ("logs", "last"), ("models",), ("models", "show", "digits")):
            said = told(call(*words[:1], "--root", root, *words[1:]))
            assert "nothing listens on 127.0.0.1:" in said and "hopsgpu cluster up" in said


def test_a_root_that_was_given_is_that_of_the_group_and_its_commands(root: Path) -> None:
    other = root / "other"
    put_run(other, OLD)
    for words in (
        ("runs", "--root", f"file://{other}/", "show", "last", "--json"),
        ("runs", "show", "--root", f"file://{other}", "last", "--json"),
    ):
        assert json.loads(call(*words).output)["run_id"] == OLD


def test_words() -> None:
    assert [duration(s) for s in (None, 7.54, 723.0, 19_200.0, 273_600.0)] == [
        *("-", "7.5s", "12m03s"),
        *("5h20m", "3d04h"),
    ]
    assert [size(n) for n in (0, 1023, 1536, 5 * 2**30, 3 * 2**40)] == [
        *("0 B", "1023 B", "1.5 KiB"),
        *("5.0 GiB", "3.0 TiB"),
    ]
    assert local_time(None) == "-" and local_time(1e300) == "1e+300"
    assert local_time(1_000_000_000.0) == time.strftime(
        "%Y-%m-%d %H:%M:%S", time.localtime(1_000_000_000)
    )


@pytest.mark.parametrize("words", [("runs",), ("logs", NEW), ("logs", NEW, "--json"), ("--help",)])
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("output", "said"),
    [
        (">&-", "standard output is closed, and nothing was done"),
        (">/dev/full", "standard output cannot be written to: No space left on device"),
    ],
)
def test_an_output_that_cannot_be_written_to_is_told_in_a_line(
    root: Path, words: tuple[str, ...], output: str, said: str, unbuffered: str
) -> None:
    put_log(put_run(root, NEW), "rank-0.log", b"zero\n")
    command = [sys.executable, "-m", "hopsgpu.cli.main", *words]
    ended = subprocess.run(
        ["sh", "-c", f'exec "$@" {output}', "sh", *command],
        stderr=subprocess.PIPE,
        text=True,
        timeout=HANG_SECONDS,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )
    (line,) = ended.stderr.splitlines()
    assert (ended.returncode, line[:10]) == (1, "hopsgpu: s") and said in line
