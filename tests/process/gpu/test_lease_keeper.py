"""The executor that the discovery script finds, and the keepers that hold its leases."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hopsgpu.gpu import script_archive
from hopsgpu.gpu.node import discovery_script, lease_keeper
from hopsgpu.gpu.node.lease_keeper import Ancestor, WatchedProcess, start_keepers, wait_for_any
from hopsgpu.gpu.node.leases import Leases, lease_directory
from tests.bounds import HANG_SECONDS
from tests.conftest import gone, until
from tests.unit.discovery_standins import gpu
from tests.unit.discovery_standins.node import IMPATIENT, Node, holders, keepers

NO_PERMISSION = 4
A = "GPU-aaaa"
UUIDS = [gpu(number)["uuid"] for number in range(4)]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with Node(tmp_path) as one:
        one.play([gpu(number) for number in range(4)])
        yield one


def test_a_script_whose_output_nobody_reads_leaves_no_keeper(node: Node) -> None:
    """The executor was killed before it knew its GPUs, and its pid shows nothing."""
    reading, writing = os.pipe()
    os.close(reading)
    directory = node.root / "nobody"
    directory.mkdir()
    command = [str(node.root / script_archive.ALIAS / "gpus-4")]
    ran = subprocess.run(
        command,
        cwd=directory,
        env=node.environ,
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    os.close(writing)
    assert ran.returncode == 1 and "Broken pipe" in ran.stderr
    assert until(lambda: not keepers(node.root))
    # One at its end shows no environment any more, and has its leases for a moment still.
    assert node.start(4).gpus == UUIDS[:4]


def listed(process: int) -> set[str]:
    found = set()
    for one in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed just then
            found.add(str(one.readlink()))
    return found


def test_the_keepers_are_good_guests(node: Node) -> None:
    """YARN can remove the container's directory, and end the container before the keepers."""
    executor = node.start(2)
    assert len(keepers(node.root)) == 2
    leases = {f"{node.environ['HOPSGPU_LEASE_DIR']}/{uuid}" for uuid in UUIDS[:2]}
    theirs = {"/dev/null", "anon_inode:[pidfd]", *leases}
    for pid in keepers(node.root):
        # on which they were told to stay
        assert until(lambda pid=pid: "pipe:" not in str(listed(pid)))
        process = Path(f"/proc/{pid}")
        assert str((process / "cwd").readlink()) == "/"
        assert until(lambda pid=pid: leases <= listed(pid) <= theirs), listed(pid)
        assert {str((process / "fd" / n).readlink()) for n in "012"} == {"/dev/null"}
        assert os.getsid(pid) == pid
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            os.kill(pid, number)
    assert "are available" in node.start(4, IMPATIENT).refusal
    assert not any(gone(pid) for pid in keepers(node.root)) and len(keepers(node.root)) == 2
    executor.end()
    assert until(lambda: not keepers(node.root))


def test_the_kill_of_a_keeper_frees_no_gpu_in_use(node: Node) -> None:
    executor = node.start(4)
    for _ in range(3):  # the later ones are not children of each other
        pid = keepers(node.root)[0]
        os.kill(pid, signal.SIGKILL)
        assert until(lambda pid=pid: gone(pid))
        assert "0 are available" in node.start(1, IMPATIENT).refusal
        assert until(lambda: len(keepers(node.root)) == 2)
    executor.end()
    assert until(lambda: not keepers(node.root))
    assert node.start(4).gpus == UUIDS[:4]


def test_a_wrapped_python(node: Node) -> None:
    """The shell between Java and the script ends with the script, and the leases do not."""
    node.wrap_python()
    executor = node.start(4)
    assert executor.gpus == UUIDS[:4]
    assert "0 are available" in node.start(1, IMPATIENT).refusal
    executor.end()
    assert node.start(4).gpus == UUIDS[:4]


@pytest.mark.parametrize(
    ("above", "executor"),
    [
        ([["java"], ["bash"], ["java"]], 0),  # the last is the NodeManager
        ([["python3", "dash"], ["java"], ["bash"]], 1),
        ([["pyenv"], ["sh"], ["java-17", "java"]], 2),
        ([["python3", "dash"], ["bash"], ["python3.11"], ["sh"]], 2),
        ([["bash"], ["sh"]], 0),
        ([["bash"], ["tmux"], ["init"]], 1),
        ([[]], 0),
    ],
)
def test_which_process_is_the_executor(above: list[list[str]], executor: int) -> None:
    # The last one is pid 1, by which nobody is told apart.
    pids = range(len(above), 0, -1)
    seen = [Ancestor(pid, frozenset(names)) for pid, names in zip(pids, above, strict=True)]
    assert discovery_script.find_executor(seen) == pids[executor]


def test_by_hand_it_says_until_when_it_leases(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parent = os.getppid()
    monkeypatch.setattr(
        discovery_script, "ancestors", lambda: [Ancestor(parent, frozenset({"tmux"}))]
    )
    with discovery_script._watch_executor() as executor:
        assert executor.pid == parent
    err = capsys.readouterr().err
    assert "no Java process" in err and f" {parent} " in err


def test_a_lease_directory_has_to_be_the_same_for_all(node: Node) -> None:
    node.environ["HOPSGPU_LEASE_DIR"] = "leases"
    assert "HOPSGPU_LEASE_DIR='leases'" in node.start(1, IMPATIENT).refusal


def test_an_isolated_container_needs_no_lease_directory(node: Node) -> None:
    Path(node.environ["HOPSGPU_LEASE_DIR"]).write_text("")
    assert "is not a directory" in node.start(1).refusal
    node.with_nvml()
    node.play([gpu(0, handle_error=NO_PERMISSION), gpu(1)])
    executor = node.start(1)
    assert executor.gpus == [UUIDS[1]]
    assert executor.isolated


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return lease_directory({"HOPSGPU_LEASE_DIR": str(tmp_path / "leases")})


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as one:
        yield one
        one.kill()


@pytest.mark.parametrize("should_use_pidfd", [True, False])
def test_the_end_of_a_process_is_seen(
    process: subprocess.Popen[bytes], should_use_pidfd: bool
) -> None:
    with WatchedProcess(process.pid, should_use_pidfd) as watched:
        assert not wait_for_any([watched], 0.0)
        process.kill()
        assert wait_for_any([watched], 20.0)  # as a zombie: nobody has reaped it
        process.wait()
        assert wait_for_any([watched], 0.0)
    with pytest.raises(ProcessLookupError):
        WatchedProcess(process.pid, should_use_pidfd)


def test_a_process_whose_first_thread_has_ended_lives() -> None:
    """The kernel calls it a zombie; its other threads run on."""
    code = (
        "import ctypes, threading\n"
        "threading.Thread(target=input).start()\n"
        "print('there', flush=True)\n"
        "ctypes.CDLL(None).syscall(60 if __import__('platform').machine() == 'x86_64' else 93, 0)\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        status = Path(f"/proc/{process.pid}/status")
        assert until(lambda: "State:\tZ" in status.read_text())
        assert not gone(process.pid)
        with WatchedProcess(process.pid, should_use_pidfd=False) as watched:
            assert not wait_for_any([watched], 0.0)
            process.kill()
            assert wait_for_any([watched], 20.0)


def test_reused_pid_counts_as_ended(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    own_stat = Path("/proc/self/stat").read_bytes()
    with WatchedProcess(process.pid, should_use_pidfd=False) as watched:
        monkeypatch.setattr(Path, "read_bytes", lambda path: own_stat)
        assert wait_for_any([watched], 0.0)


@pytest.fixture
def hidden_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide all processes as /proc with hidepid does."""

    def refuse(path: Path) -> bytes:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)


@pytest.mark.usefixtures("hidden_processes")
def test_end_of_a_hidden_process_is_noticed_without_pidfds(
    process: subprocess.Popen[bytes],
) -> None:
    with WatchedProcess(process.pid, should_use_pidfd=False) as watched:
        assert not wait_for_any([watched], 0.0)
        process.kill()
        process.wait()
        assert wait_for_any([watched], 20.0)


def test_ancestors_begin_with_the_parent() -> None:
    parent, *_ = lease_keeper.ancestors()
    assert parent.pid == os.getppid() and parent.names


@pytest.mark.usefixtures("hidden_processes")
def test_only_the_parent_is_known_of_hidden_ancestors() -> None:
    assert lease_keeper.ancestors() == [Ancestor(os.getppid(), frozenset())]


@pytest.mark.parametrize("should_use_pidfd", [True, False])
def test_keeper_holds_the_leases_until_the_executor_ends(
    directory: Path, process: subprocess.Popen[bytes], should_use_pidfd: bool
) -> None:
    with Leases(directory) as given, WatchedProcess(process.pid, should_use_pidfd) as executor:
        assert given.take(A)
        with start_keepers(given, executor) as stay:
            stay()
    with Leases(directory) as late:
        assert not late.take(A)
        process.send_signal(signal.SIGKILL)
        assert until(lambda: late.take(A))


@pytest.mark.parametrize("should_use_pidfd", [True, False])
def test_a_killed_keeper_is_replaced(
    directory: Path,
    process: subprocess.Popen[bytes],
    should_use_pidfd: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not should_use_pidfd:

        def refuse(pid: int) -> int:
            raise OSError(errno.ENOSYS, "pidfd_open")

        monkeypatch.setattr(os, "pidfd_open", refuse)
    with Leases(directory) as given, WatchedProcess(process.pid) as executor:
        assert given.take(A)
        with start_keepers(given, executor) as stay:
            stay()
    with Leases(directory) as late:
        for which in (0, 1, 0):
            killed = sorted(holders(directory))[which]
            os.kill(killed, signal.SIGKILL)
            assert until(lambda killed=killed: gone(killed))
            assert until(lambda: len(holders(directory)) == 2)
            assert not late.take(A)
        process.kill()
        assert until(lambda: not holders(directory))
        assert until(lambda: late.take(A))


def test_keeper_continues_if_it_cannot_fork_another(
    directory: Path, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    forks = iter([os.fork])

    def fork() -> int:
        for first in forks:
            return first()
        raise BlockingIOError("no room")

    monkeypatch.setattr(lease_keeper.os, "fork", fork)
    with Leases(directory) as given, WatchedProcess(process.pid) as executor:
        assert given.take(A)
        with start_keepers(given, executor) as stay:
            stay()
    with Leases(directory) as late:
        assert not late.take(A)
        assert len(holders(directory)) == 1
        process.kill()
        assert until(lambda: late.take(A))


def test_keeper_that_is_killed_before_it_is_ready_is_an_error(
    directory: Path, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    test, fork = os.getpid(), os.fork

    def fork_or_die() -> int:
        if os.getpid() != test:  # the first keeper forks the second
            os.kill(os.getpid(), signal.SIGKILL)
        return fork()

    monkeypatch.setattr(os, "fork", fork_or_die)
    with Leases(directory) as given, WatchedProcess(process.pid) as executor:
        assert given.take(A)
        with (
            pytest.raises(ChildProcessError),
            start_keepers(given, executor),
        ):
            pytest.fail("nobody keeps the lease")
    with Leases(directory) as late:
        assert until(lambda: late.take(A))


def test_keeper_without_the_order_to_stay_ends(
    directory: Path, process: subprocess.Popen[bytes]
) -> None:
    with pytest.raises(OSError, match="nobody reads"), Leases(directory) as given:
        assert given.take(A)
        with WatchedProcess(process.pid) as executor, start_keepers(given, executor):
            raise OSError("nobody reads")
    with Leases(directory) as late:
        assert until(lambda: late.take(A))
    assert process.poll() is None
