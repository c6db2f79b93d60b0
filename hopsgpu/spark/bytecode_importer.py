"""The import of Spark's modules from zips that also have their bytecode.

Python caches no bytecode for modules in a zip. `hopsgpu.backends.spark.pyspark_archives` adds
bytecode to Spark's zips in `__pycache__`, which Python reads only on a file system. Therefore other
processes use the sources.

Python would read bytecode next to the sources (`worker.pyc`) in a zip, but such code keeps the file
name of its compilation. PySpark recognises its own frames by their file names.
"""

from __future__ import annotations

import sys
from importlib.machinery import SourceFileLoader
from pathlib import PurePath
from types import CodeType
from zipimport import ZipImportError, zipimporter


class BytecodeImporter(zipimporter):
    """An importer of Spark's zips that uses their bytecode.

    Raises:
        ZipImportError: the path is not in such a zip.
    """

    def __init__(self, path: str) -> None:
        if not any(map(_is_spark_zip, PurePath(path).parts)):
            raise ZipImportError(f"not in a zip of Spark's: {path}", path=path)
        super().__init__(path)

    def get_filename(self, fullname: str) -> str:
        """Return the path of a module's source without compiling it, as `zipimporter` does."""
        name = fullname.rpartition(".")[2]
        below = f"{name}/__init__.py" if self.is_package(fullname) else f"{name}.py"
        return f"{self.archive}/{self.prefix}{below}"

    def get_code(self, fullname: str) -> CodeType:
        """Return a module's code, from its bytecode if this Python can use that."""
        code = _Module(fullname, self).get_code(fullname)
        assert code is not None, "Spark's zips have the sources"
        return code

    def invalidate_caches(self) -> None:
        """Do nothing: a container's zip does not change.

        `zipimporter` would read the list of all files again for each package, in each process that
        the daemon forks.
        """


class _Module(SourceFileLoader):
    """The loader of one module, which checks bytecode as for a file."""

    def __init__(self, fullname: str, archive: BytecodeImporter) -> None:
        super().__init__(fullname, archive.get_filename(fullname))
        self._archive = archive

    def path_stats(self, path: str) -> dict[str, int]:
        # Python does not use these values: the bytecode is unchecked (PEP 552).
        return {"mtime": 0, "size": 0}

    def get_data(self, path: str) -> bytes:
        return self._archive.get_data(path)

    def set_data(self, path: str, data: object, **_: object) -> None:
        """Do nothing: a zip cannot cache bytecode."""


def _is_spark_zip(name: str) -> bool:
    return name == "pyspark.zip" or (name.startswith("py4j-") and name.endswith("-src.zip"))


def install() -> None:
    """Import modules of Spark from their bytecode from now on."""
    sys.path_hooks.insert(0, BytecodeImporter)
    # Python has cached importers for the paths that were searched for this module.
    for path in [path for path in sys.path_importer_cache if _is_spark_zip(PurePath(path).name)]:
        del sys.path_importer_cache[path]
