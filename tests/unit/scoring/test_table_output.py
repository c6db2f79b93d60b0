"""The output on the lake: there completely or not at all, whoever else still writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from hopsgpu.errors import ConfigError, StoreError
from hopsgpu.scoring.table_output import TableOutput
from hopsgpu.storage.lake import LakePath


@pytest.fixture
def output(tmp_path: Path) -> TableOutput:
    output = TableOutput(LakePath(f"file://{tmp_path}/scored"), "run-1")
    output.prepare()
    return output


def test_the_output_appears_at_once_and_in_order(output: TableOutput, tmp_path: Path) -> None:
    for number in (1, 0, 10):
        (output.drafts / f"{number}-x").write(str(number).encode())
        output.keep(number, f"{number}-x")
    (output.drafts / "1-late").write(b"of a rank that was believed to be lost")
    assert not (tmp_path / "scored").exists() and output.kept_parts() == {0, 1, 10}
    output.publish([0, 1, 10])
    found = sorted((tmp_path / "scored").iterdir())
    assert [path.read_text() for path in found] == ["0", "1", "10"]
    assert [path.name for path in tmp_path.iterdir()] == ["scored"]


def test_a_part_is_kept_once(output: TableOutput) -> None:
    for name in ("a", "b"):
        (output.drafts / name).write(name.encode())
    output.keep(0, "a")
    with pytest.raises(StoreError, match="another driver"):
        output.keep(0, "b")
    assert output.part(0).read() == b"a"


def test_nothing_is_replaced(output: TableOutput, tmp_path: Path) -> None:
    output.check()
    (tmp_path / "scored").mkdir()
    with pytest.raises(ConfigError, match="exists"):
        output.check()
    with pytest.raises(StoreError, match="when the score began"):
        output.publish([])


def test_nothing_is_published_without_all_parts(output: TableOutput, tmp_path: Path) -> None:
    (output.drafts / "a").write(b"a")
    output.keep(1, "a")
    with pytest.raises(StoreError, match="1 part .*part-000000.*resume"):
        output.publish([0, 1])
    assert not (tmp_path / "scored").exists()


def test_a_score_that_gives_up_leaves_its_parts_and_nothing_else(
    output: TableOutput, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        (output.drafts / name).write(b"a")
    output.keep(4, "a")
    assert output.remove_unneeded() and output.kept_parts() == {4}
    assert [path.name for path in (tmp_path / ".scored-run-1").iterdir()] == ["parts"]
    TableOutput(output.target, "run-2").prepare()
    assert not TableOutput(output.target, "run-2").remove_unneeded()
    assert [path.name for path in tmp_path.iterdir()] == [".scored-run-1"]
    others = TableOutput(output.target, "run-2").others()
    assert others == {"run-1": f"file://{tmp_path}/.scored-run-1"}


def test_a_later_run_finds_what_is_kept(output: TableOutput, tmp_path: Path) -> None:
    (output.drafts / "a").write(b"a")
    output.keep(4, "a")
    again = TableOutput(LakePath(f"file://{tmp_path}/scored"), "run-1")
    again.prepare()
    assert again.kept_parts() == {4}
