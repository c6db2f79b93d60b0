"""The shipping of hopsgpu to the executors, so that it need not be installed on the nodes."""

from __future__ import annotations

import marshal
import tempfile
import zipfile
from collections.abc import Iterator
from importlib import resources
from importlib.machinery import SourceFileLoader
from importlib.resources.abc import Traversable
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark import SparkContext

ARCHIVES = "spark.yarn.dist.archives"
PY_FILES = "spark.yarn.dist.pyFiles"
MARKERS = "spark.hopsgpu.markers"
PACKAGE = "hopsgpu-shipped.zip"
# The shipped packages that processes on the nodes import, with their subpackages.
_NODE_PACKAGES = (
    "agent",
    "artifacts",
    "control",
    "core",
    "data",
    "frameworks",
    "gpu",
    "packaging",
    "rank",
    "serving",
    "spark",
    "storage",
)


def with_entry(listed: str | None, uri: str) -> str:
    """Return a comma-separated list of shipped files with one added or replaced.

    YARN rejects two files of one name, and an administrator's spark-defaults.conf may ship another
    version of a file that a driver itself ships.

    Args:
        listed: the files that are already shipped.
        uri: URI of the file, which replaces a file of the same name. The name in the container is
            the fragment, else the last part.
    """
    entries = [entry for entry in (listed or "").split(",") if entry.strip()]
    return ",".join([*(entry for entry in entries if _name(entry) != _name(uri)), uri])


def _name(entry: str) -> str:
    path, _, fragment = entry.strip().partition("#")
    return fragment or path.rpartition("/")[2]


def pack_package(target: Path) -> Path:
    """Write a zip of hopsgpu and cloudpickle, which need not be on the nodes; return its path.

    The zip also has the bytecode of the modules that processes on the nodes import: Python caches
    no bytecode for modules in a zip, so each process would compile them again. A Python of another
    minor version uses the sources.
    """
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for package in ("hopsgpu", "cloudpickle"):
            # Read them as resources: a driver in YARN itself imports hopsgpu from such a zip.
            for name, content in _files(package, resources.files(package)):
                archive.writestr(name, content)
    return target


def _files(path: str, directory: Traversable) -> Iterator[tuple[str, bytes]]:
    """Yield the path in the archive and the content of each module below a directory.

    The content is the source or the bytecode of the module.
    """
    for entry in sorted(directory.iterdir(), key=lambda entry: entry.name):
        below = f"{path}/{entry.name}"
        if entry.is_dir():
            if entry.name != "__pycache__":
                yield from _files(below, entry)
        elif entry.name.endswith(".py"):
            yield below, entry.read_bytes()
            if isinstance(entry, Path) and _is_imported_on_nodes(path):
                yield f"{below}c", _bytecode(below, entry)
        elif entry.name.endswith(".pyc") and not isinstance(entry, Path):
            yield below, entry.read_bytes()


def _is_imported_on_nodes(package: str) -> bool:
    parts = package.split("/")
    return len(parts) == 1 or parts[1] in _NODE_PACKAGES


def _bytecode(name: str, source: Path) -> bytes:
    """Return a source's bytecode; tracebacks show the name of the source in the archive."""
    code = SourceFileLoader(source.stem, str(source)).get_code(source.stem)
    assert code is not None, "it has a source"
    return unchecked_pyc(_rename_code(code, name))


def unchecked_pyc(code: CodeType) -> bytes:
    """Return a .pyc file that Python uses without a check of the source (PEP 552)."""
    unchecked = (1).to_bytes(4, "little") + bytes(8)
    return MAGIC_NUMBER + unchecked + marshal.dumps(code)


def _rename_code(code: CodeType, name: str) -> CodeType:
    inner = (_rename_code(c, name) if isinstance(c, CodeType) else c for c in code.co_consts)
    return code.replace(co_filename=name, co_consts=tuple(inner))


def ship_package(context: SparkContext) -> tempfile.TemporaryDirectory[str]:
    """Make executors import the driver's hopsgpu.

    Returns:
        The directory from which Spark serves it; it must live as long as the application.
    """
    directory = tempfile.TemporaryDirectory(prefix="hopsgpu-package-")
    context.addPyFile(str(pack_package(Path(directory.name) / "hopsgpu-package.zip")))
    return directory
