"""An application in cluster mode: its submission, its states and its end."""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from hopsgpu.cluster_managers.submitted_drivers import DriverState, SubmittedDrivers
from hopsgpu.core.bounded_reads import read_end
from hopsgpu.errors import ConfigError, HopsGpuError

_POLL_SECONDS = 1.0
# Time for a cluster manager to restart, or for another one to take over.
_SILENT_SECONDS = 900.0
_ENDING_SECONDS = 30.0
_STOPPING_SECONDS = 10.0
_LAST_BYTES = 64 * 1024
_LAST_LINES = 30
# After a success, fewer lines are of interest.
_LAST_LINES_AFTER_SUCCESS = 10
# Spark's own messages of level DEBUG and INFO. A message of several lines has two rules (=====)
# around them; other lines belong to the script, which writes to the same file.
_STAMP = r"\d\d/\d\d/\d\d \d\d:\d\d:\d\d "
_SPARK_MESSAGES = re.compile(
    rf"^{_STAMP}(?:DEBUG|INFO) [^\n]*\n?(?:={{20,}}\n.*?(?:^={{20,}}\n?|(?=^{_STAMP})|\Z))?",
    re.MULTILINE | re.DOTALL,
)
# Frames of a Java stack, which would leave no room for what was said before them.
_STACK = re.compile(r"^\s+at [^\n]*\n?", re.MULTILINE)
# Spark's own messages of all levels, with their stacks.
_ALL_SPARK_MESSAGES = re.compile(
    rf"^{_STAMP}[A-Z]+ [^\n]*\n?"
    r"(?:(?:\s+(?:at |\.\.\. )|Caused by: |[\w.$]+(?:Exception|Error)(?::|$))[^\n]*\n?)*",
    re.MULTILINE,
)
Say = Callable[[str], None]


class SubmittedApplication:
    """An application that is submitted to a cluster, whose state is reported.

    Args:
        drivers: the drivers that the cluster runs.
        tag: the tag of the application's submission.
        say: receives lines for the person who waits.
    """

    def __init__(
        self,
        drivers: SubmittedDrivers,
        tag: str,
        say: Say,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._drivers = drivers
        self._tag = tag
        self._say = say
        self._clock = clock
        self._sleep = sleep
        self._began = clock()

    def submit(self, command: Sequence[str], environ: Mapping[str, str]) -> DriverState:
        """Run spark-submit, which returns once the cluster has accepted the application.

        Raises:
            HopsGpuError: the cluster has not accepted the application; the message has the end of
                spark-submit's output.
        """
        with tempfile.NamedTemporaryFile() as log:
            # In a session of its own, so that only this process receives a Ctrl-C in the terminal.
            with subprocess.Popen(
                command,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            ) as process:
                try:
                    code = process.wait()
                except BaseException:
                    _stop(process)
                    raise
            output = _last_lines(_STACK.sub("", read_end(Path(log.name), _LAST_BYTES)))
        application = self._drivers.find(self._tag)
        if code or application is None:
            why = ""
            if application is not None:
                why = f" ({application.id} is {application.situation})"
            raise HopsGpuError(
                f"spark-submit ended with exit code {code}, and the application does not run{why}."
                f" The end of its output:\n{output}"
            )
        self._say(f"{application.id} {application.name!r} is in {application.place}")
        return application

    def follow(self, application: DriverState) -> DriverState:
        """Wait for the application's end, report every change of its state, and return the last.

        Raises:
            ConfigError: nothing but another setting helps the driver to start.
            HopsGpuError: the cluster manager has not answered for 15 min, or no longer knows the
                application.
        """
        last_gist, has_log, silent_since = "", False, None
        while True:
            try:
                state = self._drivers.state(application.id)
                silent_since = None
            except HopsGpuError as error:
                silent_since = self._clock() if silent_since is None else silent_since
                if self._clock() - silent_since > _SILENT_SECONDS:
                    raise
                text = gist = str(error)
            else:
                if state.has_ended:
                    return state
                _check_start(state)
                if state.log and not has_log:
                    self._say(f"log of the driver: {state.log}")
                    has_log = True
                text, gist = state.situation, state.gist
            if gist != last_gist:
                self._say(f"{self._clock() - self._began:6.1f} s: {text}")
                last_gist = gist
            # Poll: YARN does not notify clients of a change.
            self._sleep(_POLL_SECONDS)

    def report_end(self, state: DriverState) -> None:
        """Report how the application ended, with the last lines of its driver's output."""
        max_lines = _LAST_LINES_AFTER_SUCCESS if state.has_succeeded else _LAST_LINES
        for output in self._drivers.outputs(state) if state.driver else ():
            self._report_output_end(state, output, max_lines)
        if state.has_succeeded:
            seconds = self._clock() - self._began
            self._say(f"{seconds:6.1f} s: {state.id} has ended: {state.outcome}")
            return
        logs = dict.fromkeys(filter(None, (state.log, self._drivers.log_command(state))))
        self._say(
            f"{state.id} has ended: {state.outcome}: {state.diagnostics or 'no reason given'}."
            f" Log of the driver: {', or: '.join(logs) or 'none'}"
        )

    @contextlib.contextmanager
    def end_on_error(self) -> Iterator[None]:
        """End the application if this process leaves the context by an exception."""
        try:
            yield
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        deadline, is_requested, problem = self._clock() + _ENDING_SECONDS, False, ""
        while True:
            try:
                application = self._drivers.find(self._tag)
                if application is None or application.has_ended:
                    return
                if not is_requested:
                    self._drivers.end(application)
                    is_requested = True
                    self._say_if_possible(f"ending {application.id}")
            except HopsGpuError as error:  # a cluster manager may not answer for some seconds
                problem = str(error)
            if self._clock() >= deadline:
                break
            self._sleep(_POLL_SECONDS / 10)
        if not is_requested:
            self._say_if_possible(
                f"the application may still be running ({problem}): find it with"
                f" {self._drivers.list_command()}, and end it with"
                f" {self._drivers.end_command('ID')}"
            )

    def _say_if_possible(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal may be gone
            self._say(text)

    def _report_output_end(self, state: DriverState, name: str, max_lines: int) -> None:
        try:
            text = self._drivers.read_end(state, name, _LAST_BYTES)
        except HopsGpuError as error:
            lines = f"  (its node does not return it: {error})"
        else:
            # After a success, Spark's warnings say only how executors were released.
            spark = _ALL_SPARK_MESSAGES if state.has_succeeded else _SPARK_MESSAGES
            lines = _last_lines(spark.sub("", text), max_lines)
        if lines:
            self._say(f"the end of the driver's {name}:\n{lines}")


def _check_start(state: DriverState) -> None:
    """Raise ConfigError if nothing but another setting helps the driver to start."""
    if state.problem is not None and state.problem.is_final:
        raise ConfigError(state.problem.text)


def _stop(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(_STOPPING_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def _last_lines(text: str, most: int = _LAST_LINES) -> str:
    lines = [f"  {line}" for line in text.rstrip().splitlines()]
    return "\n".join(lines[-most:])
