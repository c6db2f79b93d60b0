"""A check at the driver that ranks can load a call: a fresh process loads the call once.

Only calls with objects whose load runs their own code are checked (`load_risks`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from hopsgpu.packaging.load_check_process import LOADED

log = logging.getLogger(__name__)

# The check is stopped after this time. An import of TensorFlow on an overloaded machine takes less.
SECONDS = 120.0
_POLL_SECONDS = 0.1
_MODULE = "hopsgpu.packaging.load_check_process"
_NO_GPUS = {
    # A number, because the user's code may parse it.
    "CUDA_VISIBLE_DEVICES": "-1",
    "HIP_VISIBLE_DEVICES": "-1",
    "ROCR_VISIBLE_DEVICES": "-1",
    "JAX_PLATFORMS": "cpu",
}
# The variables of a single rank: the load of an object may read its rank.
_SINGLE_RANK = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "NODE_RANK": "0",
}
# Variables for the nodes that could prevent this machine's Python from running.
_INTERPRETER_PREFIXES = ("PYTHON", "LD_")
_GATEWAY_PREFIX = "PYSPARK_GATEWAY_"


class LoadFailure(NamedTuple):
    """The failure of a load; `sample` is the object that cannot be loaded, None if unknown."""

    error: str
    sample: object


class LoadChecks:
    """The checks of an application; each type is checked once. Thread-safe."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._checked: weakref.WeakSet[type] = weakref.WeakSet()

    @contextlib.contextmanager
    def run_during(
        self,
        call: bytes,
        risks: Mapping[type, object],
        environment: Mapping[str, str],
        pickle_sample: Callable[[object], bytes],
        on_poll: Callable[[], None] = lambda: None,
    ) -> Iterator[list[LoadFailure]]:
        """Load a call in another process while the body of `with` runs; then wait for the result.

        The failure, if any, is added to the yielded list after the body.

        Args:
            risks: objects in the call whose load runs their own code, by type.
            environment: variables that the ranks get besides the driver's.
            pickle_sample: returns a call with one object as its argument.
            on_poll: called several times a second during the wait; an error stops the check.
        """
        failures: list[LoadFailure] = []
        new = {kind: value for kind, value in risks.items() if kind not in self._checked}
        if not new:
            yield failures
            return
        deadline = time.monotonic() + self._seconds
        variables = _environment(environment)
        with _process(call, variables) as process:
            yield failures
            error = _load_error(process, deadline, on_poll)
        if error is None:
            self._checked.update(new)
            return
        for value in new.values():
            with _process(pickle_sample(value), variables) as process:
                cause = _load_error(process, deadline, on_poll)
            if cause is not None:
                failures.append(LoadFailure(cause, value))
                return
        failures.append(LoadFailure(error, None))


def _environment(ranks: Mapping[str, str]) -> dict[str, str]:
    rank_variables = {n: v for n, v in ranks.items() if not n.startswith(_INTERPRETER_PREFIXES)}
    path = os.pathsep.join(str(Path(p).absolute()) for p in sys.path if isinstance(p, str))
    # The process must not reach the driver's JVM.
    inherited = {n: v for n, v in os.environ.items() if not n.startswith(_GATEWAY_PREFIX)}
    return {**inherited, **rank_variables, **_SINGLE_RANK, **_NO_GPUS, "PYTHONPATH": path}


@contextlib.contextmanager
def _process(call: bytes, variables: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes] | None]:
    """Start a process that loads a call; kill it on exit. Yield None if it cannot be started."""
    with contextlib.ExitStack() as stack:
        try:
            # A file in memory: a pipe would need a thread that fills it.
            file = stack.enter_context(os.fdopen(os.memfd_create("hopsgpu-call"), "w+b"))
            file.write(call)
            file.seek(0)
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", _MODULE, str(os.getpid())],
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=dict(variables),
                # Ctrl-C must reach only the driver, which kills the process.
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            log.warning("it was not checked that the ranks can load the call: %s", error)
            yield None
            return
        stack.callback(_kill, process)
        file.close()
        yield process


def _kill(process: subprocess.Popen[bytes]) -> None:
    # The process leads a group with all processes that the user's code has started.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def _load_error(
    process: subprocess.Popen[bytes] | None, deadline: float, on_poll: Callable[[], None]
) -> str | None:
    """Return the error of a load; None if there is none, or the result is unknown."""
    if process is None:
        return None
    while True:
        on_poll()
        try:
            output, _ = process.communicate(timeout=_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            if time.monotonic() < deadline:
                continue
            log.warning(
                "it was not checked that the ranks can load the call: the check took too long, and"
                " was ended"
            )
            return None
        break
    if output == LOADED:
        return None
    try:
        answer = json.loads(output)
    except ValueError:
        log.warning(
            "it was not checked that the ranks can load the call: the process that loads it exited"
            " with code %d",
            process.returncode,
        )
        return None
    if answer["depends"]:
        log.warning(
            "the call could not be loaded in a process of the driver's machine, but may be in a"
            " rank: %s",
            answer["error"],
        )
        return None
    return str(answer["error"])
