"""What `up` refuses before it starts a daemon."""

from __future__ import annotations

from pathlib import Path

import pytest

from hopsgpu.devcluster.boot import DaemonStarter
from hopsgpu.devcluster.config import ClusterSpec
from hopsgpu.devcluster.hadoop_jars import DaemonJars
from hopsgpu.devcluster.layout import ClusterLayout
from hopsgpu.devcluster.state import ClusterState
from hopsgpu.errors import ClusterError


def test_hdfs_of_another_hadoop_is_left_alone(tmp_path: Path) -> None:
    layout = ClusterLayout.at(tmp_path)
    layout.format_marker.parent.mkdir(parents=True)
    layout.format_marker.write_text("3.5.0")
    block = layout.name() / "fsimage"
    block.parent.mkdir()
    block.touch()
    state = ClusterState(ClusterSpec(hadoop="3.3.6"), "none", "/jdk", {})
    starter = DaemonStarter(layout, state, DaemonJars("3.3.6", tmp_path, None))
    with pytest.raises(ClusterError, match=r"3\.5\.0 .*3\.3\.6"):
        starter.format_namenode()
    assert block.exists() and layout.format_marker.read_text() == "3.5.0"


def test_hdfs_of_one_name_node_gets_no_second_one(tmp_path: Path) -> None:
    layout = ClusterLayout.at(tmp_path)
    layout.format_marker.parent.mkdir(parents=True)
    layout.format_marker.write_text("3.5.0")
    state = ClusterState(ClusterSpec(hadoop="3.5.0", namenode_ha=True), "none", "/jdk", {})
    starter = DaemonStarter(layout, state, DaemonJars("3.5.0", tmp_path, None))
    with pytest.raises(ClusterError, match="one NameNode: "):
        starter.format_namenode()
