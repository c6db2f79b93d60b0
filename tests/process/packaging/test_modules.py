from __future__ import annotations

import io
import os
import stat
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from hopsgpu.packaging import modules
from hopsgpu.packaging.import_scan import ImportedModules
from hopsgpu.packaging.module_finder import ModuleSource
from hopsgpu.packaging.modules import ImportRoot, Packer, import_roots, pack_modules
from tests.unit.script_ranks import printed


def names(packed: modules.PackedModules) -> list[str]:
    return zipfile.ZipFile(io.BytesIO(packed.archive)).namelist()


def test_the_root_of_a_function_is_where_its_module_is_imported_from() -> None:
    assert Path(__file__).parents[3] in [root.path for root in import_roots(names)]


def test_the_environment_itself_is_not_packed() -> None:
    found = [path for root in import_roots(pytest.raises) for path in (root.path, *root.sources)]
    assert not any("site-packages" in str(path) for path in found)


def test_modules_and_packages_with_their_files(tmp_path: Path) -> None:
    write(tmp_path, "a.py", "data.csv", "pkg/__init__.py", "pkg/table.json", "plain/b.py")
    write(tmp_path, ".git/x.py", "__pycache__/a.py", "env/pyvenv.cfg", "env/lib.py")
    packed = pack_modules([tmp_path])
    assert names(packed) == ["0/a.py", "0/pkg/__init__.py", "0/pkg/table.json", "0/plain/b.py"]
    assert packed == pack_modules([tmp_path])
    assert packed.warnings == ()


def test_hopsgpu_itself_is_no_module_of_the_users() -> None:
    root = Path(modules.__file__).parents[2]
    packed = names(pack_modules([root]))
    assert f"0/{Path(__file__).relative_to(root).as_posix()}" in packed
    assert not [name for name in packed if name.startswith("0/hopsgpu/")]


def test_top_level_of_too_large_a_directory_is_packed_with_a_warning(tmp_path: Path) -> None:
    write(tmp_path, "top.py", *(f"deep/{number}.py" for number in range(modules.MAX_ENTRIES)))
    packed = pack_modules([tmp_path])
    assert names(packed) == ["0/top.py"]
    assert str(tmp_path) in packed.warnings[0]


FIRST = (
    "from hopsgpu.packaging.modules import import_roots\nprint(import_roots(lambda: 0)[0].path)\n"
)


@pytest.mark.parametrize("how", [["script.py"], ["-m", "script"], ["-c", FIRST]])
def test_the_directory_of_a_script_or_notebook_is_a_root(tmp_path: Path, how: list[str]) -> None:
    (tmp_path / "script.py").write_text(FIRST)
    assert printed(*how, cwd=tmp_path).strip() == str(tmp_path.resolve())


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


def write(root: Path, *files: str, content: str = "x", size: int | None = None) -> None:
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(content)
        if size is not None:
            os.truncate(root / file, size)


def test_all_files_of_a_package_however_deep_and_of_whatever_kind(tmp_path: Path) -> None:
    write(tmp_path, "pkg/__init__.py", "pkg/conf/base.yaml", "pkg/LICENSE", "pkg/.secret")
    write(tmp_path, "plain/data.csv", "plain/mod.py", "data/x.csv", "fast.abi3.so", "old.pyc")
    packed = pack_modules([tmp_path])
    assert names(packed) == [
        *("0/fast.abi3.so", "0/old.pyc", "0/pkg/LICENSE", "0/pkg/__init__.py"),
        *("0/pkg/conf/base.yaml", "0/plain/mod.py"),
    ]
    assert packed.names == {"fast", "old", "pkg", "plain"}
    # What is named is taken with all that is in it, a namespace package too.
    named = pack_modules([ImportRoot(tmp_path, (ModuleSource("plain", tmp_path / "plain"),))])
    assert set(names(named)) - set(names(packed)) == {"0/plain/data.csv"}


def test_sources_of_a_root_that_is_too_large_are_packed(tmp_path: Path) -> None:
    write(tmp_path, "top.py", "pkg/__init__.py", "pkg/t.json")
    write(tmp_path, *(f"data/{number}.csv" for number in range(modules.MAX_ENTRIES)))
    source = ModuleSource("pkg", tmp_path / "pkg")
    packed = pack_modules([ImportRoot(tmp_path, (source,))])
    assert names(packed) == ["0/pkg/__init__.py", "0/pkg/t.json", "0/top.py"]
    assert str(tmp_path) in packed.warnings[0]
    packed = pack_modules([ImportRoot(tmp_path, (source,), is_expected=False)])
    assert (names(packed), packed.warnings) == (["0/pkg/__init__.py", "0/pkg/t.json"], ())
    assert pack_modules([ImportRoot(tmp_path, is_expected=False)]) == pack_modules([])


def test_other_files_are_left_out_before_modules(tmp_path: Path) -> None:
    write(tmp_path, "a/__init__.py", "b/__init__.py")
    write(tmp_path, "a/weights.bin", "b/other.bin", size=modules.MAX_BYTES - 10)
    packed = pack_modules([ImportRoot(tmp_path, (ModuleSource("a", tmp_path / "a"),))])
    assert names(packed) == ["0/a/__init__.py", "0/a/weights.bin", "0/b/__init__.py"]
    assert "only modules" in packed.warnings[0]
    write(tmp_path, "a/weights.bin", size=modules.MAX_BYTES + 1)
    packed = pack_modules([ImportRoot(None, (ModuleSource("a", tmp_path / "a"),))])
    assert names(packed) == ["0/a/__init__.py"]
    assert "only its modules" in packed.warnings[0]
    write(tmp_path, "a/__init__.py", size=modules.MAX_BYTES + 1)
    packed = pack_modules([ImportRoot(None, (ModuleSource("a", tmp_path / "a"),))])
    assert (names(packed), packed.names) == ([], set())
    assert f"{tmp_path}/a " in packed.warnings[0]


def test_package_that_pip_installed_is_packed_completely_or_not_at_all(tmp_path: Path) -> None:
    """An incomplete package would shadow the one that the ranks' Python has."""
    write(tmp_path, "a/__init__.py", "a/t.json", "a-1.dist-info/RECORD")
    source = ModuleSource("a", tmp_path / "a")
    assert names(pack_modules([ImportRoot(None, (source,))])) == ["0/a/__init__.py", "0/a/t.json"]
    write(tmp_path, "a/weights.bin", size=modules.MAX_BYTES + 1)
    for root in (ImportRoot(None, (source,)), ImportRoot(tmp_path, (source,), is_expected=False)):
        packed = pack_modules([root])
        assert names(packed) == []
        assert f"{tmp_path}/a " in packed.warnings[0] and "python_env=" in packed.warnings[0]


def test_a_part_that_is_called_otherwise(tmp_path: Path) -> None:
    write(tmp_path, "lib/__init__.py", "lib/m.py", "file_v2.py")
    sources = (
        ModuleSource("pkg", tmp_path / "lib"),
        ModuleSource("file.py", tmp_path / "file_v2.py"),
    )
    packed = pack_modules([ImportRoot(None, sources)])
    assert names(packed) == ["0/file.py", "0/pkg/__init__.py", "0/pkg/m.py"]
    assert packed.names == {"file", "pkg"}


def modes(packed: modules.PackedModules) -> dict[str, str]:
    infos = zipfile.ZipFile(io.BytesIO(packed.archive)).infolist()
    return {info.filename: stat.filemode(info.external_attr >> 16) for info in infos}


def test_the_executable_bit_travels(tmp_path: Path) -> None:
    write(tmp_path, "pkg/__init__.py", "pkg/tool.sh")
    packer = Packer()
    assert set(modes(packer.pack([tmp_path])).values()) == {"-rw-r--r--"}
    (tmp_path / "pkg" / "tool.sh").chmod(0o4755)
    assert modes(packer.pack([tmp_path]))["0/pkg/tool.sh"] == "-rwxr-xr-x"


def test_a_name_that_is_not_utf_8_is_a_warning(tmp_path: Path) -> None:
    write(tmp_path, "pkg/__init__.py", "mod.py")
    for name in (b"caf\xe9.py", b"pkg/caf\xe9.txt"):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).touch()
    packed = pack_modules([tmp_path])
    assert names(packed) == ["0/mod.py", "0/pkg/__init__.py"]
    (warning,) = packed.warnings
    assert "caf\\xe9.py and 1 more" in warning
    warning.encode()


def test_links(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    write(elsewhere, "real.py", "linked/__init__.py", "linked/m.py", "data/x.csv")
    write(root, "pkg/__init__.py")
    for name, target in {
        "file.py": "real.py",
        "linked": "linked",
        "pkg/inner": "linked",
        "pkg/data": "data",
        "gone.py": "gone",
    }.items():
        (root / name).symlink_to(elsewhere / target)
    (root / "pkg" / "round").symlink_to(root / "pkg")
    assert names(pack_modules([root])) == ["0/file.py", "0/pkg/__init__.py"]
    sources = tuple(ModuleSource(name, root / name) for name in ("pkg", "linked"))
    assert names(pack_modules([ImportRoot(root, sources)])) == [
        *("0/file.py", "0/linked/__init__.py", "0/linked/m.py", "0/pkg/__init__.py"),
        *("0/pkg/inner/__init__.py", "0/pkg/inner/m.py"),
    ]


def test_a_zip_and_what_is_in_one(tmp_path: Path) -> None:
    file = tmp_path / "libs.zip"
    with zipfile.ZipFile(file, "w") as archive:
        for name in ("pkg/__init__.py", "pkg/t.json", "single.py", "hopsgpu/__init__.py", "README"):
            archive.writestr(name, "x")
    whole = ["0/pkg/__init__.py", "0/pkg/t.json", "0/single.py"]
    assert names(pack_modules([file])) == whole
    assert names(pack_modules([ImportRoot(None, (ModuleSource("pkg", file, "pkg"),))])) == whole[:2]
    single = ModuleSource("single.py", file, "single.py")
    assert names(pack_modules([ImportRoot(None, (single,))])) == whole[2:]
    file.write_bytes(b"no zip")
    assert pack_modules([file]).roots == 0


def test_unreadable_module_is_a_warning(tmp_path: Path) -> None:
    write(tmp_path, "a.py", "b.py")

    def refuse(self: Path) -> bytes:
        if self.name == "a.py":
            raise PermissionError(13, "Permission denied")
        return b""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_bytes", refuse)
        packed = pack_modules([tmp_path])
    assert (names(packed), packed.names) == (["0/b.py"], {"b"})
    (warning,) = packed.warnings
    assert warning.startswith(f"{tmp_path}/a.py ") and warning.endswith(": Permission denied")


LAYOUT = """
import io, sys, zipfile
from hopsgpu.packaging.import_scan import ImportRecorder
from hopsgpu.packaging.modules import pack_modules, import_roots
from hopsgpu.packaging.pickling import pickle_call
def shown(function, *args):
    noted = ImportRecorder()
    pickle_call(function, args, {}, import_recorder=noted)
    packed = pack_modules(import_roots(function, noted.modules()))
    print(*sorted(zipfile.ZipFile(io.BytesIO(packed.archive)).namelist()), *packed.warnings)
"""
LAZY = "def train():\n    import own.train\n"


@pytest.mark.parametrize(
    ("before", "function", "path"),
    [
        ("", LAZY, "src"),
        ("import sys, os; sys.path.insert(0, os.path.dirname(__file__) + '/../src')", LAZY, ""),
        ("import sys; sys.path.append('src')", LAZY, ""),
        ("import own.train", "def train():\n    return own.train.fit()\n", "src"),
        ("from own.train import fit", "def train(f=fit):\n    ...\n", "src"),
        ("from own.train import Model", "def helper(): Model()\ndef train(h=helper): ...", "src"),
        # Named nowhere in the function: what a name in a text would need.
        ("import own.train", "def train(): ...", "src"),
    ],
)
def test_a_script_beside_the_packages_directory(
    tmp_path: Path, before: str, function: str, path: str
) -> None:
    write(tmp_path / "src", "own/__init__.py", content="")
    module = "import second\nclass Model: ...\ndef fit(): ...\n"
    write(tmp_path / "src", "own/train.py", content=module)
    write(tmp_path / "src", "second.py", content="")
    write(tmp_path, "jobs/run.py", content=f"{LAYOUT}{before}\n{function}\nshown(train)\n")
    packed = ["0/run.py", "1/own/__init__.py", "1/own/train.py", "1/second.py"]
    assert printed("jobs/run.py", cwd=tmp_path, path=path).split() == packed


def test_directories_behind_the_environment_give_what_is_named_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else their other modules would go before those of the ranks' environment, as not here."""
    for root in ("early", "late"):
        write(tmp_path / root, f"{root}_named.py", f"{root}_other.py")
    before = [sysconfig.get_paths()["purelib"], str(tmp_path / "early")]
    # Python ignores entries that are not strings.
    monkeypatch.setattr(sys, "path", [*before, *sys.path, str(tmp_path / "late"), tmp_path])
    imported = ImportedModules(likely=frozenset({"early_named", "late_named"}))
    found = pack_modules(import_roots(pytest.raises, imported)).names
    assert found >= {"early_named", "early_other", "late_named"}
    assert "late_other" not in found


def test_a_working_directory_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.syspath_prepend("")
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert pack_modules(import_roots(pytest.raises)).warnings == ()


def test_files_of_spark_are_packed_unnamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "added.py", "data.csv")
    for name, module in {"added.zip": "zipped", "hopsgpu.zip": "hopsgpu"}.items():
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr(f"{module}/__init__.py", "")
        monkeypatch.syspath_prepend(tmp_path / name)
    packed = pack_modules(import_roots(pytest.raises, py_files_dir=tmp_path))
    assert packed.names >= {"added", "zipped"}
    assert "hopsgpu" not in packed.names
    assert not [name for name in names(packed) if name.endswith(("csv", ".zip"))]
