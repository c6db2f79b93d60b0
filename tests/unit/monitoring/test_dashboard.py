"""The dashboard for Grafana: its order, its grid, and the metrics that its queries name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib import resources
from itertools import takewhile
from typing import Any

from hopsgpu.monitoring.families import HISTOGRAM, METRICS

PANELS: list[dict[str, Any]] = json.loads(
    (resources.files("hopsgpu.monitoring") / "dashboard.json").read_text(encoding="utf-8")
)["panels"]
LABELS = {
    f"{info.name}{ending}": {*info.labels, *(("le",) if ending == "_bucket" else ())}
    for info in METRICS
    for ending in (("_bucket", "_sum", "_count") if info.kind == HISTOGRAM else ("",))
}
COLUMNS = 24


def queries() -> Iterator[str]:
    for panel in PANELS:
        if panel["type"] != "row":
            assert panel["targets"], panel["title"]
            yield from (target["expr"] for target in panel["targets"])


def test_six_panels_come_before_the_rows() -> None:
    first = [p["title"] for p in takewhile(lambda panel: panel["type"] != "row", PANELS)]
    assert first == [
        "Free GPUs",
        "GPUs in use",
        "Gangs that wait",
        "Longest wait",
        "GPUs held without training",
        "Unhealthy GPUs",
    ]


def test_rows_are_in_their_order_and_none_is_empty() -> None:
    rows = [(at, p["title"]) for at, p in enumerate(PANELS) if p["type"] == "row"]
    titles = ["Cluster", "Waiting", "Runs", "Idle GPUs", "Scores", "Exporter"]
    assert [title for _, title in rows] == titles
    starts = [at for at, _ in rows]
    assert all(after - at > 1 for at, after in zip(starts, [*starts[1:], len(PANELS)], strict=True))


def test_panels_follow_each_other_without_overlap() -> None:
    assert [panel["id"] for panel in PANELS] == list(range(1, len(PANELS) + 1))
    taken: set[tuple[int, int]] = set()
    for before, panel in zip([{"gridPos": {"x": 0, "y": 0}}, *PANELS], PANELS, strict=False):
        place = panel["gridPos"]
        order = [(p["gridPos"]["y"], p["gridPos"]["x"]) for p in (before, panel)]
        assert order == sorted(order), panel["title"]
        assert place["x"] + place["w"] <= COLUMNS
        cells = {
            (place["x"] + column, place["y"] + line)
            for column in range(place["w"])
            for line in range(place["h"])
        }
        assert taken.isdisjoint(cells), panel["title"]
        taken |= cells


def test_each_query_names_metrics_and_labels_that_exist() -> None:
    for query in queries():
        names = re.findall(r"\bhopsgpu_\w+", query)
        assert names and LABELS.keys() >= {*names}, query
        for name, matchers in re.findall(r"\b(hopsgpu_\w+)\{([^}]*)\}", query):
            assert {*re.findall(r"(\w+)=", matchers)} <= LABELS[name], query
        for group in re.findall(r"\bby \(([^)]*)\)", query):
            assert all({*group.split(", ")} <= LABELS[name] for name in names), query


def test_legends_name_labels_that_the_queries_keep() -> None:
    for panel in PANELS:
        for target in panel.get("targets", ()):
            named = {*re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])}
            kept = re.search(r"\bby \(([^)]*)\)", target["expr"])
            metric = re.search(r"\bhopsgpu_\w+", target["expr"])
            assert metric is not None
            labels = {*kept[1].split(", ")} if kept is not None else LABELS[metric[0]]
            assert named <= labels, (panel["title"], target["expr"])


def test_cancelled_runs_have_another_colour_than_failed_ones() -> None:
    (ends,) = (p for p in PANELS if p["title"] == "Ends of runs, by reason, in an hour")
    fields = ends["fieldConfig"]
    colours = {
        override["matcher"]["options"]: override["properties"][0]["value"]["fixedColor"]
        for override in fields["overrides"]
    }
    assert (
        colours["cancelled"] == colours["interrupted"] != fields["defaults"]["color"]["fixedColor"]
    )
    (hours,) = (p for p in PANELS if p["title"].startswith("GPU hours of runs that ended"))
    (state,) = hours["fieldConfig"]["overrides"]
    (mapping,) = state["properties"][1]["value"]
    colours = {name: option["color"] for name, option in mapping["options"].items()}
    assert colours["cancelled"] not in (colours["failed"], colours["succeeded"])
