"""`make demo`: a YARN and an HDFS of its own, examples/etl_then_train.py on them, and away."""

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


# At once, in order with what the pipeline prints, where the output is a file or a pipe.
say = functools.partial(print, flush=True)


def main() -> int:
    devcluster.down(STATE, say=lambda _: None)  # of a demo that was killed
    shutil.rmtree(STATE, ignore_errors=True)
    try:
        devcluster.up(STATE, say=say)
        environment = {**os.environ, **devcluster.environment(STATE)}
        pipeline = [sys.executable, str(HERE / "etl_then_train.py")]
        return subprocess.run(pipeline, env=environment, check=False).returncode
    finally:
        devcluster.down(STATE, say=say)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except HopsGpuError as error:
        sys.exit(f"hopsgpu: {error}")
