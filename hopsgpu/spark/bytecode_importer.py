"""The import of Spark's modules from zips that also have their bytecode.

Python caches no bytecode for modules in a zip. `hopsgpu.backends.spark.pyspark_archives` adds it to
Spark's zips, in `__pycache__`, where Python itself looks only on a file system. Therefore any other
process uses the sources of such a zip as if there were nothing else.

The bytecode is not beside the sources (`worker.pyc`), where Python does look in a zip, because
such code keeps the file name with which it was compiled. PySpark recognises its own frames by
their file names, in tracebacks and in the place of a call that error messages name.
"""

from __future__ import annotations

import sys
from importlib.machinery import SourceFileLoader
from pathlib import PurePath
from types import CodeType
from zipimport import ZipImportError, zipimporter


class BytecodeImporter(zipimporter):
    """An importer of a zip of Spark's that uses the bytecode in it.

    Raises:
        ZipImportError: the path is not in such a zip.
    """

    def __init__(self, path: str) -> None:
        if not any(map(_is_spark_zip, PurePath(path).parts)):
            raise ZipImportError(f"not in a zip of Spark's: {path}", path=path)
        super().__init__(path)

    def get_filename(self, fullname: str) -> str:
        """Return the path of a module's source; `zipimporter` compiles the module for that."""
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

        `zipimporter` reads the list of all files again, once for each package. Each process that
        the daemon forks asks for that.
        """


class _Module(SourceFileLoader):
    """The loader of one module, which decides as for a file whether the bytecode can be used."""

    def __init__(self, fullname: str, archive: BytecodeImporter) -> None:
        super().__init__(fullname, archive.get_filename(fullname))
        self._archive = archive

    def path_stats(self, path: str) -> dict[str, int]:
        # Not looked at, because the bytecode is of the kind that is used without checks (PEP 552).
        return {"mtime": 0, "size": 0}

    def get_data(self, path: str) -> bytes:
        return self._archive.get_data(path)

    def set_data(self, path: str, data: object, **_: object) -> None:
        """Keep no bytecode of a module that was compiled."""


def _is_spark_zip(name: str) -> bool:
    return name == "pyspark.zip" or (name.startswith("py4j-") and name.endswith("-src.zip"))


def install() -> None:
    """Have modules of Spark that are imported from now on come from their bytecode."""
    sys.path_hooks.insert(0, BytecodeImporter)
    # Python has importers already for the paths at which it has looked for this module.
    for path in [path for path in sys.path_importer_cache if _is_spark_zip(PurePath(path).name)]:
        del sys.path_importer_cache[path]
