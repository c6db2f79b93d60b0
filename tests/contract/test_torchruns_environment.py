"""A script's environment, compared with that of the installed torchrun, variable by variable."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.bounds import HANG_SECONDS

# One rank prints: lines of two would be mixed. Only ranks that use torch have a store of an agent.
SCRIPT = """
import json, os
import torch
if os.environ["RANK"] == "0":
    print("ENVIRONMENT" + json.dumps(dict(os.environ)), flush=True)
"""
# Their values differ between two runs, or name this machine's directories.
OF_THE_RUN = {"MASTER_PORT", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}


def environment_of(directory: Path, *command: str) -> dict[str, str]:
    inherited = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(__file__).parents[2])}
    inherited |= {"HOPSGPU_ROOT": f"file://{directory}/lake", "HOME": str(directory)}
    inherited |= {name: os.environ[name] for name in ("JAVA_HOME", "TMPDIR") if name in os.environ}
    ran = subprocess.run(
        [sys.executable, "-m", *command, "--nproc-per-node", "2", "script.py"],
        cwd=directory,
        env=inherited,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    described: dict[str, str] = json.loads(ran.stdout.partition("ENVIRONMENT")[2].splitlines()[0])
    return {name: value for name, value in described.items() if inherited.get(name) != value}


def test_what_torchrun_sets_hopsgpu_sets_too(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    theirs = environment_of(tmp_path, "torch.distributed.run", "--standalone")
    ours = environment_of(tmp_path, "hopsgpu.cli.main", "run", "--name", "environment")
    assert {"RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "ROLE_NAME"} <= theirs.keys()
    assert theirs.keys() - ours.keys() <= {"LC_CTYPE"}
    differing = {name for name in theirs.keys() & ours.keys() if theirs[name] != ours[name]}
    assert differing <= OF_THE_RUN, {name: (theirs[name], ours[name]) for name in differing}
