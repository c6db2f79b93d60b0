"""Images for the tests, made of files of this machine: no registry is asked."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

# YARN's script of a container, and Spark's, run these; Java needs the libraries.
_PACKAGES = ("bash", "coreutils", "findutils", "grep", "sed", "hostname", "procps")
_EMPTY = ("tmp", "proc", "sys", "dev", "root", "run", "var/tmp", "usr/local/lib")
_FILES: Mapping[str, str] = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/bash\n",
    "etc/group": "root:x:0:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
_LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
PYTHON = f"python{sys.version_info[0]}.{sys.version_info[1]}"
SITE_PACKAGES = f"/usr/local/lib/{PYTHON}/site-packages"
_SKIPPED = re.compile(r"(^|/)(__pycache__|test|tests|site-packages|ensurepip|idlelib|config-.*)(/|$)")


def import_image(docker: list[str], name: str, *, java: Path, with_python: bool) -> None:
    """Create an image with the commands that YARN's containers need, and this Python's base."""
    command = [*docker, "import", "--change", "ENV PATH=/usr/local/bin:/usr/bin:/bin", "-", name]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    with tarfile.open(fileobj=process.stdin, mode="w|") as tar:
        _add_base(tar, java)
        if with_python:
            _add_python(tar)
    process.communicate()
    assert process.returncode == 0


def _add_base(tar: tarfile.TarFile, java: Path) -> None:
    for name in ("usr", "etc", "usr/bin", "usr/sbin", "usr/lib", "usr/lib64", *_EMPTY):
        entry = tarfile.TarInfo(name)
        entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name.endswith("tmp") else 0o755
        tar.addfile(entry)
    for name, target in _LINKS.items():
        entry = tarfile.TarInfo(name)
        entry.type, entry.linkname = tarfile.SYMTYPE, target
        tar.addfile(entry)
    for name, text in _FILES.items():
        entry = tarfile.TarInfo(name)
        entry.size, entry.mode = len(text), 0o644
        tar.addfile(entry, io.BytesIO(text.encode()))
    listed = subprocess.run(["dpkg", "-L", *_PACKAGES], check=True, capture_output=True, text=True)
    programs = [Path(line) for line in listed.stdout.splitlines() if "bin/" in line]
    programs = [program for program in programs if program.is_file()] + [Path("/bin/sh")]
    native = [*java.rglob("*.so"), java / "bin" / "java", *_of_python()]
    _add(tar, {*programs, *_libraries([*programs, *native])})


def _of_python() -> Iterator[Path]:
    stdlib = Path(sysconfig.get_path("stdlib"))
    yield Path(sys.base_prefix, "bin", PYTHON)
    yield from (stdlib / "lib-dynload").glob("*.so")


def _libraries(binaries: Iterable[Path]) -> Iterator[Path]:
    """Yield the shared libraries of binaries that are in the system's directories."""
    listed = subprocess.run(
        ["ldd", *map(str, binaries)], check=False, capture_output=True, text=True
    )
    for path in set(re.findall(r"(/\S+\.so\S*)", listed.stdout)):
        if path.startswith(("/lib", "/usr/lib")) and not path.startswith("/usr/lib/jvm"):
            yield Path(path)


def _add(tar: tarfile.TarFile, files: Iterable[Path]) -> None:
    """Add files at the paths that they have here, without symbolic links."""
    by_name = {}
    for file in files:
        name = str(file).lstrip("/")
        by_name[f"usr/{name}" if name.startswith(("bin/", "sbin/", "lib")) else name] = file
    for name, file in sorted(by_name.items()):
        tar.add(file.resolve(), name, recursive=False)


def _add_python(tar: tarfile.TarFile) -> None:
    stdlib = Path(sysconfig.get_path("stdlib"))
    tar.add(Path(sys.base_prefix, "bin", PYTHON).resolve(), f"usr/local/bin/{PYTHON}")
    python3 = tarfile.TarInfo("usr/local/bin/python3")
    python3.type, python3.linkname = tarfile.SYMTYPE, PYTHON
    tar.addfile(python3)
    library = sysconfig.get_config_var("LDLIBRARY")
    if library.endswith(".so"):
        real = Path(sysconfig.get_config_var("LIBDIR"), library).resolve()
        tar.add(real, f"usr/lib/{real.name}")
    for file in sorted(stdlib.rglob("*")):
        name = str(file.relative_to(stdlib))
        if not _SKIPPED.search(name):
            tar.add(file, f"usr/local/lib/{PYTHON}/{name}", recursive=False)
