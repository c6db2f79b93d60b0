"""Hadoop's settings, read from its files as in Hadoop's clients, but without a JVM.

Source of the rules: Hadoop's class Configuration, and its documentation. Not read: Hadoop's
defaults, which are in its jars, and system properties in `${…}`, which only a JVM has.
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
# The first limit is Hadoop's; the second is hopsgpu's, against files that include each other.
_MAX_SUBSTITUTIONS = 20
_MAX_INCLUDES = 20


def is_configured(environ: Mapping[str, str]) -> bool:
    """Return whether environment variables say where a cluster's Hadoop configuration is."""
    return any(environ.get(name) for name in _NAMES)


class HadoopConf:
    """Hadoop's properties.

    Args:
        properties: the values in the files.
        environ: the environment variables for `${env.NAME}`.
    """

    def __init__(self, properties: Mapping[str, str], environ: Mapping[str, str]) -> None:
        self._properties = properties
        self._environ = environ

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None) -> HadoopConf:
        """Load the properties in HADOOP_CONF_DIR and YARN_CONF_DIR, as Spark does.

        Raises:
            ConfigError: neither variable is set, they point at no yarn-site.xml, or a file is
                unreadable.
        """
        environ = os.environ if environ is None else environ
        directories = _directories(environ)
        if not directories:
            raise ConfigError(
                "HADOOP_CONF_DIR is not set, so YARN cannot be found: set it to the cluster's"
                " Hadoop configuration (for the development cluster:"
                ' eval "$(hopsgpu cluster env)")'
            )
        files = [_find_file(directories, name) for name in _FILES]
        if files[-1] is None:
            raise ConfigError(
                f"there is no {_FILES[-1]} in {', '.join(map(str, directories))}: set"
                " HADOOP_CONF_DIR to the cluster's Hadoop configuration"
            )
        return cls(_merge_files(files, directories), environ)

    @classmethod
    def load_hdfs(cls, environ: Mapping[str, str]) -> HadoopConf:
        """Load the properties of an HDFS client; none without a configuration.

        Raises:
            ConfigError: a file is unreadable.
        """
        directories = _directories(environ)
        files = [_find_file(directories, name) for name in _HDFS_FILES]
        return cls(_merge_files(files, directories), environ)

    def all_values(self) -> dict[str, str]:
        """Return all properties with expanded variables."""
        return {name: self.get(name) or "" for name in self._properties}

    def get(self, name: str) -> str | None:
        """Return a property's value, or None; unknown variables stay unexpanded."""
        value = self._properties.get(name)
        if value is None:
            return None
        for _ in range(_MAX_SUBSTITUTIONS):
            expanded = _VARIABLE.sub(self._expand, value)
            if expanded == value:
                break
            value = expanded
        return value

    def _expand(self, variable: re.Match[str]) -> str:
        reference = _ENVIRONMENT.fullmatch(variable[1])
        if reference is None:
            return self._properties.get(variable[1], variable[0])
        value = self._environ.get(reference["name"])
        if value is None or (reference["when"] == ":-" and not value):
            return variable[0] if reference["when"] is None else reference["otherwise"]
        return value


def _directories(environ: Mapping[str, str]) -> list[Path]:
    """Return the directories of the configuration, in the order of a JVM's class path."""
    values = [environ[name] for name in _NAMES if environ.get(name)]
    return [Path(part) for value in values for part in value.split(os.pathsep) if part]


def _find_file(directories: list[Path], name: str) -> Path | None:
    return next((d / name for d in directories if (d / name).is_file()), None)


def _merge_files(paths: list[Path | None], directories: list[Path]) -> dict[str, str]:
    values: dict[str, str] = {}
    final: set[str] = set()
    for path in paths:
        for name, value, is_final in _properties(path, directories, 0) if path is not None else ():
            if name not in final:
                values[name] = value
            if is_final:
                final.add(name)
    return values


def _properties(path: Path, directories: list[Path], depth: int) -> Iterator[tuple[str, str, bool]]:
    """Yield (name, value, whether it is final) of a file and its includes, in order."""
    try:
        if depth > _MAX_INCLUDES:
            raise ConfigError(f"{path} includes itself")
        root = ET.parse(path).getroot()
    except (OSError, ET.ParseError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    yield from _child_properties(root, path, directories, depth)


def _child_properties(
    element: ET.Element, path: Path, directories: list[Path], depth: int
) -> Iterator[tuple[str, str, bool]]:
    for child in element:
        tag = child.tag.rpartition("}")[2]
        if tag == "property":
            yield from _property(child)
        elif tag == "include":
            included = _resolve_include(child.get("href", ""), path, directories)
            fallback = next((e for e in child if e.tag.endswith("fallback")), None)
            if included.is_file() or fallback is None:
                yield from _properties(included, directories, depth + 1)
            else:
                yield from _child_properties(fallback, path, directories, depth)
        elif tag == "configuration":
            yield from _child_properties(child, path, directories, depth)


def _resolve_include(href: str, path: Path, directories: list[Path]) -> Path:
    """Return the file of an include: on the class path, at a URL, or in the same directory."""
    if (file := _find_file(directories, href)) is not None:
        return file
    url = urlsplit(href)
    return Path(unquote(url.path)) if url.scheme == "file" else path.parent / href


def _property(element: ET.Element) -> Iterator[tuple[str, str, bool]]:
    fields = dict(element.attrib)
    fields.update((child.tag, child.text or "") for child in element)
    # Hadoop ignores properties with an empty value.
    if fields.get("name") and fields.get("value"):
        # Hadoop trims addresses and booleans, too.
        yield fields["name"].strip(), fields["value"].strip(), fields.get("final") == "true"
