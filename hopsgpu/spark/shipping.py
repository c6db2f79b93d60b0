"""hopsgpu itself on the executors: nothing of ours need be installed on the nodes."""

from __future__ import annotations

import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark import SparkContext


def pack_package(target: Path) -> Path:
    """A zip of hopsgpu and cloudpickle, so that nothing of ours need be on the nodes."""
    import cloudpickle

    import hopsgpu

    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for package in (hopsgpu, cloudpickle):
            home = Path(str(package.__file__)).parent
            for file in sorted(home.rglob("*.py")):
                archive.write(file, f"{home.name}/{file.relative_to(home).as_posix()}")
    return target


def ship_package(context: SparkContext) -> tempfile.TemporaryDirectory[str]:
    """Has executors import the driver's hopsgpu.

    Returns:
        The directory from which Spark serves it; it must live as long as the application.
    """
    directory = tempfile.TemporaryDirectory(prefix="hopsgpu-package-")
    context.addPyFile(str(pack_package(Path(directory.name) / "hopsgpu-package.zip")))
    return directory
