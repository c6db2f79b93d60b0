"""A Python environment on the lake, as seen by what unpacks it and by what runs ranks with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# The driver's own copies of these travel already; other versions could not talk to the driver.
DRIVER_PACKAGES = ("hopsgpu", "cloudpickle")


@dataclass(frozen=True)
class PythonEnv:
    """A Python environment that is packed on the lake.

    Attributes:
        name: the user's name for it.
        url: URL of the archive.
        digest: SHA-256 of the archive, in hexadecimal.
        bytes: size of the archive.
        below: the directory in the archive that is the environment; "" for all of it.
        interpreter: path of its Python below that directory, such as "bin/python3.11"; None for
            packages alone, which the executors' Python imports.
        python: the minor version that it was made for, such as "3.11"; None for any.
        machine: the kind of processor that it was compiled for, as in `platform.machine()`; None
            for any.
        modules: the top-level modules that are installed in it; None if they are not known.
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
        """Return its fields without `modules`, for a message or record that `from_fields` reads."""
        return {name: value for name, value in asdict(self).items() if name != "modules"}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> PythonEnv:
        """Return the environment that `as_fields` describes.

        Raises:
            TypeError: the fields have another form.
        """
        modules = fields.get("modules")
        return cls(**{**fields, "modules": None if modules is None else tuple(modules)})

    def missing_modules(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return those of some top-level modules that it does not have, as far as that is known."""
        return tuple(n for n in names if self.modules is not None and n not in self.modules)

    def rank_python_in(self, home: Path) -> RankPython:
        """Return what ranks run with if it is unpacked in a directory."""
        if self.interpreter is None:
            return RankPython(packages=(str(home),))
        return RankPython(executable=str(home / self.interpreter))


@dataclass(frozen=True)
class RankPython:
    """What ranks run with.

    Attributes:
        executable: their Python; None for the executors'.
        packages: directories that come before others on their `sys.path`, but after the user's own
            modules.
    """

    executable: str | None = None
    packages: tuple[str, ...] = ()
