"""docs/monitoring.md has every metric, with its labels."""

from __future__ import annotations

import re

from hopsgpu.monitoring.families import METRICS
from hopsgpu.monitoring.observation import SOURCES
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(hopsgpu_\w+)` \| (\w+) \|(.*?)\| .+ \|$", re.MULTILINE)


def test_the_table_has_every_metric_with_its_kind_and_labels() -> None:
    told = {name: (kind, tuple(re.findall(r"\w+", labels))) for name, kind, labels in
            ROW.findall(PAGE)}  # fmt: skip
    assert told == {info.name: (info.kind, info.labels) for info in METRICS}


def test_the_page_names_the_sources() -> None:
    assert all(f"`{source}`" in PAGE for source in SOURCES)
