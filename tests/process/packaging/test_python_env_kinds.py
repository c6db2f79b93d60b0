"""What `python_env=` may be: told apart at the call, and refused in words."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from hopsgpu.errors import ConfigError
from hopsgpu.packaging.python_env import packing
from hopsgpu.packaging.python_env.builder import driver_python
from hopsgpu.packaging.python_env.conda import CondaEnvironment, prefix_of
from hopsgpu.packaging.python_env.kinds import recipe_for
from hopsgpu.packaging.python_env.recipes import (
    ModuleDirectory,
    Packages,
    PackedArchive,
    StoredArchive,
)

PYTHON = f"python3.{sys.version_info[1]}"
NEVER = threading.Event()


def venv(at: Path, python: str = PYTHON) -> Path:
    (at / "lib" / python / "site-packages").mkdir(parents=True)
    (at / "pyvenv.cfg").write_text("home = /usr/bin\n")
    return at


def test_forms_of_environments_are_distinguished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "requirements.txt"
    file.write_text("humanize==4.9  # pinned\n\n# a comment\nattrs\\\n>=20\n")
    assert recipe_for("requirements.txt") == Packages(
        "requirements.txt", ("humanize==4.9", "attrs >=20"), file
    )
    assert recipe_for(["a", "b>1"]) == Packages("a, b>1", ("a", "b>1"))
    assert recipe_for(tuple("abcde")).name == "a, b, c and 2 more"
    wheel = tmp_path / "mine-1-py3-none-any.whl"
    wheel.touch()
    assert recipe_for(wheel.name) == Packages(wheel.name, (wheel.name,))
    archive = tmp_path / "env.tar.gz"
    archive.touch()
    assert recipe_for(archive) == PackedArchive(str(archive), archive)
    modules = tmp_path / "modules"
    modules.mkdir()
    assert recipe_for("modules") == ModuleDirectory("modules", modules)
    packages = venv(tmp_path / "venv") / "lib" / PYTHON / "site-packages"
    assert recipe_for("venv") == ModuleDirectory("venv", packages)
    conda = tmp_path / "conda"
    (conda / "conda-meta").mkdir(parents=True)
    (conda / "bin").mkdir()
    (conda / "bin" / PYTHON).touch()
    assert recipe_for("conda") == CondaEnvironment("conda", conda)
    assert recipe_for("my-env") == CondaEnvironment("my-env")
    url = "hdfs:///user/me/hopsgpu/environments/12ab"
    assert recipe_for(url) == StoredArchive(url, "hdfs:///user/me/hopsgpu", "12ab")


@pytest.mark.parametrize(
    ("text", "packages"),
    [
        ("humanize==4.9", ["humanize==4.9"]),
        ("humanize,numpy", ["humanize", "numpy"]),
        ("humanize >= 4, < 5, numpy", ["humanize >= 4, < 5", "numpy"]),
        ("a[b,c]~=1.2,d!=1.*,e.f", ["a[b,c]~=1.2", "d!=1.*", "e.f"]),
        ("a[b]>0,<=2", ["a[b]>0,<=2"]),
    ],
)
def test_a_text_with_versions_or_several_names_is_a_list_of_packages(
    text: str, packages: list[str]
) -> None:
    assert recipe_for(text) == recipe_for(packages)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (5, "python_env=5: must be a list of packages"),
        (b"x", "python_env=b'x': must be a list of packages"),
        ("", "python_env='': must be a list of packages"),
        ([], "names no package"),
        (["--pre"], "names no package"),
        (["a", 3], "python_env has 3 in its list: must be a list of packages"),
        (["a\n--index-url x"], "python_env has .*must be a list of packages"),
        (["-e ."], "the list has '-e .': an editable package stays in its directory"),
        ("absent.txt", "python_env='absent.txt': there is no such file"),
        ("absent.txt,numpy", "no such file or directory: .*as a text humanize==4.9,numpy"),
        ("absent.txt==1", "there is no such file"),
        ("humanize,", "there is no such file"),
        ("humanize=4", "there is no such file"),
        ("a==1,some/where", "there is no such file"),
        ("some/where", "python_env='some/where': there is no such file"),
        ("environment.yml", "conda env create --file environment.yml"),
        ("other.sh", "python_env='other.sh': must be a list of packages"),
        ("empty.txt", "the file names no package"),
        ("latin.txt", "latin.txt cannot be read"),
        ("hdfs:///models/x", "a URL must be <root>/environments/<key>"),
        ("old", r"python_env='old' has python3.1, and the driver runs Python 3"),
    ],
)
def test_what_is_refused(
    given: object, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("environment.yml", "other.sh", "empty.txt"):
        (tmp_path / name).touch()
    (tmp_path / "latin.txt").write_bytes(b"\xe9")
    venv(tmp_path / "old", "python3.1")
    with pytest.raises(ConfigError, match=words):
        recipe_for(given)


def test_names_show_no_password_and_no_options() -> None:
    wanted = recipe_for(
        ["--index-url https://me:secret@index/", "x @ https://me:secret@host/x.whl"]
    )
    assert "secret" not in wanted.name
    assert wanted.name == "x @ https://…@host/x.whl"


def key_of(given: object) -> str:
    wanted = recipe_for(given)
    assert not isinstance(wanted, StoredArchive)
    return wanted.key(driver_python(), NEVER)


def test_equal_keys_where_the_same_would_come_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    included, wheel = tmp_path / "base.txt", tmp_path / "x-1-py3-none-any.whl"
    included.write_text("attrs\n")
    wheel.write_bytes(b"one")
    file = tmp_path / "requirements.txt"
    file.write_text("-r base.txt\n./x-1-py3-none-any.whl\n-r requirements.txt\n")
    keys = [key_of("requirements.txt")]
    file.write_text("# said\n-r base.txt\n./x-1-py3-none-any.whl\n-r requirements.txt\n")
    assert key_of("requirements.txt") == keys[0]
    included.write_text("attrs>=20\n")
    keys.append(key_of("requirements.txt"))
    wheel.write_bytes(b"two")
    keys.append(key_of("requirements.txt"))
    monkeypatch.setenv("PIP_INDEX_URL", "https://elsewhere/")
    keys.append(key_of("requirements.txt"))
    assert len(set(keys)) == len(keys)


def test_a_directory_is_known_by_its_contents(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for home in (one, other):
        (home / "package").mkdir(parents=True)
        (home / "package" / "a.py").write_text("A = 1\n")
    (other / ".git").mkdir()
    (other / ".git" / "HEAD").touch()
    (other / "hopsgpu").mkdir()
    (other / "hopsgpu" / "__init__.py").touch()
    (other / "package" / "__pycache__").mkdir()
    (other / "package" / "__pycache__" / "a.pyc").write_bytes(b"x")
    assert key_of(one) == key_of(other)
    (other / "package" / "a.py").write_text("A = 2\n")
    assert key_of(one) != key_of(other)


def test_directory_with_too_many_files_is_refused(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.py").touch()
    with pytest.raises(ConfigError, match=f"{tmp_path} .* 2 files"):
        packing.files_of(tmp_path, max_files=2)


def test_a_directory_that_leads_back_to_itself(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package/a.py").touch()
    (tmp_path / "package/again").symlink_to(tmp_path)
    assert list(packing.files_of(tmp_path)) == ["package/a.py"]


def test_editable_packages_are_warned_of(tmp_path: Path) -> None:
    packages = venv(tmp_path / "venv") / "lib" / PYTHON / "site-packages"
    (packages / "__editable__.mine-1.pth").touch()
    assert "__editable__.mine-1.pth" in recipe_for(packages).warnings()[0]
    assert recipe_for(tmp_path).warnings() == ()


def program(at: Path, script: str) -> Path:
    at.write_text(f"#!/bin/sh\n{script}\n")
    at.chmod(0o755)
    return at


def test_conda_is_asked_for_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    says = 'echo "a warning"; echo \'{"envs": ["/opt/conda", "/opt/conda/envs/train"]}\''
    monkeypatch.setenv("CONDA_EXE", str(program(tmp_path / "conda", says)))
    assert prefix_of("train", NEVER) == Path("/opt/conda/envs/train")
    assert prefix_of("base", NEVER) == Path("/opt/conda")
    with pytest.raises(ConfigError, match=r"conda, train\)"):
        prefix_of("other", NEVER)
    monkeypatch.setenv("CONDA_EXE", str(program(tmp_path / "conda", "echo broken; exit 3")))
    with pytest.raises(ConfigError, match=r"(?s)env list failed \(exit code 3\).*broken"):
        prefix_of("train", NEVER)
    monkeypatch.setenv("CONDA_EXE", str(program(tmp_path / "conda", "echo nothing")))
    with pytest.raises(ConfigError, match="did not write JSON"):
        prefix_of("train", NEVER)


def test_without_conda(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONDA_EXE", "MAMBA_EXE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"python_env=\['train'\].*--python-env 'train>=0'"):
        prefix_of("train", NEVER)
