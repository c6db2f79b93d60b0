"""The wheel: what is in it, and that what is installed from it needs no checkout.

pip needs no network here: the packages that hopsgpu requires, and setuptools, are this Python's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

import hopsgpu
from hopsgpu.monitoring.exposition import ALERTS, DASHBOARD
from tests.bounds import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[3]
ADMIN_DIRECTORIES = ("spark-conf", "spark-scripts", "yarn-scripts")
PROJECT = ("setup.py", "pyproject.toml", "README.md", "hopsgpu", *ADMIN_DIRECTORIES)
WEB = "hopsgpu/web"
ADMIN_FILES = "hopsgpu/devcluster/admin_files"
# Each command's help, in one process.
HELP = """
import click
from hopsgpu.cli.main import main

def show(command, words):
    command.main([*words, "--help"], prog_name="hopsgpu", standalone_mode=False)

def show_all(group, words):
    for name, command in group.commands.items():
        show(main, [*words, name])
        if isinstance(command, click.Group):
            show_all(command, [*words, name])

show_all(main, [])
"""


def ran(command: Sequence[str | Path], cwd: Path, **variables: str) -> str:
    """What a command prints; it must succeed."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**environ, **variables},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Of a copy: setuptools writes beside the sources, and others test at the same time.
    source = tmp_path_factory.mktemp("source")
    leave_out = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in PROJECT:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=leave_out)
        else:
            shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation"]
    ran([*pip, "--wheel-dir", "dist", "."], source)
    (made,) = (source / "dist").iterdir()
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the installed package; nothing else is in it."""
    target = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--no-compile"]
    ran([*pip, "--target", target, wheel], target)
    return target


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return message_from_bytes(archive.read(name))


def test_it_has_the_modules_and_the_files_that_they_read(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "hopsgpu").rglob("*.py")}
    files = {
        f"{ADMIN_FILES}/{directory}/{file.name}"
        for directory in ADMIN_DIRECTORIES
        for file in (ROOT / directory).iterdir()
    }
    for_prometheus = {f"hopsgpu/monitoring/{name}" for name in (ALERTS, DASHBOARD)}
    pages = {
        str(file.relative_to(ROOT))
        for directory in ("static", "templates")
        for file in (ROOT / WEB / directory).iterdir()
    }
    assert f"{WEB}/static/uplot.LICENSE" in pages
    cluster = {f"hopsgpu/devcluster/{name}" for name in ("HostCheck.java", "daemon_jars.sha256")}
    assert found == {*modules, *files, *for_prometheus, *pages, *cluster, "hopsgpu/py.typed"}


def test_metadata_say_what_users_need(wheel: Path) -> None:
    said = metadata(wheel)
    assert said["Version"] == hopsgpu.__version__
    assert said["Requires-Python"] == ">=3.11"
    assert {"torch", "tensorflow", "search", "all"} <= set(said.get_all("Provides-Extra", []))
    required = said.get_all("Requires-Dist", [])
    always = [line for line in required if "extra ==" not in line]
    assert all("<" in line and ">=" in line for line in always)
    everything = {line.partition(";")[0] for line in required if 'extra == "all"' in line}
    for extra in ("torch", "tensorflow", "search"):
        those = {line.partition(";")[0] for line in required if f'extra == "{extra}"' in line}
        assert those and those <= everything


def test_the_command_works_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    command = installed / "bin" / "hopsgpu"
    told = ran([command, "--version"], tmp_path, PYTHONPATH=str(installed))
    assert told == f"hopsgpu {hopsgpu.__version__}\n"
    told = ran([sys.executable, "-c", HELP], tmp_path, PYTHONPATH=str(installed))
    assert told.count("Usage: hopsgpu ") > 15


def test_what_it_ships_is_the_installed_package(installed: Path, tmp_path: Path) -> None:
    here = {"PYTHONPATH": str(installed)}
    code = "import hopsgpu; print(hopsgpu.__file__)"
    assert ran([sys.executable, "-c", code], tmp_path, **here).startswith(str(installed))
    ran([sys.executable, "-m", "hopsgpu.spark.submission", "shipped"], tmp_path, **here)
    with zipfile.ZipFile(tmp_path / "shipped" / "hopsgpu-shipped.zip") as archive:
        shipped = {name for name in archive.namelist() if name.startswith("hopsgpu/")}
    modules = {str(path.relative_to(installed)) for path in (installed / "hopsgpu").rglob("*.py")}
    assert modules <= shipped


def test_administrators_files_are_where_the_development_cluster_reads_them(
    installed: Path, tmp_path: Path
) -> None:
    code = "from hopsgpu.devcluster import admin; print(admin.HOME); admin.spark_defaults()"
    home = Path(ran([sys.executable, "-c", code], tmp_path, PYTHONPATH=str(installed)).strip())
    assert home == installed / ADMIN_FILES
    programs = ("yarn-scripts/gpu-health-check", "yarn-scripts/hopsgpu-submit")
    for program in (*programs, "spark-scripts/worker-gpus"):
        assert os.access(home / program, os.X_OK)
