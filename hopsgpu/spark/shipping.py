"""hopsgpu itself on the executors: nothing of ours need be installed on the nodes."""

from __future__ import annotations

import tempfile
import zipfile
from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark import SparkContext

ARCHIVES = "spark.yarn.dist.archives"
PY_FILES = "spark.yarn.dist.pyFiles"
MARKERS = "spark.hopsgpu.markers"
PACKAGE = "hopsgpu-shipped.zip"


def with_entry(listed: str | None, uri: str) -> str:
    """A comma-separated list of what is shipped, with one more in place of one of its name.

    YARN takes two of one name for an error; an administrator's spark-defaults.conf may ship
    another version of what a driver ships itself.

    Args:
        listed: what is shipped already.
        uri: of one more; its name in the container is its fragment, else its last part.
    """
    others = [entry for entry in (listed or "").split(",") if entry.strip()]
    return ",".join([*(entry for entry in others if _name(entry) != _name(uri)), uri])


def _name(entry: str) -> str:
    path, _, fragment = entry.strip().partition("#")
    return fragment or path.rpartition("/")[2]


def pack_package(target: Path) -> Path:
    """A zip of hopsgpu and cloudpickle, so that nothing of ours need be on the nodes."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for package in ("hopsgpu", "cloudpickle"):
            # A driver in YARN has them in such a zip itself.
            for name, source in _sources(package, resources.files(package)):
                archive.writestr(name, source)
    return target


def _sources(path: str, directory: Traversable) -> Iterator[tuple[str, bytes]]:
    """The Python files below a directory, each with its path in the archive."""
    for found in sorted(directory.iterdir(), key=lambda one: one.name):
        below = f"{path}/{found.name}"
        if found.is_dir():
            yield from _sources(below, found)
        elif found.name.endswith(".py"):
            yield below, found.read_bytes()


def ship_package(context: SparkContext) -> tempfile.TemporaryDirectory[str]:
    """Has executors import the driver's hopsgpu.

    Returns:
        The directory from which Spark serves it; it must live as long as the application.
    """
    directory = tempfile.TemporaryDirectory(prefix="hopsgpu-package-")
    context.addPyFile(str(pack_package(Path(directory.name) / "hopsgpu-package.zip")))
    return directory
