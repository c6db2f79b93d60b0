"""The saved state of a cluster: its size, its ports, its processes."""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from hopsgpu.devcluster.config import ClusterSpec, SiteConf
from hopsgpu.devcluster.daemons import DaemonProcess
from hopsgpu.devcluster.layout import NAME_SERVICE, ClusterLayout
from hopsgpu.errors import ClusterError

_FORM = 5
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class ClusterState:
    """The state of the last start in a directory.

    Attributes:
        gpus: "real", "simulated" or "none", and why.
        java: JAVA_HOME of the daemons and of clients.
        ports: port by the names of `ports.port_names`; kept after `down` for the next `up`.
        processes: daemon → process; empty after `down`.
        spark: version of the Spark of the Masters and Workers; "" on YARN.
    """

    spec: ClusterSpec
    gpus: str
    java: str
    ports: dict[str, int]
    processes: dict[str, DaemonProcess] = field(default_factory=dict)
    spark: str = ""

    def with_process(self, daemon: str, process: DaemonProcess) -> ClusterState:
        return replace(self, processes={**self.processes, daemon: process})

    @property
    def filesystem(self) -> str:
        if self.spec.namenode_ha:
            return f"hdfs://{NAME_SERVICE}"
        return f"hdfs://{self.spec.namenode_host}:{self.ports['namenode.rpc']}"

    @property
    def is_running(self) -> bool:
        """Whether any daemon is alive."""
        return any(process.alive for process in self.processes.values())

    @property
    def dead(self) -> list[str]:
        """The daemons that were started and have ended since."""
        return [daemon for daemon, process in self.processes.items() if not process.alive]

    @property
    def missing(self) -> list[str]:
        """The daemons of the spec that do not run."""
        return [
            d for d in self.spec.daemons if d not in self.processes or not self.processes[d].alive
        ]


def load(layout: ClusterLayout) -> ClusterState | None:
    """Return the state of a directory; None if no cluster was ever started in it.

    Raise ClusterError if the file is not a state of hopsgpu.
    """
    try:
        content = json.loads(layout.state.read_text(encoding="utf-8"))
        if content.pop("form") != _FORM:
            raise ValueError("another version of hopsgpu wrote it")
        spec = content.pop("spec")
        spec["conf"] = SiteConf(**spec["conf"])
        spec["token_lifetimes"] = tuple(spec["token_lifetimes"])
        processes = {d: DaemonProcess(**p) for d, p in content.pop("processes").items()}
        return ClusterState(spec=ClusterSpec(**spec), processes=processes, **content)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise ClusterError(
            f"cannot read {layout.state}: {e}; stop the daemons it names, if any, and remove it"
        ) from e


def save(layout: ClusterLayout, state: ClusterState) -> None:
    write(layout.state, json.dumps({"form": _FORM, **asdict(state)}, indent=1) + "\n")


@contextmanager
def locked(
    layout: ClusterLayout, report: Callable[[str], object], deadline: float = math.inf
) -> Iterator[None]:
    """Exclude any other `up` or `down` from a cluster's directory.

    Raise ClusterError if another one still runs at the deadline, by time.monotonic().
    """
    try:
        layout.root.mkdir(parents=True, exist_ok=True)
        fd = os.open(layout.lock, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as e:
        raise ClusterError(f"cannot use {layout.root}: {e}") from e
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"waiting for another `up` or `down` in {layout.root}")
            _await_lock(fd, layout, deadline)
        yield
    finally:
        os.close(fd)


def _await_lock(fd: int, layout: ClusterLayout, deadline: float) -> None:
    if deadline == math.inf:
        fcntl.flock(fd, fcntl.LOCK_EX)
        return
    # Poll: flock(2) has no timeout.
    while time.monotonic() < deadline:
        with suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(_POLL_SECONDS)
    raise ClusterError(f"another `up` or `down` in {layout.root} has not ended in time")


def write(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a file of the cluster's directory atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".new")
    scratch.write_text(text, encoding="utf-8")
    scratch.chmod(mode)
    scratch.replace(path)
