"""The driver's side of a container's process."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hopsgpu.agent.rank_environment import package_path
from hopsgpu.backends.local import container as container_module
from hopsgpu.backends.local.container import ContainerRequest
from hopsgpu.errors import CapacityError, ConfigError, DiscoveryError, HopsGpuError

log = logging.getLogger(__name__)

_LOG = "container.log"
_MOST_SAID = 500
_KINDS = {kind.__name__: kind for kind in (CapacityError, ConfigError, DiscoveryError)}


class ContainerJob:
    """A container's process from its start to its end; a `grant.Job`.

    Args:
        wanted: the request for the container.
        directory: directory of the container, which exists.
        warn: receives warnings for people; called in a thread.
        package: path to import hopsgpu from; None for the driver's.

    Attributes:
        ended: event, set when the process is over.
        waiting_for: what the process waits for, in words.
        problem: why the process could not serve, if it has reported that; else None.
    """

    def __init__(
        self,
        wanted: ContainerRequest,
        directory: Path,
        warn: Callable[[str], None],
        package: Path | None = None,
    ) -> None:
        self.ended = threading.Event()
        self.waiting_for = "its process is starting"
        self.problem: HopsGpuError | None = None
        self._warn = warn
        self._log = directory / _LOG
        # Ranks must not get the secret of the driver's JVM.
        own = {k: v for k, v in os.environ.items() if not k.startswith("PYSPARK_GATEWAY")}
        ours = package_path() if package is None else str(package)
        path = os.pathsep.join(filter(None, (ours, os.environ.get("PYTHONPATH"))))
        with self._log.open("ab") as said:
            # In a session of its own, so that only the driver receives a Ctrl-C.
            self._process = subprocess.Popen(
                [sys.executable, "-m", container_module.__name__],
                cwd=directory,
                env={**own, "PYTHONPATH": path},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                start_new_session=True,
            )
        self._listening = threading.Thread(
            target=self._listen, name="hopsgpu-container", daemon=True
        )
        try:
            self._write(wanted.dump())
        finally:
            self._listening.start()

    def close(self) -> None:
        """Close the process's input, which ends it if it still waits for GPUs.

        A process that has its GPUs ends when the driver disconnects its agent.
        """
        if self._process.stdin is not None:
            try:
                self._process.stdin.close()
            except BrokenPipeError:  # the process has ended
                return

    def kill(self) -> None:
        """Kill the process; its process daemon then ends the ranks."""
        self._process.kill()

    def reason(self, seconds: float) -> str:
        """Return why the process ended, in words; wait up to `seconds` for its end."""
        self.ended.wait(seconds)
        if self.problem is not None:
            return str(self.problem)
        code = self._process.poll()
        if code is None:
            return "its process is still running"
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        try:
            said = self._log.read_text(errors="backslashreplace").strip()
        except OSError:
            said = ""
        last = said.splitlines()[-1][-_MOST_SAID:] if said else ""
        return f"its process on this machine ended with {how}{f' ({last})' if last else ''}"

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None, "it was asked for a pipe"
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except BrokenPipeError:  # the process has ended; `reason` says how
            return

    def _listen(self) -> None:
        assert self._process.stdout is not None, "it was asked for a pipe"
        with self._process.stdout as said:
            for line in said:
                self._take(json.loads(line))
        code = self._process.wait()
        log.debug("process %d of a container ended with %d", self._process.pid, code)
        self.ended.set()

    def _take(self, told: dict[str, Any]) -> None:
        if "waiting" in told:
            if told["waiting"] != self.waiting_for:
                log.debug("container process %d waits: %s", self._process.pid, told["waiting"])
            self.waiting_for = told["waiting"]
        elif "warning" in told:
            self._warn(told["warning"])
        elif "problem" in told:
            self.problem = _KINDS.get(told["kind"], HopsGpuError)(told["problem"])
