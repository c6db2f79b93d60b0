"""Leases of GPUs under kill -9 at any moment: never two owners, never a leak."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.bounds import HANG_SECONDS
from tests.contract.lease_rounds import enough_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("rounds", [25, pytest.param(120, marks=pytest.mark.soak)])
def test_never_two_owners_never_a_leak(tmp_path: Path, rounds: int) -> None:
    seed = os.environ.get("HOPSGPU_TEST_SEED", str(int(time.time())))
    played = subprocess.run(
        [sys.executable, "-m", "tests.contract.lease_rounds", str(tmp_path), seed, str(rounds)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert played.returncode == 0, f"HOPSGPU_TEST_SEED={seed}\n{played.stderr}"
    killed = json.loads(played.stdout)
    print(killed)
    # Otherwise the executors were killed too early for anything to be shown.
    assert min(killed.values()) >= enough_of(rounds)
