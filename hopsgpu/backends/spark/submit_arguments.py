"""The arguments of spark-submit with which a script of any kind can hold gangs.

This module is used by yarn-scripts/hopsgpu-submit: it adds the settings and files of
`hopsgpu.session()` to spark-submit's command line.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hopsgpu.backends.spark.authorities import shipped_bundle
from hopsgpu.backends.spark.job_file import job_file
from hopsgpu.backends.spark.package_archive import (
    ARCHIVES,
    MARKERS,
    PACKAGE,
    PY_FILES,
    pack_package,
    with_entry,
)
from hopsgpu.backends.spark.settings import is_cluster_mode, session_defaults
from hopsgpu.backends.spark.shell_safety import check_line
from hopsgpu.cluster_managers.manager_table import MASTER, required_kind
from hopsgpu.cluster_managers.yarn.amounts import DEFAULT_GPU_RESOURCE
from hopsgpu.cluster_managers.yarn.gpu_resource import SPARK_SETTING, choose_gpu_resource
from hopsgpu.core.gpu_types import parse_markers
from hopsgpu.errors import ConfigError
from hopsgpu.gpu.script_archive import ALIAS, pack_scripts
from hopsgpu.packaging.modules import SHIPPED_MODULES_DIR as MODULES
from hopsgpu.packaging.modules import PackedModules, pack_modules, root_of_script
from hopsgpu.storage.spark_defaults import read_properties, spark_defaults

# The Python paths of executors, and of the driver in cluster mode: in YARN and in a pod.
_EXECUTORS_PATH = "spark.executorEnv.PYTHONPATH"
_PYTHON_PATHS = ("spark.yarn.appMasterEnv.PYTHONPATH", _EXECUTORS_PATH)
_POD_PATH = "spark.kubernetes.driverEnv.PYTHONPATH"
_KEPT_SECONDS = 7 * 24 * 3600.0
# The options of spark-submit that take no value; org.apache.spark.launcher's
# SparkSubmitOptionParser lists them.
_SWITCHES = frozenset(
    (
        *("--help", "-h", "--supervise", "--usage-error", "--verbose", "-v", "--version"),
        "--load-spark-defaults",
    )
)
_SPARK_ARCHIVES = "spark.archives"
_SPARK_PY_FILES = "spark.submit.pyFiles"
_YARN = "yarn"
# The options that set a property.
_APP_NAME = "spark.app.name"
_OPTIONS = {
    "--deploy-mode": "spark.submit.deployMode",
    "--name": _APP_NAME,
    "--master": MASTER,
}


@dataclass(frozen=True)
class Shipped:
    """The files that an application ships, of hopsgpu and of the user.

    Attributes:
        modules: zip of the modules beside the user's script, as `pack_modules` returns them; None
            if there are none.
        job: what spark-submit runs in place of the user's script, as `job_file` creates it; None if
            the script is not a Python file of this machine.
    """

    scripts: Path
    package: Path
    modules: Path | None = None
    job: Path | None = None


def pack(
    directory: Path,
    markers: Iterable[str] = (),
    modules: bytes = b"",
    job: tuple[str, bytes] | None = None,
) -> Shipped:
    """Write the files that an application ships.

    Each file is replaced atomically, so that another submission never reads a partial file. The
    names of module archives and job files depend on their content. Such files are removed a week
    after their last use.

    Args:
        markers: YARN resources that mark nodes.

    Raises:
        ConfigError: the directory cannot be written.
    """
    modules_name = f"modules-{hashlib.sha256(modules).hexdigest()[:20]}.zip"
    shipped = Shipped(
        directory / "hopsgpu-discovery.tar.gz",
        directory / PACKAGE,
        directory / modules_name if modules else None,
        directory / job[0] if job else None,
    )
    # Other users must not be able to read the user's files.
    private = {shipped.modules: modules, shipped.job: job[1] if job else b""}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _replaced(shipped.scripts) as fresh:
            pack_scripts(fresh, markers)
        with _replaced(shipped.package) as fresh:
            pack_package(fresh)
        for file, content in private.items():
            if file is not None:
                with _replaced(file) as fresh:
                    fresh.touch(mode=0o600)
                    fresh.write_bytes(content)
        _sweep(directory)
    except OSError as error:
        raise ConfigError(
            f"cannot write {directory}: {error.strerror or error}; set XDG_CACHE_HOME to a"
            " directory of your own"
        ) from error
    return shipped


@contextlib.contextmanager
def _replaced(target: Path) -> Iterator[Path]:
    """Provide the path of a new file, which replaces the target atomically on exit."""
    fresh = target.with_name(f"{target.name}.{os.getpid()}")
    try:
        yield fresh
        fresh.replace(target)
    finally:
        fresh.unlink(missing_ok=True)


def _sweep(directory: Path) -> None:
    oldest = time.time() - _KEPT_SECONDS
    for file in itertools.chain(directory.glob("modules-*"), directory.glob("job-*")):
        # Another submission may remove the file at the same time.
        with contextlib.suppress(FileNotFoundError):
            if file.stat().st_mtime < oldest:
                file.unlink()


def modules_beside(script: str) -> PackedModules:
    """Return the modules beside a script, and those of this Python's `sys.path` that it imports.

    The result has no roots if the script is not a file of this machine.
    """
    file = Path(script)
    return pack_modules([root_of_script(file)] if file.is_file() else [])


def ship(directory: Path, properties: Mapping[str, str], script: Sequence[str]) -> Shipped:
    """Write the files that a script ships, and print a warning if they are incomplete.

    Args:
        script: empty, or the script and its arguments.

    Raises:
        ConfigError: the directory cannot be written, the script cannot be read, or the markers are
            invalid.
    """
    markers = parse_markers(properties.get(MARKERS) or os.environ.get("HOPSGPU_MARKERS"))
    beside = modules_beside(script[0]) if script else pack_modules([])
    for warning in beside.warnings:
        print(f"hopsgpu: {warning}", file=sys.stderr)
    modules = beside.archive if beside.roots else b""
    return pack(directory.absolute(), markers.values(), modules, _job(properties, script))


def _job(properties: Mapping[str, str], script: Sequence[str]) -> tuple[str, bytes] | None:
    if not script or not script[0].endswith(".py") or not Path(script[0]).is_file():
        return None
    try:
        has_source = is_cluster_mode(properties.get)
        return job_file(Path(script[0]), script[1:], has_source=has_source)
    except OSError as error:
        raise ConfigError(f"cannot read {script[0]}: {error.strerror or error}") from error


def submit_arguments(
    arguments: Sequence[str], defaults: Mapping[str, str], shipped: Shipped
) -> list[str]:
    """Return the arguments of spark-submit.

    hopsgpu's arguments come first, so that the user's arguments override them. Shipped files and
    Python paths are joined with those of the user and of spark-defaults.conf.

    Args:
        arguments: the user's arguments: options, script, and the script's arguments.

    Raises:
        ConfigError: an argument would not reach the application unchanged, or two settings name
            different resources of GPUs.
    """
    options, rest = split_options(arguments)
    properties = all_properties(options, defaults)
    named = {}
    if shipped.job is not None:
        # Otherwise Spark would name the application after the job file.
        named = {_APP_NAME: Path(rest[0]).name} if _APP_NAME not in properties else {}
        rest = [shipped.job.as_uri()]
    master = properties.get(MASTER, _YARN)
    if master == _YARN:
        joined = _shipped_by_yarn(properties, shipped)
    else:
        joined = _shipped_by_driver(properties, shipped)
    ours, last = [*_confs({**session_defaults(master, properties), **named})], [*_confs(joined)]
    words = [word for option in options for word in option]
    line = ["--master", master, *ours, *words, *last, *rest]
    # A job file contains the script's arguments.
    script_arguments = rest[1:] if is_cluster_mode(properties.get) else []
    in_shell = {**properties, **joined} if required_kind(master).has_shell else {}
    check_line(line, in_shell, script_arguments, os.environ)
    return line


def _shipped_by_yarn(properties: Mapping[str, str], shipped: Shipped) -> dict[str, str]:
    """Return the properties with which YARN brings the files into containers."""
    archives = with_entry(properties.get(ARCHIVES), f"{shipped.scripts.as_uri()}#{ALIAS}")
    joined = {PY_FILES: with_entry(properties.get(PY_FILES), shipped.package.as_uri())}
    if shipped.modules is not None:
        archives = with_entry(archives, f"{shipped.modules.as_uri()}#{MODULES}")
        for name in _PYTHON_PATHS:
            path = (f"{{{{PWD}}}}/{MODULES}/0", properties.get(name))
            joined[name] = os.pathsep.join(filter(None, path))
    joined = {ARCHIVES: archives, **joined, **shipped_bundle(properties, os.environ)}
    gpu_resource = choose_gpu_resource(properties, os.environ)
    if gpu_resource != properties.get(SPARK_SETTING, DEFAULT_GPU_RESOURCE):
        joined[SPARK_SETTING] = gpu_resource
    return joined


def _shipped_by_driver(properties: Mapping[str, str], shipped: Shipped) -> dict[str, str]:
    """Return the properties with which the driver itself serves the user's modules.

    The session serves hopsgpu, and no discovery script is needed.
    """
    joined = {}
    paths = [_EXECUTORS_PATH]
    if is_cluster_mode(properties.get):
        # The image of the driver's pod may have another version of hopsgpu, or none.
        files = with_entry(properties.get(_SPARK_PY_FILES), shipped.package.as_uri())
        joined[_SPARK_PY_FILES] = files
        paths.append(_POD_PATH)
    if shipped.modules is None:
        return joined
    archives = with_entry(properties.get(_SPARK_ARCHIVES), f"{shipped.modules.as_uri()}#{MODULES}")
    joined[_SPARK_ARCHIVES] = archives
    for name in paths:
        # Python starts in the directory into which Spark unpacks the archive.
        path = (f"{MODULES}/0", properties.get(name))
        joined[name] = os.pathsep.join(filter(None, path))
    return joined


def _confs(properties: Mapping[str, str]) -> Iterator[str]:
    for name, value in properties.items():
        yield from ("--conf", f"{name}={value}")


def split_options(arguments: Sequence[str]) -> tuple[list[tuple[str, ...]], list[str]]:
    """Return spark-submit's own options, each with its value, and the script with its arguments."""
    options: list[tuple[str, ...]] = []
    start = 0
    while start < len(arguments) and arguments[start].startswith("-"):
        is_alone = (
            arguments[start] in _SWITCHES or re.match(r"--[^=]+=", arguments[start]) is not None
        )
        end = start + (1 if is_alone else 2)
        options.append(tuple(arguments[start:end]))
        start = end
    return options, list(arguments[start:])


def all_properties(
    options: Sequence[tuple[str, ...]], defaults: Mapping[str, str]
) -> dict[str, str]:
    """Return the properties that an application receives by these options of spark-submit."""
    values = {}
    for name, *value in options:
        option, _, inside = name.partition("=")
        values[option] = inside or "".join(value)
    if "--properties-file" in values and "--load-spark-defaults" not in values:
        defaults = {}  # spark-submit reads the given file instead of spark-defaults.conf
    properties = {_OPTIONS[name]: value for name, value in values.items() if name in _OPTIONS}
    return {**defaults, **_properties(options), **properties}


def _properties(options: Sequence[tuple[str, ...]]) -> dict[str, str]:
    """Return the properties that the user gave by `--conf NAME=VALUE`, or in a properties file."""
    properties: dict[str, str] = {}
    for option in options:
        name, _, inside = option[0].partition("=")
        value = inside or "".join(option[1:])
        if name in ("--properties-file", "--extra-properties-file"):
            properties = read_properties(Path(value)) | properties
        elif name in ("--conf", "-c"):
            key, _, text = value.partition("=")
            properties[key] = text
    return properties


def main(arguments: Sequence[str]) -> int:
    """Write the files that a script ships, for yarn-scripts/hopsgpu-submit; return the exit code.

    `arguments` is `DIRECTORY [-- ARGUMENTS of spark-submit]`. The function writes the files to the
    directory. With `--`, it prints the arguments of spark-submit as words of a shell, else the
    names of the written files.
    """
    if not arguments:
        print("usage: python -P -m hopsgpu.spark.submission DIRECTORY", file=sys.stderr)
        return 2
    try:
        defaults = spark_defaults(os.environ)
        options, rest = split_options(arguments[2:])
        shipped = ship(Path(arguments[0]), all_properties(options, defaults), rest)
        if arguments[1:2] == ["--"]:
            print(shlex.join(submit_arguments(arguments[2:], defaults, shipped)))
        else:
            print(shipped.scripts, shipped.package, sep="\n")
    except ConfigError as error:
        print(f"hopsgpu: {error}", file=sys.stderr)
        return 1
    return 0
