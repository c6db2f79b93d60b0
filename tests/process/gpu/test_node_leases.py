"""Leases in a directory that all users of a node share, including malicious ones."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import stat
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hopsgpu.gpu.node import leases
from hopsgpu.gpu.node.leases import (
    LeaseError,
    Leases,
    file_name,
    lease_directory,
    owner,
    read_leases,
)

A, B = "GPU-aaaa", "GPU-bbbb"
NOBODY = 65534
two_users = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act for another user")


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"HOPSGPU_LEASE_DIR": str(tmp_path / "leases"), "CONTAINER_ID": "container_1"}


@pytest.fixture
def directory(environ: dict[str, str]) -> Path:
    return lease_directory(environ)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory like /tmp, which other users can reach."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        Path(path).chmod(0o1777)
        yield Path(path)


def as_user(uid: int, act: Callable[[], object]) -> None:
    """Run something as another user, which must not raise."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            act()
            code = 0
        finally:
            if code:
                traceback.print_exc()
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0


def test_lease_lasts_until_it_is_released(directory: Path) -> None:
    with Leases(directory) as first, Leases(directory) as second:
        assert first.take(A) and not second.take(A)
        assert second.take(B) and second.addresses == [B]
        first.release(A)
        assert second.take(A)
    with Leases(directory) as third:
        assert third.take(A) and third.take(B)


def test_the_directory_is_an_absolute_one() -> None:
    """A relative path is another directory in each container."""
    environ = {"HOPSGPU_LEASE_DIR": "leases"}
    for ask in (lease_directory, read_leases):
        with pytest.raises(LeaseError, match="'leases'"):
            ask(environ)
    assert not Path("leases").exists()


def test_a_link_in_the_place_of_the_directory_is_not_followed(
    directory: Path, tmp_path: Path
) -> None:
    """The directory's owner may replace it by a link at any time."""
    with Leases(directory) as held:
        assert held.take(A)
        directory.rename(tmp_path / "moved")
        (tmp_path / "elsewhere").mkdir()
        directory.symlink_to(tmp_path / "elsewhere")
        assert not held.take(B)
        assert "is not a directory" in held.refused[B]
        held.refresh()
    assert not list((tmp_path / "elsewhere").iterdir())


def test_all_users_of_the_node_may_take_them(directory: Path) -> None:
    before = os.umask(0o077)
    try:
        with Leases(directory) as held:
            held.take(A)
    finally:
        os.umask(before)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o1777
    assert stat.S_IMODE((directory / A).stat().st_mode) == 0o666


def test_the_directory_is_made_for_all_whatever_the_umask(environ: dict[str, str]) -> None:
    before = os.umask(0o077)
    try:
        path = lease_directory(environ)
        assert os.umask(0o077) == 0o077
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o1777


def test_own_directory_is_repaired(environ: dict[str, str]) -> None:
    Path(environ["HOPSGPU_LEASE_DIR"]).mkdir(mode=0o700)
    assert stat.S_IMODE(lease_directory(environ).stat().st_mode) == 0o1777


@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_directory_that_is_none(environ: dict[str, str], tmp_path: Path, kind: str) -> None:
    path = Path(environ["HOPSGPU_LEASE_DIR"])
    (tmp_path / "elsewhere").mkdir()
    path.symlink_to(tmp_path / "elsewhere") if kind == "link" else path.touch()
    with pytest.raises(LeaseError, match="not a directory"):
        lease_directory(environ)


def _link(path: Path) -> None:
    (path.parent / "victim").write_text("dear")
    path.symlink_to(path.parent / "victim")


def _hard_link(path: Path) -> None:
    (path.parent / "victim").write_text("dear")
    path.hardlink_to(path.parent / "victim")


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(os.path.relpath(path))


@pytest.mark.parametrize("trap", [_link, _hard_link, _socket, os.mkfifo, Path.mkdir])
def test_invalid_lock_file_affects_its_gpu_only(
    directory: Path, trap: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(directory)
    trap(directory / A)
    with Leases(directory) as held:
        assert not held.take(A)
        assert "remove it" in held.refused[A] and str(directory / A) in held.refused[A]
        assert held.take(B)
        held.write_owner({"user": "me"})
    victim = directory / "victim"
    assert not victim.exists() or victim.read_text() == "dear"
    assert [lease.address for lease in read_leases({"HOPSGPU_LEASE_DIR": str(directory)})] == [B]


@pytest.mark.parametrize("address", ["", "GPU-", "..", "GPU-a_b", "GPU-a b", "GPU-a\n", "0"])
def test_invalid_address_is_refused(directory: Path, address: str) -> None:
    with Leases(directory) as held:
        assert not held.take(address)
        assert "address of a GPU" in held.refused[address]
    assert not list(directory.iterdir())


def test_an_address_is_a_file_in_the_directory() -> None:
    assert file_name("MIG-GPU-aa/1/0") == "MIG-GPU-aa_1_0"
    assert file_name("PCI-00000000:01:00.0") == "PCI-00000000:01:00.0"


def test_a_removed_file_is_no_lock(directory: Path) -> None:
    (directory / A).touch()
    removed = os.open(directory / A, os.O_RDWR)
    fcntl.flock(removed, fcntl.LOCK_EX)
    (directory / A).unlink()
    with Leases(directory) as held, Leases(directory) as late:
        assert held.take(A)
        assert not late.take(A)
    os.close(removed)


def test_removed_files_are_had_back(directory: Path) -> None:
    """A cleaner of /tmp, or the directory's owner, must not free a GPU in use."""
    with Leases(directory) as held, Leases(directory) as late:
        assert held.take(A) and held.take(B)
        (directory / A).unlink()
        held.refresh()
        assert not late.take(A)
        for file in directory.iterdir():
            file.unlink()
        directory.rmdir()
        held.refresh()
        assert stat.S_IMODE(directory.stat().st_mode) == 0o1777
        assert not late.take(A) and not late.take(B)
    with Leases(directory) as next_one:
        assert next_one.take(A) and next_one.take(B)


def test_cleaners_of_old_files_are_kept_off(directory: Path) -> None:
    with Leases(directory) as held:
        held.take(A)
        os.utime(directory / A, (1.0, 1.0))
        held.refresh()
        assert (directory / A).stat().st_mtime > 1.0


def test_a_file_says_whose_it_is(directory: Path, environ: dict[str, str]) -> None:
    with Leases(directory) as held:
        held.take(A)
        held.write_owner(owner(environ, 4711))
        (lease,) = read_leases(environ)
        assert (lease.address, lease.is_held) == (A, True)
        assert lease.owner["pid"] == "4711" and lease.owner["container"] == "container_1"
        assert lease.owner["user"] and lease.owner["since"].endswith("Z")
        assert not Leases(directory).take(A)  # to read it did not free it
    assert [lease.is_held for lease in read_leases(environ)] == [False]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1]",
        "[" * 4096,
        "\x00\xff",
        "{",
        json.dumps({"user": "\x1b[2Jx" * 99, "pid": [], "x": 1}),
    ],
)
def test_content_of_a_lock_file_is_not_trusted(
    directory: Path, environ: dict[str, str], text: str
) -> None:
    (directory / A).write_text(text)
    (directory / "else").write_text(text)
    (lease,) = read_leases(environ)
    assert all(said.isprintable() and len(said) <= 100 for said in lease.owner.values())
    assert set(lease.owner) <= {"pid", "container", "user", "since"}


def test_a_node_without_a_directory_has_no_leases(environ: dict[str, str]) -> None:
    assert read_leases(environ) == []


@two_users
def test_another_users_directory(shared: Path) -> None:
    """The first user makes it; all users must be able to use it."""
    environ = {"HOPSGPU_LEASE_DIR": str(shared / "leases")}
    as_user(NOBODY, lambda: lease_directory(environ))
    assert (shared / "leases").stat().st_uid == NOBODY
    path = lease_directory(environ)
    with Leases(path) as held:
        assert held.take(A)

    def refused() -> None:
        with pytest.raises(LeaseError, match="chown root .*; chmod 1777"):
            lease_directory({"HOPSGPU_LEASE_DIR": str(shared / "roots")})

    (shared / "roots").mkdir(mode=0o755)
    as_user(NOBODY, refused)


@two_users
def test_another_users_files(shared: Path) -> None:
    environ = {"HOPSGPU_LEASE_DIR": str(shared / "leases")}
    path = lease_directory(environ)
    for address, mode in ((A, 0o666), (B, 0o644), ("GPU-cccc", 0o600)):
        (path / address).touch()
        (path / address).chmod(mode)

    def taken() -> None:
        with Leases(path) as held:
            assert held.take(A)
            assert held.take(B)  # a lock needs no more than to read it
            assert not held.take("GPU-cccc")
            assert "chmod 666 " in held.refused["GPU-cccc"]
            held.write_owner({"user": "nobody"})

    as_user(NOBODY, taken)
    assert {lease.address: lease.owner for lease in read_leases(environ)} == {
        A: {"user": "nobody"},
        B: {},
        "GPU-cccc": {},
    }


def test_the_place_is_the_same_for_all_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/somewhere/else")
    assert str(leases.DIRECTORY) == "/tmp/hopsgpu-gpu-leases"
