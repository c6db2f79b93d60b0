"""The user's own modules: found at the driver, packed, and importable in every rank."""

from __future__ import annotations

import functools
import hashlib
import io
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

# Beyond these a directory is no project of modules (a home directory, /tmp): only what lies
# at its top is taken.
MOST_ENTRIES = 5_000
MOST_BYTES = 20 * 2**20
# The directory of a container in which YARN unpacks what `hopsgpu submit` ships of them.
SHIPPED = "hopsgpu-modules"
# Comes to the ranks by itself: a checkout of it beside a script is not the user's module.
_HOPSGPU = Path(__file__).resolve().parent
_NOT_CODE = frozenset({"__pycache__", "node_modules", "site-packages", "dist-packages"})


@dataclass(frozen=True)
class PackedModules:
    """A zip of the user's modules.

    Attributes:
        archive: the bytes; each root is a top-level directory "0", "1", … of it.
        roots: how many there are.
        warnings: roots that were too large to take whole.
    """

    archive: bytes
    roots: int
    warnings: tuple[str, ...]

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the archive, in hexadecimal."""
        return hashlib.sha256(self.archive).hexdigest()


def module_roots(function: Callable[..., Any]) -> tuple[Path, ...]:
    """Directories from which the function's own modules are imported at the driver.

    They are the directory of the script (or the notebook's working directory) and the root of
    the module that defines the function, unless the Python environment itself is there. Where
    YARN runs the script, the modules beside it are those that were shipped with it.
    """
    while isinstance(function, functools.partial):
        function = function.func
    names = ("__main__", getattr(function, "__module__", None), type(function).__module__)
    roots = [_root_of(sys.modules[name]) for name in names if name in sys.modules]
    roots += [path.resolve() for path in map(Path, sys.path) if path.parent.name == SHIPPED]
    return tuple(dict.fromkeys(root for root in roots if root and not _of_environment(root)))


def script_root(script: Path) -> Path | None:
    """The directory from which a script's own modules are imported; None in an environment."""
    root = script.resolve().parent
    return None if _of_environment(root) else root


def _root_of(module: ModuleType) -> Path | None:
    name = module.__name__
    file = module.__file__ if hasattr(module, "__file__") else None
    if file is None:
        # A notebook or `python -c`: modules beside it come from the working directory.
        return Path.cwd() if name == "__main__" and "" in sys.path else None
    if name == "__main__" and (spec := getattr(module, "__spec__", None)) is not None:
        name = spec.name
    above = name.count(".") + (Path(file).name == "__init__.py")
    return Path(file).resolve().parents[above]


def _of_environment(root: Path) -> bool:
    paths = sysconfig.get_paths()
    own = [paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")]
    own.append(str(Path(sys.executable).resolve().parent))
    return root.parent == root or any(root.is_relative_to(Path(p).resolve()) for p in own)


class Packer:
    """Packs modules for several launches: again only where a file has changed."""

    def __init__(self) -> None:
        self._last: tuple[object, PackedModules] | None = None

    def pack(self, roots: Sequence[Path]) -> PackedModules:
        """As `pack_modules`; a file has changed if its time or its size has."""
        found = [_Found.below(root) for root in roots]
        state = [(f.root, f.warnings, [_state(path) for path in f.files]) for f in found]
        last = self._last
        if last is None or last[0] != state:
            last = self._last = (state, _packed(found))
        return last[1]


@dataclass(frozen=True)
class _Found:
    """What of a root is to be packed."""

    root: Path
    files: tuple[Path, ...]
    warnings: tuple[str, ...]

    @classmethod
    def below(cls, root: Path) -> _Found:
        files = _files_below(root)
        if files is not None:
            return cls(root, tuple(sorted(files)), ())
        too_much = (
            f"{root} holds too much to be sent to the ranks: only the modules at its top"
            " are importable there; start from a directory of its own"
        )
        return cls(root, tuple(sorted(f for f in root.glob("*.py") if f.is_file())), (too_much,))


def _state(path: Path) -> tuple[object, ...]:
    """What tells whether a file is still the same."""
    try:
        found = path.stat()
    except OSError:
        return (path,)
    return path, found.st_mtime_ns, found.st_size, found.st_ino


def pack_modules(roots: Sequence[Path]) -> PackedModules:
    """The `*.py` files below each root, and every small file of the packages among them.

    Hidden directories, virtual environments, caches and this hopsgpu itself are left out. A root
    that holds more than 5,000 entries or 20 MiB gives only the `*.py` files at its top, with a
    warning.
    """
    return Packer().pack(roots)


def _packed(found: Sequence[_Found]) -> PackedModules:
    warnings: list[str] = []
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for number, part in enumerate(found):
            warnings += part.warnings
            for file in part.files:
                # A fixed time keeps equal modules equal bytes.
                entry = zipfile.ZipInfo(f"{number}/{file.relative_to(part.root).as_posix()}")
                try:
                    content = file.read_bytes()
                except OSError as error:
                    warnings.append(f"{file} is not sent to the ranks: {error.strerror}")
                else:
                    archive.writestr(entry, content, zipfile.ZIP_DEFLATED)
    return PackedModules(buffer.getvalue(), len(found), tuple(warnings))


def _files_below(root: Path) -> list[Path] | None:
    """What to pack, or None where it is too much."""
    size = 0
    files = []
    for entries, path in enumerate(_walk(root), start=1):
        if path.suffix == ".py" or (path.parent / "__init__.py").is_file():
            size += path.stat().st_size
            files.append(path)
        if entries > MOST_ENTRIES or size > MOST_BYTES:
            return None
    return files


def _walk(directory: Path) -> Iterator[Path]:
    try:
        children = list(directory.iterdir())
    except OSError:  # not ours to read: then it is not ours to import from
        return
    for path in children:
        if path.name.startswith(".") or path.name in _NOT_CODE:
            continue
        if path.is_symlink() and path.is_dir():
            continue  # may lead out of the project, or round in a circle
        if path.is_dir():
            if not (path / "pyvenv.cfg").exists() and path.resolve() != _HOPSGPU:
                yield from _walk(path)
        elif path.is_file():
            yield path
