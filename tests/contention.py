"""Applications of their own that want the GPUs of the tests' cluster."""

from __future__ import annotations

import subprocess
import sys
import textwrap

from tests.bounds import HANG_SECONDS

CONTENDER = """
    import sys, time
    import hopsgpu

    workers, launches, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    hopsgpu.session(f"contender of {workers}")
    for number in range(launches):
        result = hopsgpu.launch(time.sleep, args=(seconds,), workers=workers, name="contend",
            cores_per_worker=1, progress="off")
        assert len(result.values) == workers and not result.warnings, result
        print("launched", number, result.timeline.released, flush=True)
"""


def start_script(
    env: dict[str, str], script: str, *arguments: object, **more: str
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-u", "-c", textwrap.dedent(script), *map(str, arguments)],
        env={**env, **more},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def both_finish(env: dict[str, str], workers: int, launches: int) -> None:
    """Two applications that launch gangs one after the other, all of which come."""
    both = [start_script(env, CONTENDER, workers, launches, 1) for _ in range(2)]
    try:
        said = [contender.communicate(timeout=HANG_SECONDS) for contender in both]
    finally:
        for contender in both:
            contender.kill()
    for out, error in said:
        assert out.count("launched") == launches, error
