"""What `up` refuses before it starts a daemon."""

from __future__ import annotations

from pathlib import Path

import pytest

from hopsgpu.devcluster.boot import DaemonStarter, start_all
from hopsgpu.devcluster.config import ClusterSpec
from hopsgpu.devcluster.hadoop_jars import DaemonJars
from hopsgpu.devcluster.layout import ClusterLayout
from hopsgpu.devcluster.startup_wait import StartupWait
from hopsgpu.devcluster.state import ClusterState
from hopsgpu.errors import ClusterError


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (ClusterSpec(hadoop="3.3.6"), r"3\.5\.0 .*3\.3\.6"),
        (ClusterSpec(hadoop="3.5.0", namenode_ha=True), "one NameNode: "),
    ],
)
def test_an_hdfs_that_does_not_fit_is_left_alone(
    tmp_path: Path, spec: ClusterSpec, why: str
) -> None:
    layout = ClusterLayout.at(tmp_path)
    block = layout.name() / "fsimage"
    block.parent.mkdir(parents=True)
    block.touch()
    layout.format_marker.write_text("3.5.0")
    state = ClusterState(spec, "none", "/jdk", {})
    wait = StartupWait(layout, print)
    jars = DaemonJars(spec.hadoop, tmp_path, None)
    starter = DaemonStarter(layout, state, jars, tmp_path, wait, {})
    with pytest.raises(ClusterError, match=why):
        start_all(starter, list(spec.daemons))
    assert not starter.started
    assert block.exists() and layout.format_marker.read_text() == "3.5.0"
