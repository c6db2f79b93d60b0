"""Recognises the Python environment in an archive by the names of entries. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from hopsgpu.errors import ConfigError
from hopsgpu.packaging.python_env.archives import ArchiveEntry

# From e_machine (ELF gABI, "ELF Header") to the name in `platform.machine()`.
_MACHINES = {62: "x86_64", 183: "aarch64", 21: "ppc64le", 22: "s390x", 243: "riscv64"}
_MACH_O = (b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")
_PYTHON = re.compile(r"bin/python(3\.\d+)")
_LIBRARY = re.compile(r"lib/python(3\.\d+)/(os\.py|site-packages/)")
# The directory of packages in an environment with a Python; Debian uses dist-packages.
_INSTALLED = re.compile(r"lib/python3(\.\d+)?/(site|dist)-packages/")
# The .pth files of setuptools and of namespace packages add nothing to `sys.path`.
_ADDS_TO_PATH = re.compile(r"(?!distutils-precedence\.pth|[^/]*-nspkg\.pth)[^/]*\.(pth|egg-link)")
_TAGGED = re.compile(r"\.(cpython-3\d+|cp3\d+)[\w-]*\.(so|pyd)")


@dataclass(frozen=True)
class DriverPython:
    """The driver's Python; the ranks' must have the same minor version and machine.

    Attributes:
        python: minor version, such as "3.11".
        machine: as in `platform.machine()`.
        suffixes: of compiled modules, as in `importlib.machinery`.
    """

    python: str
    machine: str
    suffixes: tuple[str, ...]


@dataclass(frozen=True)
class ArchiveContents:
    """Fields of a `PythonEnv` that an archive determines."""

    below: str
    interpreter: str | None
    python: str | None
    machine: str | None
    modules: tuple[str, ...] | None = None


def should_peek(name: str) -> bool:
    """Return whether the first bytes of a file show for which machine it was built."""
    return name.endswith((".so", ".pyd")) or bool(_PYTHON.fullmatch(_last_parts(name, 2)))


def inspect_archive(
    entries: Iterable[ArchiveEntry], name: str, driver: DriverPython
) -> ArchiveContents:
    """Return the contents of an archive, given its entries and the first bytes of some.

    Ranks run with the archive's interpreter, if it has one with a library. Otherwise (in a virtual
    environment, Python is a link) they import from its site-packages, or else from its top.

    Raises:
        ConfigError: the archive has no Python, several minor versions, another minor version or
            platform, or links that lead out of it.
    """
    all_entries = list(entries)
    files = {entry.name: entry for entry in all_entries if entry.is_file}
    contents = _recognise(files, name)
    _check_links(all_entries, contents.below, name)
    if contents.python not in (None, driver.python):
        raise other_python(name, f"Python {contents.python}", driver.python)
    below = [file for file in files if file.startswith(contents.below)]
    _check_tags(below, name, driver)
    machines = {m for m in (_machine(files[file].head) for file in below) if m}
    if machines and driver.machine not in machines:
        raise ConfigError(
            f"{name} is compiled for {', '.join(sorted(machines))}, and this is Linux on"
            f" {driver.machine}: build it on a machine like the nodes"
        )
    compiled = driver.machine if machines else None
    tagged = any(_TAGGED.search(file) for file in below)
    python = contents.python or (driver.python if tagged else None)
    linked = [e.name for e in all_entries if e.link and e.name.startswith(contents.below)]
    modules = _modules(below, linked, contents, driver)
    return ArchiveContents(contents.below, contents.interpreter, python, compiled, modules)


def _modules(
    files: Iterable[str], links: Iterable[str], contents: ArchiveContents, driver: DriverPython
) -> tuple[str, ...] | None:
    """Return the installed top-level modules; None if `.pth` files may add others."""
    linked = list(_importable_names(links, contents))
    names = [*_importable_names(files, contents), *linked]
    if contents.interpreter is not None and any(_ADDS_TO_PATH.fullmatch(name) for name in names):
        return None
    importable = (name for name in names if name.endswith((".py", *driver.suffixes)))
    # A link may lead to a package's directory.
    tops = {name.partition("/")[0].partition(".")[0] for name in (*importable, *linked)}
    return tuple(sorted(tops))


def _importable_names(files: Iterable[str], contents: ArchiveContents) -> Iterator[str]:
    """Yield names relative to the directory that modules are imported from."""
    above = f"{contents.below}/" if contents.below else ""
    for file in files:
        name = file.removeprefix(above)
        if contents.interpreter is None:
            yield name
        elif match := _INSTALLED.match(name):
            yield name[match.end() :]


def other_python(name: str, python: str, driver: str) -> ConfigError:
    return ConfigError(
        f"{name} has {python}, and the driver runs Python {driver}: functions and values are"
        f" pickled between the two, so build it with Python {driver}"
    )


def _recognise(files: Collection[str], name: str) -> ArchiveContents:
    for root in _roots(files):
        stdlib: set[str] = set()
        packages: set[str] = set()
        for file in files:
            if (match := _LIBRARY.match(file.removeprefix(root))) and file.startswith(root):
                (stdlib if match[2] == "os.py" else packages).add(match[1])
        for python in sorted(stdlib):
            if f"{root}bin/python{python}" in files:
                return ArchiveContents(root.rstrip("/"), f"bin/python{python}", python, None)
        if len(packages) > 1:
            raise ConfigError(
                f"{name} has site-packages of Python {' and '.join(sorted(packages))}: pack an"
                " environment of one version"
            )
        for python in packages:
            return ArchiveContents(f"{root}lib/python{python}/site-packages", None, python, None)
    if not any(file.endswith((".py", ".so")) for file in files):
        raise ConfigError(
            f"{name} contains no Python: neither bin/python3.N with lib/python3.N, nor"
            " lib/python3.N/site-packages, nor modules (*.py)"
        )
    return ArchiveContents("", None, None, None)


def _roots(files: Collection[str]) -> list[str]:
    """Return possible prefixes of an environment: none, or the only top-level directory."""
    tops = {file.partition("/")[0] for file in files}
    return ["", *(f"{top}/" for top in tops if len(tops) == 1)]


def _check_links(entries: Iterable[ArchiveEntry], below: str, name: str) -> None:
    above = f"{below}/" if below else ""
    for entry in entries:
        leads_out = entry.link.startswith(("/", "..")) or not entry.link.startswith(above)
        if entry.link and entry.name.startswith(above) and leads_out:
            raise ConfigError(
                f"{name}: {entry.name} is a link to {entry.link}, which is not in"
                f" {below or 'the archive'}: pack it again with files in place of such links"
            )


def _check_tags(files: Iterable[str], name: str, driver: DriverPython) -> None:
    """Raise ConfigError if there are compiled modules, but none that can be imported."""
    tagged = [file for file in files if _TAGGED.search(file)]
    # Any shared library may have the plain suffix.
    importable = tuple(suffix for suffix in driver.suffixes if suffix != ".so")
    if tagged and not any(file.endswith(importable) for file in tagged):
        module = _last_parts(min(tagged), 1)
        raise ConfigError(
            f"{name} is compiled for another Python or platform: {module} cannot be imported by"
            f" Python {driver.python} on {driver.machine}, which the driver and the executors run"
        )


def _machine(head: bytes) -> str | None:
    if head.startswith(b"\x7fELF"):
        number = int.from_bytes(head[18:20], "little" if head[5] == 1 else "big")
        return _MACHINES.get(number, f"ELF machine {number}")
    return "macOS" if head.startswith(_MACH_O) else None


def _last_parts(name: str, parts: int) -> str:
    return "/".join(name.split("/")[-parts:])
