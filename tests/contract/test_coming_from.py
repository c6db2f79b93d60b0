"""Scripts of docs/coming-from.md: each of another launcher prints the loss that ours prints.

They train on the CPUs of this machine.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.bounds import HANG_SECONDS
from tests.docs.pages import ROOT, Block, blocks
from tests.local_scripts import local_environ, simulate_gpus

LAUNCHERS = ("torchrun", "TorchDistributor", "Horovod", "Ray Train")
SCRIPTS = [b for b in blocks(ROOT / "docs" / "coming-from.md") if b.language == "python"]
PAIRS = list(zip(LAUNCHERS, SCRIPTS[::2], SCRIPTS[1::2], strict=True))
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def _loss_of(script: Block, directory: Path, *launcher: str) -> float:
    """Run a script, and return the loss that it prints."""
    directory.mkdir()
    file = directory / "job.py"
    file.write_text(script.code)
    none = simulate_gpus(directory / "no-gpus", ())
    # Ray binds a socket below TMPDIR, whose path must be short.
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        ran = subprocess.run(
            [sys.executable, *launcher, str(file)],
            cwd=directory,
            env=local_environ(directory, none, ROOT) | {"TMPDIR": short},
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
        )
    losses = [line for line in ran.stdout.splitlines() if line.startswith("loss ")]
    assert (ran.returncode, len(losses)) == (0, 1), ran.stdout + ran.stderr
    return float(losses[0].removeprefix("loss "))


@pytest.mark.soak
@pytest.mark.parametrize(("name", "before", "after"), PAIRS, ids=LAUNCHERS)
def test_it_trains_to_the_same_loss_after_as_before(
    name: str, before: Block, after: Block, tmp_path: Path
) -> None:
    loss = _loss_of(after, tmp_path / "after")
    assert 0 < loss < 1
    if before.not_run is None:
        launcher = TORCHRUN if name == "torchrun" else ()
        assert _loss_of(before, tmp_path / "before", *launcher) == pytest.approx(loss, rel=1e-3)
