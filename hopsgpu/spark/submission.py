"""What spark-submit is told so that a script of any kind can hold gangs.

The other half of yarn-scripts/hopsgpu-submit: what `hopsgpu.session()` would set and ship goes on
spark-submit's command line.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from hopsgpu.discovery.shipping import ALIAS, pack_scripts
from hopsgpu.errors import ConfigError
from hopsgpu.gpu_types import parse_markers
from hopsgpu.spark.checks import SESSION_DEFAULTS

ARCHIVES = "spark.yarn.dist.archives"
PY_FILES = "spark.yarn.dist.pyFiles"
MARKERS = "spark.hopsgpu.markers"
# Of spark-submit's options those that take no value; org.apache.spark.launcher's
# SparkSubmitOptionParser lists them.
_SWITCHES = frozenset(
    (
        *("--help", "-h", "--supervise", "--usage-error", "--verbose", "-v", "--version"),
        "--load-spark-defaults",
    )
)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)")
_LETTERS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


def pack(directory: Path, markers: Iterable[str] = ()) -> tuple[Path, Path]:
    """Writes what an application ships: the discovery script, and hopsgpu itself.

    Each file is replaced in one step, so that another submission never reads half of it.

    Args:
        directory: where to; it is made.
        markers: YARN resources that mark nodes.

    Returns:
        `hopsgpu-discovery.tar.gz` and `hopsgpu-shipped.zip` in the directory.

    Raises:
        ConfigError: the directory cannot be written.
    """
    from hopsgpu.spark.shipping import pack_package

    scripts, package = directory / "hopsgpu-discovery.tar.gz", directory / "hopsgpu-shipped.zip"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for target in (scripts, package):
            fresh = target.with_name(f"{target.name}.{os.getpid()}")
            if target is scripts:
                pack_scripts(fresh, markers)
            else:
                pack_package(fresh)
            fresh.replace(target)
    except OSError as error:
        raise ConfigError(
            f"cannot write {directory}: {error.strerror or error}; set XDG_CACHE_HOME to a"
            " directory that is yours"
        ) from error
    return scripts, package


def submit_arguments(
    given: Sequence[str], defaults: Mapping[str, str], scripts: Path, package: Path
) -> list[str]:
    """The arguments of spark-submit.

    Ours come first, so that the user's own win; archives and Python files are joined with those
    of the user and of spark-defaults.conf, which they would replace otherwise.

    Args:
        given: the user's arguments: options, script, and what the script gets.
        defaults: the properties of spark-defaults.conf.
        scripts: the archive of the discovery script.
        package: the zip of hopsgpu.
    """
    options, rest = split_options(given)
    properties = all_properties(options, defaults)
    shipped = {ARCHIVES: f"{scripts.as_uri()}#{ALIAS}", PY_FILES: package.as_uri()}
    ours = [word for item in SESSION_DEFAULTS.items() for word in ("--conf", "=".join(item))]
    joined = []
    for name, uri in shipped.items():
        both = ",".join(filter(None, (properties.get(name), uri)))
        joined += ["--conf", f"{name}={both}"]
    words = [word for option in options for word in option]
    return ["--master", "yarn", *ours, *words, *joined, *rest]


def split_options(given: Sequence[str]) -> tuple[list[tuple[str, ...]], list[str]]:
    """spark-submit's own options, each with its value, and the script with what it gets."""
    options: list[tuple[str, ...]] = []
    at = 0
    while at < len(given) and given[at].startswith("-"):
        alone = given[at] in _SWITCHES or re.match(r"--[^=]+=", given[at]) is not None
        end = at + (1 if alone else 2)
        options.append(tuple(given[at:end]))
        at = end
    return options, list(given[at:])


def all_properties(
    options: Sequence[tuple[str, ...]], defaults: Mapping[str, str]
) -> dict[str, str]:
    """The properties that an application gets.

    Args:
        options: of spark-submit, as `split_options` gives them.
        defaults: of spark-defaults.conf.
    """
    names = {option[0].partition("=")[0] for option in options}
    if "--properties-file" in names and "--load-spark-defaults" not in names:
        defaults = {}  # it is read in place of spark-defaults.conf
    return {**defaults, **_properties(options)}


def _properties(options: Sequence[tuple[str, ...]]) -> dict[str, str]:
    """What the user gave by `--conf NAME=VALUE`, or in a properties file of their own."""
    found: dict[str, str] = {}
    for option in options:
        name, _, inside = option[0].partition("=")
        value = inside or "".join(option[1:])
        if name in ("--properties-file", "--extra-properties-file"):
            found = read_properties(Path(value)) | found
        elif name in ("--conf", "-c"):
            key, _, said = value.partition("=")
            found[key] = said
    return found


def spark_defaults(environ: Mapping[str, str]) -> dict[str, str]:
    """The properties of spark-defaults.conf, where Spark looks for it; none where there is none.

    Args:
        environ: with SPARK_CONF_DIR, or SPARK_HOME.

    Raises:
        ConfigError: it cannot be read.
    """
    home = environ.get("SPARK_HOME")
    conf = environ.get("SPARK_CONF_DIR") or (f"{home}/conf" if home else "")
    file = Path(conf, "spark-defaults.conf")
    return read_properties(file) if conf and file.is_file() else {}


def read_properties(file: Path) -> dict[str, str]:
    """The properties of a Java properties file, as spark-defaults.conf is one.

    Source of the rules: the documentation of java.util.Properties.load.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    # A line whose last character is a backslash of its own goes on in the next.
    whole = re.sub(r"(?<!\\)((?:\\\\)*)\\\n[ \t\f]*", r"\1", text)
    found = {}
    for line in whole.splitlines():
        match = re.match(r"[ \t\f]*(?![#!])((?:\\.|[^\\\s=:])+)[ \t\f]*[=:]?[ \t\f]*(.*)", line)
        if match is not None:
            # Spark trims values, which Java does not.
            found[_unescaped(match[1])] = _unescaped(match[2]).strip()
    return found


def _unescaped(text: str) -> str:
    def letter(match: re.Match[str]) -> str:
        said = match[1]
        return chr(int(said[1:], 16)) if len(said) == 5 else _LETTERS.get(said, said)

    return _ESCAPE.sub(letter, text)


def main(arguments: Sequence[str]) -> int:
    """`DIRECTORY [-- ARGUMENTS of spark-submit]`.

    Writes what is shipped into the directory; prints the arguments as words of a shell where
    `--` is given, else what was written.
    """
    if not arguments:
        print("usage: python -m hopsgpu.spark.submission DIRECTORY", file=sys.stderr)
        return 2
    try:
        defaults = spark_defaults(os.environ)
        properties = all_properties(split_options(arguments[2:])[0], defaults)
        markers = parse_markers(properties.get(MARKERS) or os.environ.get("HOPSGPU_MARKERS"))
        scripts, package = pack(Path(arguments[0]).absolute(), markers.values())
        if arguments[1:2] == ["--"]:
            print(shlex.join(submit_arguments(arguments[2:], defaults, scripts, package)))
        else:
            print(scripts, package, sep="\n")
    except ConfigError as error:
        print(f"hopsgpu: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
