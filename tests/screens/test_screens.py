"""What people see on a first day: terminals, pages and cells, over a real YARN and HDFS.

`make screens` keeps the transcripts and pictures in docs/seen, which docs/seen.md shows. A test
here checks what a picture or transcript is shown for.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from xml.etree import ElementTree

import nbformat
import pytest
import requests
from nbclient import NotebookClient
from playwright.sync_api import Browser, Page, expect

from tests import browser
from tests.bounds import HANG_SECONDS
from tests.conftest import until
from tests.screens.conftest import Environ, Screens, as_user
from tests.screens.terminal import COLUMNS, Terminal

# Words of messages that Spark logs when executors leave although nothing is wrong.
OF_RELEASES = ("TransportClient", "TaskKilled", "Lost task", "Lost executor", "Broken pipe")


def runs_of(environ: Environ, directory: Path) -> list[dict[str, Any]]:
    """Return a user's runs, the newest first."""
    command = ("hopsgpu", "runs", "--json")
    done = subprocess.run(command, env=environ, cwd=directory, check=True, capture_output=True)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def is_wide(text: str) -> bool:
    return any(len(line) > COLUMNS for line in text.splitlines())


def test_cluster_up_continues_with_the_daemons_that_run(
    cluster_starts: tuple[str, str], screens: Screens
) -> None:
    first, second = cluster_starts
    # A warning may name this machine's users.
    second = re.sub(r"^warning: .*\n", "", second, flags=re.MULTILINE)
    said = screens.keep("cluster-up", f"{first}\n{second}")
    assert re.search(r"not ready within 3 s, still waiting for .+; the logs are in", said), said
    assert "daemons keep running" in first
    assert "up after" in second and "starting the missing daemons" in second


@dataclass(frozen=True)
class Trained:
    run_id: str
    live: str
    end: str


@pytest.fixture(scope="module")
def trained(shell: Terminal, ann: Environ, home: Path) -> Trained:
    """A training that succeeds: the screen while it runs, and at its end."""
    shell.type("python digits.py")
    live = shell.wait_for(r"step 30: loss")
    end = shell.wait_for(r"^hdfs://\S+\n\$$")
    return Trained(runs_of(ann, home)[0]["run_id"], live, end)


@pytest.mark.usefixtures("gpus_back")
def test_a_training_shows_its_ranks_and_leaves_no_messages_of_spark(
    trained: Trained, screens: Screens
) -> None:
    screens.keep("running", trained.live)
    end = screens.keep("succeeded", trained.end)
    assert "running" in trained.live and "2 of 2 executors on node" in trained.live
    assert not [words for words in OF_RELEASES if words in end], end
    assert "succeeded" in end and "model digits version" in end and "value of rank 0" in end
    # Less than a minute of GPU time is too short for advice.
    assert "not spent training" not in end


@dataclass(frozen=True)
class Waited:
    run_id: str
    screen: str
    gpus: str
    metrics: str
    queue: Path


@pytest.fixture(scope="module")
def waited(
    shell: Terminal,
    second_shell: Terminal,
    trained: Trained,
    ann: Environ,
    home: Path,
    pages: Pages,
    screens: Screens,
) -> Iterator[Waited]:
    """ann's gang of 4, which waits while bob's has 2 of the 4 GPUs; then bob cancels his run."""
    bob = as_user(ann, "bob")
    command = [sys.executable, "digits.py", "--steps", "1000000"]
    with (home / "bob").open("w") as out:
        script = subprocess.Popen(command, env=bob, cwd=home, stdout=out, stderr=out)
    try:

        def is_running() -> bool:
            assert script.poll() is None, (home / "bob").read_text()
            found = runs_of(bob, home)
            return bool(found) and found[0]["state"] == "running"

        assert until(is_running, step=1.0)
        shell.type("python digits.py --workers 4")
        screen = shell.wait_for(r"Needs 4 GPUs, 2 are free")
        with _serving(ann, "exporter") as url:
            command = f"curl -s {url} | grep 'waiting_gangs.*start.*root.default'"
            metrics = second_shell.run(command)
        gpus = second_shell.run("hopsgpu gpus")
        run_id = runs_of(ann, home)[0]["run_id"]
        picture = pages.picture("queue", "queue", 1000, r"Needs 4 GPUs")
        second_shell.run("HADOOP_USER_NAME=bob hopsgpu runs cancel last")
        # A second one ends as the first did, once bob's GPUs are free.
        shell.wait_for(r"^hdfs://\S+\n\$$")
        script.wait(HANG_SECONDS)
        yield Waited(run_id, screen, gpus, metrics, picture)
    finally:
        script.kill()
        script.wait()


@pytest.mark.usefixtures("gpus_back")
def test_a_gang_that_waits_holds_nothing_and_says_who_has_the_gpus(
    waited: Waited, screens: Screens
) -> None:
    screen = screens.keep("waiting", waited.screen)
    assert re.search(r"'digits' of bob \(started \d\d:\d\d\) uses 2 GPUs", screen), screen
    assert "queue is at its limit" not in screen
    gpus = screens.keep("gpus", waited.gpus)
    assert "2 of 4 GPUs free, 2 used" in gpus and re.search(r"^ +2 +bob ", gpus, re.MULTILINE)
    assert not re.search(r"^ +\d+ +ann ", gpus, re.MULTILINE)
    metrics = screens.keep("exporter", waited.metrics)
    samples = re.findall(r'bound="(\w+)".*state="(\w+)"\} (\d)', metrics)
    assert ("cluster", "queued", "1") in samples and ("none", "acquiring", "0") in samples, metrics


@pytest.fixture(scope="module")
def failed(shell: Terminal, waited: Waited, ann: Environ, home: Path) -> str:
    shell.run("python breaks.py")
    return str(runs_of(ann, home)[0]["run_id"])


@pytest.mark.usefixtures("gpus_back")
def test_a_failed_gang_marks_the_rank_that_failed(
    failed: str, second_shell: Terminal, screens: Screens
) -> None:
    shown = screens.keep("failed", second_shell.run(f"hopsgpu runs show {failed}"))
    assert "ValueError: bad batch: 31 labels for 32 images" in shown
    assert shown.count("stopped after rank 1 failed") == 2, shown
    assert "not spent training" not in shown and not is_wide(shown)


@pytest.fixture(scope="module")
def cancelled(shell: Terminal, failed: str, ann: Environ, home: Path) -> str:
    shell.type("python digits.py --steps 1000000")
    shell.wait_for(r"step 10: loss")
    shell.interrupt()
    shell.wait_for(r"\n\$$")
    return str(runs_of(ann, home)[0]["run_id"])


@pytest.mark.usefixtures("gpus_back")
def test_ctrl_c_cancels(cancelled: str, shell: Terminal, screens: Screens) -> None:
    shown = screens.keep("cancelled", shell.screen())
    assert "cancelled" in shown and "failed" not in shown


@dataclass(frozen=True)
class Lost:
    run_id: str
    submitted: str
    shown: str


@pytest.fixture(scope="module")
def lost(shell: Terminal, second_shell: Terminal, cancelled: str, ann: Environ, home: Path) -> Lost:
    """A run whose application somebody kills."""
    shell.type("hopsgpu submit --detach digits.py --steps 1000000")
    submitted = shell.wait_for(r"application_\d+_\d+(?s:.*)\n\$$")
    found = re.search(r"application_\d+_\d+", submitted)
    assert found is not None
    application = found[0]
    assert until(lambda: runs_of(ann, home)[0]["state"] == "running", step=1.0)
    site = ElementTree.parse(Path(ann["HADOOP_CONF_DIR"]) / "yarn-site.xml")
    properties = {p.findtext("name"): p.findtext("value") for p in site.iter("property")}
    manager = properties["yarn.resourcemanager.webapp.address"]
    requests.put(
        f"http://{manager}/ws/v1/cluster/apps/{application}/state?user.name=ann",
        json={"state": "KILLED"},
        timeout=HANG_SECONDS,
    ).raise_for_status()
    assert until(lambda: runs_of(ann, home)[0]["state"] == "lost", step=1.0)
    shown = second_shell.run(f"hopsgpu runs show {application}")
    return Lost(runs_of(ann, home)[0]["run_id"], submitted, shown)


@pytest.mark.usefixtures("gpus_back")
def test_a_lost_run_says_what_yarn_says(lost: Lost, screens: Screens) -> None:
    submitted = screens.keep("detached", lost.submitted)
    for command in ("hopsgpu runs", "hopsgpu logs", "hopsgpu runs cancel"):
        assert command in submitted, submitted
    shown = screens.keep("lost", lost.shown)
    assert re.search(r"lost\b", shown) and "killed by user" in " ".join(shown.split()), shown


def test_lists_and_comparisons_fit_80_columns(
    trained: Trained, waited: Waited, lost: Lost, second_shell: Terminal, screens: Screens
) -> None:
    listed = screens.keep("runs", second_shell.run("hopsgpu runs"))
    assert "ValueError: bad batch" in listed and "Needs" not in listed
    assert all(state in listed for state in ("succeeded", "failed", "cancelled", "lost")), listed
    assert not is_wide(listed) and not is_wide(waited.gpus)
    compare = f"hopsgpu runs compare {trained.run_id} {waited.run_id}"
    compared = screens.keep("compare", second_shell.run(compare))
    assert re.search(r"GPUs +2 +4$", compared, re.MULTILINE), compared


class Pages:
    """The pages of `hopsgpu web` in Chromium."""

    def __init__(self, chromium: Browser, url: str, screens: Screens) -> None:
        self._page = chromium.new_page()
        self._page.set_default_timeout(1000 * HANG_SECONDS)
        self._page.goto(url)
        self._url = url.partition("?")[0]
        self._screens = screens

    def open(self, path: str, width: int) -> Page:
        self._page.set_viewport_size({"width": width, "height": 900})
        self._page.goto(self._url + path)
        self._page.wait_for_load_state("networkidle")
        return self._page

    def path_of(self, run_id: str) -> str:
        """Return the path of a run's page."""
        link = self.open("runs", 1000).get_by_role("link", name=run_id).get_attribute("href")
        assert link is not None
        return link.removeprefix("./")

    def picture(self, name: str, path: str, width: int, pattern: str) -> Path:
        """Keep a picture of a page once it has a match of a pattern."""
        page = self.open(path, width)
        expect(page.locator("main")).to_contain_text(re.compile(pattern))
        return self._screens.take(page, name)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser.chromium() as running_browser:
        yield running_browser


@contextmanager
def _serving(environ: Environ, command: str) -> Iterator[str]:
    """Run a server of the command line; provide its URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "hopsgpu.cli.main", command, "--port", "0"],
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"https?://\S+", line)
        assert found is not None, line
        yield found[0]
    finally:
        process.terminate()
        process.wait(HANG_SECONDS)


@pytest.fixture(scope="module")
def pages(chromium: Browser, ann: Environ, screens: Screens) -> Iterator[Pages]:
    with _serving(ann, "web") as url:
        yield Pages(chromium, url, screens)


@pytest.fixture(scope="module")
def searched(shell: Terminal, lost: Lost, ann: Environ, home: Path) -> str:
    shell.run("python tries.py")
    return str(runs_of(ann, home)[0]["run_id"])


@pytest.mark.usefixtures("gpus_back")
def test_pages(
    pages: Pages,
    trained: Trained,
    waited: Waited,
    failed: str,
    cancelled: str,
    lost: Lost,
    searched: str,
) -> None:
    assert waited.queue.exists()
    pages.picture("runs", "runs", 1000, "ValueError: bad batch")
    pages.picture("runs-narrow", "runs", 400, "ValueError: bad batch")
    pages.picture("runs-failed", "runs?state=failed", 1000, "breaks-")
    pages.picture("run", pages.path_of(waited.run_id), 1600, "Why it waited")
    pages.picture("run-failed", pages.path_of(failed), 1000, "stopped after rank 1 failed")
    pages.picture("run-lost", pages.path_of(lost.run_id), 1000, "killed by user")
    pages.picture("run-cancelled", pages.path_of(cancelled), 1000, "cancelled")
    pages.picture("search", pages.path_of(searched), 1600, "best")
    pages.picture("cluster", "", 1000, "node2")
    pages.picture("usage", "usage?since=24h&by=run", 1000, "digits")
    chosen = [pages.path_of(run_id) for run_id in (trained.run_id, waited.run_id)]
    compared = "compare?" + "&".join(f"run={path.removeprefix('runs/')}" for path in chosen)
    pages.picture("compare", f"{compared}&only=1", 1600, "Only differences")
    page = pages.open(pages.path_of(lost.run_id), 1000)
    # The driver ran in YARN, which keeps its log.
    link = page.get_by_role("link", name="in YARN").get_attribute("href")
    assert link is not None and re.search(r"/container_\w+|/logs/", link), link
    application = page.get_by_role("link", name=re.compile("application_")).first
    address = application.get_attribute("href")
    assert address is not None and urlsplit(address).path.startswith("/cluster/app/"), address


CELLS = {
    "cell-succeeded": """
        import math, time
        import hopsgpu

        spark = hopsgpu.session("notebook")

        def train(steps):
            ctx = hopsgpu.context()
            for step in range(steps):
                loss = 2.3 * math.exp(-0.08 * step)
                ctx.report(step, loss=loss, accuracy=1 - loss / 2.4)
                time.sleep(0.05)
            if ctx.rank == 0:
                (ctx.model_dir / "weights.txt").write_text(str(loss))
            return round(1 - loss / 2.4, 4)

        hopsgpu.launch(train, kwargs={"steps": 60}, workers=2, model="digits", name="digits")
        """,
    "cell-failed": """
        def breaks():
            if hopsgpu.context().rank == 1:
                raise ValueError("bad batch: 31 labels for 32 images")
            time.sleep(600)

        hopsgpu.launch(breaks, workers=2, name="breaks")
        """,
}


@pytest.fixture(scope="module")
def displays(ann: Environ, home: Path) -> dict[str, str]:
    """The HTML that each cell shows at its end."""
    cells = [nbformat.v4.new_code_cell(textwrap.dedent(source)) for source in CELLS.values()]
    cells[-1].metadata["tags"] = ["raises-exception"]
    notebook = nbformat.v4.new_notebook(cells=cells)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ann.items():
            patch.setenv(name, value)
        client = NotebookClient(
            notebook, timeout=int(HANG_SECONDS), resources={"metadata": {"path": str(home)}}
        )
        client.execute()
    found = {}
    for name, cell in zip(CELLS, cells, strict=True):
        shown = [o.data["text/html"] for o in cell.outputs if "text/html" in o.get("data", {})]
        found[name] = "\n".join(shown)
    return found


@pytest.mark.usefixtures("gpus_back")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cell-succeeded", ["succeeded", "digits version", "hdfs://", "value of rank 0", "0.9"]),
        ("cell-failed", ["failed first: exit code 1", "stopped after rank 1 failed"]),
    ],
)
def test_cells(
    displays: dict[str, str], chromium: Browser, screens: Screens, name: str, words: list[str]
) -> None:
    page = chromium.new_page(viewport={"width": 1000, "height": 600})
    page.set_content(f'<body style="font: 14px sans-serif; margin: 16px">{displays[name]}</body>')
    text = " ".join(page.locator("body").inner_text().split())
    assert [word for word in words if word not in text] == [], text
    screens.take(page, name)
