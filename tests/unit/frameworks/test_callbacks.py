"""What callbacks record of the metrics that a library logs, whatever their names and values are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hopsgpu.core.rank_warnings import CONTEXT_VARIABLE, read_warnings
from hopsgpu.frameworks.callbacks import MetricReporter


class Gang:
    """Records reports as a context would."""

    def __init__(self) -> None:
        self.reports: list[tuple[int, dict[str, Any]]] = []

    def report(self, step: int, /, **metrics: Any) -> None:
        self.reports.append((step, metrics))

    def save_checkpoint(self, path: str | Path, step: int) -> None:
        raise AssertionError


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CONTEXT_VARIABLE, str(tmp_path / "context.json"))
    return tmp_path


def test_numbers_are_recorded_under_any_name(directory: Path) -> None:
    import torch

    gang = Gang()
    given = {"self": 1, "step": np.float32(0.5), "gpu": torch.ones(1), "time": np.array(2.0)}
    MetricReporter(gang, "Lightning").report(3, given)
    MetricReporter(gang, "Lightning").report(4, None)
    wanted = {"self": 1.0, "step": 0.5, "gpu": 1.0, "time": 2.0}
    assert gang.reports == [(3, wanted), (4, {})]
    assert read_warnings(directory) == []


def test_invalid_metrics_are_left_out_with_one_warning_of_each_kind(
    directory: Path,
) -> None:
    import torch

    wrong: dict[str, Any] = {
        "": 1.0,
        "x" * 201: 1.0,
        "text": "1.5",
        "none": None,
        "table": np.zeros(2),
        "map": {"a": 1.0},
        "tensor": torch.ones(2),
        "complex": torch.tensor(1j),
        "meta": torch.ones((), device="meta"),
        "huge": 10**400,
    }
    many = {f"m{number}": number for number in range(1100)}
    gang = Gang()
    reporter = MetricReporter(gang, "Lightning")
    for step in (1, 2):
        reporter.report(step, {"loss": 0.5, **wrong, **many})
    for _, metrics in gang.reports:
        assert metrics == {"loss": 0.5, **{f"m{number}": float(number) for number in range(999)}}
    name, value, number = read_warnings(directory)
    start = "Lightning logs "
    assert name.startswith(start) and "''" in name
    assert value.startswith(start) and "text='1.5'" in value
    assert number.startswith(start) and re.search("'m999' .* 1111 .* 1000", number)
