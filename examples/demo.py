"""`make demo`: start a YARN and an HDFS, run examples/etl_then_train.py on them, and stop them."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

from hopsgpu import HopsGpuError, devcluster

HERE = Path(__file__).resolve().parent
STATE = HERE.parent / ".demo"


# Flushed, so that a file or a pipe has it in order with what the pipeline prints.
say = functools.partial(print, flush=True)


def main() -> int:
    devcluster.down(STATE, say=lambda _: None)  # left by a demo that was killed
    shutil.rmtree(STATE, ignore_errors=True)
    try:
        devcluster.up(STATE, say=say)
        environment = {**os.environ, **devcluster.environment(STATE)}
        pipeline = [sys.executable, str(HERE / "etl_then_train.py")]
        code = subprocess.run(pipeline, env=environment, check=False).returncode
    finally:
        devcluster.down(STATE, say=say)
    if not code:
        say("next: docs/tutorial.md#a-cluster-to-play-with")
    return code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except HopsGpuError as error:
        sys.exit(f"hopsgpu: {error}")
