"""Machines, and the state of one before the first check, for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.gpu_machine.results import CheckResult, GpuMachine, GpuRun, Outcome
from tests.gpu_machine.situation import Situation

FIELDS: Mapping[str, Any] = {
    "memory_mib": 40960,
    "driver": "580.1",
    "cuda": "13.0",
    "python": "3.11.7",
    "torch": "2.15.0",
    "torch_cuda": "13.2",
}


def machine(*gpus: str, **fields: Any) -> GpuMachine:
    return GpuMachine(gpus or ("A100",), **{**FIELDS, **fields})


def situation(
    directory: Path, gpus: Sequence[str] = ("GPU-1",), pids: Sequence[int] = (), **fields: Any
) -> Situation:
    names = machine(*["A100"] * len(gpus), **fields)
    return Situation(names, tuple(gpus), tuple(gpus), tuple(pids), {"GPU-1": 5}, directory)


def run_of(*outcomes: Outcome, gpus: Sequence[str] = ("A100",), date: str = "2026-12-01") -> GpuRun:
    checks = (
        CheckResult(f"check {n}", outcome, 1.5 if outcome is Outcome.OK else None, f"detail {n}")
        for n, outcome in enumerate(outcomes)
    )
    return GpuRun(date, machine(*gpus), tuple(checks))
