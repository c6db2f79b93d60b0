"""The doctor's check of the directories of the queue of gangs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hopsgpu.backends.gang_queue import QueueMember, make_queue_dir, queued
from hopsgpu.cluster_managers.yarn.manager import YarnManager
from hopsgpu.doctor.facts import queue_facts
from hopsgpu.doctor.queue_checks import QueueDirectory, QueueFacts, check_gang_queue
from hopsgpu.storage.lake import LakePath

URL = "hdfs://nn:8020/tmp/hopsgpu/locks/blue"
PARENTS = tuple(
    QueueDirectory(path, "hdfs", 0o755)
    for path in ("/tmp/hopsgpu", "/tmp/hopsgpu/locks", "/tmp/hopsgpu/locks/blue")
)
DEFAULT = QueueDirectory("/tmp/hopsgpu/locks/blue/default", "hdfs", 0o1777)
FACTS = QueueFacts(URL, administrator="hdfs", parents=PARENTS, partitions=(DEFAULT,), waiting=1)


def test_directories_of_the_superuser_are_right() -> None:
    check = check_gang_queue(FACTS)
    assert (check.state, check.seen) == ("ok", f"{URL}: 1 waiting gang")
    odd = check_gang_queue(replace(FACTS, ignored={"eve": 7, "ann": 1}))
    assert odd.seen == f"{URL}: 1 waiting gang; 8 files of eve, ann there do not count"


def test_a_missing_directory_has_the_commands_that_create_it() -> None:
    check = check_gang_queue(QueueFacts(URL, administrator="hdfs"))
    assert check.state == "unknown" and "the first gang would own it" in check.seen
    for command in (
        "hdfs dfs -mkdir -p /tmp/hopsgpu/locks/blue/default",
        "hdfs dfs -chmod 755 /tmp/hopsgpu/locks/blue",
        "hdfs dfs -chmod 1777 /tmp/hopsgpu/locks/blue/default",
    ):
        assert command in check.fix
    local = check_gang_queue(QueueFacts("file:///locks/blue", is_local=True))
    assert "as root: mkdir -p /locks/blue/default; chown root " in local.fix


@pytest.mark.parametrize("at", range(4))
def test_a_directory_of_another_user_is_wrong(at: int) -> None:
    every = [*PARENTS, DEFAULT]
    every[at] = replace(every[at], owner="eve")
    check = check_gang_queue(replace(FACTS, parents=tuple(every[:3]), partitions=(every[3],)))
    assert check.state == "wrong" and check.seen == (
        f"owned by eve, who can remove the tickets of other users: {every[at].path}"
    )
    assert f"chown hdfs {' '.join(one.path for one in every)}" in check.fix
    assert "chmod 755 /tmp/hopsgpu /tmp/hopsgpu/locks /tmp/hopsgpu/locks/blue;" in check.fix


def test_a_directory_without_the_sticky_bit_is_wrong() -> None:
    open_to_all = replace(FACTS, partitions=(replace(DEFAULT, mode=0o777),))
    assert "not sticky" in check_gang_queue(open_to_all).seen
    of_a_group = replace(FACTS, partitions=(replace(DEFAULT, mode=0o1770),))
    assert check_gang_queue(of_a_group).state == "ok"


def test_facts_of_a_directory(tmp_path: Path) -> None:
    settings = {"spark.hopsgpu.locks": f"file://{tmp_path}/locks"}
    hadoop = {"yarn.resourcemanager.cluster-id": "blue"}.get
    manager = YarnManager(hadoop)
    none = queue_facts(settings, {}, hadoop, manager)
    assert (none.url, none.parents, none.partitions) == (f"file://{tmp_path}/locks/blue", (), ())
    locks = LakePath(f"file://{tmp_path}/locks")
    locks.make()
    directory = make_queue_dir(locks, "blue", "default")
    member = QueueMember(directory, application="application_1", executors=1, gpus=1)
    with queued(member):
        member.file_ticket(member.ticket)
        (directory / "readme.txt").write(b"")
        facts = queue_facts(settings, {}, hadoop, manager)
    assert (facts.administrator, facts.is_local, facts.problem) == ("root", True, "")
    assert (facts.waiting, dict(facts.ignored)) == (1, {member.owner: 1})
    assert [one.path for one in facts.parents] == [locks.path, f"{locks.path}/blue"]
    assert [(one.path, one.mode) for one in facts.partitions] == [(directory.path, 0o1777)]


def test_a_lake_that_refuses_is_unknown() -> None:
    hadoop = {"yarn.resourcemanager.cluster-id": "a"}.get
    bad = queue_facts({"spark.hopsgpu.locks": "s3://bucket/x"}, {}, hadoop, YarnManager(hadoop))
    assert check_gang_queue(bad).state == "unknown" and "object store" in bad.problem
