"""A container on this machine: a process that leases GPUs and runs an agent.

The driver starts `python -m hopsgpu.backends.local.container` in a directory of its own. The first
line of the process's input is the request (`ContainerRequest` as JSON), so that the run's secret is
not on a command line. The process reports to the driver with lines of JSON on stdout:
{"waiting": …}, {"warning": …} or {"problem": …, "kind": …}. The process ends when the driver
disconnects, closes the process's input, or has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hopsgpu.agent.agent import run_agent
from hopsgpu.backends.local.gpu_leases import NoLongerNeeded, take_gpus
from hopsgpu.control.peer import DriverEndpoint
from hopsgpu.core.wait_reasons import WaitReason
from hopsgpu.errors import HopsGpuError
from hopsgpu.gpu.node.discovery_script import DiscoveryFailure, write_container_gpus
from hopsgpu.gpu.node.leases import LeaseError, Leases, lease_directory, owner

# Directory that all containers share, as on a node; next to the containers' directories.
SHARED = "shared"
_WAIT_SECONDS = 0.3
_REFRESH_SECONDS = 10.0


@dataclass(frozen=True)
class ContainerRequest:
    """The driver's request for a container.

    Attributes:
        gpu_type: words that the GPUs' product name must contain; None for any GPU.
    """

    driver: DriverEndpoint
    gpus: int
    gpu_type: str | None
    excluded_gpus: tuple[str, ...]
    pid: int

    def dump(self) -> bytes:
        """Return the request as a line that `from_line` reads; it contains the run's secret."""
        driver = vars(self.driver) | {"secret": self.driver.secret.hex()}
        return json.dumps({**vars(self), "driver": driver}).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> ContainerRequest:
        fields = json.loads(line)
        driver = fields["driver"]
        driver["secret"] = bytes.fromhex(driver["secret"])
        driver["modules"] = tuple(driver["modules"])
        excluded_gpus = tuple(fields["excluded_gpus"])
        return cls(**{**fields, "driver": DriverEndpoint(**driver), "excluded_gpus": excluded_gpus})


def main() -> int:
    """Serve until the driver no longer needs the container; return the exit code."""
    request = ContainerRequest.from_line(sys.stdin.buffer.readline())
    directory = Path.cwd()
    os.environ["CONTAINER_ID"] = f"local-{os.getpid()}"
    try:
        with _gpus(request):
            run_agent(request.driver, watched_pid=os.getpid())
    except NoLongerNeeded:
        return 0
    except (HopsGpuError, LeaseError, DiscoveryFailure, OSError) as error:
        _report(problem=str(error) or repr(error), kind=type(error).__name__)
        return 1
    finally:
        if os.getppid() != request.pid:
            # A running driver removes the directories itself.
            shutil.rmtree(directory, ignore_errors=True)
            _remove_unused(directory.parent)
    return 0


def _remove_unused(directory: Path) -> None:
    """Remove the directory of a driver's containers, unless another container may still use it."""
    with contextlib.suppress(FileNotFoundError):  # another container has removed it
        if {entry.name for entry in directory.iterdir()} <= {SHARED}:
            shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _gpus(request: ContainerRequest) -> Iterator[None]:
    if not request.gpus:
        yield
        return
    directory = lease_directory(os.environ)
    with Leases(directory) as leases:
        devices = take_gpus(
            request.gpus,
            request.gpu_type,
            request.excluded_gpus,
            leases,
            directory,
            _wait,
            lambda text: _report(warning=text),
        )
        leases.write_owner(owner(os.environ, os.getpid()))
        write_container_gpus(devices, is_isolated=False)
        with _refresh_leases(leases):
            yield


@contextlib.contextmanager
def _refresh_leases(leases: Leases) -> Iterator[None]:
    """Touch the leases' files while inside, so that cleaners of old files do not remove them."""
    ended = threading.Event()

    def refresh() -> None:
        while not ended.wait(_REFRESH_SECONDS):
            leases.refresh()

    thread = threading.Thread(target=refresh, name="hopsgpu-leases", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _wait(why: WaitReason) -> bool:
    """Wait a moment for GPUs; return False if the driver has closed our input or has ended."""
    _report(waiting=[why.sentence, why.details, why.lack])
    return not select.select([sys.stdin.buffer], [], [], _WAIT_SECONDS)[0]


def _report(**fields: Any) -> None:
    # A driver that has ended needs no report.
    with contextlib.suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), json.dumps(fields).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
