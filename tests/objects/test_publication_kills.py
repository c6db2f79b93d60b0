"""SIGKILL at every step of a publish, of a deletion and of a sweep, on an object store."""

from __future__ import annotations

import concurrent.futures
import signal
from pathlib import Path

import pytest

from hopsgpu.artifacts import publication, stale_uploads
from hopsgpu.errors import HopsGpuError
from hopsgpu.storage.lake import LakePath
from tests.contract import test_publication_kills
from tests.contract.test_publication_kills import (
    DAYS,
    Deed,
    Milestones,
    delete_first,
    kill_delete,
    kill_publish,
    publish_parts,
    publish_whole,
)


class Killing(test_publication_kills.Killing):
    # Those that are installed.
    imported = ("s3fs", "gcsfs", "adlfs")


sources = test_publication_kills.sources
at_once = test_publication_kills.at_once

CLAIM = ("before make _claims", "before write _claims/N")
# The files of all parts are uploaded in any order.
UPLOAD = (
    "after write _claims/N",
    "before write N/config",
    "within write N/config",
    "after write N/config",
    "before write N/s/zero",
    "within write N/s/zero",
    "after write N/s/zero",
    "before write N/t/one",
    "within write N/t/one",
    "after write N/t/one",
)
COMMIT = (
    "before write N/manifest.json",
    "within write N/manifest.json",
    "after write N/manifest.json",
    "before write _tags/.*.draft",
    "after write _tags/.*.draft",
    "before remove _tags/.*.draft",
    "after remove _tags/.*.draft",
    "before write _tags/production",
    "within write _tags/production",
    "after write _tags/production",
)
BY_MANIFEST = Milestones(
    (*CLAIM, *UPLOAD, *COMMIT),
    claimed="after write _claims/N",
    published="after write N/manifest.json",
    tagged="after write _tags/production",
)
REMOVE = (
    "after write N/manifest.json",
    "before remove N/config",
    "after remove N/config",
    "before remove N/s",
    "after remove N/s",
    "before remove N/t",
    "after remove N/t",
    "before remove N/manifest.json",
    "after remove N/manifest.json",
)
DELETE = (*CLAIM, "before write N/manifest.json", *REMOVE)
SWEEP = ("before write N/manifest.json", *REMOVE)


@pytest.mark.parametrize("publish", [publish_parts, publish_whole], ids=["parts", "whole"])
def test_a_publish_killed_at_any_step(
    lake: LakePath, sources: Path, at_once: concurrent.futures.Executor, publish: Deed
) -> None:
    points = BY_MANIFEST.ordered
    assert len(points) >= 20
    assert set(points) <= set(Killing(lake, "steps", sources, publish).steps())
    killings = [Killing(lake, f"net-{at}", sources, publish) for at in range(len(points))]
    killed = at_once.map(lambda *one: kill_publish(*one, BY_MANIFEST), killings, points)
    assert [wrong for wrong in killed if wrong] == []


def test_a_deletion_killed_at_any_step(
    lake: LakePath, sources: Path, at_once: concurrent.futures.Executor
) -> None:
    steps = Killing(lake, "steps", sources, publish_parts)
    for _ in range(2):
        steps.publish()
    assert set(DELETE) <= set(steps.steps(delete_first))
    killings = [Killing(lake, f"net-{at}", sources, publish_parts) for at in range(len(DELETE))]
    killed = at_once.map(lambda *one: kill_delete(*one, REMOVE), killings, DELETE)
    assert [wrong for wrong in killed if wrong] == []


def sweep_second(url: str, name: str, sources: Path) -> int:
    home = LakePath(url) / name
    stale_uploads.sweep(home, (home / "_claims" / "2").stat().modified + DAYS)
    return 2


def kill_sweep(killing: Killing, lake: LakePath, sources: Path, point: str) -> str | None:
    """What is wrong after a sweep of an abandoned upload was killed at a step, or None."""
    try:
        killing.publish()
        staging = publication.begin(lake, killing.home.url.rpartition("/")[2])
        publication.upload(staging, sources / "all", 0)
        assert killing.exit_code(point, sweep_second) == -signal.SIGKILL
        assert killing.whole() == [1]
        killing.sweep()
        assert killing.publish() == 3
        assert killing.whole() == [1, 3]
    except (AssertionError, HopsGpuError) as problem:
        return f"{point}: {problem!r}"
    return None


def test_a_sweep_killed_at_any_step(
    lake: LakePath, sources: Path, at_once: concurrent.futures.Executor
) -> None:
    killings = [Killing(lake, f"net-{at}", sources, publish_parts) for at in range(len(SWEEP))]
    killed = at_once.map(lambda *one: kill_sweep(one[0], lake, sources, one[1]), killings, SWEEP)
    assert [wrong for wrong in killed if wrong] == []
