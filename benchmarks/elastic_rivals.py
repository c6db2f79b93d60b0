"""Other launchers whose worlds shrink and grow: torchrun, Ray Train and torchft, on this machine.

A member of a world is what a node or an executor is: an agent, a raylet or a replica, with its
rank. All processes of a member have its mark in their environment, and are killed by it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Protocol, TypeVar

from benchmarks.elastic_ranks import SAVED, Event

Found = TypeVar("Found")

_POLL_SECONDS = 0.01
# A process ends by itself after so long, whatever became of the benchmark.
_PROGRAM_SECONDS = 1800
# `timeout` also ends the program when this process dies without leaving its contexts.
_BOUNDED = ("setpriv", "--pdeathsig=TERM", "timeout", "--kill-after=10", str(_PROGRAM_SECONDS))
# Imports of several processes on two cores, and Ray's looks and timeouts of up to a minute.
WAIT_SECONDS = 240.0
_KILL_SECONDS = 30.0
_MARK = "HOPSGPU_BENCH_MEMBER"
_ADDRESS = "127.0.0.1"
# Of the logs of torchrun's agents.
_JOINS = "attempts to join the next round"
_DEAD = "Detected dead node"
_LEAST_STORE = 80 * 2**20


class World(Protocol):
    """A training that runs."""

    @property
    def events(self) -> Sequence[Event]:
        """What its processes have noted so far."""

    def remove(self) -> float:
        """Kill the newest member with all its processes; return when, in s since the epoch."""

    def add(self) -> float:
        """Start a member; return when it was up and about to join, in s since the epoch."""

    def noticed(self, since: float) -> float | None:
        """Return when the launcher knew that a member is lost, or None if it does not tell."""

    def told(self) -> str:
        """Return the last lines of its processes, for the text of an error."""


class System(Protocol):
    """A launcher of elastic training."""

    @property
    def name(self) -> str:
        """As it stands in the tables."""

    def world(self, least: int, most: int) -> AbstractContextManager[World]:
        """Yield a training on `most` members that goes on with `least`; end it with the context."""


class EventFile:
    """Reads events while processes append to them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()
        self._offset = 0
        self._read: list[Event] = []

    def read(self) -> Sequence[Event]:
        """Return all so far."""
        with self.path.open("rb") as file:
            file.seek(self._offset)
            # The last line may be one that is being written.
            text = file.read().rpartition(b"\n")[0]
        if text:
            self._offset += len(text) + 1
            self._read += [Event(**json.loads(line)) for line in text.splitlines()]
        return self._read


class Programs:
    """Starts the programs of a world, by member, and kills what they have started.

    Args:
        directory: for their output.
        environment: variables beside those of this process.
    """

    def __init__(self, directory: Path, environment: Mapping[str, str] | None = None) -> None:
        self._directory = directory
        self._environment = environment or {}
        self._mark = uuid.uuid4().hex
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Programs:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        ends = time.monotonic() + _KILL_SECONDS
        # What is killed may just have forked.
        while self._kill(self._marked("")) and time.monotonic() < ends:
            time.sleep(_POLL_SECONDS)
        for program in self._started:
            program.wait(_KILL_SECONDS)

    def start(self, member: str, command: Sequence[str]) -> None:
        """Start a program of a member; its output is that of `log`."""
        root = str(Path(__file__).resolve().parent.parent)
        own = {_MARK: f"{self._mark}/{member}/", "PYTHONPATH": root}
        with self.log(member).open("ab") as out:
            self._started.append(
                subprocess.Popen(
                    [*_BOUNDED, *command],
                    env={**os.environ, **self._environment, **own},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                )
            )

    def kill(self, member: str) -> float:
        """Kill all processes of a member at once; return when, in seconds since the epoch."""
        pids = self._marked(f"{member}/")
        if not pids:
            raise RuntimeError(f"no process of member {member} runs\n{self.told()}")
        when = time.time()
        self._kill(pids)
        return when

    def log(self, member: str) -> Path:
        """Return the file with a member's output."""
        return self._directory / f"member-{member}.log"

    def told(self) -> str:
        """Return the last lines of all members."""
        logs = sorted(self._directory.glob("member-*.log"))
        return "\n".join(f"{log.name}: {log.read_text(errors='replace')[-2000:]}" for log in logs)

    def _marked(self, member: str) -> list[int]:
        mark = f"{_MARK}={self._mark}/{member}".encode()
        return [pid for pid in _pids() if mark in _environment_of(pid)]

    def _kill(self, pids: Sequence[int]) -> bool:
        """Kill processes, those whose end nobody has seen yet included; return if there were."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for program in self._started:
            program.poll()
        return bool(pids)


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _environment_of(pid: int) -> bytes:
    """Return a process's environment, empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def wait_for(look: Callable[[], Found | None], what: str, told: Callable[[], str]) -> Found:
    """Return what `look` finds once it does.

    Raises:
        TimeoutError: after `WAIT_SECONDS`; the text has what `told` returns.
    """
    ends = time.monotonic() + WAIT_SECONDS
    while (found := look()) is None:
        if time.monotonic() > ends:
            raise TimeoutError(f"no {what} within {WAIT_SECONDS:g} s\n{told()}")
        # Other processes append to files, and nothing tells of it.
        time.sleep(_POLL_SECONDS)
    return found


@dataclass
class _Members:
    """The members of a world.

    Attributes:
        programs: their processes.
        file: where these note events.
        start: starts a member that has a name.
        ready: returns when a member was ready, if it is, given its name and when it was started.
        lost: returns when the launcher noticed a loss, if it has, given when it happened.
    """

    programs: Programs
    file: EventFile
    start: Callable[[str], None]
    ready: Callable[[str, float], float | None]
    lost: Callable[[float], float | None]

    def __post_init__(self) -> None:
        self._numbers = itertools.count()
        self._alive: list[str] = []

    @property
    def events(self) -> Sequence[Event]:
        return self.file.read()

    def begin(self) -> str:
        """Start a member; return its name without waiting for it."""
        name = str(next(self._numbers))
        self.start(name)
        self._alive.append(name)
        return name

    def add(self) -> float:
        began, name = time.time(), self.begin()
        return wait_for(lambda: self.ready(name, began), f"ready member {name}", self.programs.told)

    def remove(self) -> float:
        return self.programs.kill(self._alive.pop())

    def noticed(self, since: float) -> float | None:
        return self.lost(since)

    def told(self) -> str:
        return self.programs.told()


@dataclass(frozen=True)
class Torchrun:
    """torchrun's elastic agents, with the c10d rendezvous.

    A member is ready when its agent says that it enters the rendezvous: its imports are made, as
    those of an executor that has registered with its driver, and no rank is started yet. It has
    noticed a loss when an agent drops the dead one from the rendezvous, for lack of heartbeats; the
    other ranks' collectives have failed long before.

    Attributes:
        name: as it stands in the tables.
        configuration: of the rendezvous; empty for torchrun's defaults.
        saved: steps between two checkpoints; 0 for none.
    """

    name: str
    configuration: str = ""
    saved: int = SAVED

    @contextlib.contextmanager
    def world(self, least: int, most: int) -> Iterator[World]:
        from torch.distributed import TCPStore

        # The store is nobody's of those that are killed, and its port free without a race.
        store = TCPStore(_ADDRESS, 0, is_master=True, wait_for_workers=False)
        # With the agents' own store (the default, as of torch 2.15) a restarted rank can read gloo
        # addresses of the round before, and fails: torchrun is not to be measured by that.
        settings = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        # For the lines of an agent that joins, and of a dead one.
        settings["TORCH_LOGS"] = "+torch.distributed.elastic.rendezvous.dynamic_rendezvous"
        with _programs(settings) as (programs, file):
            configuration = ",".join(filter(None, ("is_host=0", self.configuration)))
            command = [
                *(sys.executable, "-m", "torch.distributed.run"),
                f"--nnodes={least}:{most}",
                "--nproc-per-node=1",
                "--max-restarts=100",
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint={_ADDRESS}:{store.port}",
                f"--rdzv-id={uuid.uuid4().hex}",
                f"--rdzv-conf={configuration}",
                f"--local-addr={_ADDRESS}",
                *("-m", "benchmarks.elastic_ranks", *_arguments("torchrun", file, least, most)),
                f"--saved={self.saved}",
            ]
            members = _Members(
                programs,
                file,
                lambda name: programs.start(name, command),
                lambda name, since: _logged(programs.log(name), _JOINS, since),
                functools.partial(_dead_agent, programs),
            )
            for _ in range(most):
                members.begin()
            yield members


def _dead_agent(programs: Programs, since: float) -> float | None:
    """Return when an agent first dropped a dead one."""
    logs = programs.log("*")
    times = [_logged(log, _DEAD, since) for log in sorted(logs.parent.glob(logs.name))]
    return min((when for when in times if when is not None), default=None)


def _logged(log: Path, text: str, since: float) -> float | None:
    """Return the time of a line in torchrun's log, in seconds since the epoch."""
    for line in log.read_text(errors="replace").splitlines() if log.exists() else ():
        stamp = re.match(r"[DIWEV](\d{4}) (\d\d:\d\d:\d\d\.\d+)", line)
        if stamp is not None and text in line:
            year = datetime.now().year
            when = datetime.strptime(f"{year}{stamp[1]} {stamp[2]}", "%Y%m%d %H:%M:%S.%f")
            if when.timestamp() >= since:
                return when.timestamp()
    return None


@contextlib.contextmanager
def _programs(environment: Mapping[str, str]) -> Iterator[tuple[Programs, EventFile]]:
    # A short name: sockets of Ray are below it.
    with (
        tempfile.TemporaryDirectory(prefix="elastic-", ignore_cleanup_errors=True) as name,
        Programs(Path(name), environment) as programs,
    ):
        yield programs, EventFile(Path(name) / "events")


def _arguments(launcher: str, file: EventFile, least: int, most: int) -> list[str]:
    return [
        launcher,
        f"--events={file.path}",
        f"--checkpoint={file.path.with_name('checkpoint')}",
        f"--seconds={_PROGRAM_SECONDS}",
        *("--workers", str(least), str(most)),
    ]


@dataclass(frozen=True)
class RayTrain:
    """Ray Train's elastic trainer, on one raylet a member and a head that has no CPU to give.

    A member is ready when its raylet has registered, as an executor with its driver; it has noticed
    a loss when Ray counts the node as dead.

    Attributes:
        name: as it stands in the tables.
        interval: seconds between two looks whether the world can grow; None for Ray's minute.
        environment: further settings of Ray.
    """

    name: str
    interval: float | None = None
    environment: tuple[tuple[str, str], ...] = ()

    @contextlib.contextmanager
    def world(self, least: int, most: int) -> Iterator[World]:
        settings = {
            "RAY_USAGE_STATS_ENABLED": "0",
            **dict(self.environment),
        }
        with _programs(settings) as (programs, file):
            start = ["ray", "start", "--block", f"--node-ip-address={_ADDRESS}"]
            start[0] = str(Path(sys.executable).with_name("ray"))
            start += ["--disable-usage-stats", f"--object-store-memory={_LEAST_STORE}"]
            directory = file.path.parent
            programs.start(
                "head",
                [*start, "--head", "--port=0", "--num-cpus=0", "--include-dashboard=false"]
                + [f"--temp-dir={directory}"],
            )
            current = directory / "ray_current_cluster"
            address = wait_for(
                lambda: (current.read_text().strip() or None) if current.exists() else None,
                "head of Ray",
                programs.told,
            )
            node = [*start, f"--address={address}", "--num-cpus=1"]
            node += ["--dashboard-agent-listen-port=0", "--include-log-monitor=false"]
            members = _Members(
                programs,
                file,
                lambda name: programs.start(name, node),
                lambda name, since: _first(file, since, "nodes", most),
                lambda since: _first(file, since, "nodes", most - 1),
            )
            for _ in range(most):
                # One after the other: Ray gives up on a raylet that takes long on busy cores.
                _started(programs, members.begin())
            interval = [] if self.interval is None else [f"--interval={self.interval}"]
            programs.start(
                "driver",
                [
                    *("env", f"RAY_ADDRESS={address}", sys.executable),
                    *("-m", "benchmarks.elastic_ranks"),
                    *_arguments("ray", file, least, most),
                    *interval,
                ],
            )
            yield members


def _started(programs: Programs, name: str) -> None:
    """Wait until a member's raylet runs."""
    log = programs.log(name)
    told = "Ray runtime started"
    wait_for(lambda: told in log.read_text() or None, f"raylet {name}", programs.told)


def _first(file: EventFile, since: float, event: str, world: int) -> float | None:
    """Return the time of the first such event, if there is one."""
    found = (e for e in file.read() if e.time > since and (e.event, e.world) == (event, world))
    return next((e.time for e in found), None)


@dataclass(frozen=True)
class Torchft:
    """torchft: replicas that lose a step, not their process, with torchft's coordinator.

    A member is ready when its process has made its imports and is about to join. torchft does not
    tell when it has noticed a loss.

    Attributes:
        name: as it stands in the tables.
        heartbeat_ms: the coordinator's timeout; None for torchft's default.
    """

    name: str
    heartbeat_ms: int | None = None

    @contextlib.contextmanager
    def world(self, least: int, most: int) -> Iterator[World]:
        from torchft.coordination import LighthouseServer

        timeout = {} if self.heartbeat_ms is None else {"heartbeat_timeout_ms": self.heartbeat_ms}
        lighthouse = LighthouseServer(bind=f"{_ADDRESS}:0", min_replicas=least, **timeout)
        try:
            with _programs({}) as (programs, file):
                port = lighthouse.address().rpartition(":")[2]
                command = [
                    *(sys.executable, "-m", "benchmarks.elastic_ranks"),
                    *_arguments("torchft", file, least, most),
                    f"--lighthouse=http://{_ADDRESS}:{port}",
                ]
                members = _Members(
                    programs,
                    file,
                    lambda name: programs.start(name, command),
                    lambda name, since: _first(file, since, "ready", 0),
                    lambda since: None,
                )
                for _ in range(most):
                    members.begin()
                yield members
        finally:
            lighthouse.shutdown()
