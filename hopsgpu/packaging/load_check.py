"""A check at the driver that ranks will be able to load a call: a fresh process loads it once.

It is made only for calls with objects whose load runs code of their own (`load_risks`).
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

# A check that takes longer is ended. An import of TensorFlow from a slow disk takes less.
SECONDS = 30.0
_SLICE_SECONDS = 0.1
_MODULE = "hopsgpu.packaging.load_check_process"
_NO_GPUS = {
    # A number, because code of the user's may read it as one.
    "CUDA_VISIBLE_DEVICES": "-1",
    "HIP_VISIBLE_DEVICES": "-1",
    "ROCR_VISIBLE_DEVICES": "-1",
    "JAX_PLATFORMS": "cpu",
}
# The variables of a rank that is alone: objects may ask for their rank when they are loaded.
_PLACE = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "NODE_RANK": "0",
}
# Variables of the nodes that could keep a Python of this machine from running.
_OF_INTERPRETERS = ("PYTHON", "LD_")
_OF_GATEWAY = "PYSPARK_GATEWAY_"


class LoadFailure(NamedTuple):
    """The failure of a load.

    Attributes:
        error: the error in words.
        sample: the object that cannot be loaded; None if it is not known which one.
    """

    error: str
    sample: object


class LoadChecks:
    """The checks of an application, which do not repeat for the same types.

    Several threads may use it.
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._checked: weakref.WeakSet[type] = weakref.WeakSet()

    @contextlib.contextmanager
    def run_during(
        self,
        call: bytes,
        risks: Mapping[type, object],
        environment: Mapping[str, str],
        pickle_one: Callable[[object], bytes],
        on_slice: Callable[[], None] = lambda: None,
    ) -> Iterator[list[LoadFailure]]:
        """Load a call in another process while the body of `with` runs; then wait for the end.

        Args:
            call: the call, pickled.
            risks: objects in it whose load runs code of their own, by their types.
            environment: variables that the ranks get besides the driver's.
            pickle_one: returns a call that has one object as its argument.
            on_slice: is called several times a second during the wait; the check ends if it raises.

        Yields:
            A list, which contains the failure after the body, if there is one.
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
            error = _error_of(process, deadline, on_slice)
        if error is None:
            self._checked.update(new)
            return
        for value in new.values():
            with _process(pickle_one(value), variables) as process:
                own = _error_of(process, deadline, on_slice)
            if own is not None:
                failures.append(LoadFailure(own, value))
                return
        failures.append(LoadFailure(error, None))


def _environment(ranks: Mapping[str, str]) -> dict[str, str]:
    theirs = {n: value for n, value in ranks.items() if not n.startswith(_OF_INTERPRETERS)}
    path = os.pathsep.join(str(Path(p).absolute()) for p in sys.path if isinstance(p, str))
    # The process must not reach the driver's JVM.
    mine = {n: value for n, value in os.environ.items() if not n.startswith(_OF_GATEWAY)}
    return {**mine, **theirs, **_PLACE, **_NO_GPUS, "PYTHONPATH": path}


@contextlib.contextmanager
def _process(call: bytes, variables: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes] | None]:
    """Start a process that loads a call, and end it on exit; None if it cannot be started."""
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
                # Ctrl-C is for the driver, which ends the process.
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            log.warning("it was not checked that the ranks can load the call: %s", error)
            yield None
            return
        stack.callback(_end, process)
        file.close()
        yield process


def _end(process: subprocess.Popen[bytes]) -> None:
    # The process leads a group, which has what the user's code has started.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def _error_of(
    process: subprocess.Popen[bytes] | None, deadline: float, on_slice: Callable[[], None]
) -> str | None:
    """Return the error of a load; None if there is none, or if it is not known."""
    if process is None:
        return None
    while True:
        on_slice()
        try:
            output, _ = process.communicate(timeout=_SLICE_SECONDS)
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
