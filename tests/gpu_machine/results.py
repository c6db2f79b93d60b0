"""The values of a run of `make gpu`, and the file of the recorded runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results.json"
PASSED, FAILED, NO_GPU = 0, 1, 2


class Outcome(Enum):
    OK = "ok"
    FAILED = "failed"
    NOT_APPLICABLE = "not applicable"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Verdict:
    """The outcome of a check; `detail` has what was measured, or why the check failed."""

    outcome: Outcome
    detail: str


@dataclass(frozen=True)
class CheckResult:
    """A check as the page shows it.

    Attributes:
        seconds: None for a check that was not started.
    """

    name: str
    outcome: Outcome
    seconds: float | None
    detail: str


@dataclass(frozen=True)
class GpuMachine:
    """The machine and the software of a run; "" for a version that is unknown.

    Attributes:
        gpus: product names of all GPUs, bad ones included.
        memory_mib: memory of the first GPU, in MiB; 0 if it is unknown.
        cuda: the latest CUDA version that the driver supports.
        torch: version of PyTorch; "" if it cannot be imported.
        torch_cuda: CUDA version for which PyTorch was built; "" if it has no CUDA.
        torch_problem: why PyTorch cannot be imported, or "".
    """

    gpus: tuple[str, ...]
    memory_mib: int
    driver: str
    cuda: str
    python: str
    torch: str
    torch_cuda: str
    torch_problem: str = ""

    @property
    def title(self) -> str:
        """The GPUs, as "2 × NVIDIA H200"."""
        return ", ".join(f"{self.gpus.count(name)} × {name}" for name in dict.fromkeys(self.gpus))


@dataclass(frozen=True)
class GpuRun:
    """A run of all checks; `date` is as 2026-01-31."""

    date: str
    machine: GpuMachine
    checks: tuple[CheckResult, ...]


def exit_code(checks: Sequence[CheckResult]) -> int:
    """Return PASSED if no check failed, and none was left out for lack of time."""
    is_bad = any(check.outcome in (Outcome.FAILED, Outcome.NOT_RUN) for check in checks)
    return FAILED if is_bad else PASSED


def load_runs(file: Path = RESULTS) -> list[GpuRun]:
    """Return the recorded runs."""
    return [_run(fields) for fields in json.loads(file.read_text(encoding="utf-8"))]


def record_run(run: GpuRun, file: Path = RESULTS) -> None:
    """Store a run, in place of an earlier one on a machine with the same GPUs."""
    kept = [other for other in load_runs(file) if other.machine.title != run.machine.title]
    runs = sorted([*kept, run], key=lambda kept_run: kept_run.machine.title)
    file.write_text(as_text(runs) + "\n", encoding="utf-8")


def as_text(value: Any) -> str:
    """Return dataclasses, and what contains them, as JSON."""
    return json.dumps(value, indent=1, ensure_ascii=False, default=_as_json)


def _as_json(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else asdict(value)


def machine_of(fields: Mapping[str, Any]) -> GpuMachine:
    """Return the machine that `as_text` wrote."""
    return GpuMachine(**{**fields, "gpus": tuple(fields["gpus"])})


def _run(fields: Mapping[str, Any]) -> GpuRun:
    checks: Iterable[Mapping[str, Any]] = fields["checks"]
    return GpuRun(
        fields["date"],
        machine_of(fields["machine"]),
        tuple(CheckResult(**{**c, "outcome": Outcome(c["outcome"])}) for c in checks),
    )
