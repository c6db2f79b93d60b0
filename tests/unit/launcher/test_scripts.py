"""Scripts at the driver: how they are named, found, packed and stored."""

from __future__ import annotations

import json
import tarfile
import threading
from importlib.machinery import PathFinder
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from hopsgpu.errors import Cancelled, ConfigError
from hopsgpu.launcher.scripts import (
    PackableScript,
    ReadyScript,
    ScriptRequest,
    default_script_name,
    find_script,
    ready_script,
    request_of,
)
from hopsgpu.packaging.code_variables import Setting
from hopsgpu.packaging.preload import StaticFindings
from hopsgpu.packaging.python_env.archives import unpack
from hopsgpu.packaging.script import (
    FILE,
    MODULE,
    PROGRAM,
    KeptDirectories,
    ScriptCall,
    StoredScript,
)
from hopsgpu.storage.lake import LakePath

NOTHING_KEPT = KeptDirectories()


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, which is the working directory of most scripts here."""
    directory = tmp_path / "work"
    directory.mkdir()
    monkeypatch.chdir(directory)
    return directory


@pytest.fixture
def root(tmp_path: Path) -> LakePath:
    (tmp_path / "lake").mkdir()
    return LakePath(f"file://{tmp_path}/lake")


def write(root: Path, name: str, text: str = "") -> Path:
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def find(
    kind: str,
    target: object,
    working_dir: Path | None,
    *args: object,
    kept: KeptDirectories = NOTHING_KEPT,
) -> PackableScript:
    return find_script(ScriptRequest(kind, str(target), working_dir), args, kept)


def unpacked(script: PackableScript, root: LakePath, home: Path) -> Path:
    """The script as it arrives on a node."""
    stored = script.store(root, threading.Event())
    unpack(Path(LakePath(stored.url).path), "", home, ())
    return home


def names_below(directory: Path) -> list[str]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return sorted(path.relative_to(directory).as_posix() for path in files)


def is_importable(name: str, script: PackableScript, home: Path) -> bool:
    """Whether the script finds a module in a rank, without the ranks' own Python."""
    first = home / "work"
    if script.call.kind == FILE:
        first = (first / script.call.target).parent
    roots = [*(home / "work" / path for path in script.paths)]
    roots += [home / "modules" / str(number) for number in range(script.modules.roots)]
    return PathFinder.find_spec(name, [*map(str, (first, *roots))]) is not None


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        ("train.py", FILE),
        ("missing/train", FILE),
        ("./train", FILE),
        ("no-suffix", FILE),
        (Path("train"), FILE),
        ("train", MODULE),
        ("mypkg.train", MODULE),
        ("mypkg", MODULE),
    ],
)
def test_what_a_target_names(work: Path, target: Any, kind: str) -> None:
    write(work, "no-suffix")
    write(work, "mypkg/__init__.py")
    assert request_of(target, "dir") == ScriptRequest(kind, str(target), Path("dir"))
    assert request_of(target, None) == ScriptRequest(kind, str(target))


@pytest.mark.parametrize("target", ["", ".", "no file", "a..b", "1st", "a-b", "mypkg.", 7])
def test_what_names_neither_is_refused(work: Path, target: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        request_of(target, None)
    assert str(raised.value).startswith(f"train_fn={str(target)!r}: must be a function, the path")


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("train.py", "train"),
        ("deep/er/fit model.py", "fit-model"),
        (Path("/abs/train.py"), "train"),
        ("mypkg.train", "mypkg.train"),
        (ScriptRequest(MODULE, "mypkg.train"), "mypkg.train"),
        (ScriptRequest(PROGRAM, "./train.sh"), "train.sh"),
        ("-.py", "script"),
        ("x" * 99 + ".py", "x" * 40),
    ],
)
def test_runs_have_the_name_of_their_script(target: object, name: str) -> None:
    assert default_script_name(target) == name


def test_a_file_in_the_working_directory(work: Path, root: LakePath, tmp_path: Path) -> None:
    write(work, "train.py", "import helper, torch\n")
    write(work, "helper.py", "import numpy\n")
    write(work, "conf/a.yaml")
    script = find(FILE, "train.py", work, "--epochs", 3)
    assert script.call == ScriptCall(FILE, "train.py", ("--epochs", "3"))
    assert script.beside is None and script.needs == () and script.warnings == ()
    assert script.modules.roots == 0, "the helper is in the working directory"
    assert script.bytes >= len("import helper, torch\nimport numpy\n")
    assert {"torch", "numpy"} <= set(script.foreseen.imports)
    home = unpacked(script, root, tmp_path / "node")
    assert names_below(home) == ["work/conf/a.yaml", "work/helper.py", "work/train.py"]
    assert is_importable("helper", script, home)


@pytest.mark.parametrize("is_absolute", [False, True])
def test_a_file_deeper_in_the_working_directory(
    work: Path, root: LakePath, tmp_path: Path, is_absolute: bool
) -> None:
    file = write(work, "scripts/train.py", "import beside\n")
    write(work, "scripts/beside.py", "import pandas\n")
    target = file if is_absolute else "scripts/../scripts/train.py"
    script = find(FILE, target, Path())
    assert script.call.target == "scripts/train.py"
    assert "pandas" in script.foreseen.imports
    assert is_importable("beside", script, unpacked(script, root, tmp_path / "node"))


def test_an_ignored_file_travels(work: Path, root: LakePath, tmp_path: Path) -> None:
    write(work, ".gitignore", "scratch/\n")
    write(work, "scratch/train.py")
    write(work, "scratch/data.bin")
    script = find(FILE, "scratch/train.py", work)
    home = unpacked(script, root, tmp_path / "node")
    assert names_below(home) == ["work/.gitignore", "work/scratch/train.py"]


def test_a_file_that_is_a_link_to_one_elsewhere(work: Path, root: LakePath, tmp_path: Path) -> None:
    (work / "train.py").symlink_to(write(tmp_path, "elsewhere/train.py", "print()\n"))
    script = find(FILE, "train.py", work)
    assert script.call.target == "train.py"
    home = unpacked(script, root, tmp_path / "node")
    assert (home / "work" / "train.py").read_text() == "print()\n"


def test_a_file_outside_the_working_directory(work: Path, root: LakePath, tmp_path: Path) -> None:
    file = write(tmp_path, "elsewhere/train.py", "import helper, tensorflow\n")
    write(tmp_path, "elsewhere/helper.py")
    write(work, "data.txt")
    script = find(FILE, file, work)
    assert script.call.target == "../script/train.py" and script.beside == file
    assert "tensorflow" in script.foreseen.imports
    home = unpacked(script, root, tmp_path / "node")
    assert {"script/train.py", "work/data.txt", "modules/0/helper.py"} <= set(names_below(home))
    assert (home / "work" / script.call.target).resolve() == home / "script" / "train.py"
    assert is_importable("helper", script, home)


def test_a_file_without_a_working_directory(work: Path, root: LakePath, tmp_path: Path) -> None:
    write(work, "train.py", "import helper\n")
    write(work, "helper.py")
    write(work, "data.txt", "x" * 999)
    script = find(FILE, "train.py", None)
    assert script.call.target == "../script/train.py" and script.directory is None
    home = unpacked(script, root, tmp_path / "node")
    assert (home / "work").is_dir() and names_below(home / "work") == []
    assert is_importable("helper", script, home)
    assert "modules/0/data.txt" not in names_below(home)


def test_modules_from_elsewhere_travel_with_a_file(
    work: Path, root: LakePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(work, "train.py", "def main():\n    import own_package.model\n")
    write(tmp_path, "other/src/own_package/__init__.py")
    write(tmp_path, "other/src/own_package/model.py", "import own_library, scipy\n")
    write(tmp_path, "other/src/own_package/vocabulary.txt")
    write(tmp_path, "library/own_library.py")
    monkeypatch.syspath_prepend(tmp_path / "other" / "src")
    monkeypatch.syspath_prepend(tmp_path / "library")
    script = find(FILE, "train.py", work)
    assert script.modules.names == {"own_package", "own_library"}
    assert "scipy" in script.foreseen.imports
    home = unpacked(script, root, tmp_path / "node")
    assert is_importable("own_package", script, home)
    assert is_importable("own_library", script, home)
    travelled = [PurePosixPath(name).name for name in names_below(home / "modules")]
    assert sorted(travelled) == ["__init__.py", "model.py", "own_library.py", "vocabulary.txt"]


@pytest.mark.parametrize(
    ("script_name", "package_root"),
    [("train.py", "src"), ("scripts/train.py", "src"), ("scripts/train.py", ".")],
)
def test_modules_that_sys_path_finds_in_the_working_directory_are_importable(
    work: Path,
    root: LakePath,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script_name: str,
    package_root: str,
) -> None:
    # As after `pip install -e .` in a project with `src`, or with PYTHONPATH=.
    write(work, script_name, "import own_project.model\n")
    write(work / package_root, "own_project/__init__.py")
    write(work / package_root, "own_project/model.py")
    monkeypatch.syspath_prepend(work / package_root)
    script = find(FILE, script_name, work)
    assert is_importable("own_project", script, unpacked(script, root, tmp_path / "node"))


def test_a_module_beside_the_script_comes_before_one_elsewhere(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(work, "train.py", "import own_twin\n")
    write(work, "own_twin.py")
    write(tmp_path, "other/own_twin.py")
    monkeypatch.syspath_prepend(tmp_path / "other")
    assert find(FILE, "train.py", work).modules.roots == 0


def test_a_missing_file_is_refused(work: Path) -> None:
    with pytest.raises(ConfigError, match="'train.py': there is no such file on this machine"):
        find(FILE, "train.py", work)
    (work / "dir.py").mkdir()
    with pytest.raises(ConfigError, match="'dir.py': there is no such file"):
        find(FILE, "dir.py", work)


def test_a_script_with_an_error_of_syntax_travels(work: Path) -> None:
    # Python itself reports the error, in the rank.
    write(work, "train.py", "def broken(:\n")
    assert find(FILE, "train.py", work).foreseen == StaticFindings()
    (work / "train.py").write_bytes(b"\xff\xfe\x00")
    assert find(FILE, "train.py", work).call.target == "train.py"


def test_settings_of_a_script_are_foreseen(work: Path) -> None:
    write(work, "train.py", "import os, jax, helper\nos.environ['MASTER_PORT'] = '1'\n")
    write(work, "helper.py", "import os\nos.environ.setdefault('XLA_FLAGS', '')\n")
    foreseen = find(FILE, "train.py", work).foreseen
    assert foreseen.settings == {Setting("MASTER_PORT", False), Setting("XLA_FLAGS", True)}
    assert foreseen.imports == (), "jax must see what the script sets"


def test_a_module_in_the_working_directory(work: Path, root: LakePath, tmp_path: Path) -> None:
    write(work, "own_package/__init__.py")
    write(work, "own_package/train.py", "from . import data\n")
    write(work, "own_package/data.py", "import xgboost\n")
    script = find(MODULE, "own_package.train", work, "-x")
    assert script.call == ScriptCall(MODULE, "own_package.train", ("-x",))
    assert script.modules.roots == 0 and script.needs == ()
    assert "xgboost" in script.foreseen.imports
    home = unpacked(script, root, tmp_path / "node")
    assert "work/own_package/train.py" in names_below(home)
    assert is_importable("own_package", script, home)


def test_a_package_that_runs_as_a_module(work: Path) -> None:
    write(work, "own_package/__init__.py", "import sklearn\n")
    write(work, "own_package/__main__.py", "import torch\n")
    foreseen = find(MODULE, "own_package", work).foreseen
    assert {"torch", "sklearn"} <= set(foreseen.imports)


def test_a_module_without_a_working_directory(work: Path, root: LakePath, tmp_path: Path) -> None:
    write(work, "own_package/__init__.py")
    write(work, "own_package/train.py", "import own_helper\n")
    write(work, "own_helper.py")
    write(work, "data.txt")
    script = find(MODULE, "own_package.train", None)
    assert script.modules.names == {"own_package", "own_helper"} and script.needs == ()
    home = unpacked(script, root, tmp_path / "node")
    assert names_below(home / "work") == [] and is_importable("own_package", script, home)


@pytest.mark.parametrize("has_directory", [False, True])
def test_a_module_elsewhere(
    work: Path,
    root: LakePath,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_directory: bool,
) -> None:
    write(tmp_path, "other/src/own_elsewhere/__init__.py")
    write(tmp_path, "other/src/own_elsewhere/train.py", "import accelerate\n")
    monkeypatch.syspath_prepend(tmp_path / "other" / "src")
    script = find(MODULE, "own_elsewhere.train", work if has_directory else None)
    assert script.modules.names == {"own_elsewhere"} and script.needs == ()
    assert "accelerate" in script.foreseen.imports
    assert is_importable("own_elsewhere", script, unpacked(script, root, tmp_path / "node"))


def test_a_module_of_a_project_with_src_in_the_working_directory(
    work: Path, root: LakePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(work, "src/own_source/__init__.py")
    write(work, "src/own_source/train.py")
    monkeypatch.syspath_prepend(work / "src")
    script = find(MODULE, "own_source.train", work)
    home = unpacked(script, root, tmp_path / "node")
    assert is_importable("own_source", script, home) and script.needs == ()


def test_a_module_of_the_environment_must_be_in_that_of_the_ranks(work: Path) -> None:
    script = find(MODULE, "pytest", work)
    assert script.needs == ("pytest",) and script.modules.roots == 0


def test_an_unknown_module_is_refused(work: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        find(MODULE, "own_missing.train", work)
    text = str(raised.value)
    assert "'own_missing.train': this Python finds no module 'own_missing'" in text
    assert str(work) in text and "sys.path" in text


def test_a_program_travels_with_the_working_directory(
    work: Path, root: LakePath, tmp_path: Path
) -> None:
    write(work, "train.sh", "#!/bin/sh\n").chmod(0o755)
    script = find(PROGRAM, "./train.sh", work, "a b")
    assert script.call == ScriptCall(PROGRAM, "./train.sh", ("a b",))
    assert script.foreseen == StaticFindings() and script.needs == ()
    home = unpacked(script, root, tmp_path / "node")
    assert (home / "work" / "train.sh").stat().st_mode & 0o100


def test_a_program_of_the_nodes_travels_alone(root: LakePath, tmp_path: Path) -> None:
    script = find(PROGRAM, "nvidia-smi", None)
    assert script.bytes == len(script.modules.archive) and script.directory is None
    assert names_below(unpacked(script, root, tmp_path / "node")) == []


def test_arguments_are_texts_numbers_and_paths(work: Path) -> None:
    write(work, "train.py")
    args = ("--lr", 1e-3, 7, -1, Path("conf/a.yaml"), "", "é", "--", "-h")
    script = find(FILE, "train.py", work, *args)
    words = ("--lr", "0.001", "7", "-1", "conf/a.yaml", "", "é", "--", "-h")
    assert script.call.args == words


@pytest.mark.parametrize(
    "value", [None, True, False, b"bytes", ["a"], {"a": 1}, object(), 1j, "a\0b", Path("a\0b")]
)
def test_other_arguments_are_refused(work: Path, value: object) -> None:
    write(work, "train.py")
    with pytest.raises(ConfigError, match="args has"):
        find(FILE, "train.py", work, "fine", value)


def test_files_of_directories_that_ranks_fill_stay(work: Path) -> None:
    for name in ("train.py", "out/old", "model/old", "tb/old", "ckpt/old"):
        write(work, name)
    kept = KeptDirectories("model", "ckpt", "tb", ("out",))
    script = find(FILE, "train.py", work, kept=kept)
    assert script.directory is not None
    files = [name for name in script.directory.files if (work / name).is_file()]
    assert files == ["ckpt/old", "train.py"]


def test_the_bound_of_the_working_directory_is_passed_on(work: Path) -> None:
    write(work, "train.py", "x" * 1000)
    request = ScriptRequest(FILE, "train.py", work)
    with pytest.raises(ConfigError, match="spark.hopsgpu.working_dir.limit"):
        find_script(request, (), NOTHING_KEPT, 999)
    assert find_script(request, (), NOTHING_KEPT, 1000).directory is not None


def test_warnings_of_the_working_directory_are_the_scripts(work: Path) -> None:
    write(work, "train.py")
    (work / "broken").symlink_to("nothing")
    (warning,) = find(FILE, "train.py", work).warnings
    assert "broken" in warning


def test_the_same_script_is_stored_once(work: Path, root: LakePath) -> None:
    write(work, "train.py", "print()\n")
    first = find(FILE, "train.py", work).store(root, threading.Event())
    archive = Path(LakePath(first.url).path)
    before = archive.stat()
    # Arguments do not travel in the archive.
    second = find(FILE, "train.py", work, "--other").store(root, threading.Event())
    assert second == first and archive.stat().st_ino == before.st_ino
    assert archive.stat().st_mtime_ns == before.st_mtime_ns
    assert archives_in(root) == [archive]


def archives_in(root: LakePath) -> list[Path]:
    return sorted(Path(root.path).rglob("*.tar.gz"))


@pytest.mark.parametrize("changed", ["train.py", "conf", "../other/own_changing.py"])
def test_a_changed_script_is_stored_beside_the_earlier_one(
    work: Path, root: LakePath, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    for name in ("train.py", "conf", "../other/own_changing.py"):
        write(work, name, "import own_changing\n" if name == "train.py" else "")
    monkeypatch.syspath_prepend(work / ".." / "other")
    first = find(FILE, "train.py", work).store(root, threading.Event())
    with (work / changed).open("a") as file:
        file.write("# changed\n")
    second = find(FILE, "train.py", work).store(root, threading.Event())
    assert second.url != first.url and second.digest != first.digest
    assert len(archives_in(root)) == 2


def test_a_changed_script_outside_is_another(work: Path, tmp_path: Path) -> None:
    file = write(tmp_path, "site-packages/train.py", "print()\n")
    digests = [find(FILE, file, work).content]
    file.write_text("print(1)\n")
    digests.append(find(FILE, file, work).content)
    file = file.rename(file.with_name("fit.py"))
    digests.append(find(FILE, file, work).content)
    assert len(set(digests)) == 3


def test_an_archive_has_its_three_directories(work: Path, root: LakePath) -> None:
    write(work, "train.py")
    stored = find(FILE, "train.py", work).store(root, threading.Event())
    with tarfile.open(LakePath(stored.url).path) as tar:
        members = {member.name: member for member in tar.getmembers()}
    assert set(members) == {"work", "script", "modules", "work/train.py"}
    assert all(members[name].isdir() for name in ("work", "script", "modules"))
    assert {(m.uid, m.gid, m.uname, m.gname) for m in members.values()} == {(0, 0, "", "")}


def test_the_right_to_run_a_modules_file_travels(
    work: Path, root: LakePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(work, "train.py", "import own_tools\n")
    write(tmp_path, "other/own_tools/__init__.py")
    write(tmp_path, "other/own_tools/tool.sh").chmod(0o755)
    monkeypatch.syspath_prepend(tmp_path / "other")
    home = unpacked(find(FILE, "train.py", work), root, tmp_path / "node")
    assert (home / "modules/0/own_tools/tool.sh").stat().st_mode & 0o100
    assert not (home / "modules/0/own_tools/__init__.py").stat().st_mode & 0o100


def test_a_stop_ends_the_storing(work: Path, root: LakePath) -> None:
    write(work, "train.py")
    script, stop = find(FILE, "train.py", work), threading.Event()
    stop.set()
    with pytest.raises(Cancelled):
        script.store(root, stop)
    assert archives_in(root) == []


def test_a_ready_script_is_that_of_its_driver(work: Path, root: LakePath) -> None:
    write(work, "train.py", "import torch\n")
    (work / "broken").symlink_to("nothing")
    script = find(FILE, "train.py", work, "--lr", 0.1)
    ready = ready_script(script, root, threading.Event())
    assert ready.call == script.call and ready.foreseen == script.foreseen
    assert ready.stored == script.store(root, threading.Event())
    assert ready.warnings == script.warnings != ()
    assert ready.content == script.content
    assert ready.store(LakePath("file:///elsewhere"), threading.Event()) == ready.stored
    assert default_script_name(ready) == "train"


@pytest.mark.parametrize(
    "ready",
    [
        ReadyScript(
            ScriptCall(FILE, "../script/train.py", ("--a", "é")),
            StoredScript("hdfs://lake/a.tar.gz", "0f", 2, ("src", ".")),
            StaticFindings(("torch", "torch._dynamo"), frozenset({Setting("OMP", True)})),
            ("pytest",),
            "0e",
            ("a warning",),
        ),
        ReadyScript(
            ScriptCall(MODULE, "mypkg"), StoredScript("u", "d", 0), StaticFindings(), (), "c"
        ),
    ],
)
def test_ready_scripts_travel_as_json(ready: ReadyScript) -> None:
    assert ReadyScript.from_fields(json.loads(json.dumps(ready.as_fields()))) == ready
