"""The cluster's own dockerd, and the NodeManagers' settings with which containers run in Docker.

Hadoop's packages for Python and Maven lack `container-executor`, the setuid program by which a
NodeManager starts containers. `container_executor` is a stand-in for it.

Sources: Hadoop's documentation, "Launching Applications Using Docker Containers" and "Using GPU On
YARN"; Docker's, "dockerd".
"""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hopsgpu.devcluster import container_executor
from hopsgpu.devcluster.config import Properties
from hopsgpu.devcluster.layout import CONTAINERD, ClusterLayout
from hopsgpu.devcluster.state import write
from hopsgpu.errors import ClusterError

_PROGRAMS = ("containerd", "dockerd", "docker", "runc")
_INSTALL = "apt install docker.io containerd runc (Debian and Ubuntu)"
_SYSTEM_PATH = "/usr/local/sbin:/usr/sbin:/sbin"
# The kernel's limit for the path of a Unix socket, with its final zero.
_MAX_SOCKET_PATH = 107
# A NodeManager mounts it into each container.
_CGROUPS = "/sys/fs/cgroup"
# NVIDIA's runtime shows a container the GPUs in its NVIDIA_VISIBLE_DEVICES.
_NVIDIA_RUNTIME = "nvidia-container-runtime"
_UNMOUNT_SECONDS = 60.0
_NM = "yarn.nodemanager"
_DOCKER = f"{_NM}.runtime.linux.docker"
# Hadoop's container-executor.cfg: the requests of users that are allowed.
_ALLOWED: Mapping[str, str] = {
    "docker.trusted.registries": "local,library",
    "docker.allowed.networks": "host,none",
    "docker.allowed.runtimes": "nvidia,runc",
}


def check_docker(layout: ClusterLayout) -> None:
    """Raise ClusterError if dockerd cannot run here: without root, or without its packages."""
    if os.geteuid() != 0:
        raise ClusterError("--docker starts dockerd, which needs root: run this command as root")
    missing = [name for name in _PROGRAMS if _find(name) is None]
    if missing:
        raise ClusterError(f"--docker needs {', '.join(missing)}, which is missing: {_INSTALL}")
    longest = max((str(socket_of(d, layout)) for d in (CONTAINERD, "dockerd")), key=len)
    if len(longest) > _MAX_SOCKET_PATH:
        raise ClusterError(
            f"the path of a Unix socket may have {_MAX_SOCKET_PATH} bytes, and {longest} has"
            f" {len(longest)}: use a shorter --dir"
        )


def socket_of(daemon: str, layout: ClusterLayout) -> Path:
    return layout.docker / ("containerd.sock" if daemon == CONTAINERD else "docker.sock")


def docker_url(layout: ClusterLayout) -> str:
    """Return the DOCKER_HOST of the cluster's dockerd."""
    return f"unix://{socket_of('dockerd', layout)}"


def is_listening(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except OSError:
            return False
    return True


def docker_command(daemon: str, layout: ClusterLayout) -> list[str]:
    """Return the command of containerd or of dockerd, which stays in the foreground."""
    home = layout.docker
    if daemon == CONTAINERD:
        return [_program("containerd"), "--config", str(home / "containerd.toml")]
    nvidia = _find(_NVIDIA_RUNTIME) or _program("runc")
    return [
        _program("dockerd"),
        *("--host", docker_url(layout)),
        *("--containerd", str(socket_of(CONTAINERD, layout))),
        *("--data-root", str(home / "data")),
        *("--exec-root", str(home / "run-dockerd")),
        *("--pidfile", str(home / "dockerd.pid")),
        *("--add-runtime", f"nvidia={nvidia}"),
        *("--exec-opt", "native.cgroupdriver=cgroupfs"),
        # The machine's network stays as it is: containers of YARN use the host's.
        *("--iptables=false", "--ip6tables=false", "--bridge=none"),
        # A lower value is refused in some containers.
        *("--oom-score-adjust", "0"),
    ]


def read_only_mounts(layout: ClusterLayout, java: Path, spark: Path) -> tuple[str, ...]:
    """Return the paths of this machine that every container needs.

    Args:
        java: JAVA_HOME of the containers.
        spark: directory of the PySpark whose jars the containers run.
    """
    java_conf = (java / "conf" / "security" / "java.security").resolve().parent.parent
    of_cluster = (layout.hosts, layout.root / "conf", layout.root / "nodes")
    return tuple(dict.fromkeys(map(str, (java.resolve(), java, java_conf, spark, *of_cluster))))


def write_files(layout: ClusterLayout, mounts: Sequence[str], allowed: Mapping[str, str]) -> None:
    """Write containerd's configuration, and the NodeManagers' program for containers.

    Args:
        mounts: `read_only_mounts`.
        allowed: the user's properties of container-executor.cfg; mounts that they allow are
            allowed besides those that every container needs.
    """
    home = layout.docker
    write(
        home / "containerd.toml",
        f'''version = 2
root = "{home / "containerd"}"
state = "{home / "run-containerd"}"
oom_score = 0
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
address = "{socket_of(CONTAINERD, layout)}"
''',
    )
    needed = {
        "docker.allowed.ro-mounts": [_CGROUPS, *mounts],
        "docker.allowed.rw-mounts": [str(layout.root / "nodes")],
    }
    settings = {
        **_ALLOWED,
        "docker.binary": _program("docker"),
        "docker.host": docker_url(layout),
        **allowed,
        **{
            # As in Hadoop's file, with paths that follow symbolic links.
            name: ",".join(os.path.realpath(path) for path in (*paths, *_split(allowed.get(name))))
            for name, paths in needed.items()
        },
    }
    cfg = layout.container_executor.with_suffix(".cfg")
    write(cfg, "".join(f"{name}={value}\n" for name, value in settings.items()))
    command = [sys.executable, "-I", str(container_executor.__file__), str(cfg)]
    write(layout.container_executor, f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n', 0o755)


def node_site(layout: ClusterLayout, mounts: Sequence[str]) -> Properties:
    """Return the additional properties of a NodeManager whose containers can run in Docker.

    Args:
        mounts: `read_only_mounts`.
    """
    return {
        f"{_NM}.container-executor.class": "org.apache.hadoop.yarn.server.nodemanager"
        ".LinuxContainerExecutor",
        f"{_NM}.linux-container-executor.path": str(layout.container_executor),
        f"{_NM}.linux-container-executor.group": "root",
        # The containers' user is the application's, as for the other clusters.
        f"{_NM}.linux-container-executor.nonsecure-mode.limit-users": "false",
        f"{_NM}.runtime.linux.allowed-runtimes": "default,docker",
        f"{_DOCKER}.default-container-network": "host",
        f"{_DOCKER}.allowed-container-networks": "host,none",
        f"{_DOCKER}.allowed-container-runtimes": "runc,nvidia",
        f"{_DOCKER}.default-ro-mounts": ",".join(f"{path}:{path}" for path in mounts),
        # This cluster's users include root.
        f"{_DOCKER}.userremapping-uid-threshold": "0",
        f"{_DOCKER}.userremapping-gid-threshold": "0",
        f"{_NM}.resource-plugins.gpu.docker-plugin": "nvidia-docker-v2",
        # The process that copies files into a container's directory resolves names too.
        f"{_NM}.container-localizer.java.opts": f"-Xmx256m -Djdk.net.hosts.file={layout.hosts}",
    }


def release_mounts(layout: ClusterLayout) -> None:
    """Unmount the file systems of containers, which a killed dockerd leaves mounted."""
    places = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for place in sorted((p for p in places if p.startswith(f"{layout.docker}/")), reverse=True):
        subprocess.run(["umount", "--lazy", place], timeout=_UNMOUNT_SECONDS, check=True)


def _split(text: str | None) -> list[str]:
    return [part for part in (text or "").split(",") if part]


def _find(program: str) -> str | None:
    return shutil.which(program) or shutil.which(program, path=_SYSTEM_PATH)


def _program(name: str) -> str:
    path = _find(name)
    if path is None:
        raise ClusterError(f"--docker needs {name}, which is missing: {_INSTALL}")
    return path
