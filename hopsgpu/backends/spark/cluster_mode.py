"""An application in cluster mode: its submission, its states, and its end with the submitter."""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from hopsgpu.errors import HopsGpuError
from hopsgpu.yarn.application_state import ApplicationState
from hopsgpu.yarn.node_manager import NodeManagers
from hopsgpu.yarn.resource_manager import ResourceManager

_LOOK_SECONDS = 1.0
# Time for a ResourceManager to restart, or for another one to take over.
_SILENT_SECONDS = 900.0
_ENDING_SECONDS = 30.0
_STOPPING_SECONDS = 10.0
_LAST_BYTES = 64 * 1024
_LAST_LINES = 30
# Fewer lines after a success, because nobody looks for an error.
_LAST_LINES_OF_SUCCESS = 10
# Spark's own messages that report no trouble (DEBUG, INFO). A message of several lines has them
# between two rules (=====); lines after any other message are the script's, which writes to the
# same file.
_STAMP = r"\d\d/\d\d/\d\d \d\d:\d\d:\d\d "
_OF_SPARK = re.compile(
    rf"^{_STAMP}(?:DEBUG|INFO) [^\n]*\n?(?:={{20,}}\n.*?(?:^={{20,}}\n?|(?=^{_STAMP})|\Z))?",
    re.MULTILINE | re.DOTALL,
)
# The parts of a text that YARN changes with each heartbeat of a node: the time, and how full the
# queue is.
_PASSING = re.compile(r"(?<=: )\[[^]]*\] |\s+(?:Details :|Last Node which was processed).*")
Say = Callable[[str], None]


class SubmittedApplication:
    """One application that is submitted to YARN, and the reports of its state.

    Args:
        manager: the ResourceManager.
        nodes: the NodeManagers, for the driver's log.
        tag: unique tag of the application.
        say: receives lines for the person who waits.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        manager: ResourceManager,
        nodes: NodeManagers,
        tag: str,
        say: Say,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._manager = manager
        self._nodes = nodes
        self._tag = tag
        self._say = say
        self._clock = clock
        self._began = clock()

    def submit(self, command: Sequence[str], environ: Mapping[str, str]) -> ApplicationState:
        """Run spark-submit, which returns once YARN has accepted the application.

        Raises:
            HopsGpuError: YARN has not accepted the application; the message has the end of
                spark-submit's output.
        """
        with tempfile.TemporaryFile("w+", errors="replace") as log:
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
            log.seek(0)
            output = _last_lines(log.read())
        application = self._manager.find_by_tag(self._tag)
        if code or application is None:
            why = ""
            if application is not None:
                why = f" ({application.id} is {application.state}: {application.diagnostics})"
            raise HopsGpuError(
                f"spark-submit ended with exit code {code}, and the application does not run{why}."
                f" The end of its output:\n{output}"
            )
        self._say(f"{application.id} {application.name!r} is in queue {application.queue}")
        return application

    def follow(self, application: ApplicationState) -> ApplicationState:
        """Wait for the application's end, report every change of its state, and return the last.

        Raises:
            HopsGpuError: the ResourceManager has not answered for a quarter of an hour, or has
                forgotten the application.
        """
        last_gist, has_log, silent_since = "", False, None
        while True:
            try:
                standing = self._manager.application_state(application.id)
                silent_since = None
            except HopsGpuError as error:
                silent_since = self._clock() if silent_since is None else silent_since
                if self._clock() - silent_since > _SILENT_SECONDS:
                    raise
                text = str(error)
            else:
                if standing.has_ended:
                    return standing
                if standing.log and not has_log:
                    self._say(f"log of the driver: {self._log(standing)}")
                    has_log = True
                text = _where(standing)
            if (gist := _gist(text)) != last_gist:
                self._say(f"{self._clock() - self._began:6.1f} s: {text}")
                last_gist = gist
            # YARN does not notify clients of a change.
            time.sleep(_LOOK_SECONDS)

    def tell_end(self, standing: ApplicationState) -> None:
        """Report how the application ended, with the last lines of its driver's output.

        After a success these are lines of stdout only; for a killed application there are none.
        """
        how = standing.final if standing.state == "FINISHED" else standing.state
        if standing.has_succeeded:
            self._tell_last_words(standing, "stdout", _LAST_LINES_OF_SUCCESS)
            self._say(f"{self._clock() - self._began:6.1f} s: {standing.id} has ended: {how}")
            return
        # If the application was killed, they only show how Spark ended, and no error of the script.
        for name in ("stdout", "stderr") if standing.state != "KILLED" else ():
            self._tell_last_words(standing, name, _LAST_LINES)
        self._say(
            f"{standing.id} has ended: {how}: {standing.diagnostics or 'no reason given'}."
            f" Log of the driver: {self._log(standing)}, or: yarn logs -applicationId {standing.id}"
        )

    @contextlib.contextmanager
    def ended_with(self) -> Iterator[None]:
        """End the application if this process leaves the context by an exception.

        An application that has ended, or was never accepted, is left alone.
        """
        try:
            yield
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        until, asked, problem = self._clock() + _ENDING_SECONDS, False, ""
        while True:
            try:
                application = self._manager.find_by_tag(self._tag)
                if application is None or application.has_ended:
                    return
                if not asked:
                    self._manager.kill(application.id, application.user)
                    asked = True
                    self._say_if_heard(f"ending {application.id}")
            except HopsGpuError as error:  # a ResourceManager may not answer for some seconds
                problem = str(error)
            if self._clock() >= until:
                break
            time.sleep(_LOOK_SECONDS / 10)
        if not asked:
            self._say_if_heard(
                f"the application may still be running ({problem}): find it with yarn application"
                " -list, and end it with yarn application -kill ID"
            )

    def _say_if_heard(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal may be gone
            self._say(text)

    def _log(self, standing: ApplicationState) -> str:
        if not standing.log:
            return "none yet"
        # Some host names are known only to YARN's own daemons, so `base` replaces them.
        path = standing.log.partition("//")[2].partition("/")[2]
        return f"{self._nodes.base(standing.web)}/{path}"

    def _tell_last_words(self, standing: ApplicationState, name: str, most_lines: int) -> None:
        if not standing.master:
            return
        try:
            text = self._nodes.log(standing.web, standing.master, name, _LAST_BYTES)
        except HopsGpuError as error:
            words = f"  (its node does not return it: {error})"
        else:
            words = _last_lines(_OF_SPARK.sub("", text), most_lines)
        if words:
            self._say(f"the end of the driver's {name}:\n{words}")


def _where(standing: ApplicationState) -> str:
    if standing.state == "RUNNING":
        return f"RUNNING, GPUs held: {standing.gpus}"
    return f"{standing.state}: {standing.diagnostics or 'no reason given'}"


def _gist(text: str) -> str:
    """Return a text without the parts that change with each heartbeat of a node."""
    return _PASSING.sub("", text)


def _stop(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(_STOPPING_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def _last_lines(text: str, most: int = _LAST_LINES) -> str:
    lines = [f"  {line}" for line in text.rstrip().splitlines()]
    return "\n".join(lines[-most:])
