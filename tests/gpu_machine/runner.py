"""Runs the checks one after the other, within the bounds of time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.gpu_machine.results import CheckResult, Outcome, Verdict
from tests.gpu_machine.situation import Situation
from tests.gpu_machine.steps import ROOT, Step
from tests.gpu_machine.verdicts import reject
from tests.local_scripts import OF_CLUSTERS
from tests.matrix.behaviours import first_line

# No check starts later than this; the last one ends before four minutes have passed.
LAST_START_SECONDS = 225.0
END_SECONDS = 235.0
# A process that was killed may wait for the driver for a moment.
_KILL_SECONDS = 2.0


def run_steps(
    steps: Sequence[Step],
    situation: Situation,
    run_step: Callable[[Step, float], Verdict],
    began: float,
    clock: Callable[[], float] = time.monotonic,
) -> list[CheckResult]:
    """Run the checks that apply, as long as there is time.

    Args:
        run_step: runs a check; its second argument is the time limit in seconds.
        began: when the whole run began, by the clock.
        clock: in seconds.
    """
    results = []
    for step in steps:
        start = clock()
        if reason := why_not_applicable(step, situation):
            results.append(CheckResult(step.name, Outcome.NOT_APPLICABLE, None, reason))
        elif start - began >= LAST_START_SECONDS:
            late = f"{LAST_START_SECONDS:g} s had passed"
            results.append(CheckResult(step.name, Outcome.NOT_RUN, None, late))
        else:
            verdict = run_step(step, min(step.seconds, END_SECONDS - (start - began)))
            seconds = round(clock() - start, 1)
            results.append(CheckResult(step.name, verdict.outcome, seconds, verdict.detail))
    return results


def why_not_applicable(step: Step, situation: Situation) -> str:
    """Return why a check cannot show anything on this machine, or ""."""
    machine = situation.machine
    if step.needs_cuda and not machine.torch:
        return "torch cannot be imported"
    if step.needs_cuda and not machine.torch_cuda:
        return "torch has no CUDA"
    if step.needs_two_gpus and len(situation.whole_gpus) < 2:
        return "one GPU only" if situation.whole_gpus else "no two whole GPUs"
    if step.needs_idle_gpus and situation.pids_before:
        return "another program computes on a GPU"
    return ""


def run_in_process(step: Step, seconds: float, situation: Situation) -> Verdict:
    """Run a check in a process of its own, which is killed after some seconds."""
    print(f"gpu: {step.name}", file=sys.stderr, flush=True)
    log = situation.log_file(step.name)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu_machine.steps", step.name, str(situation.directory)],
            cwd=ROOT,
            env=_environment(situation.directory),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return reject(f"did not end within {seconds:.0f} s")
    finally:
        # The group includes the JVM of Spark. Ranks end when they lose their driver.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_SECONDS)
    return _read_verdict(situation.verdict_file(step.name), process.returncode, log)


def _read_verdict(file: Path, code: int, log: Path) -> Verdict:
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = first_line(lines[-1]) if lines else "no output"
        return reject(f"ended with exit code {code}: {last}")
    return Verdict(Outcome(fields["outcome"]), fields["detail"])


def _environment(directory: Path) -> dict[str, str]:
    """Return the environment of a check: no cluster, and a root for its runs alone."""
    environ = {name: value for name, value in os.environ.items() if name not in OF_CLUSTERS}
    paths = [str(ROOT), *filter(None, [environ.get("PYTHONPATH")])]
    return {
        **environ,
        "HOPSGPU_ROOT": (directory / "root").as_uri(),
        "PYTHONPATH": os.pathsep.join(paths),
    }
