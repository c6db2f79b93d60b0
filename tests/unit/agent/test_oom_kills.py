from __future__ import annotations

from pathlib import Path

import pytest

from hopsgpu.agent.oom_kills import oom_kills


@pytest.mark.parametrize(
    ("groups", "file", "content"),
    [
        ("0::/yarn/c1\n", "yarn/c1/memory.events", "low 0\noom 3\noom_kill 2\noom_group_kill 0\n"),
        (
            "4:cpu,cpuacct:/x\n3:memory:/yarn/c1\n0::/x\n",
            "memory/yarn/c1/memory.oom_control",
            "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
        ),
    ],
)
def test_kills_are_counted_in_both_hierarchies(
    tmp_path: Path, groups: str, file: str, content: str
) -> None:
    (tmp_path / "own").write_text(groups)
    counts = tmp_path / "groups" / file
    counts.parent.mkdir(parents=True)
    counts.write_text(content)
    assert oom_kills(tmp_path / "own", tmp_path / "groups") == 2


def test_unknown_counter_gives_no_kills(tmp_path: Path) -> None:
    assert oom_kills(tmp_path / "own", tmp_path) == 0
    (tmp_path / "own").write_text("0::/c\n")
    assert oom_kills(tmp_path / "own", tmp_path) == 0
    assert oom_kills() >= 0
