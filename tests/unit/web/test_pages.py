"""What the pages show of records, and that no record makes a page fail."""

from __future__ import annotations

import html
import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from hopsgpu.artifacts.models import ModelStore
from hopsgpu.cluster_managers.cluster_gpus import ClusterGpus
from hopsgpu.cluster_managers.silent_runs import SilentRuns
from hopsgpu.cluster_managers.yarn.application_state import application_state_of
from hopsgpu.cluster_managers.yarn.manager import YarnManager
from hopsgpu.core.queue_policy import Bound, QueueSnapshot, Ticket, TurnHolder, queue_tag
from hopsgpu.errors import HopsGpuError
from hopsgpu.web import page_sources
from tests.bounds import HANG_SECONDS
from tests.conftest import until
from tests.unit.cli.test_gpus import FOUND
from tests.unit.records import DATA, put_run
from tests.unit.rest import serving
from tests.unit.searches import trial
from tests.unit.web.site import RESOURCE_MANAGER, browser, sources_of

RUN = "fit-20261122-201502-3fa1c0"
OTHER = "fit-20261122-190011-b07e55"
EVIL = "<script>alert(1)</script>"
ERROR = f"""rank 3 on node1 (container c-1, GPU g) raised ValueError: {EVIL}
Traceback (most recent call last):
  File "train.py", line 3, in train
ValueError: {EVIL}
whole log: hdfs://lake/logs/rank-3.log"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "lake" / "hopsgpu"


@pytest.fixture
def client(root: Path) -> Iterator[TestClient]:
    with browser(sources_of(root)) as client:
        yield client


def page(client: TestClient, path: str, status: int = 200) -> str:
    answer = client.get(path)
    assert answer.status_code == status, answer.text
    return answer.text


def words(text: str) -> str:
    """What a page says, without its elements."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", text)).split())


def of_run(client: TestClient, run_id: str = RUN) -> str:
    return page(client, f"/runs/lake/{run_id}")


def test_without_a_lake_the_pages_say_so(client: TestClient) -> None:
    assert "There are no runs yet." in page(client, "/runs")
    assert "No model was published yet." in page(client, "/models")
    assert "There were no runs." in page(client, "/usage")
    assert "Nobody waits" in page(client, "/queue")
    assert "There is no node with GPUs" in page(client, "/")


def test_runs_are_listed_the_newest_first(root: Path, client: TestClient) -> None:
    put_run(root, RUN, "running", updated=0.0 + time.time())
    put_run(root, OTHER, "failed", error=ERROR, timeline={"requested": 5.0})
    text = page(client, "/runs")
    assert text.index(f"runs/lake/{RUN}") < text.index(f"runs/lake/{OTHER}")
    assert "raised ValueError" in text and "alice" in text


def test_more_runs_than_a_page_has(root: Path, client: TestClient) -> None:
    for number in range(4):
        put_run(root, f"fit-2026112{number}-201502-3fa1c0")
    text = page(client, "/runs?most=2")
    assert text.count('scope="row"') == 2 and "?of=lake&most=8" in html.unescape(text)
    assert "Show more" not in page(client, "/runs?most=8")


def test_runs_are_searched_and_the_address_remembers_it(root: Path, client: TestClient) -> None:
    put_run(root, RUN, "running", user="alice")
    put_run(root, OTHER, "failed", error=ERROR, user="bob", name="other")
    put_run(root, "tune-20261122-120000-3fa1c0", model="hdfs://lake/models/digits/3")
    failed = page(client, "/runs?state=failed")
    assert OTHER in failed and f"/{RUN}" not in failed
    assert "<option selected>failed</option>" in failed
    assert "Searched: 3 of 3 runs." in words(failed)
    text = page(client, "/runs?model=DIGITS&name=tune&user=ali")
    assert text.count('scope="row"') == 1 and 'name="model" value="DIGITS"' in text
    assert "No run fits." in page(client, f"/runs?name={EVIL}")
    more = html.unescape(page(client, "/runs?user=a&most=1"))
    assert 'href="?of=lake&user=a&most=4"' in more


def test_a_search_reads_no_more_records_than_it_needs(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_sources, "_MAX_SEARCHED", 6)
    monkeypatch.setattr(page_sources, "_SEARCH_STEP", 2)
    for number in range(1, 10):
        user = "alice" if number == 4 else "bob"
        put_run(root, f"fit-2026110{number}-201502-3fa1c0", user=user)
    client = browser(sources_of(root))
    text = page(client, "/runs?user=alice")
    assert "fit-20261104" in text and "Searched: 6 of 9 runs." in words(text)
    assert "Searched: 2 of 9 runs." in words(page(client, "/runs?user=bob&most=2"))
    assert "No run fits." in page(client, "/runs?name=fit-20261101")


def test_runs_are_compared(root: Path, client: TestClient) -> None:
    for run_id, rate, loss in ((RUN, "0.1", 0.5), (OTHER, EVIL, 0.25)):
        call = {
            "function": "train",
            "code_digest": "sha256:ab",
            "arguments": {"lr": rate, "n": "3"},
        }
        directory = put_run(root, run_id, call=call)
        reports = [{"time": 1.0, "step": s, "metrics": {"loss": loss / (1 + s)}} for s in range(3)]
        (directory / "logs" / "metrics-0.jsonl").write_text(
            "".join(json.dumps(one) + "\n" for one in reports)
        )
    query = f"run=lake/{RUN}&run={OTHER}"
    text = page(client, f"/compare?{query}")
    assert "<script>alert" not in text and f"lr 0.1 {EVIL}" in words(text)
    assert '<tr class="differs"><th scope="row">lr' in text
    assert "A 0.1667 at step 2, B 0.08333 at step 2" in text and '<img src="data:image' in text
    only = words(page(client, f"/compare?{query}&only=1&log=1&smooth=0.9"))
    assert "n 3 3" not in only and f"lr 0.1 {EVIL}" in only
    found = client.get(f"/compare/metrics.json?{query}&smooth=0.6").json()
    (loss_plot,) = found["metrics"]
    assert [one["label"] for one in loss_plot["series"]] == ["A", "B"]
    assert loss_plot["series"][0]["points"][1][1] > 0.25


def test_runs_that_cannot_be_compared_are_named(root: Path, client: TestClient) -> None:
    put_run(root, RUN)
    put_run(root, OTHER)
    text = page(client, f"/compare?run=lake/{RUN}&run=lake/none")
    assert "run none:" in text and "Choose another run or more" in words(text)
    assert f'value="lake/{OTHER}"' in text
    many = "&".join(f"run=lake/r{n}" for n in range(9))
    assert "at most 6 runs are compared" in page(client, f"/compare?{many}")
    assert "Choose two runs or more" in words(page(client, "/compare"))


def test_roots_of_others_are_chosen(tmp_path: Path) -> None:
    mine, theirs = (tmp_path / user / "hopsgpu" for user in ("alice", "bob"))
    put_run(mine, RUN)
    put_run(theirs, OTHER, user="bob")
    client = browser(sources_of(mine, others=[theirs]))
    assert OTHER not in page(client, "/runs")
    assert OTHER in page(client, "/runs?of=bob")
    everybody = page(client, "/runs?of=all")
    assert f"runs/bob/{OTHER}" in everybody and f"runs/alice/{RUN}" in everybody
    assert "bob" in page(client, f"/runs/bob/{OTHER}")
    page(client, f"/runs/alice/{OTHER}", 404)
    page(client, "/runs?of=carol", 404)
    assert "bob" in page(client, "/usage")


def test_a_run_that_failed_begins_with_the_traceback(root: Path, client: TestClient) -> None:
    put_run(root, RUN, "failed", error=ERROR)
    text = of_run(client)
    told = words(text)
    assert told.index("Traceback (most") < told.index("rank 3 on node1") < told.index("Timeline")
    assert "whole log: hdfs://lake/logs/rank-3.log" in told


def test_a_run_that_goes_on_can_be_cancelled(root: Path, client: TestClient) -> None:
    put_run(root, RUN, "waiting", waiting_for="Needs 4 GPUs", waiting_details=["used by 'x'", "y"])
    text = of_run(client)
    assert "Needs 4 GPUs" in words(text) and "used by 'x'; y" in words(text)
    assert f'action="../../runs/lake/{RUN}/cancel"' in text and 'data-live="3"' in text
    put_run(root, OTHER, "succeeded")
    assert "<form" not in of_run(client, OTHER) and "data-live" not in of_run(client, OTHER)


def test_why_a_run_waited_is_told_afterwards(root: Path, client: TestClient) -> None:
    waits = [
        {"time": 5.0, "why": "Needs 4 GPUs", "seconds": 30.0},
        {"time": 9.0, "why": f"{EVIL} uses 2", "seconds": 10.0},
    ]
    put_run(root, RUN, "succeeded", waits=waits)
    text = of_run(client)
    assert words(text).index("Needs 4 GPUs for 30.0s") < words(text).index("uses 2 for 10.0s")
    assert "<script>alert" not in text


def test_a_run_that_ended_meanwhile_is_not_cancelled(root: Path, client: TestClient) -> None:
    put_run(root, RUN, "succeeded")
    answer = client.post(
        f"/runs/lake/{RUN}/cancel",
        data={"form": "the-form"},
        headers={"Origin": "http://127.0.0.1:8420"},
    )
    assert answer.status_code == 409 and "has ended already: succeeded" in answer.text
    assert not (root / "runs" / RUN / "cancel").exists()


def test_strangers_texts_are_texts(root: Path, client: TestClient) -> None:
    """In every field of a record, and in metrics, logs and trials."""
    trials = [asdict(trial(number)) for number in range(3)]
    trials[0]["params"] = {EVIL: EVIL, "lr": 0.1}
    trials[1] |= {"state": "failed", "error": EVIL, "host": EVIL}
    world = {"generation": 0, "ranks": 2, "hosts": [EVIL], "began": 1.0}
    worlds = [{**world, "why": EVIL, "end": EVIL}]
    search = {
        **{"trials_wanted": 3, "max_concurrent": 1, "workers_per_trial": 1, "gpus_per_trial": 1},
        **{"direction": "minimize", "metric": EVIL, "sampler": EVIL, "pruner": EVIL},
        **{"best": {"params": {EVIL: EVIL}, "value": 1.0, "number": 0}, "trials": trials},
    }
    changes: dict[str, Any] = {
        **{"name": EVIL, "user": EVIL, "queue": EVIL, "application": EVIL, "error": EVIL + ERROR},
        **{"warnings": [EVIL], "model": f"file:///{EVIL}/1", "waiting_for": EVIL, "worlds": worlds},
        "environment": {"hopsgpu": EVIL, "driver": {"host": EVIL}},
        "data": {EVIL: {**DATA, "url": EVIL}},
        "metrics": [{EVIL: 0.5, "step": 1}, {}],
    }
    directory = put_run(root, RUN, "failed", **changes)
    (directory / "logs" / "metrics-0.jsonl").write_text(
        json.dumps({"time": 1.0, "step": 1, "metrics": {EVIL: 1.0}}) + "\n"
    )
    (directory / "logs" / "rank-0.log").write_text(f"{EVIL}\x1b[31mred\n")
    put_run(root, OTHER, "running", **{**changes, "search": search})
    for path in ("/", "/queue", "/runs", f"/runs/lake/{RUN}", f"/runs/lake/{OTHER}", "/usage"):
        text = page(client, path)
        assert "<script>alert" not in text, path
        # All scripts are files of this server.
        assert not re.search(r"<script(?! src=)", text) and not re.search(r"\son\w+=", text)
    log = page(client, f"/runs/lake/{RUN}/log?rank=0")
    assert html.escape(EVIL) in log and "<script>alert" not in log and "\x1b" not in log
    answer = client.get(f"/runs/lake/{RUN}/log.txt?rank=0")
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    answer = client.get(f"/runs/lake/{RUN}/metrics.json")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["metrics"][0]["name"] == EVIL


@pytest.mark.parametrize(
    "text", ["\x1b]0;title\x07", "\u202egnp.exe", "\ud800", "\x00\x9b31m", "'\"><img src=x>"]
)
def test_odd_characters_change_nothing(root: Path, client: TestClient, text: str) -> None:
    changes = {"name": text, "user": text, "error": text, "warnings": [text]}
    put_run(root, RUN, "failed", **changes)
    for path in ("/runs", f"/runs/lake/{RUN}", "/usage"):
        shown = page(client, path)
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", shown)
        assert "<img src=x" not in shown


ODD: list[Any] = [
    None, [], {}, "x", -1, 1e308, True, [None], [[]], [{}], {"x": []}, {"x": {"y": None}},
    ["x"] * 3, {"direction": 1, "trials": [1]}, {"direction": "minimize", "trials": [{}]},
]  # fmt: skip
FIELDS = (
    *("spec", "timeline", "ranks", "metrics", "logs", "worlds", "warnings", "environment"),
    *("gpu_seconds", "use", "model", "data", "search", "queue", "executors", "executor", "error"),
    *("name", "user", "application", "attempt", "updated", "waiting_for", "run_id", "schema"),
    "waits",
)


@pytest.mark.parametrize("field", FIELDS)
def test_no_odd_record_makes_a_page_fail(root: Path, client: TestClient, field: str) -> None:
    for number, odd in enumerate(ODD):
        run_id = f"fit-20261122-2015{number:02}-3fa1c0"
        put_run(root, run_id, "running", **{field: odd})
        answer = client.get(f"/runs/lake/{run_id}")
        assert answer.status_code in (200, 404), (odd, answer.text)
        assert run_id in answer.text
    for path in ("/", "/queue", "/runs", "/usage"):
        text = page(client, path)
        assert "3fa1c0" in text or path in ("/", "/queue", "/usage"), words(text)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"schema": 99}', b"NaN"])
def test_damaged_records_are_named(root: Path, client: TestClient, content: bytes) -> None:
    (put_run(root, RUN) / "run.json").write_bytes(content)
    (root / "runs" / "empty").mkdir()
    put_run(root, OTHER)
    text = page(client, "/runs")
    assert text.count("unreadable") >= 2 and OTHER in text
    assert f"run {RUN}" in page(client, f"/runs/lake/{RUN}", 404)
    assert RUN in page(client, "/usage")


def test_a_record_of_another_run_is_not_shown_as_this_one(root: Path, client: TestClient) -> None:
    put_run(root, RUN, run_id=OTHER)
    assert "is the record of run" in page(client, f"/runs/lake/{RUN}", 404)


def test_a_huge_record_is_named_and_not_read(root: Path, client: TestClient) -> None:
    with (put_run(root, RUN) / "run.json").open("wb") as file:
        file.truncate(2**20 + 1)
    assert "has more than" in page(client, f"/runs/lake/{RUN}", 404)


@pytest.mark.parametrize(
    "path",
    [
        "/runs/lake/%2e%2e", "/runs/lake/..%2f..%2fetc", "/runs/lake/.",
        "/runs/../x", "/runs/lake/-x", "/runs/lake/a%00b", "/runs/lake/a%0ab", "/runs/lake/a%5cb",
        "/runs/lake/a..b", "/runs/..%2f/x", "/runs/none/x", "/runs/",
        "/models/lake/_staging", "/models/lake/a%2fb",
        "/models/lake/%2e%2e%2f", "/static/..%2froutes.py", "/static/%2e%2e/routes.py",
        "/static/..%2f..%2f..%2fsetup.py", "//etc/passwd", "/runs/lake/x/log?rank=../../x",
        "/runs/lake/x/log?rank=-1", "/runs/lake/x/log?attempt=1e9", "/runs/lake/x/log?from=%C2%B2",
        "/runs?most=x", "/usage?by=x", "/usage?since=1d;x", "/runs?state=x", "/runs?since=1s",
        "/compare?run=..%2f..%2fetc", "/compare?run=none/x", "/compare?run=lake/..",
        "/compare?run=", "/compare?smooth=1", "/compare/metrics.json?run=lake/../x",
    ],
)  # fmt: skip
def test_no_address_leads_out_of_a_root(root: Path, client: TestClient, path: str) -> None:
    (root / "runs").mkdir(parents=True)
    (root / "secret").write_text("no")
    answer = client.get(path)
    assert answer.status_code == 404, answer.text
    assert "root:" not in answer.text and "setup(" not in answer.text


def test_a_log_is_shown_in_parts(root: Path, client: TestClient) -> None:
    directory = put_run(root, RUN, "succeeded", logs={"logs/rank-0.log": 10})
    lines = "".join(f"line {number}\n" for number in range(50_000))
    (directory / "logs" / "rank-0.log").write_text(lines)
    (directory / "logs" / "rank-1.log").write_text("other\n")
    last = page(client, f"/runs/lake/{RUN}/log?rank=0")
    assert "line 49999" in last and "line 100\n" not in last and len(last) < 300_000
    assert "rank=1" in last
    first = page(client, f"/runs/lake/{RUN}/log?rank=0&from=0")
    assert "line 0\nline 1\n" in first and "Later" in first and "Earlier" not in first
    # Part by part, each line comes once.
    found, at = "", 0
    while True:
        answer = client.get(f"/runs/lake/{RUN}/log.txt?rank=0&from={at}")
        found, until = found + answer.text, int(answer.headers["x-log-end"])
        if until == at:
            break
        at = until
    assert found == lines and answer.headers["x-log-grows"] == "0"
    assert "there is no log of rank 7" in page(client, f"/runs/lake/{RUN}/log?rank=7")


def test_a_growing_log_is_followed_by_whole_lines(root: Path) -> None:
    now = [time.time()]
    directory = put_run(root, RUN, "running")
    log = directory / "logs" / "rank-0.log"
    log.write_text("one\ntw")
    client = browser(sources_of(root, clock=lambda: now[0]))
    text = page(client, f"/runs/lake/{RUN}/log?rank=0")
    assert 'data-end="4"' in text and "tw" not in text.partition("<pre")[2].partition("</pre")[0]
    log.write_text("one\ntwo\n")
    answer = client.get(f"/runs/lake/{RUN}/log.txt?rank=0&from=4")
    assert (answer.text, answer.headers["x-log-end"]) == ("two\n", "8")
    assert answer.headers["x-log-grows"] == "1"


def test_metrics_are_drawn_by_step_and_gpus_over_time(root: Path, client: TestClient) -> None:
    directory = put_run(root, RUN, "succeeded", timeline={"requested": 100.0})
    for rank in (0, 1):
        reports = [
            {"time": 100.0 + step, "step": step, "metrics": {"loss": 1 / (1 + step), "acc": "NaN"}}
            for step in range(50)
        ]
        samples = [
            {"time": 100.0 + 2 * n, "gpu": {"uuid": f"GPU-{rank}", "utilisation": 0.5 + rank / 4}}
            for n in range(20)
        ]
        lines = [json.dumps(one) for one in (*reports, *samples)]
        (directory / "logs" / f"metrics-{rank}.jsonl").write_text("\n".join([*lines, "{odd", ""]))
    told = client.get(f"/runs/lake/{RUN}/metrics.json").json()
    (loss,) = (one for one in told["metrics"] if one["name"] == "loss")
    assert [one["rank"] for one in loss["series"]] == [0, 1]
    assert loss["series"][0]["points"][:2] == [[0.0, 1.0], [1.0, 0.5]]
    assert [one["points"][3] for one in told["gpus"]] == [[6.0, 0.5], [6.0, 0.75]]
    text = of_run(client)
    assert "last 0.02 at step 49 (rank 0), from 0.02 to 1" in text
    assert "mean: rank 0 50%, rank 1 75%" in text and "2 lines of the ranks" in text


def test_a_search_shows_its_trials(root: Path, client: TestClient) -> None:
    trials = [asdict(trial(n, params={"lr": 10.0**-n, "kind": f"k{n % 2}"})) for n in range(6)]
    trials.append(asdict(trial(6, "failed")))
    trials.append({**asdict(trial(7)), "value": "NaN"})
    search = {
        **{"trials_wanted": 20, "max_concurrent": 2, "workers_per_trial": 1, "gpus_per_trial": 1},
        **{"direction": "minimize", "metric": "loss", "sampler": "TPESampler", "pruner": "None"},
        **{"best": {"params": {"lr": 1e-5}, "value": 1 / 6, "number": 5}, "trials": trials},
    }
    put_run(root, RUN, "running", search=search)
    text = of_run(client)
    told = words(text)
    assert "8 of 20 trials: 7 complete, 1 failed" in told
    assert "loss 0.166667 (trial 5): lr=1e-05" in told and "ValueError: <lr> is too large" in told
    assert text.count("<polyline") == 6 and "lr (log)" in told
    assert "/log?trial=6&amp;attempt=0" in text or "/log?trial=6&attempt=0" in text


def test_a_score_shows_its_rows_and_its_failed_parts(root: Path, client: TestClient) -> None:
    error = "rank 0 failed\nTraceback (most recent call last)\n  <x>\nLookupError: <no> row\nwhole"
    part = {"first": 0, "place": "rows 0 to 9 of hdfs://lake/t", "rows": 10, "tries": 3}
    part["error"] = error
    score = {
        **{"output": "hdfs://lake/scored", "is_complete": False, "kept_in": None, "model": None},
        **{"max_concurrent": 8, "gpus_per_worker": 1, "rows": 10_000, "scored": 2500, "parts": 4},
        **{"done": 1, "rate": 1234.5, "seconds_left": 6.0, "failed_parts": [part] * 201},
    }
    put_run(root, RUN, "running", score=score)
    told = words(of_run(client))
    assert "25 % of the rows" in told and "2,500 of 10,000 rows (25 %) rate 1,234 rows/s" in told
    assert "rows 0 to 9 of hdfs://lake/t 3 LookupError: <no> row" in told
    assert "and 1 more parts" in told and "Last report" not in told and "attempt" not in told
    assert "continues the score" in told
    assert "score" in words(page(client, "/runs"))


def test_the_application_and_the_queue_lead_to_the_resource_manager(
    root: Path, client: TestClient
) -> None:
    put_run(root, RUN, application="application_17_0001", queue="root.a")
    text = of_run(client)
    link = f'<a href="{RESOURCE_MANAGER}/cluster/app/application_17_0001">application_17_0001</a>'
    assert link in text
    assert f'<a href="{RESOURCE_MANAGER}/cluster/scheduler">root.a</a>' in text
    put_run(root, OTHER, application="local-17", queue="")
    assert RESOURCE_MANAGER not in of_run(client, OTHER)


def test_a_driver_in_yarn_has_its_log_there(root: Path) -> None:
    container = "container_17_0001_01_000001"
    driver = {"host": "node1", "container": container}
    put_run(root, RUN, application="application_17_0001", environment={"driver": driver})
    put_run(root, OTHER, application="application_17_0001")

    def link(run_id: str, log: str) -> tuple[str, bool]:
        app = {"id": "application_17_0001", "state": "RUNNING", "amContainerLogs": log}
        sources = sources_of(root, application=lambda _: application_state_of(app, "yarn.io/gpu"))
        return words(of_run(browser(sources), run_id)), log in of_run(browser(sources), run_id)

    url = f"http://node1:8042/node/containerlogs/{container}/alice"
    assert link(RUN, url)[1] and "driver's log in YARN" in link(RUN, url)[0]
    assert not link(RUN, f"javascript:alert(1)//{container}")[1]
    assert not link(RUN, url.replace("000001", "000009"))[1]
    told, has_link = link(OTHER, url)
    assert not has_link and "the driver wrote it where it ran, on laptop" in told


def test_models_and_versions(root: Path, client: TestClient, tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("w")
    store = ModelStore(f"file://{root}/models")
    for _ in range(2):
        store.publish(tmp_path, "digits", run_id=RUN, metrics={"loss": 0.5, EVIL: 1}, tags=["prod"])
    (root / "models" / "digits" / "1" / "hopsgpu-manifest.json").write_text("{")
    listed = words(page(client, "/models"))
    assert "digits 2 2 prod → 2" in listed
    assert "No model fits." in page(client, "/models?name=letters")
    assert "digits" in words(page(client, "/models?name=DIG"))
    text = page(client, "/models/lake/digits")
    assert f"runs/lake/{RUN}" in text and "loss=0.5" in text and "<script>alert" not in text
    page(client, "/models/lake/none", 404)


def test_usage_by_what_a_reader_chooses(root: Path, client: TestClient) -> None:
    put_run(root, RUN, user="carol")
    assert "carol" in page(client, "/usage")
    text = page(client, "/usage?by=run&since=7d")
    assert RUN in text and "svg" in text
    assert "0.03" in words(text)  # 120 GPU seconds


def test_a_cluster_that_does_not_answer_is_said(root: Path) -> None:
    def silent() -> ClusterGpus:
        raise HopsGpuError(f"no answer from {EVIL}")

    put_run(root, RUN, "running")
    client = browser(sources_of(root, silent))
    text = page(client, "/")
    assert "no answer from &lt;script&gt;" in text and RUN in text
    assert "no answer from" in page(client, "/queue")


def test_the_cluster_shows_who_has_what(root: Path) -> None:
    put_run(root, RUN, "running", application="application_1_0001")
    text = page(browser(sources_of(root, lambda: FOUND)), "/")
    told = words(text)
    assert "1 free" in told and "application_1_0001" in told and f"runs/lake/{RUN}" in text
    assert "ERROR no GPU can be used" in told and "timed out" in told
    assert "\x1b" not in text


def test_the_cluster_shows_how_busy_nodes_were(root: Path) -> None:
    directory = put_run(root, RUN, "running", application="application_1_0001")
    host = FOUND.nodes[0].host
    record = json.loads((directory / "run.json").read_text())
    record["ranks"][1]["host"] = host
    (directory / "run.json").write_text(json.dumps(record))
    (directory / "logs" / "attempt-1").mkdir()
    for attempt, use in (("", 0.1), ("attempt-1", 0.75)):
        sample = {"time": time.time() - 60, "gpu": {"uuid": "GPU-2", "utilisation": use}}
        file = directory / "logs" / attempt / "metrics-1.jsonl"
        file.write_text(json.dumps(sample) + "\n")
    client = browser(sources_of(root, lambda: FOUND))
    assert "mean 75%" in words(page(client, "/"))
    assert "Use, last hour" not in page(browser(sources_of(root / "x", lambda: FOUND)), "/")


def test_the_queue_shows_who_waits(root: Path) -> None:
    put_run(root, RUN, "waiting", application="application_1_0003", waiting_for="0 of 4 GPUs free")
    first = Ticket(
        *(1_795_000_000_000, "a" * 8, False, 4, 2, queue_tag("root.a"), Bound.QUEUE, 1),
        "application_1_0003",
    )
    second = Ticket(
        *(1_795_000_001_000, "b" * 8, True, 1, 1, queue_tag("root"), Bound.CLUSTER, 0),
        "application_1_0002",
    )
    tickets = ((first, "alice"), (second, EVIL))
    queue = QueueSnapshot(tickets, 3, TurnHolder("application_1_0001", EVIL))
    client = browser(sources_of(root, lambda: FOUND, lambda: ({"default": (queue, 0)}, ["odd"])))
    text = page(client, "/queue")
    told = words(text)
    assert told.index("0 of 4 GPUs free") < told.index("the cluster has not enough free")
    assert "4 executors with 2 GPUs each" in told and "queue root.a" in told
    assert "passed 1 times" in told and "requests its executors now" in told
    assert f"runs/lake/{RUN}" in text and "<script>alert" not in text


def test_one_source_that_hangs_keeps_no_other_page_away(root: Path) -> None:
    hangs = threading.Event()

    def hanging() -> ClusterGpus:
        hangs.wait(HANG_SECONDS)
        return FOUND

    put_run(root, RUN)
    with browser(sources_of(root, hanging), patience=6) as client:
        try:
            text = page(client, "/")
            assert "YARN has not answered within 6 s; it is still asked" in text
            assert RUN in page(client, "/runs") and "No model" in page(client, "/models")
        finally:
            hangs.set()
        assert until(lambda: "application_1_0001" in page(client, "/"))


def test_a_silent_run_is_lost_with_yarns_reason(root: Path) -> None:
    app = {"id": "application_1_0001", "state": "FAILED", "diagnostics": "on a *lost* node"}
    apps = "/ws/v1/cluster/apps"
    put_run(root, RUN, "running", updated=-30.0)
    sources = sources_of(root)
    answers = {apps: {"apps": {"app": [app]}}, f"{apps}/{app['id']}": {"app": app}}
    with serving(answers) as daemon:
        setting = {"yarn.resourcemanager.webapp.address": daemon.address}.get
        sources.silent = SilentRuns(YarnManager(setting, seconds=(10.0, 30.0)))
        with browser(sources) as client:
            told = words(of_run(client))
            listed = words(page(client, "/runs"))
    assert "on a *lost* node the state of application_1_0001: FAILED" in told
    assert "Cancel this run" not in told
    assert "on a *lost* node" in listed
