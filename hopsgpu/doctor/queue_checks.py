"""The check of the directories of the queue of gangs. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from hopsgpu.doctor.report import Check, join_names, ok, unknown, wrong
from hopsgpu.units import count_of

NAME = "gang queue"
_STICKY, _WRITABLE = 0o1000, 0o022
_PARTITION_MODE, _PARENT_MODE = "1777", "755"


@dataclass(frozen=True)
class QueueDirectory:
    """A directory of the queue of gangs, or one that leads to it."""

    path: str
    owner: str
    mode: int


@dataclass(frozen=True)
class QueueFacts:
    """The directories of the queues of a cluster's gangs.

    Attributes:
        url: the directory that has one for each partition.
        is_local: whether it is on a local or mounted file system.
        is_hosted: whether it is in the cluster manager, and not on a file system.
        administrator: owner of the file system's root; "" if it cannot be read.
        parents: the existing directories that lead to the partitions, the first one first.
        partitions: one for each partition; none if no gang has waited yet.
        problem: why they cannot be read; or "".
        waiting: number of tickets that count.
        ignored: by user, the number of files that do not count.
    """

    url: str
    is_local: bool = False
    is_hosted: bool = False
    administrator: str = ""
    parents: tuple[QueueDirectory, ...] = ()
    partitions: tuple[QueueDirectory, ...] = ()
    problem: str = ""
    waiting: int = 0
    ignored: Mapping[str, int] = field(default_factory=dict)


def check_gang_queue(facts: QueueFacts) -> Check:
    """Check whether an administrator owns the directories.

    A directory's owner can remove other users' files in it, in spite of the sticky bit.
    """
    if facts.problem:
        return unknown(NAME, facts.problem)
    if not facts.partitions and not facts.is_hosted:
        seen = f"{facts.url} has no queue yet: the user of the first gang would own it"
        return unknown(NAME, seen, _creation(facts))
    owned = [
        directory
        for directory in (*facts.parents, *facts.partitions)
        if facts.administrator and directory.owner != facts.administrator
    ]
    if owned:
        users = join_names(dict.fromkeys(directory.owner for directory in owned))
        paths = join_names(directory.path for directory in owned)
        seen = f"owned by {users}, who can remove the tickets of other users: {paths}"
        return wrong(NAME, seen, _creation(facts))
    exposed = [
        directory.path
        for directory in (*facts.parents, *facts.partitions)
        if directory.mode & _WRITABLE and not directory.mode & _STICKY
    ]
    if exposed:
        seen = f"not sticky: {join_names(exposed)}: users can remove each other's tickets"
        return wrong(NAME, seen, _creation(facts))
    return ok(
        NAME, f"{facts.url}: {count_of(facts.waiting, 'waiting gang')}{_describe_ignored(facts)}"
    )


def _describe_ignored(facts: QueueFacts) -> str:
    if not facts.ignored:
        return ""
    users = sorted(facts.ignored, key=lambda user: (-facts.ignored[user], user))
    count = count_of(sum(facts.ignored.values()), "file")
    return f"; {count} of {join_names(users)} there do not count"


def _creation(facts: QueueFacts) -> str:
    """Return the commands with which an administrator creates or corrects the directories."""
    path = "/" + facts.url.partition("://")[2].partition("/")[2]
    parents = [directory.path for directory in facts.parents] or [path]
    partitions = [directory.path for directory in facts.partitions] or [f"{path}/default"]
    tool, who = ("", "root") if facts.is_local else ("hdfs dfs -", "HDFS's superuser")
    # The administrator's name comes from a listing, so it is quoted as the paths are.
    owner = facts.administrator or ("root" if facts.is_local else "hdfs")
    make = f"{tool}mkdir -p {shlex.join(partitions)}"
    chown = f"{tool}chown {shlex.quote(owner)} {shlex.join([*parents, *partitions])}"
    close = f"{tool}chmod {_PARENT_MODE} {shlex.join(parents)}"
    share = f"{tool}chmod {_PARTITION_MODE} {shlex.join(partitions)}"
    return (
        f"as {who}: {make}; {chown}; {close}; {share} (one directory for each node label of YARN)"
    )
