"""Spark's zips with bytecode: what is built, when it is used, and what happens if it cannot be."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import sys
import zipfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import pyspark
import pytest
from pyspark import SparkContext

from hopsgpu.backends.spark.package_archive import unchecked_pyc
from hopsgpu.backends.spark.pyspark_archives import (
    VARIABLE,
    PysparkArchives,
    bytecode_of_new_jvm,
    with_bytecode,
)
from tests.process.backends.python import run_python

ROOT = Path(__file__).resolve().parents[3]
HOME = Path(pyspark.__file__).parent
TAG = sys.implementation.cache_tag
# Says of modules of Spark, imported as the daemon imports them, where each one's code comes from.
SHOWS = """
import importlib, json, sys
compiled = []
from importlib.machinery import SourceFileLoader
to_code = SourceFileLoader.source_to_code
def noted(self, data, path, **more):
    compiled.append(path)
    return to_code(self, data, path, **more)
SourceFileLoader.source_to_code = noted
from hopsgpu.spark import bytecode_importer
bytecode_importer.install()
shown = {}
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    code = module.__spec__.loader.get_code(name)
    shown[name] = [module.__file__, code.co_filename, type(module.__spec__.loader).__name__]
shown["compiled"] = [path for path in compiled if ".zip/" in path]
print(json.dumps(shown))
"""


def paths_of(value: str) -> list[Path]:
    """The files that a value of PYSPARK_ARCHIVES_PATH names."""
    return [Path(unquote(urlsplit(uri).path)) for uri in value.split(",")]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> PysparkArchives:
    archives = PysparkArchives.of(HOME, tmp_path_factory.mktemp("cache"))
    assert archives.create()
    return archives


@pytest.fixture
def spark_home(tmp_path: Path) -> Path:
    """A Spark with small zips."""
    lib = tmp_path / "spark" / "python" / "lib"
    lib.mkdir(parents=True)
    for name in ("pyspark.zip", "py4j-0.1-src.zip"):
        with zipfile.ZipFile(lib / name, "w") as archive:
            archive.writestr("pyspark/__init__.py", f"NAME = '{name}'\n" * 100)
    return tmp_path / "spark"


@pytest.fixture
def caches(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def imported(zips: list[Path], *modules: str) -> dict[str, list[str]]:
    """What SHOWS prints of modules that a process imports from these zips."""
    (line,) = run_python(SHOWS, [*zips, ROOT], *modules)
    shown: dict[str, list[str]] = json.loads(line)
    return shown


def test_archives_have_spark_s_own_files_and_bytecode_beside(built: PysparkArchives) -> None:
    own, copy = built.zips[0], built.directory / "pyspark.zip"
    with zipfile.ZipFile(own) as original, zipfile.ZipFile(copy) as archive:
        before, after = original.namelist(), archive.namelist()
        assert after[: len(before)] == before
        assert archive.read("pyspark/worker.py") == original.read("pyspark/worker.py")
        assert archive.testzip() is None
    added = set(after[len(before) :])
    assert f"pyspark/__pycache__/worker.{TAG}.pyc" in added
    assert f"pyspark/sql/pandas/__pycache__/types.{TAG}.pyc" in added
    assert not [name for name in added if name.startswith(("pyspark/pandas/", "pyspark/ml/"))]
    assert [path.name for path in paths_of(built.value)] == [file.name for file in built.zips]


def test_code_comes_from_bytecode_with_the_right_file_names(built: PysparkArchives) -> None:
    names = ("pyspark.daemon", "pyspark.worker", "pyspark.sql.types", "py4j.java_gateway")
    shown = imported(paths_of(built.value), *names)
    assert shown["compiled"] == []
    for name in names:
        file, code_s, loader = shown[name]
        # PySpark finds its own frames by these names.
        assert file == code_s
        assert file.startswith(f"{built.directory}/py"), file
        assert file.endswith(f"{name.replace('.', '/')}.py")
        assert loader == "BytecodeImporter"


GOOD = unchecked_pyc(compile("WHICH = 'bytecode'", "any name", "exec"))


@pytest.mark.parametrize(
    ("content", "used"),
    [
        (GOOD, "bytecode"),
        # Of another Python, cut and empty.
        (bytes(byte ^ 1 for byte in GOOD[:2]) + GOOD[2:], "source"),
        (GOOD[:10], "source"),
        (b"", "source"),
    ],
)
def test_bytecode_that_this_python_can_use_is_what_runs(
    tmp_path: Path, content: bytes, used: str
) -> None:
    """A module whose bytecode and source differ shows which of the two is used."""
    archive = tmp_path / "pyspark.zip"
    with zipfile.ZipFile(archive, "w") as zipped:
        zipped.writestr("spark_module.py", "WHICH = 'source'")
        zipped.writestr(f"__pycache__/spark_module.{TAG}.pyc", content)
    shows = "import spark_module; print(spark_module.WHICH)"
    installs = "from hopsgpu.spark import bytecode_importer; bytecode_importer.install()\n"
    assert run_python(installs + shows, [archive, ROOT]) == [used]
    # Any other process does not even see the bytecode.
    assert run_python(shows, [archive, ROOT]) == ["source"]


def test_zips_without_bytecode_are_imported_from_their_sources() -> None:
    zips = sorted((HOME / "python" / "lib").glob("*.zip"), reverse=True)
    shown = imported(zips, "pyspark.daemon")
    file, code_s, _ = shown["pyspark.daemon"]
    assert file == code_s == f"{zips[0]}/pyspark/daemon.py"
    assert file in shown["compiled"]


def test_modules_that_no_daemon_imports_have_sources_only(built: PysparkArchives) -> None:
    shown = imported(paths_of(built.value), "pyspark.streaming.context")
    file, code_s, _ = shown["pyspark.streaming.context"]
    assert file == code_s
    assert file in shown["compiled"]


def test_other_zips_keep_python_s_own_importer(tmp_path: Path) -> None:
    archive = tmp_path / "users.zip"
    with zipfile.ZipFile(archive, "w") as zipped:
        zipped.writestr("users_module.py", "")
    file, _, loader = imported([archive], "users_module")["users_module"]
    assert file == f"{archive}/users_module.py"
    assert loader == "zipimporter"


def test_the_daemon_imports_no_more_than_spark_s_own() -> None:
    """What it imports would hide users' modules of the same name in all workers."""
    code = (
        "import sys; from pyspark import daemon;"
        " import hopsgpu.linux; before = set(sys.modules);"
        " from hopsgpu.spark import daemon as ours; daemon.manager = lambda: None; ours.main();"
        " print(*sorted(set(sys.modules) - before), sep='\\n')"
    )
    own = ["hopsgpu.spark", "hopsgpu.spark.bytecode_importer", "hopsgpu.spark.daemon"]
    assert run_python(code, [ROOT]) == own


def test_second_call_uses_what_is_there(spark_home: Path, caches: Path) -> None:
    archives = PysparkArchives.of(spark_home, caches)
    assert archives.create()
    inode = archives.directory.stat().st_ino
    assert PysparkArchives.of(spark_home, caches).create()
    assert archives.directory.stat().st_ino == inode
    assert sorted(path.name for path in caches.iterdir()) == [archives.directory.name, "lock"]


@pytest.mark.parametrize("damage", ["cut", "removed", "changed"])
def test_damaged_copies_are_built_again(spark_home: Path, caches: Path, damage: str) -> None:
    archives = PysparkArchives.of(spark_home, caches)
    assert archives.create()
    copy = archives.directory / "pyspark.zip"
    if damage == "removed":
        copy.unlink()
    else:
        content = bytearray(copy.read_bytes())
        content[100] ^= 1
        copy.write_bytes(content[:-10] if damage == "cut" else content)
    assert not archives.are_complete()
    assert archives.create()
    assert archives.are_complete()
    assert sorted(path.name for path in caches.iterdir()) == [archives.directory.name, "lock"]


def _create(home_and_cache: tuple[Path, Path]) -> bool:
    return PysparkArchives.of(*home_and_cache).create()


def test_drivers_that_build_at_once_never_see_half_of_it(caches: Path) -> None:
    with ProcessPoolExecutor(3, mp_context=get_context("spawn")) as pool:
        created = list(pool.map(_create, [(HOME, caches)] * 6))
    assert any(created)
    assert PysparkArchives.of(HOME, caches).are_complete()
    assert len([path for path in caches.iterdir() if path.is_dir()]) == 1


def test_while_another_process_builds_spark_ships_its_own(
    spark_home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hopsgpu")
    environ = {"SPARK_HOME": str(spark_home), "XDG_CACHE_HOME": str(tmp_path)}
    caches = tmp_path / "hopsgpu" / "pyspark"
    caches.mkdir(parents=True)
    with (caches / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert with_bytecode(environ) == environ
    assert "another process is creating" in caplog.text
    assert VARIABLE in with_bytecode(environ)


def test_leftovers_of_killed_processes_and_of_other_sparks_are_removed(
    spark_home: Path, caches: Path
) -> None:
    for name in ("building-x", "old", "recent"):
        (caches / name).mkdir(parents=True)
    os.utime(caches / "old", (0, 0))
    assert _create((spark_home, caches))
    left = {path.name for path in caches.iterdir()}
    assert "recent" in left
    assert not left & {"building-x", "old"}


def test_the_user_s_own_archives_win(tmp_path: Path) -> None:
    environ = {VARIABLE: "/mine/pyspark.zip", "XDG_CACHE_HOME": str(tmp_path)}
    assert with_bytecode(environ) == environ
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("problem", ["a file", "no zips", "a damaged zip"])
def test_a_problem_is_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, problem: str
) -> None:
    caplog.set_level(logging.INFO, "hopsgpu")
    home = HOME if problem == "a file" else tmp_path / "spark"
    environ = {"SPARK_HOME": str(home), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    if problem == "a file":
        (tmp_path / "cache").write_text("")
    if problem == "a damaged zip":
        lib = home / "python" / "lib"
        lib.mkdir(parents=True)
        (lib / "pyspark.zip").write_bytes(b"PK")
        (lib / "py4j-0.1-src.zip").write_bytes(b"PK")
    assert with_bytecode(environ) == environ
    assert "there is no copy with bytecode" in caplog.text


def test_a_path_with_commas_and_spaces_stays_one_path(spark_home: Path, tmp_path: Path) -> None:
    environ = {"SPARK_HOME": str(spark_home), "XDG_CACHE_HOME": str(tmp_path / "a, b #c")}
    value = with_bytecode(environ)[VARIABLE]
    assert [path.is_file() for path in paths_of(value)] == [True, True]


@pytest.fixture
def no_jvm(spark_home: Path, caches: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process of this Spark without a JVM, and with a cache directory of its own."""
    monkeypatch.setenv("SPARK_HOME", str(spark_home))
    monkeypatch.setenv("XDG_CACHE_HOME", str(caches))
    for name in (VARIABLE, "PYSPARK_GATEWAY_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(SparkContext, "_jvm", None)
    return monkeypatch


def test_only_the_jvm_that_is_started_gets_the_variable(no_jvm: pytest.MonkeyPatch) -> None:
    with pytest.raises(InterruptedError), bytecode_of_new_jvm():
        assert all(path.is_file() for path in paths_of(os.environ[VARIABLE]))
        raise InterruptedError
    assert VARIABLE not in os.environ


def test_a_jvm_of_spark_submit_stays_as_it_is(
    no_jvm: pytest.MonkeyPatch, caches: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "hopsgpu")
    no_jvm.setenv("PYSPARK_GATEWAY_PORT", "1")
    with bytecode_of_new_jvm():
        assert VARIABLE not in os.environ
    assert "a JVM already runs" in caplog.text
    assert not caches.exists()


@pytest.mark.parametrize("ships", [True, False])
def test_what_a_running_jvm_ships_exists_though_the_cache_was_emptied(
    no_jvm: pytest.MonkeyPatch, caches: Path, ships: bool
) -> None:
    value = with_bytecode(os.environ)[VARIABLE]
    shutil.rmtree(caches / "hopsgpu")
    getenv = {VARIABLE: value if ships else None}.get
    system = SimpleNamespace(lang=SimpleNamespace(System=SimpleNamespace(getenv=getenv)))
    no_jvm.setattr(SparkContext, "_jvm", SimpleNamespace(java=system))
    with bytecode_of_new_jvm():
        assert VARIABLE not in os.environ
    assert {path.is_file() for path in paths_of(value)} == {ships}
