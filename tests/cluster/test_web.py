"""The pages over a real YARN and HDFS: their numbers are the ResourceManager's own."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import httpx2
import pytest
from pyspark.sql import SparkSession

import hopsgpu
from hopsgpu.cluster_managers.manager import ClusterManager
from tests.bounds import HANG_SECONDS
from tests.conftest import until
from tests.in_ranks import counts

pytestmark = pytest.mark.usefixtures("nothing_warmed")


@pytest.fixture
def browser(cluster_env: dict[str, str]) -> Iterator[httpx2.Client]:
    """A client with the cookie, of a process that has the cluster's configuration alone."""
    command = [sys.executable, "-m", "hopsgpu.cli.main", "web", "--port", "0"]
    process = subprocess.Popen(command, env=cluster_env, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().partition(" at ")[2].strip()
        place = urlsplit(url)
        address = f"{place.scheme}://{place.netloc}"
        with httpx2.Client(base_url=address, timeout=HANG_SECONDS, follow_redirects=True) as client:
            assert client.get(f"/?{place.query}").status_code == 200
            yield client
    finally:
        process.terminate()
        process.wait(HANG_SECONDS)


def page(client: httpx2.Client, path: str) -> str:
    answer = client.get(path)
    assert answer.status_code == 200, answer.text
    return answer.text


def words(text: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", text)).split())


def figures(text: str) -> dict[str, int]:
    found = re.findall(r"<dt>([^<]+)</dt><dd[^>]*>(\d+)</dd>", text)
    return {name: int(number) for name, number in found}


def address_of(client: httpx2.Client, run: hopsgpu.Run) -> str:
    """The address of a run's page, once the list of runs has it."""
    pattern = re.compile(rf'href="\./(runs/[^"/]+/{re.escape(run.run_id)})"')
    assert until(lambda: pattern.search(page(client, "/runs")) is not None, step=1.0)
    match = pattern.search(page(client, "/runs"))
    assert match is not None
    return f"/{match[1]}"


@pytest.mark.soak
def test_the_pages_are_what_yarn_and_the_lake_say_and_cancel_a_run(
    spark: SparkSession,
    manager: ClusterManager,
    browser: httpx2.Client,
    gpus_back: Callable[[], int],
) -> None:
    before = manager.gpus()[0]
    run = hopsgpu.submit(counts, args=(300,), workers=2, placement="spread", progress="off")
    waiting = hopsgpu.submit(os.getpid, workers=4, acquire_timeout=None, progress="off")
    try:
        assert until(lambda: run.status().state == "running")
        assert until(lambda: manager.gpus()[0] == before + 2)

        def agree() -> bool:
            used, total = manager.gpus()
            shown = figures(page(browser, "/"))
            expected = {"GPUs": total, "in use": used, "free": total - used, "unhealthy": 0}
            return expected.items() <= shown.items()

        assert until(agree, step=1.0), (manager.gpus(), figures(page(browser, "/")))
        application = spark.sparkContext.applicationId
        assert until(lambda: f"/{run.run_id}" in page(browser, "/"), step=1.0)
        told = words(page(browser, "/"))
        assert application in told and "node1 (1), node2 (1)" in told
        assert until(lambda: f"/{waiting.run_id}" in page(browser, "/queue"), step=1.0)
        told = words(page(browser, "/queue"))
        assert "4 executors with 1 GPU each" in told or "requests its executors" in told

        def says_why() -> bool:
            told = words(page(browser, "/queue"))
            return "Needs 4 GPUs" in told or "4 are needed" in told

        # The run's record has the words, and is written from time to time.
        assert until(says_why, step=1.0), words(page(browser, "/queue"))

        place = address_of(browser, run)
        log = f"{place}/log.txt?rank=0"
        # The log is on the lake some seconds after its first line.
        assert until(lambda: "line 20\n" in browser.get(log).text, step=1.0), page(browser, log)

        def reported() -> bool:
            answer = browser.get(f"{place}/metrics.json")
            metrics = answer.json()["metrics"] if answer.status_code == 200 else []
            loss = [one["series"] for one in metrics if one["name"] == "loss"]
            return bool(loss) and [one["rank"] for one in loss[0]] == [0, 1]

        assert until(reported, step=1.0)
        text = page(browser, place)
        form = re.search(r'name="form" value="([^"]+)"', text)
        assert form is not None and "Cancel this run" in text
        foreign = browser.post(f"{place}/cancel", data={"form": form[1]})
        assert foreign.status_code == 403 and run.status().state == "running"
        origin = str(browser.base_url).rstrip("/")
        answer = browser.post(f"{place}/cancel", data={"form": form[1]}, headers={"Origin": origin})
        assert answer.status_code == 200 and run.run_id in answer.text
        assert run.wait(HANG_SECONDS)
        with pytest.raises(hopsgpu.Cancelled):
            run.result()
        assert until(lambda: "cancelled" in words(page(browser, place)), step=1.0)
        # What waited for the GPUs gets them, and why it waited is told afterwards.
        assert waiting.wait(HANG_SECONDS)
        waited = page(browser, address_of(browser, waiting))
        assert "Why it waited" in waited and "succeeded" in words(waited)
        assert until(lambda: figures(page(browser, "/"))["in use"] == before, step=1.0)
        assert run.run_id in page(browser, "/usage?by=run&since=24h")
    finally:
        for one in (run, waiting):
            one.cancel()
            one.wait(HANG_SECONDS)
