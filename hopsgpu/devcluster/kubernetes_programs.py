"""The programs of a cluster on Kubernetes: built once by `make kubernetes`, or from the PATH."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from hopsgpu.core.cache_directory import cache_directory
from hopsgpu.errors import ClusterError

VERSION = "1.34.4"
DAEMONS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet")
PLUGIN, PAUSE, KUBECTL = "gpu-device-plugin", "hopsgpu-pause", "kubectl"
_SYSTEM = ("containerd", "ctr", "runc", "ip", "nsenter", "unshare", "mount", "sysctl", "openssl")
_SYSTEM_PATH = "/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin"
PLUGINS_OF_CNI = Path("/usr/lib/cni")


def built_programs(environ: Mapping[str, str]) -> Path:
    """Return the directory in which `make kubernetes` puts its programs."""
    return cache_directory(environ) / f"kubernetes-{VERSION}"


def find_programs(environ: Mapping[str, str]) -> dict[str, Path]:
    """Return the programs of Kubernetes by name.

    Raises:
        ClusterError: programs are missing, or the caller is not root.
    """
    if os.geteuid() != 0:
        raise ClusterError(
            "--kubernetes starts containerd and a kubelet, which need root: run this command as"
            " root; docs/kubernetes.md names clusters that need none"
        )
    missing = [name for name in _SYSTEM if shutil.which(name, path=_SYSTEM_PATH) is None]
    if not (PLUGINS_OF_CNI / "bridge").exists():
        missing.append(str(PLUGINS_OF_CNI / "bridge"))
    if missing:
        raise ClusterError(
            f"--kubernetes needs {', '.join(missing)}, which is missing: apt install containerd"
            " runc containernetworking-plugins iproute2 procps openssl (Debian and Ubuntu)"
        )
    built = built_programs(environ)
    programs: dict[str, Path] = {}
    for name in (*DAEMONS, PLUGIN, PAUSE, KUBECTL):
        path = shutil.which(name, path=f"{built}:{environ.get('PATH', os.defpath)}")
        if path is None:
            missing.append(name)
        else:
            programs[name] = Path(path)
    if missing:
        raise ClusterError(
            f"--kubernetes needs {', '.join(missing)}, which is neither in {built} nor on the PATH:"
            " `make kubernetes` in a checkout of hopsgpu builds it once, with Go 1.25 or later"
        )
    return programs
