"""A user who was first in the node's directory of GPU leases, and keeps the others out."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hopsgpu.gpu.node.leases import LeaseError, Leases, lease_directory, read_leases
from tests.attacks.users import as_other_user

# Neither root, whom no mode keeps out, nor the user whom `as_other_user` plays.
EVE = 4711
GPU = "GPU-aaaa"
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def directory(shared_dir: Path) -> Path:
    path = shared_dir / "leases"
    path.mkdir()
    os.chown(path, EVE, EVE)
    path.chmod(0o1777)
    return path


def problem_of(act: Callable[[], object]) -> str:
    with pytest.raises(LeaseError) as raised:
        act()
    return str(raised.value)


@pytest.mark.parametrize("mode", [0o700, 0o711, 0o755, 0o777, 0o1770])
def test_a_closed_directory_names_its_owner_and_the_remedy(directory: Path, mode: int) -> None:
    directory.chmod(mode)

    def ask() -> None:
        problem = problem_of(lambda: lease_directory({"HOPSGPU_LEASE_DIR": str(directory)}))
        assert f"belongs to user {EVE} and has mode {mode:o}" in problem
        assert f"as root, run chown root {directory}; chmod 1777 {directory}" in problem

    as_other_user(ask)
    # The remedy is one: root opens the directory.
    directory.chmod(0o1777)
    as_other_user(lambda: Leases(directory).take(GPU))


def test_an_owner_with_a_name_is_named(directory: Path) -> None:
    os.chown(directory, 1, 1)
    directory.chmod(0o700)

    def ask() -> None:
        problem = problem_of(lambda: lease_directory({"HOPSGPU_LEASE_DIR": str(directory)}))
        assert "belongs to user daemon (1)" in problem

    as_other_user(ask)


@pytest.mark.parametrize("kind", ["link", "file"])
def test_what_is_no_directory_names_its_owner(directory: Path, kind: str) -> None:
    directory.rmdir()
    directory.symlink_to("/") if kind == "link" else directory.touch()
    os.chown(directory, EVE, EVE, follow_symlinks=False)
    problem = problem_of(lambda: lease_directory({"HOPSGPU_LEASE_DIR": str(directory)}))
    assert f"is not a directory, and belongs to user {EVE}: remove it" in problem


def test_a_directory_that_is_closed_while_leases_are_held_says_so(directory: Path) -> None:
    def ask() -> None:
        with Leases(directory) as held:
            assert not held.take(GPU)
            assert f"belongs to user {EVE}" in held.refused[GPU]
            held.refresh()

    directory.chmod(0o700)
    as_other_user(ask)


def test_a_closed_file_names_its_owner_and_the_remedy(directory: Path) -> None:
    for name, mode in ((GPU, 0o600), ("GPU-bbbb", 0o666)):
        (directory / name).touch()
        (directory / name).chmod(mode)
        os.chown(directory / name, EVE, EVE)

    def ask() -> None:
        with Leases(directory) as held:
            assert not held.take(GPU)
            assert f"belongs to user {EVE} and has mode 600" in held.refused[GPU]
            assert f"as root, run chmod 666 {directory / GPU}" in held.refused[GPU]
            assert held.take("GPU-bbbb"), "the other GPUs are not affected"

    as_other_user(ask)


@pytest.mark.parametrize("plant", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/")])
def test_what_is_no_file_names_its_owner(directory: Path, plant: Callable[[Path], object]) -> None:
    plant(directory / GPU)
    os.chown(directory / GPU, EVE, EVE, follow_symlinks=False)
    with Leases(directory) as held:
        assert not held.take(GPU)
        assert f"user {EVE}" in held.refused[GPU] and "remove it" in held.refused[GPU]


def test_a_reader_of_a_closed_directory_is_told_too(directory: Path) -> None:
    """`hopsgpu gpus` on a laptop; a PermissionError would end it with a traceback."""
    directory.chmod(0o700)

    def ask() -> None:
        problem = problem_of(lambda: read_leases({"HOPSGPU_LEASE_DIR": str(directory)}))
        assert f"belongs to user {EVE}" in problem

    as_other_user(ask)
