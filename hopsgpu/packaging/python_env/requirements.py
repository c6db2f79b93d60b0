"""Requirements of an environment that pip installs, and the inputs that determine the result."""

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
# These options override settings of the target directory in variables and in pip.conf. Settings of
# index, certificate and proxy stay in force. An empty root would be the working directory.
PIP_OPTIONS = (
    *("--no-user", "--prefix=", "--root=/"),
    *("--no-input", "--disable-pip-version-check", "--progress-bar", "off"),
)
# Variables for another target directory, another Python or further packages.
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
    """Return requirements without comments and empty lines.

    Raises:
        ConfigError: a requirement is editable: no node can reach its directory.
    """
    requirements = []
    for line in lines:
        text = _COMMENT.sub("", line).strip()
        if _EDITABLE.match(text):
            raise ConfigError(
                f"python_env: {where} has {text!r}: an editable package stays in its directory, so"
                " ranks cannot import it: write it without -e. hopsgpu sends the modules beside the"
                " script to the ranks anyway"
            )
        if text:
            requirements.append(text)
    return tuple(requirements)


def read_lines(file: Path) -> tuple[str, ...]:
    """Return a file's requirements as `check_lines` does; ConfigError also if it is unreadable."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"python_env: {file} cannot be read: {reason}") from error
    return check_lines(re.sub(r"\\\n", " ", text).splitlines(), str(file))


def pip_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without settings of where and for which Python to install."""
    variables = {name: value for name, value in environ.items() if name.upper() not in _NOT_FOR_PIP}
    # No option of pip overrides a pip.conf's `require-virtualenv`.
    return {**variables, "PIP_REQUIRE_VIRTUALENV": "0"}


def pip_inputs(
    lines: Iterable[str], base: Path, variables: Mapping[str, str], stop: threading.Event
) -> list[str]:
    """Return the inputs that determine what pip will install.

    The inputs are the requirements, digests of local files that these name, and the variables that
    pip reads. Names of included files are relative to `base`.

    Raises:
        ConfigError: an included or named file cannot be read.
        Cancelled: `stop` was set.
    """
    inputs = list(_inputs_of(lines, base, stop, frozenset()))
    return inputs + [f"{name}={variables[name]}" for name in VARIABLES if name in variables]


def _inputs_of(
    lines: Iterable[str], base: Path, stop: threading.Event, ancestors: frozenset[Path]
) -> Iterator[str]:
    for line in lines:
        yield line
        if (included := _INCLUDED.fullmatch(line)) is not None:
            if "://" in included["file"]:
                continue
            file = (base / included["file"].strip()).resolve()
            if file not in ancestors:
                yield from _inputs_of(read_lines(file), file.parent, stop, ancestors | {file})
        elif (named := _local_path(line)) is not None:
            digest = digest_of(files_of(named), stop) if named.is_dir() else None
            yield digest or digest_of_file(named, stop)


def _local_path(line: str) -> Path | None:
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
