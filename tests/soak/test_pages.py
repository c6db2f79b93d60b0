"""The pages in a real Chromium, over the records of real launches on this machine.

Screenshots of each page at three widths, in light and dark, are left in a temporary directory,
whose path is printed (`pytest -s`), for whoever changes how the pages look.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from tests import browser, local_scripts
from tests.bounds import HANG_SECONDS
from tests.conftest import until
from tests.local_scripts import local_environ, running, simulate_gpus

DRIVER = Path(__file__).with_name("pages_driver.py")
UUIDS = local_scripts.UUIDS[1:]
WIDTHS = (400, 1000, 1600)
EVIL = "<script>document.title='mine'</script>"
# What no page may have: elements without a name for a screen reader, ids that two have, and so on.
NAMELESS = """() => {
  const found = [];
  const named = (e) => (e.textContent.trim() || e.getAttribute("aria-label") || e.title
    || (e.labels && e.labels.length) || e.getAttribute("aria-labelledby"));
  for (const e of document.querySelectorAll("a, button, select, input:not([type=hidden]), summary,"
      + " [role=region], [role=img], nav, pre[tabindex]")) {
    if (!named(e)) found.push("without a name: " + e.outerHTML.slice(0, 120));
  }
  for (const e of document.querySelectorAll("[aria-labelledby]")) {
    const by = document.getElementById(e.getAttribute("aria-labelledby"));
    if (!by) found.push("labelled by nothing: " + e.outerHTML.slice(0, 99));
  }
  const ids = [...document.querySelectorAll("[id]")].map((e) => e.id);
  for (const id of new Set(ids)) {
    if (ids.filter((i) => i === id).length > 1) found.push("two with id " + id);
  }
  for (const e of document.querySelectorAll("img:not([alt])")) found.push("img without alt");
  for (const e of document.querySelectorAll("th")) {
    if (!e.scope && !e.closest(".uplot")) found.push("th without scope: " + e.textContent);
  }
  for (const e of document.querySelectorAll("table")) {
    if (!e.caption && !e.closest(".uplot")) found.push("table without caption");
  }
  let level = 0;
  for (const e of document.querySelectorAll("h1, h2, h3")) {
    const own = Number(e.tagName[1]);
    if (own > level + 1) found.push("heading skips a level: " + e.textContent);
    level = own;
  }
  if (document.querySelectorAll("h1").length !== 1) found.push("not one h1");
  if (document.querySelectorAll("main").length !== 1) found.push("not one main");
  if (!document.documentElement.lang) found.push("no language");
  return found;
}"""
# Contrast of texts to their grounds, after WCAG 2.1.
FAINT = """() => {
  const light = (c) => {
    const [r, g, b] = c.map((v) => v / 255)
      .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const parts = (s) => (s.match(/[\\d.]+/g) || []).map(Number);
  const ground = (e) => {
    for (; e; e = e.parentElement) {
      const c = parts(getComputedStyle(e).backgroundColor);
      if (c.length === 3 || c[3] > 0.99) return c.slice(0, 3);
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const e of document.querySelectorAll("main *, header *, footer *")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || e.closest("svg, .uplot, option, select") || !e.getClientRects().length) continue;
    const [a, b] = [light(parts(getComputedStyle(e).color).slice(0, 3)), light(ground(e))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const text = e.textContent.trim().slice(0, 40);
    if (ratio < 4.5) found.push(`${ratio.toFixed(2)}: ${e.tagName}.${e.className} ${text}`);
  }
  return [...new Set(found)];
}"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def environ(home: Path) -> dict[str, str]:
    smi = simulate_gpus(home / "nvidia-smi", UUIDS)
    return local_environ(home, smi, DRIVER.parents[2])


@pytest.fixture(scope="module")
def runs(home: Path, environ: dict[str, str]) -> Iterator[dict[str, str]]:
    """Ids of runs of the driver, by what they do; it goes on meanwhile."""
    found: dict[str, str] = {}
    with running(DRIVER, home, environ) as process:
        assert process.stdin is not None and process.stdout is not None
        while "waiting" not in found:
            line = process.stdout.readline()
            assert line, (home / "errors").read_text()[-3000:]
            if line.startswith("TOLD "):
                told = json.loads(line.removeprefix("TOLD "))
                found[told["step"]] = told["run"]
        _as_by_strangers(home / "hopsgpu" / "runs", found)
        yield found
        process.stdin.close()
        process.wait(HANG_SECONDS)


def _as_by_strangers(directory: Path, found: dict[str, str]) -> None:
    """Changes a record as a stranger could, and gives a run samples that no GPU gave."""
    file = directory / found["failed"] / "run.json"
    record = json.loads(file.read_text())
    file.write_text(json.dumps({**record, "name": EVIL, "warnings": [EVIL]}))
    samples = directory / found["trained"] / "logs" / "metrics-0.jsonl"
    first = json.loads(samples.read_text().splitlines()[0])["time"]
    with samples.open("a") as out:
        for n in range(120):
            gpu = {"uuid": UUIDS[0], "utilisation": 0.6 + 0.3 * (n % 7) / 7}
            out.write(json.dumps({"time": first + n, "gpu": gpu}) + "\n")
    (directory / "damaged-20200101-000000-000000").mkdir()


@pytest.fixture(scope="module")
def url(environ: dict[str, str], runs: dict[str, str], home: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "hopsgpu.cli.main", "web", "--port", "0"]
    with (home / "web-errors").open("w") as errors:
        process = subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().partition(" at ")[2].strip()
        assert "Traceback" not in (home / "web-errors").read_text()
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser.chromium() as running_browser:
        yield running_browser


Open = Callable[..., Page]


@pytest.fixture
def opened(chromium: Browser, url: str) -> Iterator[Open]:
    """Opens the pages; at the end no page may have said anything on its console."""
    contexts: list[BrowserContext] = []
    said: list[str] = []

    def open_pages(width: int = 900, **given: Any) -> Page:
        context = chromium.new_context(viewport={"width": width, "height": 900}, **given)
        context.set_default_timeout(1000 * HANG_SECONDS)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(url)
        return page

    yield open_pages
    for context in contexts:
        context.close()
    assert said == []


def addresses(runs: dict[str, str], root: str) -> dict[str, str]:
    at = f"runs/{root}"
    return {
        "cluster": "",
        "queue": "queue",
        "runs": "runs",
        "found": "runs?state=failed&name=breaks",
        "compare": f"compare?run={root}/{runs['trained']}&run={root}/{runs['running']}",
        **{name: f"{at}/{run_id}" for name, run_id in runs.items()},
        "log": f"{at}/{runs['running']}/log?rank=0",
        "models": "models",
        "model": f"models/{root}/digits",
        "usage": "usage?since=24h&by=run",
        "missing": f"{at}/nothing",
    }


def go(page: Page, url: str, path: str) -> None:
    page.goto(url.partition("?")[0] + path)


@pytest.fixture(scope="module")
def shots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("screenshots")
    print(f"screenshots: {directory}")
    return directory


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_each_page_at_each_width(
    opened: Open, url: str, runs: dict[str, str], home: Path, shots: Path, width: int, scheme: str
) -> None:
    page = opened(width, color_scheme=scheme)
    for name, path in addresses(runs, home.name).items():
        if name == "missing":  # of whose 404 the console tells
            continue
        go(page, url, path)
        page.wait_for_load_state("networkidle")
        page.screenshot(path=shots / f"{name}-{width}-{scheme}.png", full_page=True)
        over = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert over <= 0, f"{name} is wider than {width}"
        assert page.evaluate(NAMELESS) == [], name
        assert page.evaluate(FAINT) == [], name
        assert page.title().endswith("· hopsgpu")


def test_strangers_texts_run_no_script(
    opened: Open, url: str, runs: dict[str, str], home: Path
) -> None:
    page = opened()
    for path in ("runs", f"runs/{home.name}/{runs['failed']}"):
        go(page, url, path)
        expect(page.locator("body")).to_contain_text("<script>")
        assert page.title() != "mine"
    traceback = page.locator(".failure pre").first
    expect(traceback).to_contain_text("Traceback (most recent call last)")
    expect(traceback).to_contain_text("is no batch")


def test_a_damaged_record_is_named(opened: Open, url: str) -> None:
    page = opened()
    go(page, url, "runs")
    row = page.get_by_role("row").filter(has_text="damaged-2020")
    expect(row).to_contain_text("unreadable")


def test_without_scripts_all_that_is_text_is_there(
    opened: Open, url: str, runs: dict[str, str], home: Path
) -> None:
    page = opened(java_script_enabled=False)
    for name, path in addresses(runs, home.name).items():
        if name != "missing":
            go(page, url, path)
            expect(page.get_by_role("heading", level=1)).to_be_visible()
    go(page, url, f"runs/{home.name}/{runs['trained']}")
    expect(page.locator("figure img")).to_have_count(3)  # loss, accuracy, GPU utilisation
    expect(page.locator("main")).to_contain_text("at step 119")
    expect(page.locator("main")).to_contain_text("step 100: loss")
    go(page, url, f"runs/{home.name}/{runs['running']}")
    page.get_by_text("Cancel this run").click()
    expect(page.get_by_role("button", name="Cancel long-")).to_be_visible()


def test_metrics_become_plots_in_which_one_looks_closer(
    opened: Open, url: str, runs: dict[str, str], home: Path
) -> None:
    page = opened()
    go(page, url, f"runs/{home.name}/{runs['trained']}")
    expect(page.locator(".plots canvas")).to_have_count(3)
    expect(page.locator(".plots img")).to_have_count(0)
    page.locator(".plots .u-over").first.hover(position={"x": 200, "y": 50})
    expect(page.locator(".plots .u-legend").first).to_contain_text(re.compile(r"rank 0:?\s*0\.\d"))
    page.set_viewport_size({"width": 400, "height": 900})
    assert until(lambda: page.evaluate("document.documentElement.scrollWidth") <= 400)


def test_a_search_has_a_line_for_each_trial(
    opened: Open, url: str, runs: dict[str, str], home: Path
) -> None:
    record = json.loads((home / "hopsgpu/runs" / runs["searched"] / "run.json").read_text())
    states = [trial["state"] for trial in record["search"]["trials"]]
    complete = states.count("complete")
    assert len(states) == 24 and complete > 10
    page = opened(1600)
    go(page, url, f"runs/{home.name}/{runs['searched']}")
    picture = page.get_by_role("img", name=f"Parallel coordinates of {complete} trials")
    expect(picture).to_be_visible()
    expect(page.locator(".coordinates polyline")).to_have_count(complete)
    rows = page.get_by_role("region", name="Trials").get_by_role("row")
    expect(rows).to_have_count(25)
    expect(rows.nth(1)).to_contain_text("best")
    page.get_by_role("link", name="Log of trial 3").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("Trial 3")


def test_runs_are_searched_without_scripts(opened: Open, url: str, runs: dict[str, str]) -> None:
    page = opened(java_script_enabled=False)
    go(page, url, "runs")
    page.get_by_label("State").select_option("failed")
    page.get_by_label("Name or id").fill("BREAKS")
    page.get_by_role("button", name="Show").click()
    rows = page.get_by_role("region", name="Runs").locator("tbody tr")
    expect(rows).to_have_count(1)
    expect(rows.first).to_contain_text(runs["failed"])
    expect(page.get_by_label("State")).to_have_value("failed")
    page.get_by_role("link", name="Show all").click()
    assert rows.count() > 3


def test_chosen_runs_are_compared(opened: Open, url: str, runs: dict[str, str], home: Path) -> None:
    page = opened(1600)
    go(page, url, "runs")
    for name in ("trained", "running"):
        page.get_by_label(f"Compare {runs[name]}").check()
    # The list is renewed meanwhile, and keeps the choice.
    made = page.locator("#made").inner_text()
    assert until(lambda: page.locator("#made").inner_text() != made, 60)
    page.get_by_role("button", name="Compare the chosen runs").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Compare runs")
    parameters = page.get_by_role("region", name="Parameters").get_by_role("row")
    expect(parameters.filter(has_text="steps").first).to_contain_text("120")
    expect(parameters.filter(has_text="steps").first).to_contain_text("100000")
    expect(page.locator(".plots canvas")).to_have_count(2)  # loss, accuracy
    page.get_by_label("Logarithmic scale").check()
    page.get_by_label("Smoothing").select_option("0.9")
    page.get_by_role("button", name="Show").click()
    expect(page.locator(".plots canvas")).to_have_count(2)
    assert "log=1" in page.url and "smooth=0.9" in page.url
    expect(page.locator(".plots .u-legend").first).to_contain_text(re.compile(r"A:?.*B"))


def test_wide_screens_have_two_columns_and_narrow_ones_cards(
    opened: Open, url: str, runs: dict[str, str], home: Path
) -> None:
    page = opened(1600)
    go(page, url, f"runs/{home.name}/{runs['trained']}")
    metrics, details = page.locator("#metrics"), page.locator("#facts")
    left, right = metrics.bounding_box(), details.bounding_box()
    assert left is not None and right is not None and right["x"] > left["x"] + 400
    page.set_viewport_size({"width": 400, "height": 900})
    left, right = metrics.bounding_box(), details.bounding_box()
    assert left is not None and right is not None and right["x"] == left["x"]
    go(page, url, "runs")
    card = page.locator(".cards tbody tr").first
    assert card.evaluate("e => getComputedStyle(e).display") == "block"
    cell = card.locator("td[data-label]").first
    assert cell.evaluate("e => getComputedStyle(e, '::before').content") == '"State"'


def test_pages_renew_themselves_and_keep_the_focus(
    opened: Open, url: str, runs: dict[str, str], home: Path
) -> None:
    page = opened()
    go(page, url, f"runs/{home.name}/{runs['running']}")
    link = page.get_by_role("link", name="Log of rank 1")
    link.focus()
    before = page.locator("#ranks ~ .scroll").inner_text()
    assert until(lambda: page.locator("#ranks ~ .scroll").inner_text() != before)
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Log of rank 1"
    pause = page.get_by_role("button", name="Pause updates")
    pause.click()
    expect(pause).to_have_attribute("aria-pressed", "true")


def test_a_log_is_followed(opened: Open, url: str, runs: dict[str, str], home: Path) -> None:
    page = opened()
    go(page, url, f"runs/{home.name}/{runs['running']}/log?rank=0")
    before = len(page.locator("#log").inner_text())
    assert until(lambda: len(page.locator("#log").inner_text()) > before)
    lines = page.locator("#log").inner_text().split()
    steps = [int(lines[n + 1].rstrip(":")) for n, word in enumerate(lines) if word == "step"]
    assert steps == list(range(0, steps[-1] + 20, 20))


def test_the_keyboard_reaches_all(opened: Open, url: str, runs: dict[str, str]) -> None:
    page = opened()
    go(page, url, "runs")
    told = "document.activeElement.textContent.trim()"
    page.keyboard.press("Tab")
    assert page.evaluate(told) == "Skip to the content"
    box = page.get_by_text("Skip to the content").bounding_box()
    assert box is not None and box["y"] >= 0
    order = []
    while runs["trained"] not in order:
        page.keyboard.press("Tab")
        order.append(page.evaluate(told).split("\n")[0])
        assert len(order) < 60, order
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", order[-1]
    assert order[:6] == ["hopsgpu", "Cluster", "Queue", "Runs", "Models", "Usage"]
    assert runs["waiting"] in order and runs["trained"] in order
    page.keyboard.press("Shift+Tab")
    go(page, url, "runs")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"


def test_a_stranger_s_browser_gets_nothing(chromium: Browser, url: str) -> None:
    context = chromium.new_context()
    context.set_default_timeout(1000 * HANG_SECONDS)
    page = context.new_page()
    for path in ("", "runs", "static/page.js"):
        answer = page.goto(url.partition("?")[0] + path)
        assert answer is not None and answer.status == 401
    assert "token" not in page.url
    page.goto(url)
    assert "token" not in page.url and "token=" not in page.evaluate("document.cookie")
    context.close()


def test_cancelling_is_the_last_thing(
    opened: Open, url: str, runs: dict[str, str], home: Path
) -> None:
    page = opened()
    go(page, url, f"runs/{home.name}/{runs['waiting']}")
    expect(page.locator("main .waits strong").first).to_be_visible()
    page.get_by_text("Cancel this run").click()
    page.get_by_role("button", name=f"Cancel {runs['waiting']}").click()
    expect(page.locator("main .state").first).to_have_text("cancelled")
    expect(page.locator("details.cancel")).to_have_count(0)
    expect(page.get_by_role("status")).to_contain_text("state: cancelled")
