"""The files of a directory from which ranks import."""

from __future__ import annotations

from pathlib import Path

from hopsgpu.packaging.module_files import files_below, files_in


def test_links_that_lead_nowhere_hide_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "nowhere").symlink_to("nothing")
    (tmp_path / "no directory").symlink_to("train.py/below")
    below = files_below(tmp_path, "", limit=10)
    assert below is not None and [file.name for file in below] == ["train.py"]
    assert [file.name for file in files_in(tmp_path)] == ["train.py"]
