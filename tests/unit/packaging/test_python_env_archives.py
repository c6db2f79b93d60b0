"""Archives: what is in them, what they may not do, and what they become on a node."""

from __future__ import annotations

import io
import random
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from hopsgpu.errors import ConfigError
from hopsgpu.packaging.python_env.archives import ArchiveEntry, read_entries, unpack
from hopsgpu.packaging.python_env.inspection import (
    ArchiveContents,
    DriverPython,
    inspect_archive,
    should_peek,
)

HERE = DriverPython("3.11", "x86_64", (".cpython-311-x86_64-linux-gnu.so", ".abi3.so", ".so"))
ELF = b"\x7fELF\x02\x01" + bytes(12)
X86_64, AARCH64 = ELF + bytes([62, 0]), ELF + bytes([183, 0])


def found(*names: str, **heads: bytes) -> ArchiveContents:
    peeked = {name.replace("__", "/").replace("_so", ".so"): head for name, head in heads.items()}
    files = [ArchiveEntry(name, True, peeked.get(name, b"")) for name in (*names, *peeked)]
    return replace(inspect_archive(files, "env", HERE), modules=None)


@pytest.mark.parametrize(
    ("names", "modules"),
    [
        (("a.py", "b/__init__.py", "c/d/e.py", "b-1.dist-info/RECORD"), ("a", "b", "c")),
        (("x.abi3.so", "y.cpython-311-x86_64-linux-gnu.so", "libz.so.6"), ("x", "y")),
        (("lib/python3.11/site-packages/a.py", "bin/activate", "bin/b.py"), ("a",)),
        (("bin/python3.11", "lib/python3.11/os.py", "lib/python3.11/site-packages/a.py"), ("a",)),
        (
            (
                *("bin/python3.11", "lib/python3.11/os.py", "lib/python3/dist-packages/a.py"),
                "lib/python3.11/site-packages/distutils-precedence.pth",
            ),
            ("a",),
        ),
        (
            (
                *("bin/python3.11", "lib/python3.11/os.py", "lib/python3.11/site-packages/a.py"),
                "lib/python3.11/site-packages/elsewhere.pth",
            ),
            None,
        ),
    ],
)
def test_which_modules_an_archive_has(
    names: tuple[str, ...], modules: tuple[str, ...] | None
) -> None:
    entries = [ArchiveEntry(name, True) for name in names]
    assert inspect_archive(entries, "env", HERE).modules == modules


def test_a_link_may_be_a_package() -> None:
    files = [
        ArchiveEntry("a.py", True),
        ArchiveEntry("pkg", False, link="real"),
        ArchiveEntry("real/b.py", True),
    ]
    assert inspect_archive(files, "env", HERE).modules == ("a", "pkg", "real")


def test_archives_are_recognised() -> None:
    assert found("a.py", "b/__init__.py") == ArchiveContents("", None, None, None)
    venv = ("bin/activate", "lib/python3.11/site-packages/a.py", "pyvenv.cfg")
    assert found(*venv) == ArchiveContents("lib/python3.11/site-packages", None, "3.11", None)
    below = [f"env/{name}" for name in venv]
    assert found(*below) == ArchiveContents("env/lib/python3.11/site-packages", None, "3.11", None)
    whole = ("bin/python3.11", "lib/python3.11/os.py", "lib/python3.11/site-packages/a.py")
    assert found(*whole) == ArchiveContents("", "bin/python3.11", "3.11", None)
    assert found(*(f"e/{n}" for n in whole)) == ArchiveContents("e", "bin/python3.11", "3.11", None)
    # With copies of an interpreter whose library is elsewhere.
    assert found(*venv, "bin/python3.11").interpreter is None


def test_machine_of_an_archive_is_recognised() -> None:
    assert found("a.py", x_so=X86_64) == ArchiveContents("", None, None, "x86_64")
    tagged = {"a.cpython-311-x86_64-linux-gnu.so": X86_64}
    assert found("a.py", **tagged) == ArchiveContents("", None, "3.11", "x86_64")
    # A package may bring others besides.
    assert found("a.cpython-312-x86_64-linux-gnu.so", **tagged).machine == "x86_64"


@pytest.mark.parametrize(
    ("names", "heads", "words"),
    [
        (("README", "data.csv"), {}, "env contains no Python: neither bin/python3.N"),
        ((), {}, "env contains no Python"),
        (("bin/python3.12", "lib/python3.12/os.py"), {}, "env has Python 3.12, and the driver"),
        (("lib/python3.10/site-packages/a.py",), {}, "env has Python 3.10, and the driver"),
        (
            ("lib/python3.10/site-packages/a.py", "lib/python3.11/site-packages/a.py"),
            {},
            "site-packages of Python 3.10 and 3.11",
        ),
        (("a.cpython-312-x86_64-linux-gnu.so",), {}, "a.cpython-312.* cannot be imported by"),
        (("a.cp311-win_amd64.pyd", "a.py"), {}, "cannot be imported by Python 3.11 on x86_64"),
        (("a.cpython-311-darwin.so",), {}, "cannot be imported by Python 3.11"),
        (("a.py",), {"x_so": AARCH64}, "compiled for aarch64, and this is Linux on x86_64"),
        (("a.py",), {"x_so": b"\xcf\xfa\xed\xfe"}, "compiled for macOS"),
    ],
)
def test_environments_that_ranks_cannot_use_are_refused(
    names: tuple[str, ...], heads: Mapping[str, bytes], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        found(*names, **heads)


def tar_of(at: Path, *members: tarfile.TarInfo, **files: bytes) -> Path:
    with tarfile.open(at, "w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name.replace("__", "/"))
            info.size, info.mode = len(content), 0o4755
            tar.addfile(info, io.BytesIO(content))
        for member in members:
            tar.addfile(member)
    return at


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def inspected(archive: Path) -> ArchiveContents:
    return replace(
        inspect_archive(read_entries(archive, should_peek), archive.name, HERE), modules=None
    )


@pytest.mark.parametrize(
    ("member", "words"),
    [
        (tarfile.TarInfo("../out.py"), "'../out.py' points outside the archive"),
        (tarfile.TarInfo("/out.py"), "'/out.py' points outside the archive"),
        (link("a/b", "/etc/passwd"), "a/b is a link to /etc/passwd"),
        (link("a/b", "../../x"), "a/b is a link to ../x"),
        (link("b", "../x", tarfile.LNKTYPE), "b is a link to ../x"),
        (link("null", "", tarfile.CHRTYPE), "'null' is a device"),
    ],
)
def test_entries_that_lead_out_of_an_archive_are_refused(
    member: tarfile.TarInfo, words: str, tmp_path: Path
) -> None:
    archive = tar_of(tmp_path / "env.tar.gz", member, a__py=b"")
    with pytest.raises(ConfigError, match=words):
        inspected(tar_of(archive, member, **{"a.py": b""}))
    # And where nobody has looked before.
    with pytest.raises(ConfigError, match="outside|device"):
        unpack(archive, "", tmp_path / "home", ())
    assert {path.name for path in tmp_path.iterdir()} <= {"env.tar.gz", "home"}


def test_entries_below_links_that_lead_out_are_refused(tmp_path: Path) -> None:
    """Each name by itself is inside."""
    archive = tar_of(tmp_path / "env.tar.gz", link("dir/up", ".."), link("dir/up/out", "../x"))
    with pytest.raises(ConfigError, match="'dir/up/out' .*outside"):
        unpack(archive, "", tmp_path / "home", ())


def test_only_what_is_below_is_unpacked(tmp_path: Path) -> None:
    archive = tar_of(
        tmp_path / "env.tar.gz",
        link("lib/python3.11/site-packages/also.py", "mine.py"),
        link("bin/python", "/usr/bin/python3.11"),
        **{
            "lib/python3.11/site-packages/mine.py": b"A = 1\n",
            "lib/python3.11/site-packages/hopsgpu/__init__.py": b"",
            "bin/activate": b"",
        },
    )
    assert inspected(archive) == ArchiveContents("lib/python3.11/site-packages", None, "3.11", None)
    home = tmp_path / "home"
    unpack(archive, "lib/python3.11/site-packages", home, ("hopsgpu",))
    assert sorted(path.name for path in home.rglob("*")) == ["also.py", "mine.py"]
    assert (home / "also.py").read_text() == "A = 1\n"
    assert (home / "mine.py").stat().st_mode & 0o7777 == 0o755


def test_zip(tmp_path: Path) -> None:
    archive = tmp_path / "env.zip"
    with zipfile.ZipFile(archive, "w") as zipped:
        tool = zipfile.ZipInfo("e/bin/tool")
        tool.external_attr = 0o100775 << 16
        zipped.writestr(tool, "#!")
        zipped.writestr("e/a/", "")
        zipped.writestr("e/a/b.py", "B = 1\n")
    assert inspected(archive) == ArchiveContents("", None, None, None)
    unpack(archive, "e", tmp_path / "home", ())
    assert (tmp_path / "home/a/b.py").read_text() == "B = 1\n"
    assert (tmp_path / "home/bin/tool").stat().st_mode & 0o777 == 0o755
    with zipfile.ZipFile(archive, "a") as zipped:
        zipped.writestr("../out.py", "")
    with pytest.raises(ConfigError, match="outside"):
        inspected(archive)
    with pytest.raises(ConfigError, match="outside"):
        unpack(archive, "", tmp_path / "other", ())
    with zipfile.ZipFile(archive, "w") as zipped:
        info = zipfile.ZipInfo("a.py")
        info.external_attr = 0o120777 << 16
        zipped.writestr(info, "/etc/passwd")
    with pytest.raises(ConfigError, match="link.* zip"):
        inspected(archive)


@pytest.mark.parametrize("name", ["env.tar.gz", "env.zip", "env.tar", "env.tar.bz2"])
def test_damaged_archive_is_refused(name: str, tmp_path: Path) -> None:
    archive = tmp_path / name
    archive.write_bytes(b"no archive of any kind")
    with pytest.raises(ConfigError, match=f"{name} is damaged"):
        inspected(archive)


def test_an_archive_that_was_cut_off(tmp_path: Path) -> None:
    whole = tar_of(tmp_path / "env.tar.gz", **{"a.py": random.Random(1).randbytes(100_000)})
    whole.write_bytes(whole.read_bytes()[:-5000])
    with pytest.raises(ConfigError, match="is damaged"):
        inspected(whole)
    with pytest.raises(ConfigError, match="is damaged"):
        unpack(whole, "", tmp_path / "home", ())


def test_the_driver_knows_itself() -> None:
    from hopsgpu.packaging.python_env.builder import driver_python

    here = driver_python()
    assert here.python == ".".join(map(str, sys.version_info[:2]))
    assert here.suffixes[-1] == ".so"
