"""A container to start ranks in: a stand-in for the executor's JVM, and its directory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hopsgpu.agent import spare_child
from hopsgpu.agent.daemon_client import DaemonClient, StartedRank, connected
from hopsgpu.agent.orphans import find_marked
from hopsgpu.agent.rank_environment import ServerSpec
from hopsgpu.agent.reaper import ExitStatus
from hopsgpu.linux import comm
from hopsgpu.packaging.pickling import pickle_call
from hopsgpu.rank import files
from tests.bounds import HANG_SECONDS
from tests.conftest import gone, until

ROOT = Path(__file__).resolve().parents[2]

# Its name is what a daemon looks for above the task that starts it.
JVM = """
import ctypes, signal, subprocess, sys
PR_SET_NAME = 15
ctypes.CDLL(None).prctl(PR_SET_NAME, b"java", 0, 0, 0)
print("named", flush=True)
if sys.argv[1:]:
    subprocess.run(sys.argv[1:])
signal.pause()
"""


@dataclass
class Rank:
    """A rank that was started, and its directory."""

    daemon: DaemonClient
    started: StartedRank
    directory: Path

    @property
    def pid(self) -> int:
        return self.started.pid

    @property
    def log(self) -> str:
        return (self.directory / files.LOG).read_text()

    async def end(self) -> ExitStatus:
        return await asyncio.wait_for(self.daemon.wait_exit(self.pid), HANG_SECONDS)

    async def value(self) -> Any:
        ended = await self.end()
        assert ended.status == 0, self.log
        return pickle.loads((self.directory / files.VALUE).read_bytes())


@dataclass
class Container:
    """A directory with a daemon that ends with a stand-in for the JVM.

    Attributes:
        directory: as YARN makes it.
        jvm: pid of the stand-in.
        tokens: of the daemons that there were.
        ranks: started so far.
    """

    directory: Path
    jvm: int
    tokens: set[str] = field(default_factory=set)
    ranks: int = 0

    def spec(self, *modules: str, seconds: float = HANG_SECONDS, **variables: str) -> ServerSpec:
        path = os.pathsep.join((str(ROOT), str(self.directory / "path")))
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": path, **variables}
        return ServerSpec(sys.executable, environment, modules, seconds)

    def module(self, name: str, source: str) -> None:
        """A module that fork servers and ranks can import."""
        file = self.directory / "path" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)

    @contextlib.asynccontextmanager
    async def connect_daemon(self) -> AsyncIterator[DaemonClient]:
        async with connected(self.directory / "hopsgpu", self.jvm) as daemon:
            self.tokens.add(daemon.token)
            yield daemon

    async def start(
        self,
        daemon: DaemonClient,
        spec: ServerSpec,
        function: Callable[..., Any],
        *args: Any,
        own: Mapping[str, str] | None = None,
    ) -> Rank:
        self.ranks += 1
        directory = self.directory / f"rank-{self.ranks}"
        (directory / files.WORK).mkdir(parents=True)
        (directory / files.CALL).write_bytes(pickle_call(function, args, {}))
        return Rank(daemon, await daemon.spawn(spec, directory, own or {}), directory)

    async def value(self, spec: ServerSpec, function: Callable[..., Any], *args: Any) -> Any:
        """The value of a function that a rank has run over a connection of its own."""
        async with self.connect_daemon() as daemon:
            return await (await self.start(daemon, spec, function, *args)).value()

    def marked(self) -> list[int]:
        """All processes of fork servers and ranks, and no spares."""
        return without_spares(self.left())

    def spares(self) -> list[int]:
        """Processes that are to become ranks."""
        return [pid for pid in self.left() if comm(pid) == spare_child.NAME]

    def left(self) -> list[int]:
        """All processes of fork servers and ranks, and spares."""
        return [pid for token in self.tokens for pid in find_marked(token)]


def without_spares(pids: Iterable[int]) -> list[int]:
    return [pid for pid in pids if comm(pid) != spare_child.NAME]


@contextlib.contextmanager
def container(directory: Path) -> Iterator[Container]:
    """A container; when its JVM ends nothing of it may be left."""
    directory.mkdir(parents=True, exist_ok=True)
    with subprocess.Popen([sys.executable, "-c", JVM], stdout=subprocess.PIPE) as jvm:
        assert jvm.stdout is not None and jvm.stdout.readline()
        there = Container(directory, jvm.pid)
        try:
            yield there
        finally:
            jvm.kill()
    assert until(lambda: not there.left()), there.left()
    assert until(lambda: not list(directory.glob("hopsgpu/process-daemon-*")))


__all__ = ["Container", "Rank", "container", "gone", "until", "without_spares"]
