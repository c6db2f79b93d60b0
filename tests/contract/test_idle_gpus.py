"""What GPUs did while they were held, on a local master: real ranks that wait, save and idle.

The machine's GPUs are simulated; a stand-in for NVML has their utilisation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests import idle_runs, nvml_standin
from tests.idle_runs import Records, Told
from tests.local_scripts import UUIDS, local_environ, simulate_gpus

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def told(home: Path) -> Told:
    environ = local_environ(home, simulate_gpus(home / "nvidia-smi", UUIDS[1:]))
    return idle_runs.told_by_script(nvml_standin.install(home / "nvml"), environ)


@pytest.fixture
def records(home: Path) -> Records:
    def record(run: str) -> Mapping[str, Any]:
        file = home / "hopsgpu" / "runs" / run / "run.json"
        found: Mapping[str, Any] = json.loads(file.read_text())
        return found

    return record


def test_a_slow_feed_is_not_training(told: Told, records: Records) -> None:
    idle_runs.check_slow_feed(told, records)


def test_checkpoints_are_not_training(told: Told, records: Records) -> None:
    idle_runs.check_checkpoints(told, records)


def test_gpus_that_are_not_used_are_told_of_at_once(told: Told, records: Records) -> None:
    idle_runs.check_unused(told, records)


def test_a_run_that_leaves_its_gpus_idle_is_ended(told: Told, records: Records) -> None:
    idle_runs.check_ended(told, records)


def test_a_trial_that_leaves_its_gpu_idle_fails(told: Told) -> None:
    idle_runs.check_trial(told)


def test_nothing_ends_where_the_utilisation_is_unknown(told: Told, records: Records) -> None:
    idle_runs.check_unknown(told, records)
