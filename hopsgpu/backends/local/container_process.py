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
from hopsgpu.backends.local.container import SHARED, ContainerRequest
from hopsgpu.core.bounded_reads import read_end
from hopsgpu.core.wait_reasons import WaitReason, starting_process
from hopsgpu.errors import CapacityError, ConfigError, DiscoveryError, HopsGpuError

log = logging.getLogger(__name__)

_LOG = "container.log"
_LOG_TAIL_BYTES = 500
_KINDS = {kind.__name__: kind for kind in (CapacityError, ConfigError, DiscoveryError)}


class ContainerJob:
    """A container's process from its start to its end; a `gang_allocation.Job`.

    Args:
        directory: an existing directory.
        warn: receives warnings for people; called in a thread.
        package: path to import hopsgpu from; None for the driver's.

    Attributes:
        ended: event, set when the process has ended.
        wait_reason: what the process waits for.
        problem: the reported reason why the process cannot serve; else None.
    """

    def __init__(
        self,
        request: ContainerRequest,
        directory: Path,
        warn: Callable[[str], None],
        package: Path | None = None,
    ) -> None:
        self.name = request.driver.job
        self.ended = threading.Event()
        self.is_closed = False
        self.wait_reason = starting_process()
        self.problem: HopsGpuError | None = None
        self._warn = warn
        self._log = directory / _LOG
        # Ranks must not get the secret of the driver's JVM.
        environ = {k: v for k, v in os.environ.items() if not k.startswith("PYSPARK_GATEWAY")}
        hopsgpu_path = package_path() if package is None else str(package)
        path = os.pathsep.join(filter(None, (hopsgpu_path, os.environ.get("PYTHONPATH"))))
        with self._log.open("ab") as errors:
            # In its own session, so that only the driver receives a Ctrl-C.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", container_module.__name__],
                cwd=directory,
                # LOCAL_DIRS as on YARN: the directory that the application's containers share.
                env={**environ, "PYTHONPATH": path, "LOCAL_DIRS": str(directory.parent / SHARED)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        self._listening = threading.Thread(
            target=self._listen, name="hopsgpu-container", daemon=True
        )
        try:
            self._write(request.dump())
        finally:
            self._listening.start()

    def close(self) -> None:
        """Close the process's input, which ends it if it still waits for GPUs.

        A process that has its GPUs ends when the driver disconnects its agent.
        """
        self.is_closed = True
        if self._process.stdin is not None:
            try:
                self._process.stdin.close()
            except BrokenPipeError:  # the process has ended
                return

    def kill(self) -> None:
        """Kill the process; its process daemon then ends the ranks."""
        self._process.kill()

    def loss(self, seconds: float) -> str:
        return self.reason(0.0) if self.ended.wait(seconds) else ""

    def reason(self, seconds: float) -> str:
        self.ended.wait(seconds)
        if self.problem is not None:
            return str(self.problem)
        code = self._process.poll()
        if code is None:
            return "its process is still running"
        status = f"signal {-code}" if code < 0 else f"exit code {code}"
        try:
            text = read_end(self._log, _LOG_TAIL_BYTES).strip()
        except OSError:
            text = ""
        last = text.splitlines()[-1] if text else ""
        return f"its process on this machine ended with {status}{f' ({last})' if last else ''}"

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None, "Popen opens a pipe for it"
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except BrokenPipeError:  # the process has ended; `reason` says how
            return

    def _listen(self) -> None:
        assert self._process.stdout is not None, "Popen opens a pipe for it"
        with self._process.stdout as reports:
            for line in reports:
                self._handle(json.loads(line))
        code = self._process.wait()
        log.debug(
            "container %s: process %d ended with exit code %d", self.name, self._process.pid, code
        )
        self.ended.set()

    def _handle(self, report: dict[str, Any]) -> None:
        if "waiting" in report:
            sentence, details, lack = report["waiting"]
            reason = WaitReason(sentence, tuple(details), lack)
            if reason != self.wait_reason:
                log.debug("container %s waits: %s", self.name, reason)
            self.wait_reason = reason
        elif "warning" in report:
            self._warn(report["warning"])
        elif "problem" in report:
            self.problem = _KINDS.get(report["kind"], HopsGpuError)(report["problem"])
