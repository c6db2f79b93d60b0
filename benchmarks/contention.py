"""Two applications that together need more GPUs than there are."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping

ROUNDS = 10
TRAINING_SECONDS = 3.0
GPUS = 4
_MOST_SECONDS = 1800

# An application of its own: launches in a row, each for itself in the line.
CONTENDER = f"""
import sys, time
import hopsgpu

hopsgpu.session("contender")
print("up", flush=True)
sys.stdin.readline()
for _ in range({ROUNDS}):
    hopsgpu.launch(
        time.sleep, args=({TRAINING_SECONDS},), workers=int(sys.argv[1]), cores_per_worker=1,
        progress="off",
    )
print("finished", flush=True)
"""


def measure() -> Mapping[str, object]:
    """Measure two applications that each need one GPU too many, or all."""
    return {f"two of {workers} on {GPUS}": two_of(workers) for workers in (3, 4)}


def two_of(workers: int) -> Mapping[str, object]:
    """Return seconds until two applications of 10 launches of `workers` ranks have finished."""
    command = [sys.executable, "-c", CONTENDER, str(workers)]
    both = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        for contender in both:
            assert contender.stdout is not None
            assert contender.stdout.readline() == "up\n"
        began = time.monotonic()
        said = []
        for contender in both:
            assert contender.stdin is not None
            contender.stdin.write("go\n")
            contender.stdin.flush()
        said = [contender.communicate(timeout=_MOST_SECONDS)[0] for contender in both]
        took = time.monotonic() - began
    finally:
        for contender in both:
            contender.kill()
            contender.wait()
    finished = sum("finished" in out for out in said)
    trained = 2 * ROUNDS * TRAINING_SECONDS
    print(f"\ntwo applications, {ROUNDS} launches of {workers} ranks each, on {GPUS} GPUs")
    print(f"  finished: {finished} of 2 (without the line both wait for ever)")
    print(f"  {took:.0f} s in all; the trainings alone are {trained:.0f} s: {took / trained:.1f} x")
    return {"finished": finished, "seconds": took, "training": trained, "ratio": took / trained}
