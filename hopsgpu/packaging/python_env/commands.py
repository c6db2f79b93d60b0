"""Programs that make an environment (pip, conda) and can be cancelled."""

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

_POLL_SECONDS = 0.2
_MAX_LINES = 12
_MAX_CHARACTERS = 3000


def run(
    command: Sequence[str],
    purpose: str,
    stop: threading.Event,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run a program for a purpose that errors name; return its output.

    Raises:
        ConfigError: it cannot be started, or fails; the message has the end of its output.
        Cancelled: `stop` was set; the program was killed with its process group.
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
    """Return the exit code, or None if `stop` was set."""
    while not stop.is_set():
        try:
            return process.wait(_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    return None


def _last_lines(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return "\n".join(lines[-_MAX_LINES:])[-_MAX_CHARACTERS:] or "(it wrote nothing)"
