"""The page of `make gpu`, and its table in docs/gpus.md: `python -m tests.gpu_machine.page`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.gpu_machine.results import CheckResult, GpuMachine, GpuRun, Outcome, load_runs
from tests.matrix.behaviours import first_line

PAGE = Path(__file__).resolve().parents[2] / "docs" / "gpus.md"
BEGIN = "<!-- written by tests/gpu_machine/page.py from tests/gpu_machine/results.json -->"
END = "<!-- end of what tests/gpu_machine/page.py wrote -->"
NO_RUNS = "No run of `make gpu` on a real GPU is recorded yet."
OTHER_PYTHON = (
    "for a torch with CUDA: make gpu GPU_PYTHON=/path/to/python, which needs hopsgpu's packages too"
)


def text_page(run: GpuRun) -> str:
    """Return the page for a terminal."""
    rows = [("check", "result", "seconds", "detail"), *map(_row, run.checks)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [f"hopsgpu on a machine with GPUs, {run.date}", *machine_lines(run.machine), ""]
    for name, outcome, seconds, detail in rows:
        cells = name.ljust(widths[0]), outcome.ljust(widths[1]), seconds.rjust(widths[2]), detail
        lines.append("  ".join(cells).rstrip())
    return "\n".join([*lines, "", summary(run.checks)])


def machine_lines(machine: GpuMachine) -> list[str]:
    memory = f", {machine.memory_mib / 1024:.0f} GiB" if machine.memory_mib else ""
    lines = [
        f"GPUs    {machine.title}{memory}",
        f"driver  {machine.driver or 'unknown'}, CUDA {machine.cuda or 'unknown'}",
        f"Python  {machine.python}, {_torch(machine)}",
    ]
    return lines if machine.torch_cuda else [*lines, f"        {OTHER_PYTHON}"]


def _torch(machine: GpuMachine) -> str:
    if not machine.torch:
        return f"torch cannot be imported: {machine.torch_problem}"
    cuda = f"with CUDA {machine.torch_cuda}" if machine.torch_cuda else "without CUDA"
    return f"torch {machine.torch} {cuda}"


def _row(check: CheckResult) -> tuple[str, str, str, str]:
    seconds = "-" if check.seconds is None else f"{check.seconds:.1f}"
    return check.name, check.outcome.value, seconds, check.detail


def summary(checks: Sequence[CheckResult]) -> str:
    """Return the counts of the outcomes, and the names of the checks that time did not allow."""
    counts = Counter(check.outcome for check in checks)
    text = ", ".join(f"{counts[outcome]} {outcome.value}" for outcome in Outcome if counts[outcome])
    late = [check.name for check in checks if check.outcome is Outcome.NOT_RUN]
    return f"{text}; no time was left for: {', '.join(late)}" if late else text


def docs_table(runs: Sequence[GpuRun]) -> str:
    """Return a table of Markdown with a column for each machine, or a sentence without runs."""
    if not runs:
        return NO_RUNS
    names = dict.fromkeys(check.name for run in runs for check in run.checks)
    columns = [
        ["", "date", "driver", "torch", *names],
        *([*_head(run), *(_cell(run, name) for name in names)] for run in runs),
    ]
    first, *rows = [f"| {' | '.join(cells)} |" for cells in zip(*columns, strict=True)]
    return "\n".join([first, f"| {' | '.join(['---'] * len(columns))} |", *rows])


def _head(run: GpuRun) -> list[str]:
    machine = run.machine
    driver = f"{machine.driver or 'unknown'}, CUDA {machine.cuda or 'unknown'}"
    return [machine.title, run.date, driver, _torch(machine).removeprefix("torch ")]


def _cell(run: GpuRun, name: str) -> str:
    check = next((check for check in run.checks if check.name == name), None)
    if check is None:
        return "–"
    if check.outcome is Outcome.OK:
        return f"ok ({check.seconds:.0f} s)"
    return f"{check.outcome.value}: {first_line(check.detail).replace('|', '/')}"


def with_table(text: str, runs: Sequence[GpuRun]) -> str:
    """Return a page's text with the table between its two markers.

    Raises:
        ValueError: a marker is missing.
    """
    before, has_begin, rest = text.partition(BEGIN)
    _, has_end, after = rest.partition(END)
    if not has_begin or not has_end:
        raise ValueError(f"the page lacks {BEGIN!r} or, after it, {END!r}")
    return f"{before}{BEGIN}\n\n{docs_table(runs)}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), load_runs()), encoding="utf-8")
