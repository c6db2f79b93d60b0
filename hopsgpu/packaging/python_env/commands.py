"""Programs that make an environment (pip, conda), ended when their run no longer wants them."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence

from hopsgpu.errors import Cancelled, ConfigError

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.2
_MOST_LINES = 12
_MOST_SHOWN = 3000


def run(
    command: Sequence[str],
    purpose: str,
    stop: threading.Event,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run a program to its end, and return what it wrote.

    Args:
        command: the program and its arguments.
        purpose: what it does, for errors.
        stop: is set when the program is no longer wanted; it is then killed with its process group.
        environment: its environment variables; this process's by default.

    Raises:
        ConfigError: it cannot be started, or it fails; the message has the last lines that it
            wrote.
        Cancelled: `stop` was set.
    """
    began = time.monotonic()
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(
                f"{purpose} failed: {command[0]} cannot be started: {error.strerror}"
            ) from error
        try:
            code = _wait(process, stop)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        text = output.read().decode(errors="backslashreplace")
    ended = "cancelled" if code is None else f"exit code {code}"
    # The output may contain a password, so it is not logged.
    log.info("%s: %s after %.1f s", purpose, ended, time.monotonic() - began)
    if code is None:
        raise Cancelled(f"the run was cancelled during {purpose}")
    if code != 0:
        raise ConfigError(f"{purpose} failed (exit code {code}):\n{_last_lines(text)}")
    return text


def _wait(process: subprocess.Popen[bytes], stop: threading.Event) -> int | None:
    """Return the exit code, or None if the program is no longer wanted."""
    while not stop.is_set():
        try:
            return process.wait(_LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    return None


def _last_lines(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return "\n".join(lines[-_MOST_LINES:])[-_MOST_SHOWN:] or "(it wrote nothing)"
