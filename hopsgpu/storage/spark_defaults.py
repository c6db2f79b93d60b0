"""The properties of spark-defaults.conf, read without Spark."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from hopsgpu.errors import ConfigError

_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)")
_LETTERS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


def spark_defaults(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the properties in SPARK_CONF_DIR or SPARK_HOME/conf; empty without a file.

    Raises:
        ConfigError: the file cannot be read.
    """
    home = environ.get("SPARK_HOME")
    conf = environ.get("SPARK_CONF_DIR") or (f"{home}/conf" if home else "")
    file = Path(conf, "spark-defaults.conf")
    return read_properties(file) if conf and file.is_file() else {}


def read_properties(file: Path) -> dict[str, str]:
    """Return the properties of a Java properties file such as spark-defaults.conf.

    Source of the rules: the documentation of java.util.Properties.load.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    # A line that ends with an unescaped backslash continues on the next line.
    joined = re.sub(r"(?<!\\)((?:\\\\)*)\\\n[ \t\f]*", r"\1", text)
    properties = {}
    for line in joined.splitlines():
        match = re.match(r"[ \t\f]*(?![#!])((?:\\.|[^\\\s=:])+)[ \t\f]*[=:]?[ \t\f]*(.*)", line)
        if match is not None:
            # Spark trims values; Java does not.
            properties[_unescape(match[1])] = _unescape(match[2]).strip()
    return properties


def _unescape(text: str) -> str:
    def letter(match: re.Match[str]) -> str:
        escape = match[1]
        return chr(int(escape[1:], 16)) if len(escape) == 5 else _LETTERS.get(escape, escape)

    return _ESCAPE.sub(letter, text)
