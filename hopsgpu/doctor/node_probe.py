"""Inspects a node from inside a container, as the function of a rank."""

from __future__ import annotations

import errno
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import pwd
import re
import resource
import runpy
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hopsgpu.agent.container_entry import container_directory
from hopsgpu.backends.spark.spark_versions import jar_version, java_version
from hopsgpu.gpu.container_gpus import ContainerGpu, read_container_gpus
from hopsgpu.gpu.node.devices import DriverError, list_devices
from hopsgpu.gpu.node.leases import LeaseError, lease_directory

_DRIVER_SECONDS = 10.0
# Distributions that provide CUDA for jax; their names contain its major version.
_JAX = ("jax-cuda13-plugin", "jax-cuda12-plugin")


@dataclass(frozen=True)
class Framework:
    """A framework in the executors' Python; `cuda` is such as "12.4", or "" without CUDA."""

    name: str
    version: str
    cuda: str


@dataclass(frozen=True)
class LeaseDirectory:
    """The node's directory of GPU leases, and why it cannot serve all users, or ""."""

    path: str
    problem: str


@dataclass(frozen=True)
class ContainerFacts:
    """Facts of the container itself, which an image and its runtime determine.

    Attributes:
        shared_memory: size of /dev/shm in bytes; None if there is none.
        open_files, locked_memory: limits of a process; -1 for none. The memory is in bytes.
        user: name of the user with this uid, or "".
        tokens: "readable" or "unreadable" for the file of the application's tokens, "none" without
            one.
        hadoop_conf: HADOOP_CONF_DIR, or "".
        has_hadoop_conf: whether it is a directory with core-site.xml.
        has_host_network: whether the container has the node's network; None if it is unknown.
    """

    shared_memory: int | None
    open_files: int
    locked_memory: int
    uid: int
    user: str
    tokens: str
    hadoop_conf: str
    has_hadoop_conf: bool
    has_host_network: bool | None


@dataclass(frozen=True)
class NodeFacts:
    """Facts of a node, seen from a container on it. A version is "" if it is unknown.

    Attributes:
        python, executable: version and path of the executors' Python.
        gpus: GPUs of this container.
        visible: how many GPUs the container sees; None if unknown.
        is_isolated: whether the discovery script found the container isolated.
        nvml: version of nvidia-ml-py.
    """

    host: str
    python: str
    executable: str
    java: str
    spark: str
    gpus: tuple[ContainerGpu, ...]
    visible: int | None
    is_isolated: bool
    leases: LeaseDirectory
    frameworks: tuple[Framework, ...]
    nvml: str
    container: ContainerFacts


def inspect_node() -> NodeFacts:
    """Inspect the node; call it in a rank."""
    # A rank works in another directory.
    container = container_directory(os.environ)
    gpus = read_container_gpus(container)
    return NodeFacts(
        host=os.environ.get("NM_HOST") or platform.node(),
        python=platform.python_version(),
        executable=sys.executable,
        java=java_version(Path(os.environ.get("JAVA_HOME", ""))),
        spark=spark_version(os.environ, container),
        gpus=gpus.gpus,
        visible=_visible(),
        is_isolated=gpus.is_isolated,
        leases=_leases(),
        frameworks=tuple(frameworks()),
        nvml=_nvml(),
        container=_container(),
    )


def _container() -> ContainerFacts:
    try:
        shared = os.statvfs("/dev/shm")
    except OSError:
        shared = None
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        user = os.environ.get("USER", "")
    file = os.environ.get("HADOOP_TOKEN_FILE_LOCATION", "")
    conf = os.environ.get("HADOOP_CONF_DIR", "")
    is_readable = "readable" if os.access(file, os.R_OK) else "unreadable"
    return ContainerFacts(
        shared_memory=None if shared is None else shared.f_blocks * shared.f_frsize,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_memory=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        uid=os.getuid(),
        user=user,
        tokens=is_readable if file else "none",
        hadoop_conf=conf,
        has_hadoop_conf=Path(conf, "core-site.xml").is_file(),
        has_host_network=_has_host_network(os.environ.get("NM_HOST", "")),
    )


def _has_host_network(node: str) -> bool | None:
    """Return whether an address of the node is one of this container's; None if it has no name."""
    try:
        address = socket.gethostbyname(node)
        with socket.socket() as server:
            server.bind((address, 0))
    except OSError as error:
        return False if error.errno == errno.EADDRNOTAVAIL else None
    return True


def _visible() -> int | None:
    try:
        return len(list_devices(_DRIVER_SECONDS).devices)
    except DriverError:
        return None


def _nvml() -> str:
    if importlib.util.find_spec("pynvml") is None:
        return ""
    # An older distribution is called pynvml.
    return _version("nvidia-ml-py") or _version("pynvml") or "unknown version"


def _leases() -> LeaseDirectory:
    try:
        return LeaseDirectory(str(lease_directory(os.environ)), "")
    except (LeaseError, OSError) as error:
        return LeaseDirectory("", str(error))


def spark_version(environ: Mapping[str, str], container: Path) -> str:
    """Return the version of the executor's Spark, from its variables; "" if it is unknown."""
    class_path = environ.get("CLASSPATH", "")
    if not class_path and (home := environ.get("SPARK_HOME")):
        # Only YARN sets a class path; a standalone worker passes its own SPARK_HOME on.
        return jar_version(Path(home, "jars")) or ""
    for entry in class_path.replace("{{PWD}}", str(container)).split(os.pathsep):
        if entry.endswith("/*") and (version := jar_version(Path(entry[:-2]))):
            return version
    return ""


def frameworks() -> Iterator[Framework]:
    """Yield the frameworks in this Python and the CUDA of each, without importing them."""
    if (torch := _variables("torch", "version.py")) is not None:
        yield Framework("torch", str(torch.get("__version__")), torch.get("cuda") or "")
    if (build := _variables("tensorflow", "python/platform/build_info.py")) is not None:
        version = _version("tensorflow") or _version("tensorflow-cpu")
        # The values that tf.sysconfig.get_build_info() returns.
        yield Framework("tensorflow", version, build["build_info"].get("cuda_version", ""))
    if importlib.util.find_spec("jax") is not None:
        plugins = (name for name in _JAX if _version(name))
        cuda = next((re.sub(r"\D", "", name) for name in plugins), "")
        yield Framework("jax", _version("jax"), cuda)


def _variables(package: str, file: str) -> dict[str, Any] | None:
    """Return the variables that a file of a package sets; None without the package."""
    spec = importlib.util.find_spec(package)
    places = spec.submodule_search_locations if spec is not None else None
    paths = (Path(place, file) for place in places or ())
    path = next((path for path in paths if path.is_file()), None)
    return None if path is None else runpy.run_path(str(path))


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
