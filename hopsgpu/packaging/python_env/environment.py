"""A description of a Python environment on the lake, for its unpacker and for agents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# hopsgpu sends the driver's copies of these, because other versions cannot talk to the driver.
DRIVER_PACKAGES = ("hopsgpu", "cloudpickle")


@dataclass(frozen=True)
class PythonEnv:
    """A Python environment that is packed on the lake.

    Attributes:
        name: the user's name for it.
        url: URL of the archive.
        digest: SHA-256 of the archive, in hexadecimal.
        bytes: size of the archive.
        below: the environment's directory in the archive; "" for all of it.
        interpreter: path of its Python below that directory, such as "bin/python3.11"; None for
            packages without a Python, which the executors' Python imports.
        python: the minor version that it was built for, such as "3.11"; None for any.
        machine: the processor type that it was built for, as in `platform.machine()`; None for any.
        modules: the installed top-level modules; None if unknown.
    """

    name: str
    url: str = field(repr=False)
    digest: str
    bytes: int
    below: str = ""
    interpreter: str | None = None
    python: str | None = None
    machine: str | None = None
    modules: tuple[str, ...] | None = field(default=None, repr=False)

    def as_fields(self) -> dict[str, Any]:
        """Return the fields for `from_fields`, without `modules`."""
        return {name: value for name, value in asdict(self).items() if name != "modules"}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> PythonEnv:
        """Return the environment with these fields; raise TypeError if they have another form."""
        modules = fields.get("modules")
        return cls(**{**fields, "modules": None if modules is None else tuple(modules)})

    def missing_modules(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the names of modules that are certainly not in the environment."""
        return tuple(n for n in names if self.modules is not None and n not in self.modules)

    def rank_python_in(self, home: Path) -> RankPython:
        if self.interpreter is None:
            return RankPython(packages=(str(home),))
        return RankPython(executable=str(home / self.interpreter))


@dataclass(frozen=True)
class RankPython:
    """The Python of ranks.

    Attributes:
        executable: path of the interpreter; None for the executors' Python.
        packages: directories at the start of `sys.path`, after the user's own modules.
    """

    executable: str | None = None
    packages: tuple[str, ...] = ()
