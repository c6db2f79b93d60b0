"""Real processes: started detached, recognised and ended, but never another's."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hopsgpu.devcluster.daemons import (
    MARKER,
    DaemonProcess,
    last_lines,
    marker,
    members,
    spawn,
    stop,
)
from tests.bounds import HANG_SECONDS

PLAIN = {"PATH": "/usr/bin:/bin"}
Start = Callable[..., DaemonProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts shell commands as daemons, and ends them after the test."""
    started: list[DaemonProcess] = []

    def begin(command: str, daemon: str = "node1", root: Path = tmp_path) -> DaemonProcess:
        environ = {**PLAIN, MARKER: marker(root, daemon)}
        argv = ["/bin/sh", "-c", command]
        started.append(spawn(argv, environ, tmp_path, tmp_path / "logs" / f"{daemon}.log"))
        return started[-1]

    yield begin
    stop(started, 0)


def comes(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + HANG_SECONDS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)  # between two looks at /proc
    return condition()


def text(log: Path) -> str:
    return log.read_text() if log.exists() else ""


def test_a_daemon_is_on_its_own(start: Start, tmp_path: Path) -> None:
    process = start("pwd; echo err >&2; exec sleep 60")
    log = tmp_path / "logs" / "node1.log"
    assert comes(lambda: text(log) == f"{tmp_path}\nerr\n")
    assert process.alive
    assert os.getsid(process.pid) == process.pid != os.getsid(0)
    stop([process], 10)
    assert not process.alive
    assert not Path(f"/proc/{process.pid}").exists()


def test_one_that_ends_by_itself_is_dead_even_unreaped(start: Start) -> None:
    process = start("exit 3")
    assert comes(lambda: not process.alive)


def test_a_daemon_holds_no_file_of_the_caller(start: Start, tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as lock:
        os.set_inheritable(lock.fileno(), True)
        process = start("exec sleep 60")
    assert comes(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "sleep\n")
    held = {str(fd.readlink()) for fd in Path(f"/proc/{process.pid}/fd").iterdir()}
    assert held == {os.devnull, str(tmp_path / "logs" / "node1.log")}


def test_one_that_does_not_want_to_end_is_killed(start: Start, tmp_path: Path) -> None:
    process = start("trap '' TERM; echo ready; while :; do sleep 0.05; done")
    assert comes(lambda: "ready" in text(tmp_path / "logs" / "node1.log"))
    began = time.monotonic()
    stop([process], 0.3)
    assert not process.alive
    assert 0.3 <= time.monotonic() - began < HANG_SECONDS


def test_another_process_with_the_same_id_is_left_alone(start: Start) -> None:
    process = start("exec sleep 60")
    stranger = replace(process, born="another time")
    assert not stranger.alive
    stop([stranger], 0)
    assert process.alive
    stop([DaemonProcess(2**22 - 1, "never")], 0)


def test_members_are_found_by_cluster_and_daemon(start: Start, tmp_path: Path) -> None:
    one = start("exec sleep 60", "node1")
    ten = start("exec sleep 60", "node10")
    inner = start("exec sleep 60", "node1", tmp_path / "inner")
    # A process that is between fork and exec has not its own environment yet.
    assert comes(lambda: len(members(tmp_path)) == 2 and len(members(tmp_path / "inner")) == 1)
    assert {p.pid for p in members(tmp_path)} == {one.pid, ten.pid}
    assert [p.pid for p in members(tmp_path, "node1")] == [one.pid]
    assert [p.pid for p in members(tmp_path / "inner")] == [inner.pid]


def test_what_a_daemon_started_is_a_member_too(start: Start, tmp_path: Path) -> None:
    start("setsid sh -c \"trap '' TERM; echo in; sleep 60\" & exec sleep 60")
    assert comes(lambda: "in" in text(tmp_path / "logs" / "node1.log"))

    def ended() -> bool:
        # What it starts just then is not among those that are found.
        stop(members(tmp_path), 0.2)
        return not members(tmp_path)

    assert comes(ended)


def test_looking_for_members_leaves_others_children_to_their_parents(tmp_path: Path) -> None:
    child = subprocess.Popen(["/bin/sh", "-c", "exit 5"])
    # Ended and not yet waited for.
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert members(tmp_path) == []
    assert child.wait() == 5


def test_the_log_of_the_time_before_is_kept(start: Start, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "node1.log"
    for word in ("first", "second"):
        process = start(f"echo {word}")
        assert comes(lambda p=process: not p.alive)  # type: ignore[misc]
    assert text(log) == "second\n"
    assert text(log.with_name("node1.log.previous")) == "first\n"


def test_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_bytes(b"\xff\n" + b"".join(b"line %d\n" % i for i in range(9000)))
    assert last_lines(log, 2) == "  line 8998\n  line 8999"
    assert "no log" in last_lines(tmp_path / "none")
    log.write_text("java.io.IOException: a\nCaused by: b\n\tat x\n\tat y\nBYE\n")
    assert last_lines(log, 2).splitlines() == ["  Caused by: b", "  …", "  \tat y", "  BYE"]
    assert last_lines(log, 4).splitlines()[0] == "  Caused by: b"


def test_a_stop_that_is_interrupted_leaves_no_descriptor(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start("exec sleep 60")

    def opened() -> int:
        """Return descriptors of processes; other threads may have others for a moment."""
        found = 0
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found += "pidfd" in str(entry.readlink())
        return found

    before = opened()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(signal, "pidfd_send_signal", interrupt)
    with pytest.raises(KeyboardInterrupt):
        stop([process], 1)
    assert opened() == before
    monkeypatch.undo()
