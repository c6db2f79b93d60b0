"""Hadoop's settings, read from its files as a client's JVM reads them, but without a JVM.

Source of the rules: Hadoop's class Configuration, and its documentation. Hadoop's own defaults,
which are in its jars, and system properties in `${…}`, which only a JVM has, are not read.
"""

from __future__ import annotations

import os
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from hopsgpu.errors import ConfigError

# Later files override earlier ones.
_FILES = ("core-site.xml", "yarn-site.xml")
_HDFS_FILES = ("core-site.xml", "hdfs-site.xml")
_NAMES = ("HADOOP_CONF_DIR", "YARN_CONF_DIR")
_VARIABLE = re.compile(r"\$\{([^}$ ]+)\}")
_ENVIRONMENT = re.compile(r"env\.(?P<name>\w+)(?:(?P<when>:?-)(?P<otherwise>.*))?")
# The first bound is Hadoop's own; the second is ours, against files that include each other.
_MOST_SUBSTITUTIONS = 20
_MOST_INCLUDES = 20


def is_configured(environ: Mapping[str, str]) -> bool:
    """Return whether environment variables say where a cluster's Hadoop configuration is."""
    return any(environ.get(name) for name in _NAMES)


class HadoopConf:
    """Hadoop's properties by their names.

    Args:
        properties: the values as they are in the files.
        environ: the environment variables that `${env.NAME}` refers to.
    """

    def __init__(self, properties: Mapping[str, str], environ: Mapping[str, str]) -> None:
        self._properties = properties
        self._environ = environ

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None) -> HadoopConf:
        """Load the properties of the cluster that HADOOP_CONF_DIR and YARN_CONF_DIR point at.

        Spark finds its cluster in the same way.

        Args:
            environ: environment variables; this process's by default.

        Raises:
            ConfigError: neither variable is set, they point at no yarn-site.xml, or a file is
                unreadable.
        """
        environ = os.environ if environ is None else environ
        places = _places(environ)
        if not places:
            raise ConfigError(
                "HADOOP_CONF_DIR is not set, so YARN cannot be found: set it to the cluster's"
                " Hadoop configuration (for the development cluster:"
                ' eval "$(hopsgpu cluster env)")'
            )
        files = [_first(places, name) for name in _FILES]
        if files[-1] is None:
            raise ConfigError(
                f"there is no {_FILES[-1]} in {', '.join(map(str, places))}: set HADOOP_CONF_DIR"
                " to the cluster's Hadoop configuration"
            )
        return cls(_merged(files, places), environ)

    @classmethod
    def load_hdfs(cls, environ: Mapping[str, str]) -> HadoopConf:
        """Load what a client of HDFS reads; without a configuration, no properties.

        Args:
            environ: environment variables.

        Raises:
            ConfigError: a file is unreadable.
        """
        places = _places(environ)
        return cls(_merged([_first(places, name) for name in _HDFS_FILES], places), environ)

    def filled(self) -> dict[str, str]:
        """Return all properties with their `${…}` filled in."""
        return {name: self.get(name) or "" for name in self._properties}

    def get(self, name: str) -> str | None:
        """Return a property's value with its `${…}` filled in, or None if no file has it.

        A variable that is not known stays as it is.
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
        reference = _ENVIRONMENT.fullmatch(variable[1])
        if reference is None:
            return self._properties.get(variable[1], variable[0])
        value = self._environ.get(reference["name"])
        if value is None or (reference["when"] == ":-" and not value):
            return variable[0] if reference["when"] is None else reference["otherwise"]
        return value


def _places(environ: Mapping[str, str]) -> list[Path]:
    """Return the directories of the configuration.

    They are on a JVM's class path, where the first file of a name counts.
    """
    values = [environ[name] for name in _NAMES if environ.get(name)]
    return [Path(place) for value in values for place in value.split(os.pathsep) if place]


def _first(places: list[Path], name: str) -> Path | None:
    return next((place / name for place in places if (place / name).is_file()), None)


def _merged(paths: list[Path | None], places: list[Path]) -> dict[str, str]:
    values: dict[str, str] = {}
    final: set[str] = set()
    for path in paths:
        for name, value, last in _properties(path, places, 0) if path is not None else ():
            if name not in final:
                values[name] = value
            if last:
                final.add(name)
    return values


def _properties(path: Path, places: list[Path], depth: int) -> Iterator[tuple[str, str, bool]]:
    """Yield (name, value, whether it is final) of a file and of its includes, in their order."""
    try:
        if depth > _MOST_INCLUDES:
            raise ConfigError(f"{path} includes itself")
        root = ET.parse(path).getroot()
    except (OSError, ET.ParseError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    yield from _inside(root, path, places, depth)


def _inside(
    element: ET.Element, path: Path, places: list[Path], depth: int
) -> Iterator[tuple[str, str, bool]]:
    for child in element:
        tag = child.tag.rpartition("}")[2]
        if tag == "property":
            yield from _property(child)
        elif tag == "include":
            included = _included(child.get("href", ""), path, places)
            fallback = next((one for one in child if one.tag.endswith("fallback")), None)
            if included.is_file() or fallback is None:
                yield from _properties(included, places, depth + 1)
            else:
                yield from _inside(fallback, path, places, depth)
        elif tag == "configuration":
            yield from _inside(child, path, places, depth)


def _included(href: str, path: Path, places: list[Path]) -> Path:
    """Return the file that an include names: of the class path, a URL, or beside the including."""
    if (of_class_path := _first(places, href)) is not None:
        return of_class_path
    url = urlsplit(href)
    return Path(unquote(url.path)) if url.scheme == "file" else path.parent / href


def _property(element: ET.Element) -> Iterator[tuple[str, str, bool]]:
    fields = dict(element.attrib)
    fields.update((child.tag, child.text or "") for child in element)
    # Hadoop treats an empty value as none.
    if fields.get("name") and fields.get("value"):
        # Hadoop, too, trims addresses and switches when it reads them.
        yield fields["name"].strip(), fields["value"].strip(), fields.get("final") == "true"
