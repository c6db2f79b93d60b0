"""What pip is to install, and what tells whether that is still the same."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from hopsgpu.errors import ConfigError
from hopsgpu.packaging.python_env.packing import digest_of, digest_of_file, files_of

# What else decides what pip finds.
VARIABLES = (
    "PIP_CONSTRAINT",
    "PIP_EXTRA_INDEX_URL",
    "PIP_FIND_LINKS",
    "PIP_INDEX_URL",
    "PIP_NO_INDEX",
    "PIP_PRE",
)
# The command line wins over variables, and these over pip.conf. So these also undo what a pip.conf
# says of the place that pip installs into; an index, a certificate or a proxy of it stay in force.
# An empty root would be the working directory.
PIP_OPTIONS = (
    *("--no-user", "--prefix=", "--root=/"),
    *("--no-input", "--disable-pip-version-check", "--progress-bar", "off"),
)
# Variables of pip that name another place, another Python, or more to install.
_NOT_FOR_PIP = frozenset(
    f"PIP_{name}"
    for name in (
        *("USER", "NO_USER", "PREFIX", "TARGET", "ROOT", "HOME", "PYTHON"),
        *("REQUIREMENT", "EDITABLE", "DRY_RUN"),
    )
)
_INCLUDED = re.compile(r"(?:-r|--requirement|-c|--constraint)(?:\s+|=)?(?P<file>.+)")
_LINKS = re.compile(r"(?:-f|--find-links)(?:\s+|=)(?P<file>.+)")
_EDITABLE = re.compile(r"(-e|--editable)(\s|=)")
_COMMENT = re.compile(r"(^|\s)#.*$")


def check_lines(lines: Iterable[str], where: str) -> tuple[str, ...]:
    """Lines of requirements, without comments and empty ones.

    Raises:
        ConfigError: one is editable, which leads to where no node can follow.
    """
    found = []
    for line in lines:
        text = _COMMENT.sub("", line).strip()
        if _EDITABLE.match(text):
            raise ConfigError(
                f"python_env: {where} has {text!r}: what is editable stays where it is, and no"
                " rank can import it; write it without -e. Modules beside the script travel by"
                " themselves"
            )
        if text:
            found.append(text)
    return tuple(found)


def read_lines(file: Path) -> tuple[str, ...]:
    """The lines of a requirements file, as `check_lines` gives them.

    Raises:
        ConfigError: it cannot be read, or one cannot travel.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"python_env: {file} cannot be read: {reason}") from error
    return check_lines(re.sub(r"\\\n", " ", text).splitlines(), str(file))


def pip_variables(given: Mapping[str, str]) -> dict[str, str]:
    """The variables with which pip installs into a directory, whatever the user's own pip is for.

    Args:
        given: of this process.
    """
    kept = {name: value for name, value in given.items() if name.upper() not in _NOT_FOR_PIP}
    # What is installed into a directory needs no virtual environment; pip has no option that undoes
    # a pip.conf's `require-virtualenv`.
    return {**kept, "PIP_REQUIRE_VIRTUALENV": "0"}


def recipe_of(
    lines: Iterable[str], base: Path, variables: Mapping[str, str], stop: threading.Event
) -> list[str]:
    """What decides what pip will install, as texts: lines, also of included files, and digests of
    local files that they name.

    Args:
        lines: of requirements.
        base: the directory that included files are named from.
        variables: of the environment.
        stop: set when it is no longer wanted.

    Raises:
        ConfigError: an included or named file cannot be read.
        Cancelled: `stop` was set.
    """
    found = list(_recipe(lines, base, stop, frozenset()))
    return found + [f"{name}={variables[name]}" for name in VARIABLES if name in variables]


def _recipe(
    lines: Iterable[str], base: Path, stop: threading.Event, above: frozenset[Path]
) -> Iterator[str]:
    for line in lines:
        yield line
        if (included := _INCLUDED.fullmatch(line)) is not None:
            if "://" in included["file"]:
                continue
            file = (base / included["file"].strip()).resolve()
            if file not in above:
                yield from _recipe(read_lines(file), file.parent, stop, above | {file})
        elif (named := _local(line)) is not None:
            whole = digest_of(files_of(named), stop) if named.is_dir() else None
            yield whole or digest_of_file(named, stop)


def _local(line: str) -> Path | None:
    """The file or directory here that a line names; pip finds it from the working directory."""
    if (links := _LINKS.fullmatch(line)) is not None:
        text = links["file"].strip()
        return Path(text) if "://" not in text and Path(text).is_dir() else None
    text = line.partition(" @ ")[2].strip() or line.partition(" ")[0]
    if text.startswith("file:"):
        text = unquote(urlsplit(text).path)
    elif "://" in text or not ("/" in text or text.endswith(".whl") or text.startswith(".")):
        return None
    path = Path(text.partition("[")[0])
    return path if path.exists() else None
