"""Starts, identifies and stops processes that outlive the command that started them."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hopsgpu.errors import ClusterError

# A variable in the environment of every daemon and its containers; `marker` returns its value.
MARKER = "HOPSGPU_CLUSTER_MEMBER"
_TAIL_BYTES = 40_000
_PROGRAM_SECONDS = 600.0
_THREADS_SECONDS = 5.0
_CAUSE = re.compile(r"Caused by:|^[\w.$]+(Exception|Error)\b")
# utime, stime, cutime and cstime in the fields of /proc/<pid>/stat after the name.
_CPU_TIMES = slice(11, 15)
_SHELL = 'cd "$1" || exit 1; shift; exec "$@"'


@dataclass(frozen=True)
class DaemonProcess:
    """A process, identified by its pid and its start time."""

    pid: int
    born: str

    @classmethod
    def of(cls, pid: int) -> DaemonProcess:
        """Return the process of a pid that was not reaped yet."""
        stat = _stat(pid)
        return cls(pid, stat[1] if stat else "ended")

    @property
    def alive(self) -> bool:
        stat = _stat(self.pid)
        if stat is None or stat[1] != self.born:
            return False
        if stat[0] in "ZX":
            _await_threads(self.pid)
            _reap(self.pid)
            return False
        return True

    @property
    def is_stopped(self) -> bool:
        """Whether a signal such as SIGSTOP has stopped the process."""
        stat = _stat(self.pid)
        return stat is not None and stat == ("T", self.born)

    @property
    def cpu_seconds(self) -> float:
        """The CPU time of the process and of its children that have ended."""
        try:
            ticks = _stat_fields(self.pid)[_CPU_TIMES]
        except OSError:
            return 0.0
        return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def spawn(argv: Sequence[str], environ: Mapping[str, str], cwd: Path, log: Path) -> DaemonProcess:
    """Start a command in its own session, with its output in a new log, and no signal blocked.

    The previous log is kept with the suffix `.previous`.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    if log.exists():
        log.replace(log.with_name(log.name + ".previous"))
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    pid = os.posix_spawn(
        "/bin/sh",
        ["/bin/sh", "-c", _SHELL, "sh", str(cwd), *argv],
        dict(environ),
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), flags, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
            *((os.POSIX_SPAWN_CLOSE, fd) for fd in _inherited_descriptors()),
        ],
        setsid=True,
        setsigmask=(),
    )
    # The process is our child and not yet reaped, so /proc has its entry even if it has ended.
    return DaemonProcess.of(pid)


def _inherited_descriptors() -> list[int]:
    """Return the descriptors that a new process would get from this process's parent.

    A daemon that kept them would hold the lock of a script that calls `up` under flock(1).
    """
    inherited = []
    for entry in Path("/proc/self/fd").iterdir():
        fd = int(entry.name)
        # The descriptor of the listing itself is closed.
        with suppress(OSError):
            if fd > 2 and os.get_inheritable(fd):
                inherited.append(fd)
    return inherited


def run_logged(argv: Sequence[str], environ: Mapping[str, str], log: Path, stdin: str = "") -> None:
    """Run a program, wait for its end, and append its output to a log.

    Raises:
        ClusterError: the program failed, or did not end within ten minutes.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        try:
            completed = subprocess.run(
                argv,
                env=dict(environ),
                input=stdin.encode(),
                stdout=out,
                stderr=out,
                timeout=_PROGRAM_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ClusterError(
                f"{argv[0]} did not end within {_PROGRAM_SECONDS:.0f} s ({log})"
            ) from error
    if completed.returncode:
        raise ClusterError(f"{argv[0]} failed ({log}):\n{last_lines(log)}")


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay SIGINT and SIGTERM while inside, so that a started process is recorded too."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stop(processes: Iterable[DaemonProcess], grace: float) -> None:
    """Stop processes and wait for their end: SIGTERM, then SIGKILL after `grace` seconds."""
    with ExitStack() as stack:
        alive: dict[int, DaemonProcess] = {}
        for process in processes:
            with suppress(ProcessLookupError):
                fd = os.pidfd_open(process.pid)
                stack.callback(os.close, fd)
                # Check after opening the descriptor, which excludes that the pid is reused.
                if process.alive:
                    alive[fd] = process
        for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, 10.0)):
            for fd in alive:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(fd, number)
            _wait(alive, seconds)


def _wait(processes: dict[int, DaemonProcess], seconds: float) -> None:
    """Remove from `processes` the processes that end within `seconds`."""
    poll = select.poll()
    for fd in processes:
        poll.register(fd, select.POLLIN)
    deadline = time.monotonic() + seconds
    while processes and (seconds_left := deadline - time.monotonic()) > 0:
        for fd, _ in poll.poll(seconds_left * 1000):
            poll.unregister(fd)
            _reap(processes.pop(fd).pid)


def members(cluster: Path, daemon: str | None = None) -> list[DaemonProcess]:
    """Return this user's processes with the marker of a cluster, or of one of its daemons."""
    begin = f"{MARKER}={marker(cluster, daemon or '')}".encode()
    processes = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with suppress(OSError):
            values = (entry / "environ").read_bytes().split(b"\0")
            if any(v == begin if daemon else v.startswith(begin) for v in values):
                stat = _stat(int(entry.name))
                if stat:
                    processes.append(DaemonProcess(int(entry.name), stat[1]))
    return processes


def marker(cluster: Path, daemon: str) -> str:
    """Return the value of MARKER in the environment of a daemon and of the containers under it."""
    return f"{cluster}:{daemon}"


def last_lines(log: Path, lines: int = 15) -> str:
    """Return the end of a log, for an error; if it has no cause, with the last cause before it."""
    try:
        with log.open("rb") as f:
            f.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            text = f.read().decode(errors="replace").splitlines()
    except OSError as e:
        return f"  (no log: {e})"
    shown, earlier = text[-lines:], text[:-lines]
    if not any(_CAUSE.search(line) for line in shown):
        causes = [line for line in earlier if _CAUSE.search(line)]
        shown = [*causes[-1:], "…", *shown] if causes else shown
    return "\n".join(f"  {line[:400]}" for line in shown)


def _stat(pid: int) -> tuple[str, str] | None:
    """Return the state and the start time of a process, which identify it on this machine."""
    try:
        fields = _stat_fields(pid)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    return fields[0], f"{boot}/{fields[19]}"


def _stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat after the name, which may contain spaces."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _await_threads(pid: int) -> None:
    """Wait until all threads of a process have ended; its main thread has ended before.

    The threads of a killed JVM hold its ports a moment longer.
    """
    with suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll(_THREADS_SECONDS * 1000)
        finally:
            os.close(descriptor)


def _reap(pid: int) -> None:
    """Reap a child that has ended; other processes are reaped by their own parents."""
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
