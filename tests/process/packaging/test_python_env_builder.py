"""Environments made at the driver, and unpacked as a node does it; the lake is a local directory.

Packages are wheels made on the spot, so that pip needs no network.
"""

from __future__ import annotations

import concurrent.futures
import json
import logging
import os
import re
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hopsgpu.artifacts import python_environments
from hopsgpu.errors import Cancelled, ConfigError, StoreError
from hopsgpu.packaging.python_env import commands, conda, unpacker
from hopsgpu.packaging.python_env.builder import driver_python, ensure_built, put_on_lake
from hopsgpu.packaging.python_env.environment import PythonEnv
from hopsgpu.packaging.python_env.kinds import recipe_for
from hopsgpu.packaging.python_env.requirements import pip_variables
from hopsgpu.storage.lake import LakePath
from hopsgpu.storage.node_copies import marker_file
from tests.bounds import HANG_SECONDS
from tests.conftest import gone, until
from tests.travelling import make_wheel

NEVER = threading.Event()
PYTHON = f"python3.{sys.version_info[1]}"


@pytest.fixture
def root(tmp_path: Path) -> LakePath:
    return LakePath(f"file://{tmp_path}/lake")


@pytest.fixture
def index(tmp_path: Path) -> list[str]:
    """Options with which pip finds what is made here, and nothing else."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    make_wheel(wheels, "travelled", "1.0", "VALUE = 'from the wheel'\n")
    return ["--no-index", f"--find-links {wheels}"]


def modules(at: Path, **files: str) -> Path:
    at.mkdir(parents=True)
    for name, text in files.items():
        (at / f"{name}.py").write_text(text)
    return at


def names_of(home: Path) -> list[str]:
    return sorted(p.name for p in home.iterdir())


def test_packages_are_installed_once(root: LakePath, index: list[str], tmp_path: Path) -> None:
    env = ensure_built(recipe_for([*index, "travelled"]), root, NEVER)
    assert (env.name, env.interpreter, env.machine) == ("travelled", None, None)
    assert env.bytes == LakePath(env.url).stat().size
    before = LakePath(env.url).stat().modified
    assert ensure_built(recipe_for([*index, "travelled"]), root, NEVER) == env
    assert LakePath(env.url).stat().modified == before
    home = unpacker.ensure_unpacked(env, [tmp_path / "node"])
    assert env.rank_python_in(home).packages == (str(home),)
    code = "import travelled; print(travelled.VALUE)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(home)}, stdout=-1
    )
    assert done.stdout == b"from the wheel\n"
    file = tmp_path / "requirements.txt"
    file.write_text("\n".join([*index, "travelled"]))
    other = ensure_built(recipe_for(file), root, NEVER)
    assert other.name == str(file)
    url = put_on_lake(file, root, NEVER)
    assert ensure_built(recipe_for(url), root, NEVER).digest == other.digest
    with pytest.raises(ConfigError, match="no such environment"):
        ensure_built(recipe_for(f"{url}0"), root, NEVER)


def test_builds_and_reuses_are_logged(
    root: LakePath, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hopsgpu")
    directory = modules(tmp_path / "own", mine="VALUE = 1\n")
    env = ensure_built(recipe_for(str(directory)), root, NEVER)
    key = env.url.split("/")[-2]
    begun, built, uploaded = caplog.messages
    assert f" {key} ({directory}): built" in begun
    assert re.search(rf"{key}: built in \d+\.\d s, {env.bytes} bytes", built)
    assert env.url.rpartition("/")[0] in uploaded
    caplog.clear()
    assert ensure_built(recipe_for(str(directory)), root, NEVER) == env
    (reused,) = caplog.messages
    assert f" {key} ({directory}): reused" in reused
    caplog.clear()
    ensure_built(recipe_for(env.url.rpartition("/")[0]), root, NEVER)
    (reused,) = caplog.messages
    assert f" {key}: reused" in reused and f" {env.bytes} bytes" in reused


def test_a_password_is_not_logged(root: LakePath, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "hopsgpu")
    line = "--index-url http://me:s3cret@127.0.0.1:1/simple"
    with pytest.raises(ConfigError, match="pip install failed"):
        ensure_built(recipe_for([line, "--retries 0", "nonsuch"]), root, NEVER)
    assert any("pip install: exit code 1" in text for text in caplog.messages)
    assert "s3cret" not in caplog.text


def test_package_that_pip_cannot_install_is_an_error(root: LakePath, index: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"(?s)pip install .*No matching distribution"):
        ensure_built(recipe_for([*index, "nonsuch"]), root, NEVER)
    assert not (root / "environments").exists()


@pytest.mark.parametrize(
    "given_by",
    ["variables", *(pytest.param(g, marks=pytest.mark.soak) for g in ("global", "install"))],
)
def test_target_of_the_users_pip_configuration_is_ignored(
    root: LakePath, tmp_path: Path, index: list[str], given_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {name: "elsewhere" for name in ("prefix", "target", "root")}
    options = {"user": "true", "require-virtualenv": "true", **places}
    # What the user's settings say of where packages come from stays in force.
    wheels = index[-1].partition(" ")[2]
    settings = f"[global]\nno-index = true\nfind-links = {wheels}\n"
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    if given_by == "variables":
        more = {"home": "elsewhere", "python": "/nonsuch", "dry-run": "1", "requirement": "none"}
        for name, value in {**options, **more}.items():
            monkeypatch.setenv(f"PIP_{name.upper().replace('-', '_')}", value)
    else:
        settings += f"[{given_by}]\n" * (given_by != "global")
        settings += "".join(f"{name} = {value}\n" for name, value in options.items())
    (tmp_path / "pip.conf").write_text(settings)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.chdir(tmp_path)
    env = ensure_built(recipe_for(["travelled"]), root, NEVER)
    names = names_of(unpacker.ensure_unpacked(env, [tmp_path / "node"]))
    assert {"travelled-1.0.dist-info", "travelled.py"} <= set(names)
    assert not (tmp_path / "elsewhere").exists()


def test_pip_keeps_the_variables_that_say_where_packages_come_from() -> None:
    kept = {"PIP_INDEX_URL": "https://a/simple", "PIP_CERT": "/c", "PIP_PROXY": "http://p", "A": ""}
    found = pip_variables({**kept, "PIP_USER": "1", "PIP_Target": "/x"})
    assert found == {**kept, "PIP_REQUIRE_VIRTUALENV": "0"}


def test_a_cancelled_run_ends_what_makes_its_environment(tmp_path: Path) -> None:
    told, stop = tmp_path / "pids", threading.Event()
    script = f"sleep 600 & echo $$ $! > {told}.new; mv {told}.new {told}; wait"
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(commands.run, ["sh", "-c", script], "pip install", stop)
        assert until(told.exists)
        stop.set()
        with pytest.raises(Cancelled, match="pip install"):
            running.result(HANG_SECONDS)
    assert until(lambda: all(gone(int(pid)) for pid in told.read_text().split()))


def test_without_pip(root: LakePath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="no pip"):
        ensure_built(recipe_for(["travelled"]), root, NEVER)


def test_a_directory_and_an_archive(root: LakePath, tmp_path: Path) -> None:
    given = modules(tmp_path / "mine", mine="A = 1\n", other="")
    (given / "hopsgpu").mkdir()
    (given / "hopsgpu" / "__init__.py").write_text("raise ImportError\n")
    env = ensure_built(recipe_for(given), root, NEVER)
    home = unpacker.ensure_unpacked(env, [tmp_path / "node"])
    assert names_of(home) == ["mine.py", "other.py"]
    assert int((home / "mine.py").stat().st_mtime) == int((given / "mine.py").stat().st_mtime)
    with tarfile.open(tmp_path / "packed.tgz", "w:gz") as tar:
        tar.add(given, "")
    env = ensure_built(recipe_for(tmp_path / "packed.tgz"), root, NEVER)
    assert env.url.endswith("/archive.tgz")
    assert names_of(unpacker.ensure_unpacked(env, [tmp_path / "node"])) == ["mine.py", "other.py"]
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ConfigError, match="nothing for ranks"):
        ensure_built(recipe_for(tmp_path / "nothing"), root, NEVER)


def test_two_builders_at_once(root: LakePath, tmp_path: Path) -> None:
    given = modules(tmp_path / "mine", mine="A = 1\n")
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: ensure_built(recipe_for(given), root, NEVER), range(4)))
    assert len({env.digest for env in made}) == 1
    assert len((root / "environments").names()) == 2  # with _staging, which is empty
    assert (root / "environments/_staging").names() == ()


def test_of_two_the_one_whose_claim_was_taken_over_has_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mine", "theirs"):
        modules(tmp_path / name, x="A = 1\n")
    # As where somebody has removed the claim, and made theirs, right after it was made.
    monkeypatch.setattr(Path, "mkdir", lambda path: None)
    assert not LakePath(f"file://{tmp_path}/mine").rename(LakePath(f"file://{tmp_path}/theirs"))
    assert (tmp_path / "mine" / "x.py").exists()


def test_changed_environment_is_unpacked_again(root: LakePath, tmp_path: Path) -> None:
    env = ensure_built(recipe_for(modules(tmp_path / "mine", mine="A = 1\n")), root, NEVER)
    LakePath(env.url).write(b"less")
    again = ensure_built(recipe_for(tmp_path / "mine"), root, NEVER)
    assert LakePath(again.url).stat().size == again.bytes == env.bytes


def test_environments_are_swept_by_their_last_use(root: LakePath, tmp_path: Path) -> None:
    env = ensure_built(recipe_for(modules(tmp_path / "mine", mine="A = 1\n")), root, NEVER)
    home, day = root / "environments", 24 * 3600
    now = int(time.time() * 1000)
    old = tmp_path / "lake/environments" / env.url.split("/")[-2]

    def age(days: float) -> None:
        for path in (*old.iterdir(), old):
            os.utime(path, (time.time() - days * day,) * 2)

    age(20)
    assert python_environments.sweep(home, now) == []
    ensure_built(recipe_for(tmp_path / "mine"), root, NEVER)
    assert (old / "used").stat().st_mtime > time.time() - 60
    age(31)
    assert python_environments.sweep(home, now) == [old.name]
    assert not old.exists()


def test_damaged_environments_on_the_lake_are_refused(root: LakePath, tmp_path: Path) -> None:
    given = modules(tmp_path / "mine", mine="A = 1\n")
    env = ensure_built(recipe_for(given), root, NEVER)
    described = LakePath(env.url.rpartition("/")[0]) / "environment.json"
    for content, words in ((b"{", "is not JSON"), (b'{"schema": 9}', "has a schema that")):
        described.write(content)
        with pytest.raises(StoreError, match=words):
            ensure_built(recipe_for(given), root, NEVER)


@pytest.fixture
def env(root: LakePath, tmp_path: Path) -> PythonEnv:
    return ensure_built(recipe_for(modules(tmp_path / "mine", mine="A = 1\n")), root, NEVER)


def test_an_archive_that_is_another_is_not_unpacked(env: PythonEnv, tmp_path: Path) -> None:
    content = LakePath(env.url).read()
    LakePath(env.url).write(content[:-1] + b"x")
    with pytest.raises(StoreError, match="SHA-256 mismatch"):
        unpacker.ensure_unpacked(env, [tmp_path / "node"])
    assert [p.suffix for p in (tmp_path / "node").iterdir()] == [".lock"]
    LakePath(env.url).remove()
    with pytest.raises(StoreError, match="archive.tar.gz"):
        unpacker.ensure_unpacked(env, [tmp_path / "node"])


def test_partly_unpacked_environment_is_unpacked_again(env: PythonEnv, tmp_path: Path) -> None:
    home = unpacker.ensure_unpacked(env, [tmp_path / "node"])
    marker_file(tmp_path / "node", env.digest).unlink()
    (home / "mine.py").write_text("half")
    assert unpacker.ensure_unpacked(env, [tmp_path / "node"]) == home
    assert (home / "mine.py").read_text() == "A = 1\n"


def test_once_on_a_node(env: PythonEnv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    downloads: list[str] = []
    download = LakePath.download

    def counted(lake: LakePath, target: Path) -> None:
        downloads.append(lake.url)
        download(lake, target)

    monkeypatch.setattr(LakePath, "download", counted)
    places = [tmp_path / "disk1", tmp_path / "disk2"]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        homes = set(pool.map(lambda _: unpacker.ensure_unpacked(env, places), range(4)))
    assert len(homes) == 1
    assert downloads == [env.url]


def test_a_node_of_another_machine(env: PythonEnv, tmp_path: Path) -> None:
    from dataclasses import replace

    with pytest.raises(ConfigError, match="vax"):
        unpacker.ensure_unpacked(replace(env, machine="vax"), [tmp_path / "node"])


def whole(at: Path, python: str) -> Path:
    """An archive that says it is a whole environment; its Python is a script."""
    (at / "bin").mkdir(parents=True)
    (at / "lib" / PYTHON).mkdir(parents=True)
    (at / "lib" / PYTHON / "os.py").touch()
    script = at / "bin" / PYTHON
    script.write_text(f"#!/bin/sh\n{python}\n")
    script.chmod(0o755)
    (at / "bin/conda-unpack").touch()
    archive = at.with_suffix(".tar.gz")
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(at, "")
    return archive


def test_an_interpreter_is_tried_and_settled(root: LakePath, tmp_path: Path) -> None:
    says = (
        f'if [ "$1" = -I ]; then echo {driver_python().python}; else echo "$1" > "$0.settled"; fi'
    )
    env = ensure_built(recipe_for(whole(tmp_path / "env", says)), root, NEVER)
    home = unpacker.ensure_unpacked(env, [tmp_path / "node"])
    assert env.rank_python_in(home).executable == str(home / "bin" / PYTHON)
    assert (home / f"bin/{PYTHON}.settled").read_text() == f"{home}/bin/conda-unpack\n"


@pytest.mark.parametrize(
    ("python", "words"),
    [
        ("echo 2.7", "is Python 2.7, not 3"),
        ("echo GLIBC_2.99 not found >&2; exit 1", r"does not run.*\(exit code 1\): GLIBC_2.99"),
    ],
)
def test_an_interpreter_that_cannot_run(
    root: LakePath, tmp_path: Path, python: str, words: str
) -> None:
    env = ensure_built(recipe_for(whole(tmp_path / "env", python)), root, NEVER)
    with pytest.raises(ConfigError, match=words):
        unpacker.ensure_unpacked(env, [tmp_path / "node"])


def conda_environment(at: Path) -> Path:
    """A prefix with what conda-pack goes by; nothing in it is from a conda package."""
    (at / "conda-meta").mkdir(parents=True)
    (at / "conda-meta/history").touch()
    packages = at / "lib" / PYTHON / "site-packages"
    packages.mkdir(parents=True)
    (at / "lib" / PYTHON / "os.py").touch()
    (packages / "mine.py").write_text("A = 1\n")
    (at / "bin").mkdir()
    (at / "bin" / PYTHON).write_bytes(Path(sys.executable).resolve().read_bytes())
    (at / "bin" / PYTHON).chmod(0o755)
    return at


def test_a_conda_environment_is_packed(root: LakePath, tmp_path: Path) -> None:
    env = ensure_built(recipe_for(conda_environment(tmp_path / "conda")), root, NEVER)
    assert (env.interpreter, env.below) == (f"bin/{PYTHON}", "")
    assert env.machine == driver_python().machine
    with tarfile.open(env.url.removeprefix("file://")) as tar:
        assert "bin/conda-unpack" in tar.getnames()


def test_without_conda_pack(
    root: LakePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conda.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'hopsgpu\[conda\]'"):
        ensure_built(recipe_for(conda_environment(tmp_path / "conda")), root, NEVER)


def test_the_process_on_a_node(env: PythonEnv, tmp_path: Path) -> None:
    def run(**fields: Any) -> dict[str, Any]:
        asked = {
            "env": {**env.as_fields(), **fields},
            "places": [str(tmp_path / "node")],
            "answer": str(tmp_path / "answer"),
        }
        command = [sys.executable, "-m", unpacker.__name__, str(os.getpid())]
        subprocess.run(
            command, input=json.dumps(asked), text=True, check=True, timeout=HANG_SECONDS
        )
        told: dict[str, Any] = json.loads((tmp_path / "answer").read_text())
        return told

    assert run(machine="vax")["configured"] is True
    told = run(digest="0" * 64)
    assert (told["configured"], "SHA-256" in told["problem"]) == (False, True)
    assert run() == {"home": str(tmp_path / "node" / env.digest)}
