from __future__ import annotations

import io
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hopsgpu import modules
from hopsgpu.modules import Packer, pack_modules, roots_of


def names(packed: modules.PackedModules) -> list[str]:
    return zipfile.ZipFile(io.BytesIO(packed.archive)).namelist()


def test_the_root_of_a_function_is_where_its_module_is_imported_from() -> None:
    assert Path(__file__).parents[2] in [root.path for root in roots_of(names)]


def test_the_environment_itself_is_not_packed() -> None:
    found = [path for root in roots_of(pytest.raises) for path in (root.path, *root.parts)]
    assert not any("site-packages" in str(path) for path in found)


def test_modules_and_packages_with_their_files(tmp_path: Path) -> None:
    for file in ("a.py", "data.csv", "pkg/__init__.py", "pkg/table.json", "plain/b.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("x")
    for left_out in (".git/x.py", "__pycache__/a.py", "env/pyvenv.cfg", "env/lib.py"):
        (tmp_path / left_out).parent.mkdir(exist_ok=True)
        (tmp_path / left_out).write_text("x")
    packed = pack_modules([tmp_path])
    assert names(packed) == ["0/a.py", "0/pkg/__init__.py", "0/pkg/table.json", "0/plain/b.py"]
    assert packed == pack_modules([tmp_path])
    assert packed.warnings == ()


def test_hopsgpu_itself_is_no_module_of_the_users() -> None:
    root = Path(modules.__file__).parents[1]
    packed = names(pack_modules([root]))
    assert f"0/{Path(__file__).relative_to(root).as_posix()}" in packed
    assert not [name for name in packed if name.startswith("0/hopsgpu/")]


def test_too_large_a_directory_gives_its_top_and_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules, "MOST_ENTRIES", 3)
    (tmp_path / "deep").mkdir()
    for number in range(4):
        (tmp_path / "deep" / f"{number}.py").write_text("x")
    (tmp_path / "top.py").write_text("x")
    packed = pack_modules([tmp_path])
    assert names(packed) == ["0/top.py"]
    assert str(tmp_path) in packed.warnings[0]


@pytest.mark.parametrize("how", [["script.py"], ["-m", "script"]])
def test_the_scripts_directory_is_a_root(tmp_path: Path, how: list[str]) -> None:
    (tmp_path / "script.py").write_text(
        "from hopsgpu.modules import roots_of\ndef f(): ...\nprint(roots_of(f)[0].path)\n"
    )
    ran = subprocess.run(
        [sys.executable, *how], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == str(tmp_path.resolve())


def test_a_notebooks_working_directory_is_a_root(tmp_path: Path) -> None:
    code = "from hopsgpu.modules import roots_of\nprint(roots_of(lambda: 0)[0].path)"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == str(tmp_path.resolve())


def test_modules_are_packed_again_only_where_one_has_changed(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    packer = Packer()
    first = packer.pack([tmp_path])
    assert packer.pack([tmp_path]) is first
    (tmp_path / "a.py").write_text("x = 22\n")
    changed = packer.pack([tmp_path])
    assert changed.archive != first.archive
    (tmp_path / "b.py").touch()
    assert packer.pack([tmp_path]).archive != changed.archive
    (tmp_path / "b.py").unlink()
    assert packer.pack([tmp_path]) == changed
