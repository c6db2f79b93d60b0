"""What pip is to install for an environment, and what tells whether that has changed."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from hopsgpu.errors import ConfigError
from hopsgpu.packaging.python_env.packing import digest_of, digest_of_file, files_of

# Environment variables that also decide what pip finds.
VARIABLES = (
    "PIP_CONSTRAINT",
    "PIP_EXTRA_INDEX_URL",
    "PIP_FIND_LINKS",
    "PIP_INDEX_URL",
    "PIP_NO_INDEX",
    "PIP_PRE",
)
# The command line overrides variables, and these override pip.conf. So these options also undo a
# pip.conf's settings of the place that pip installs into; its index, certificate and proxy stay in
# force. An empty root would be the working directory.
PIP_OPTIONS = (
    *("--no-user", "--prefix=", "--root=/"),
    *("--no-input", "--disable-pip-version-check", "--progress-bar", "off"),
)
# pip's variables that name another place, another Python, or more packages to install.
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
    """Return lines of requirements, without comments and empty lines.

    Raises:
        ConfigError: a line is editable; it refers to a directory that no node can reach.
    """
    found = []
    for line in lines:
        text = _COMMENT.sub("", line).strip()
        if _EDITABLE.match(text):
            raise ConfigError(
                f"python_env: {where} has {text!r}: an editable package stays in its directory, so"
                " ranks cannot import it: write it without -e. hopsgpu sends the modules beside the"
                " script to the ranks anyway"
            )
        if text:
            found.append(text)
    return tuple(found)


def read_lines(file: Path) -> tuple[str, ...]:
    """Return the lines of a requirements file, as `check_lines` returns them.

    Raises:
        ConfigError: the file cannot be read, or a line cannot travel.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"python_env: {file} cannot be read: {reason}") from error
    return check_lines(re.sub(r"\\\n", " ", text).splitlines(), str(file))


def pip_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which pip installs into a directory, whatever the user's pip does.

    Args:
        environ: variables of this process.
    """
    variables = {name: value for name, value in environ.items() if name.upper() not in _NOT_FOR_PIP}
    # To install into a directory needs no virtual environment; pip has no option that undoes a
    # pip.conf's `require-virtualenv`.
    return {**variables, "PIP_REQUIRE_VIRTUALENV": "0"}


def recipe_of(
    lines: Iterable[str], base: Path, variables: Mapping[str, str], stop: threading.Event
) -> list[str]:
    """Return the texts that decide what pip will install.

    They are the lines, also those of included files, digests of the local files that they name, and
    the variables that pip reads.

    Args:
        lines: lines of requirements.
        base: the directory from which the lines name included files.
        variables: environment variables.
        stop: is set when the result is no longer wanted.

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
    """Return the local file or directory that a line names, or None.

    pip finds it from the working directory.
    """
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
