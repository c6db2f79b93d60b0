"""Hadoop's settings, read from its files as a client's JVM reads them, without one.

Source of the rules: Hadoop's class Configuration, and its documentation. Not read are Hadoop's
own defaults, which lie in its jars, and system properties in `${…}`, which only a JVM has.
"""

from __future__ import annotations

import os
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping
from pathlib import Path

from hopsgpu.errors import ConfigError

# Later ones win.
_FILES = ("core-site.xml", "yarn-site.xml")
_NAMES = ("HADOOP_CONF_DIR", "YARN_CONF_DIR")
_VARIABLE = re.compile(r"\$\{([^}$ ]+)\}")
_ENVIRONMENT = re.compile(r"env\.(?P<name>\w+)(?:(?P<when>:?-)(?P<otherwise>.*))?")
# Hadoop's own bounds; the second is ours, against files that include each other.
_MOST_SUBSTITUTIONS = 20
_MOST_INCLUDES = 20


def is_configured(environ: Mapping[str, str]) -> bool:
    """Whether environment variables say where a cluster's Hadoop configuration is."""
    return any(environ.get(name) for name in _NAMES)


class HadoopConf:
    """Properties by their names.

    Args:
        properties: as the files have them.
        environ: the environment variables that `${env.NAME}` means.
    """

    def __init__(self, properties: Mapping[str, str], environ: Mapping[str, str]) -> None:
        self._properties = properties
        self._environ = environ

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None) -> HadoopConf:
        """Those of the cluster that HADOOP_CONF_DIR, or YARN_CONF_DIR, points at, as for Spark.

        Args:
            environ: of this process by default.

        Raises:
            ConfigError: neither is set, or they hold no yarn-site.xml or one that is unreadable.
        """
        environ = os.environ if environ is None else environ
        given = [environ[name] for name in _NAMES if environ.get(name)]
        if not given:
            raise ConfigError(
                "HADOOP_CONF_DIR is not set, so YARN cannot be found: set it to the cluster's"
                " Hadoop configuration (for the development cluster:"
                ' eval "$(hopsgpu cluster env)")'
            )
        # They stand on a JVM's class path, where the first file of a name is the one.
        places = [Path(place) for value in given for place in value.split(os.pathsep) if place]
        found = [_first(places, name) for name in _FILES]
        if found[-1] is None:
            raise ConfigError(
                f"there is no {_FILES[-1]} in {', '.join(map(str, places))}: set HADOOP_CONF_DIR"
                " to the cluster's Hadoop configuration"
            )
        return cls(_merged(path for path in found if path is not None), environ)

    def get(self, name: str) -> str | None:
        """A property's value with its `${…}` filled in, or None where no file has it.

        A variable that nobody knows stays as it is.
        """
        value = self._properties.get(name)
        if value is None:
            return None
        for _ in range(_MOST_SUBSTITUTIONS):
            filled = _VARIABLE.sub(self._filled, value)
            if filled == value:
                break
            value = filled
        return value

    def _filled(self, variable: re.Match[str]) -> str:
        wanted = _ENVIRONMENT.fullmatch(variable[1])
        if wanted is None:
            return self._properties.get(variable[1], variable[0])
        found = self._environ.get(wanted["name"])
        if found is None or (wanted["when"] == ":-" and not found):
            return variable[0] if wanted["when"] is None else wanted["otherwise"]
        return found


def _first(places: list[Path], name: str) -> Path | None:
    return next((place / name for place in places if (place / name).is_file()), None)


def _merged(paths: Iterator[Path]) -> dict[str, str]:
    values: dict[str, str] = {}
    final: set[str] = set()
    for path in paths:
        for name, value, last in _properties(path, 0):
            if name not in final:
                values[name] = value
            if last:
                final.add(name)
    return values


def _properties(path: Path, depth: int) -> Iterator[tuple[str, str, bool]]:
    """(name, value, whether it is final) of a file, and of what it includes, in their order."""
    try:
        if depth > _MOST_INCLUDES:
            raise ConfigError(f"{path} is included by itself")
        root = ET.parse(path).getroot()
    except (OSError, ET.ParseError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    yield from _inside(root, path, depth)


def _inside(element: ET.Element, path: Path, depth: int) -> Iterator[tuple[str, str, bool]]:
    for child in element:
        tag = child.tag.rpartition("}")[2]
        if tag == "property":
            yield from _property(child)
        elif tag == "include":
            included = path.parent / child.get("href", "")
            fallback = next((one for one in child if one.tag.endswith("fallback")), None)
            if included.is_file() or fallback is None:
                yield from _properties(included, depth + 1)
            else:
                yield from _inside(fallback, path, depth)
        elif tag == "configuration":
            yield from _inside(child, path, depth)


def _property(element: ET.Element) -> Iterator[tuple[str, str, bool]]:
    said = dict(element.attrib)
    said.update((child.tag, child.text or "") for child in element)
    # Hadoop takes an empty one for none.
    if said.get("name") and said.get("value"):
        # Who asks for addresses and switches trims them in Hadoop too.
        yield said["name"].strip(), said["value"].strip(), said.get("final") == "true"
