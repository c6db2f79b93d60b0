"""What travels to ranks, made on the spot: wheels, for which pip needs no network, and a Python."""

from __future__ import annotations

import base64
import hashlib
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

PYTHON = f"python3.{sys.version_info[1]}"
# Of the standard library, what takes room and no rank wants.
LARGE = ("site-packages", "dist-packages", "test", "idlelib", "lib2to3", "ensurepip", "config-*")


def make_wheel(directory: Path, name: str, version: str, source: str) -> Path:
    """A wheel (PEP 427) of one module.

    Args:
        directory: it is made in.
        name: of project and module.
        version: of the project.
        source: of the module.
    """
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": source,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        record.append(f"{path},sha256={digest.decode()},{len(text)}")
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,"]) + "\n"
    wheel = directory / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return wheel


def whole_environment(directory: Path, modules: Mapping[str, str]) -> Path:
    """An archive of this Python's own interpreter and library, and some modules.

    Args:
        directory: it is made in.
        modules: sources by name.
    """
    base, root = Path(sys.base_prefix), directory / "env"
    leave_out = shutil.ignore_patterns(*LARGE, "__pycache__")
    shutil.copytree(base / "lib" / PYTHON, root / "lib" / PYTHON, ignore=leave_out)
    for library in (base / "lib").glob("libpython3*.so.*"):
        shutil.copy(library, root / "lib")
    (root / "bin").mkdir()
    shutil.copy(base / "bin" / PYTHON, root / "bin" / PYTHON)
    # Debian's Python reads the second alone.
    for packages in (f"lib/{PYTHON}/site-packages", "lib/python3/dist-packages"):
        (root / packages).mkdir(parents=True)
        for name, source in modules.items():
            (root / packages / f"{name}.py").write_text(source)
    with tarfile.open(directory / "env.tar.gz", "w:gz", compresslevel=1) as tar:
        tar.add(root, "env")
    return directory / "env.tar.gz"
