"""Directories of another user beside the queues of gangs."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from hopsgpu.backends.gang_queue import (
    _MAX_PARTITIONS,
    GangQueueReader,
    QueueMember,
    make_queue_dir,
)
from hopsgpu.errors import HopsGpuError
from hopsgpu.storage.lake import LakePath
from tests.attacks.users import as_other_user

REAL = ("default", "gpu", "zeta")


@pytest.fixture
def cluster(shared_dir: Path) -> LakePath:
    cluster = LakePath(f"file://{shared_dir}")
    for name in REAL:
        member = QueueMember(
            make_queue_dir(cluster, name), application=f"application_{name}", executors=1, gpus=1
        )
        member.file_ticket(member.ticket)
    return cluster


def _waiting(
    cluster: LakePath, find_partitions: Callable[[], Collection[str]] = tuple
) -> tuple[set[str], str]:
    queues, problems = GangQueueReader(cluster, find_partitions=find_partitions).read()
    assert len(queues) <= _MAX_PARTITIONS
    gangs = {
        ticket.application for snapshot, _ in queues.values() for ticket, _ in snapshot.tickets
    }
    return gangs, " ".join(problems)


def _plant(directory: Path) -> None:
    # "a-…" sorts before all real names.
    for number in range(2 * _MAX_PARTITIONS):
        (directory / f"a-{number:04}").mkdir()


def test_directories_of_another_user_hide_no_queue(shared_dir: Path, cluster: LakePath) -> None:
    as_other_user(lambda: _plant(shared_dir))
    gangs, problems = _waiting(cluster)
    assert gangs == {f"application_{name}" for name in REAL}
    assert f"{2 * _MAX_PARTITIONS + len(REAL)} directories" in problems


def test_directories_of_the_owner_of_the_queues_hide_no_partition(
    shared_dir: Path, cluster: LakePath
) -> None:
    _plant(shared_dir)
    assert _waiting(cluster, lambda: ("gpu", "zeta", ""))[0] == {f"application_{n}" for n in REAL}

    def refuse() -> Collection[str]:
        raise HopsGpuError("YARN is away")

    gangs, problems = _waiting(cluster, refuse)
    assert "application_default" in gangs and "YARN is away" in problems


def test_yarn_is_not_asked_without_an_attack(cluster: LakePath) -> None:
    assert _waiting(cluster, lambda: pytest.fail("asked")) == (
        {f"application_{name}" for name in REAL},
        "",
    )
