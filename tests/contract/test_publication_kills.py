"""SIGKILL at every step of a publish and of a deletion, each by its name, on every lake.

A step is a call that changes something on the lake, and what it is about. The process is killed
before it, or within it where that is possible, or after it.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing.connection
import os
import re
import signal
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hopsgpu.artifacts import publication, stale_uploads
from hopsgpu.artifacts.manifest import VersionDescription
from hopsgpu.artifacts.models import ModelStore
from hopsgpu.artifacts.versions import numbers
from hopsgpu.errors import HopsGpuError
from hopsgpu.storage.lake import LakePath
from tests.bounds import HANG_SECONDS


@dataclass(frozen=True)
class Milestones:
    """What is there after a step of a publish, of steps that come in this order.

    Attributes:
        ordered: the steps.
        claimed: the step after which its number is claimed.
        published: the step after which there is the version.
        tagged: the step after which the tag points at it.
    """

    ordered: tuple[str, ...]
    claimed: str
    published: str
    tagged: str

    def has(self, milestone: str, point: str) -> bool:
        return point in self.ordered[self.ordered.index(milestone) :]


FILES = {0: {"config": "{}", "s/zero": "0" * 3000}, 1: {"config": "{}", "t/one": "1"}}
# Both ways to publish end so.
COMMIT = (
    "before make _claims",
    "before write _claims/N",
    "after write _claims/N",
    "before write _staging/*/0/manifest.json",
    "within write _staging/*/0/manifest.json",
    "after write _staging/*/0/manifest.json",
    "before rename _staging/*/0",
    "after rename _staging/*/0",
    "before remove _staging/*",
    "after remove _staging/*",
    "before make _tags",
    "before write _tags/.production.*.draft",
    "within write _tags/.production.*.draft",
    "before rename _tags/.production.*.draft",
    "after rename _tags/.production.*.draft",
)
BY_RENAME = Milestones(
    COMMIT,
    claimed="after write _claims/N",
    published="after rename _staging/*/0",
    tagged="after rename _tags/.production.*.draft",
)
# Of a launch: a part of each rank.
PARTS = (
    "before make _staging/*",
    "before make _staging/*/0",
    "before make _staging/*/0/s",
    "before write _staging/*/0/config",
    "within write _staging/*/0/config",
    "before write _staging/*/0/s/zero",
    "within write _staging/*/0/s/zero",
    "before make _staging/*/1",
    "before write _staging/*/1/t/one",
    "within write _staging/*/1/t/one",
    "after write _staging/*/1/t/one",
    "before make _staging/*/0/t",
    "before rename _staging/*/1/t/one",
    "after rename _staging/*/1/t/one",
    *COMMIT,
)
# Of `ModelStore.publish`, which closes the files while it claims a number and writes the manifest.
WHOLE = (
    "before make _staging/*",
    "before make _staging/*/0",
    "before make _staging/*/0/s",
    "before make _staging/*/0/t",
    "before write _staging/*/0/config",
    "within write _staging/*/0/config",
    "after write _staging/*/0/config",
    "before write _staging/*/0/s/zero",
    "within write _staging/*/0/s/zero",
    "after write _staging/*/0/s/zero",
    "before write _staging/*/0/t/one",
    "within write _staging/*/0/t/one",
    "after write _staging/*/0/t/one",
    *COMMIT,
)
# The manifest is there, and of this file everything but its end.
OPEN = "within close _staging/*/0/s/zero"
DELETE = (
    "before make _claims",
    "before write _claims/N",
    "before make _staging/*",
    "before rename N",
    "after rename N",
    "before remove _staging/*",
    "after remove _staging/*",
)
DELETED = DELETE[DELETE.index("after rename N") :]
# A local directory is renamed in two steps, which no other process sees as a version.
LOCAL_HALF = "within rename _staging/*/0"
DAYS = 2 * 24 * 3600 * 1000


class Steps:
    """Calls of a file system by their names; at one of them the process is killed."""

    def __init__(self, home: str, killed_at: str | None) -> None:
        self._home = home
        self._killed_at = killed_at
        self._manifest = threading.Event()
        self.seen: list[str] = []

    def name(self, call: str, path: str) -> str:
        below = path.removeprefix(self._home).lstrip("/")
        below = re.sub(r"[0-9a-f]{32}|(?<=\.)[0-9a-f]{8}(?=\.draft)", "*", below)
        return f"{call} " + re.sub(r"^(_claims/)?[0-9]+(?=/|$)", r"\1N", below)

    def reach(self, name: str) -> None:
        self.seen.append(name)
        if name == "after write _staging/*/0/manifest.json":
            self._manifest.set()
        if name == self._killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self, files: type) -> None:
        for call in ("make", "write", "rename", "remove"):
            setattr(files, call, self._watched(call, getattr(files, call)))

    def _watched(self, call: str, original: Callable[..., None]) -> Callable[..., None]:
        def watched(files: object, path: str, *arguments: Any, **options: Any) -> None:
            if not path.startswith(self._home):
                original(files, path, *arguments, **options)
                return
            step = self.name(call, path)
            self.reach(f"before {step}")
            if call == "write":
                arguments = (self._within(step, *arguments),)
            original(files, path, *arguments, **options)
            self.reach(f"after {step}")

        return watched

    def _within(self, step: str, blocks: Iterable[bytes]) -> Iterator[bytes]:
        for block in blocks:
            yield block
            if block:
                self.reach(f"within {step}")
        at = step.replace("write", "within close", 1)
        if at == self._killed_at and self._manifest.wait(HANG_SECONDS):
            self.reach(at)

    def watch_local_rename(self) -> None:
        """Within it is before the system call, where it is made after others."""
        original = os.rename

        def rename(source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
            directory = Path(f"/proc/self/fd/{src_dir_fd}").readlink()
            self.reach(f"within {self.name('rename', str(directory / source))}")
            original(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

        os.rename = rename  # type: ignore[assignment]


def publish_parts(url: str, name: str, sources: Path) -> int:
    staging = publication.begin(LakePath(url), name)
    parts = {rank: publication.upload(staging, sources / str(rank), rank) for rank in FILES}
    return publication.commit(staging, parts, VersionDescription(tags=["production"])).version


def publish_whole(url: str, name: str, sources: Path) -> int:
    return ModelStore(url).publish(sources / "all", name, tags=["production"]).version


def delete_first(url: str, name: str, sources: Path) -> int:
    ModelStore(url).delete(name, 1)
    return 1


Deed = Callable[[str, str, Path], int]


def act(url: str, name: str, sources: Path, deed: Deed, point: str | None, told: Path) -> None:
    """A process that publishes or deletes, and is killed; or tells all steps."""
    home = LakePath(url) / name
    steps = Steps(home.path, point)
    steps.watch(type(home.client))
    steps.watch_local_rename()
    deed(url, name, sources)
    told.write_text("\n".join(steps.seen))


class Killing:
    """A model of which one process after the other is killed.

    The processes know nothing of the clients of this one, as of a fork of it they would.
    """

    _asking = threading.Lock()
    # Modules that each of them imports.
    imported: Sequence[str] = ()

    def __init__(self, lake: LakePath, name: str, sources: Path, publish: Deed) -> None:
        self.store = ModelStore(lake.url)
        self.home = lake / name
        self._url = lake.url
        self._name = name
        self._sources = sources
        self._publish = publish
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__, *self.imported])

    def publish(self) -> int:
        return self._publish(self._url, self._name, self._sources)

    def exit_code(self, point: str | None, deed: Deed | None = None) -> int | None:
        told = self._sources / self._name
        arguments = (self._url, self._name, self._sources, deed or self._publish, point, told)
        process = self._context.Process(target=act, args=arguments)
        # A start looks after all other processes too, and of two that ask after the same one only
        # the first is told how it ended.
        with self._asking:
            process.start()
        multiprocessing.connection.wait([process.sentinel], HANG_SECONDS)
        with self._asking:
            return process.exitcode

    def steps(self, deed: Deed | None = None) -> list[str]:
        assert self.exit_code(None, deed) == 0
        return (self._sources / self._name).read_text().split("\n")

    def whole(self) -> list[int]:
        """The versions that are listed, each of which is checked."""
        versions = self.store.versions(self._name)
        for version in versions:
            version.verify()
            assert sorted(version.files) == ["config", "s/zero", "t/one"]
            assert version.manifest["version"] == version.version
        if versions:
            assert self.store.get(self._name) == versions[-1]
        return [version.version for version in versions]

    def claimed(self) -> int:
        return max(numbers((self.home / "_claims").names()))

    def tagged(self) -> int | None:
        tags = self.store.tags(self._name)
        if tags:
            assert self.store.get(self._name, "production").version == tags["production"]
        return tags.get("production")

    def sweep(self) -> None:
        """What was left goes by age, and not before."""
        now = max(entry.modified for entry in (self.home / "_claims").entries())
        assert stale_uploads.sweep(self.home, now) == []
        stale_uploads.sweep(self.home, now + DAYS)
        assert (self.home / "_staging").names() == ()
        assert (self.home / "_tags").names() == ("production",)
        assert sorted(numbers(self.home.names())) == self.whole()


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    for rank, files in FILES.items():
        for name, content in files.items():
            for directory in (str(rank), "all"):
                file = tmp_path / "sources" / directory / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(content)
    return tmp_path / "sources"


@pytest.fixture
def at_once() -> Iterator[concurrent.futures.Executor]:
    """Most of the time goes by in waiting for the lake."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        yield pool


def kill_publish(killing: Killing, point: str, steps: Milestones = BY_RENAME) -> str | None:
    """What is wrong after a publish was killed at a step, or None."""
    try:
        first = killing.publish()
        assert first == 1
        assert killing.exit_code(point) == -signal.SIGKILL
        new = steps.has(steps.published, point)
        assert killing.whole() == ([1, 2] if new else [1])
        assert killing.tagged() == (2 if steps.has(steps.tagged, point) else 1)
        claimed = killing.claimed()
        # What comes before these may be done at the same time as them.
        expected = 2 if steps.has(steps.claimed, point) else 1
        assert point not in steps.ordered or claimed == expected
        # The next publisher is not in the way of what was left, and a number may be lost.
        following = killing.publish()
        assert following == claimed + 1
        assert killing.whole() == [1, *([2] if new else []), following]
        assert killing.tagged() == following
        killing.sweep()
    except (AssertionError, HopsGpuError) as problem:
        return f"{point}: {problem!r}"
    return None


def kill_delete(killing: Killing, point: str, gone: Collection[str]) -> str | None:
    """What is wrong after a deletion was killed at a step, or None."""
    try:
        for _ in range(2):
            killing.publish()
        assert killing.exit_code(point, delete_first) == -signal.SIGKILL
        there = point not in gone
        assert killing.whole() == ([1, 2] if there else [2])
        if there:
            killing.store.delete(killing.home.url.rpartition("/")[2], 1)
        assert killing.publish() == 3
        assert killing.whole() == [2, 3]
        killing.sweep()
    except (AssertionError, HopsGpuError) as problem:
        return f"{point}: {problem!r}"
    return None


@pytest.mark.parametrize(
    ("publish", "named", "unseen"),
    [(publish_parts, PARTS, []), (publish_whole, WHOLE, [OPEN])],
    ids=["parts", "whole"],
)
def test_a_publish_killed_at_any_step(
    lake: LakePath,
    sources: Path,
    at_once: concurrent.futures.Executor,
    publish: Deed,
    named: tuple[str, ...],
    unseen: list[str],
) -> None:
    points = [*named, *([LOCAL_HALF] if lake.url.startswith("file:") else [])]
    assert len(points) >= 20
    assert set(points) <= set(Killing(lake, "steps", sources, publish).steps())
    points += unseen
    killings = [Killing(lake, f"net-{at}", sources, publish) for at in range(len(points))]
    assert [wrong for wrong in at_once.map(kill_publish, killings, points) if wrong] == []


def test_a_deletion_killed_at_any_step(
    lake: LakePath, sources: Path, at_once: concurrent.futures.Executor
) -> None:
    steps = Killing(lake, "steps", sources, publish_parts)
    for _ in range(2):
        steps.publish()
    assert set(DELETE) <= set(steps.steps(delete_first))
    killings = [Killing(lake, f"net-{at}", sources, publish_parts) for at in range(len(DELETE))]
    killed = at_once.map(lambda *one: kill_delete(*one, DELETED), killings, DELETE)
    assert [wrong for wrong in killed if wrong] == []
