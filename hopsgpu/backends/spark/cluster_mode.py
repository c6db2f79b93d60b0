"""An application in cluster mode: its submission, its states and its end."""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from hopsgpu.cluster_managers.yarn.application_state import ApplicationState
from hopsgpu.cluster_managers.yarn.node_manager import NodeManagers
from hopsgpu.cluster_managers.yarn.queues import queue_path
from hopsgpu.cluster_managers.yarn.resource_manager import ResourceManager
from hopsgpu.core.bounded_reads import read_end
from hopsgpu.errors import HopsGpuError

_POLL_SECONDS = 1.0
# Time for a ResourceManager to restart, or for another one to take over.
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
# Parts of a text that change with each heartbeat of a node: the time, and the queue's usage.
_CHANGING_PARTS = re.compile(r"(?<=: )\[[^]]*\] |\s+(?:Details :|Last Node which was processed).*")
Say = Callable[[str], None]


class SubmittedApplication:
    """An application that is submitted to YARN, whose state is reported.

    Args:
        nodes: the NodeManagers, for the driver's log.
        say: receives lines for the person who waits.
    """

    def __init__(
        self,
        manager: ResourceManager,
        nodes: NodeManagers,
        tag: str,
        say: Say,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._manager = manager
        self._nodes = nodes
        self._tag = tag
        self._say = say
        self._clock = clock
        self._sleep = sleep
        self._began = clock()

    def submit(
        self, command: Sequence[str], environ: Mapping[str, str], queue_paths: Sequence[str]
    ) -> ApplicationState:
        """Run spark-submit, which returns once YARN has accepted the application.

        Args:
            queue_paths: paths of YARN's queues.

        Raises:
            HopsGpuError: YARN has not accepted the application; the message has the end of
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
            output = _last_lines(read_end(Path(log.name), _LAST_BYTES))
        application = self._manager.find_by_tag(self._tag)
        if code or application is None:
            why = ""
            if application is not None:
                why = f" ({application.id} is {application.state}: {application.diagnostics})"
            raise HopsGpuError(
                f"spark-submit ended with exit code {code}, and the application does not run{why}."
                f" The end of its output:\n{output}"
            )
        queue = queue_path(application.queue, queue_paths)
        self._say(f"{application.id} {application.name!r} is in queue {queue}")
        return application

    def follow(self, application: ApplicationState) -> ApplicationState:
        """Wait for the application's end, report every change of its state, and return the last.

        Raises:
            HopsGpuError: the ResourceManager has not answered for 15 min, or no longer knows the
                application.
        """
        last_gist, has_log, silent_since = "", False, None
        while True:
            try:
                state = self._manager.application_state(application.id)
                silent_since = None
            except HopsGpuError as error:
                silent_since = self._clock() if silent_since is None else silent_since
                if self._clock() - silent_since > _SILENT_SECONDS:
                    raise
                text = str(error)
            else:
                if state.has_ended:
                    return state
                if state.log and not has_log:
                    self._say(f"log of the driver: {self._log(state)}")
                    has_log = True
                text = _where(state)
            if (gist := _gist(text)) != last_gist:
                self._say(f"{self._clock() - self._began:6.1f} s: {text}")
                last_gist = gist
            # Poll: YARN does not notify clients of a change.
            self._sleep(_POLL_SECONDS)

    def report_end(self, state: ApplicationState) -> None:
        """Report how the application ended, with the last lines of its driver's output.

        After a success these are lines of stdout only; for a killed application there are none.
        """
        how = state.final if state.state == "FINISHED" else state.state
        if state.has_succeeded:
            self._report_output_end(state, "stdout", _LAST_LINES_AFTER_SUCCESS)
            self._say(f"{self._clock() - self._began:6.1f} s: {state.id} has ended: {how}")
            return
        # The output of a killed application shows only how Spark ended.
        for name in ("stdout", "stderr") if state.state != "KILLED" else ():
            self._report_output_end(state, name, _LAST_LINES)
        self._say(
            f"{state.id} has ended: {how}: {state.diagnostics or 'no reason given'}."
            f" Log of the driver: {self._log(state)}, or: yarn logs -applicationId {state.id}"
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
                application = self._manager.find_by_tag(self._tag)
                if application is None or application.has_ended:
                    return
                if not is_requested:
                    self._manager.kill(application.id, application.user)
                    is_requested = True
                    self._say_if_possible(f"ending {application.id}")
            except HopsGpuError as error:  # a ResourceManager may not answer for some seconds
                problem = str(error)
            if self._clock() >= deadline:
                break
            self._sleep(_POLL_SECONDS / 10)
        if not is_requested:
            self._say_if_possible(
                f"the application may still be running ({problem}): find it with yarn application"
                " -list, and end it with yarn application -kill ID"
            )

    def _say_if_possible(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal may be gone
            self._say(text)

    def _log(self, state: ApplicationState) -> str:
        if not state.log:
            return "none yet"
        # `base` replaces host names that only YARN's daemons know.
        path = state.log.partition("//")[2].partition("/")[2]
        return f"{self._nodes.base(state.web)}/{path}"

    def _report_output_end(self, state: ApplicationState, name: str, max_lines: int) -> None:
        if not state.master:
            return
        try:
            text = self._nodes.log(state.web, state.master, name, _LAST_BYTES)
        except HopsGpuError as error:
            lines = f"  (its node does not return it: {error})"
        else:
            lines = _last_lines(_SPARK_MESSAGES.sub("", text), max_lines)
        if lines:
            self._say(f"the end of the driver's {name}:\n{lines}")


def _where(state: ApplicationState) -> str:
    if state.state == "RUNNING":
        return f"RUNNING, GPUs held: {state.gpus}"
    return f"{state.state}: {state.diagnostics or 'no reason given'}"


def _gist(text: str) -> str:
    return _CHANGING_PARTS.sub("", text)


def _stop(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(_STOPPING_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def _last_lines(text: str, most: int = _LAST_LINES) -> str:
    lines = [f"  {line}" for line in text.rstrip().splitlines()]
    return "\n".join(lines[-most:])
