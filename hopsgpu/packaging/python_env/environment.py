"""What a Python environment on the lake is, for whoever unpacks it or runs ranks with it: pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# The driver's own travel already; another version of these could not talk to it.
OURS = ("hopsgpu", "cloudpickle")


@dataclass(frozen=True)
class PythonEnv:
    """A Python environment that lies packed on the lake.

    Attributes:
        name: how its user named it.
        url: of the archive.
        digest: SHA-256 of the archive, in hexadecimal.
        bytes: of the archive.
        below: the directory in the archive that is the environment, "" for all of it.
        interpreter: path of its Python below that, as "bin/python3.11"; None for packages alone,
            which the executors' Python imports.
        python: the minor version that it was made for, as "3.11"; None for any.
        machine: of the processors that it was compiled for, as `platform.machine()` has it; None
            for any.
        modules: the top-level modules that are installed in it; None where that is not known.
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
        """For a message or a record, without its many modules; `from_fields` reads it."""
        return {name: value for name, value in asdict(self).items() if name != "modules"}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> PythonEnv:
        """What `as_fields` gave.

        Raises:
            TypeError: it is of another form.
        """
        modules = fields.get("modules")
        return cls(**{**fields, "modules": None if modules is None else tuple(modules)})

    def lacks(self, names: Iterable[str]) -> tuple[str, ...]:
        """Of top-level modules those that it does not have, as far as that is known."""
        return tuple(n for n in names if self.modules is not None and n not in self.modules)

    def at(self, home: Path) -> Home:
        """What ranks run with where it is unpacked in a directory."""
        if self.interpreter is None:
            return Home(packages=(str(home),))
        return Home(executable=str(home / self.interpreter))


def mark_in(place: Path, digest: str) -> Path:
    """The file that is there once the environment of a digest is whole in a directory."""
    return place / f"{digest}.whole"


def whole_in(places: Iterable[Path], digest: str) -> Path | None:
    """Where an environment lies whole, of several directories; None where it does in none."""
    return next((p / digest for p in places if mark_in(p, digest).exists()), None)


@dataclass(frozen=True)
class Home:
    """What ranks run with.

    Attributes:
        executable: their Python, None for the executors'.
        packages: directories that come before others on their `sys.path`, behind the user's own
            modules.
    """

    executable: str | None = None
    packages: tuple[str, ...] = ()
