"""Mount tables of viewfs: what hdfs-native is given, and what is behind a mount point."""

from __future__ import annotations

import pytest

from hopsgpu.storage.hdfs import Hdfs
from hopsgpu.storage.viewfs import NO_MOUNT, complete_mount_table, resolve_mount

TABLE = "fs.viewfs.mounttable.company."
NN1, NN2 = "hdfs://nn1:8020", "hdfs://nn2:8020"
LINKS = {f"{TABLE}link./data": f"{NN1}/data", f"{TABLE}link./data/raw": f"{NN2}/raw"}


def test_a_table_without_a_fallback_gets_one_where_nothing_can_be() -> None:
    assert complete_mount_table("viewfs://company", LINKS) == {
        f"{TABLE}linkFallback": f"{NN1}{NO_MOUNT}"
    }
    assert complete_mount_table("hdfs://company", LINKS) == {}


@pytest.mark.parametrize("kind", ["linkFallback", "linkMergeSlash"])
def test_a_fallback_is_kept(kind: str) -> None:
    settings = {**LINKS, TABLE + kind: f"{NN2}/all"}
    assert complete_mount_table("viewfs://company", settings) == {
        f"{TABLE}linkFallback": f"{NN2}/all"
    }


def test_mount_points_on_other_file_systems_do_not_hide_the_others() -> None:
    settings = {**LINKS, f"{TABLE}link./cold": "s3a://bucket/cold"}
    assert complete_mount_table("viewfs://company", settings)[f"{TABLE}link./cold"] == (
        f"{NN1}{NO_MOUNT}"
    )


def test_a_table_without_mount_points_on_hdfs_is_refused() -> None:
    with pytest.raises(ValueError, match=r"fs\.viewfs\.mounttable\.other\.link\.<path>"):
        Hdfs("viewfs://other", should_fail_fast=True)


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("/data", f"{NN1}/data"),
        ("/data/a/b", f"{NN1}/data/a/b"),
        ("/data/raw/c", f"{NN2}/raw/c"),
        ("/data/rawer", f"{NN1}/data/rawer"),
        ("/database", None),
        ("/", None),
    ],
)
def test_the_longest_mount_point_counts(path: str, target: str | None) -> None:
    assert resolve_mount(f"viewfs://company{path}", LINKS) == target
    assert resolve_mount(f"hdfs://company{path}", LINKS) is None
