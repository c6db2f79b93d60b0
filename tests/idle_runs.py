"""Runs that use GPUs or leave them idle, of a script of its own, and what must be told of them.

`tests/idle_driver.py` is the script; on a local master and on a cluster it tells the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

DRIVER = Path(__file__).with_name("idle_driver.py")
SECONDS = 900
Told = Mapping[str, Any]
Records = Callable[[str], Mapping[str, Any]]


def told_by_script(nvml: Path, environ: Mapping[str, str]) -> Told:
    """Run the script; return what it told by its steps, and its output as "out" and "err".

    Args:
        nvml: directory of the stand-in for NVML.
        environ: the script's environment, without PYTHONPATH.
    """
    path = os.pathsep.join([str(nvml), str(DRIVER.parents[1])])
    ran = subprocess.run(
        [sys.executable, str(DRIVER), str(nvml)],
        env={**environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    lines = [line for line in ran.stdout.splitlines() if line.startswith("TOLD ")]
    steps = [json.loads(line.removeprefix("TOLD ")) for line in lines]
    print(*steps, sep="\n")
    return {step["step"]: step for step in steps} | {"out": ran.stdout, "err": ran.stderr}


def check_sums(run: Told, records: Records) -> None:
    """What was told, and what the record says, adds up."""
    assert sum(run["kinds"].values()) == pytest.approx(run["held"])
    seconds = records(run["run"])["gpu_seconds"]
    parts = seconds["training"] + seconds["publishing"] + seconds["idle"]
    assert parts == pytest.approx(seconds["held"])
    assert seconds["waiting_for_data"] == pytest.approx(run["kinds"]["waiting for data"])


def check_slow_feed(told: Told, records: Records) -> None:
    feed = told["data"]
    check_sums(feed, records)
    assert feed["kinds"]["waiting for data"] > 0.3 * feed["held"]
    assert feed["kinds"]["unused"] == 0 and feed["warnings"] == []


def check_checkpoints(told: Told, records: Records) -> None:
    saves = told["saves"]
    check_sums(saves, records)
    assert saves["kinds"]["checkpointing"] > 0.3 * saves["held"]


def check_unused(told: Told, records: Records) -> None:
    """GPUs that are not used are told of while the function runs."""
    unused = told["unused"]
    check_sums(unused, records)
    assert unused["kinds"]["unused"] > 0.3 * unused["held"]
    said = "all 2 GPUs have idled for 3 s"
    (text,) = [warning for warning in unused["warnings"] if said in warning]
    shown = [line for line in told["out"].splitlines() if said in line]
    assert shown and shown[0].startswith("[rank 0 ")
    assert text in records(unused["run"])["warnings"]
    # The ranks printed their word after it.
    assert told["out"].index(said) < told["out"].index("has waited")


def check_ended(told: Told, records: Records) -> None:
    """A run that leaves its GPUs idle is ended, not tried again, and gives them back."""
    ended = told["ended"]
    assert ended["seconds"] >= 5.0 and "gpu_idle_timeout=5 s ended the run" in ended["said"]
    # The stacks say where the function was.
    assert "in waits" in ended["said"]
    assert not [text for text in ended["warnings"] if "attempt 0 failed" in text], "not retried"
    known = records(ended["run"])
    assert known["state"] == "failed" and "gpu_idle_timeout=5 s" in known["error"]
    assert known["spec"]["gpu_idle_timeout"] == 5.0
    assert told["back"]["used"] == 0


def check_trial(told: Told) -> None:
    """A trial that leaves its GPU idle fails."""
    trial = told["trial"]
    assert "gpu_idle_timeout=15 s ended the run" in trial["error"]
    assert any("trial 0: the gang's GPU has idled for 3 s" in text for text in trial["warnings"])


def check_unknown(told: Told, records: Records) -> None:
    """Nothing ends, and nothing is warned of, where the utilisation is unknown."""
    unknown = told["unknown"]
    assert unknown["values"] == ["returned", "returned"] and unknown["warnings"] == []
    assert unknown["kinds"]["unused"] == 0
    check_sums(unknown, records)
