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

# YARN's script of a container, and Spark's, run these.
_PACKAGES = ("bash", "coreutils", "findutils", "grep", "sed", "hostname", "procps")
# Of wheels, which load some at run time.
_LIBRARIES = ("libc6", "libgcc-s1", "libstdc++6", "libgomp1")
_EMPTY = ("tmp", "proc", "sys", "dev", "root", "run", "var/tmp", "usr/local/lib")
_FILES: Mapping[str, str] = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/bash\n",
    "etc/group": "root:x:0:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
_LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
PYTHON = f"python{sys.version_info[0]}.{sys.version_info[1]}"
SITE_PACKAGES = f"/usr/local/lib/{PYTHON}/site-packages"
_SKIPPED = re.compile(
    r"(^|/)(__pycache__|test|tests|site-packages|ensurepip|idlelib|config-.*)(/|$)"
)


def import_image(env: Mapping[str, str], name: str, *, java: Path, has_python: bool) -> None:
    """Create an image with the commands that YARN's containers need, and this Python's base.

    Args:
        env: names the dockerd in DOCKER_HOST.
    """
    path = "ENV PATH=/usr/local/bin:/usr/bin:/bin"
    process = subprocess.Popen(
        ["docker", "import", "--change", path, "-", name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=dict(env),
    )
    assert process.stdin is not None
    with tarfile.open(fileobj=process.stdin, mode="w|") as tar:
        _add_base(tar, java)
        if has_python:
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
    programs = [*_of_packages(_PACKAGES, "bin/"), Path("/bin/sh")]
    libraries = [*_of_packages(_LIBRARIES, ".so")]
    native = [*java.rglob("*.so"), java / "bin" / "java", *_of_python()]
    _add(tar, {*programs, *libraries, *_libraries([*programs, *native])})


def _of_packages(packages: Iterable[str], part: str) -> Iterator[Path]:
    """Yield the files of installed packages of Debian whose path has a part."""
    command = ["dpkg", "-L", *packages]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    yield from (Path(line) for line in listed.splitlines() if part in line and Path(line).is_file())


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
