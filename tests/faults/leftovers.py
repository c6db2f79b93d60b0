"""What must be gone after each fault: processes, pods, files, leases of GPUs, half a model."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hopsgpu.cluster_managers.kubernetes.manager import KubernetesManager
from hopsgpu.cluster_managers.kubernetes.pods import APPLICATION, PROFILE
from hopsgpu.cluster_managers.manager import ClusterManager
from hopsgpu.core.container_ids import NAMESPACE, POD, pod_container, standalone_container
from hopsgpu.gpu.node.leases import read_leases
from hopsgpu.storage.lake import LakePath
from tests.conftest import until
from tests.faults.launches import MODEL
from tests.kubernetes.kubectl import kubectl_of
from tests.processes import is_of_cluster

# What is checked after the GPUs may take longer: NodeManagers remove directories in the background.
BACK_SECONDS = 10.0
_CLEAN_SECONDS = 20.0
# The package for executors, which the driver's session keeps.
_SESSION = "hopsgpu-package-"
# Phases of pods that have ended.
_ENDED = ("Succeeded", "Failed")
# Variables of executors' pods, and the profile of executors that gangs do not use.
_APPLICATION, _PROFILE, _DEFAULT_PROFILE = "SPARK_APPLICATION_ID", "SPARK_RESOURCE_PROFILE_ID", "0"


def container_of(pid: int) -> str:
    """Return the container that a process of this machine is in, or ""."""
    environ = _environ_of(pid)
    if named := environ.get("CONTAINER_ID"):
        return named
    if pod := environ.get(POD):
        return pod_container(environ.get(NAMESPACE, ""), pod)
    return _standalone_container_of(pid)


def _environ_of(pid: int) -> dict[str, str]:
    """Return the variables of a process of this machine; none if it has ended."""
    try:
        content = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in content.split("\0") if "=" in entry)


def _standalone_container_of(pid: int) -> str:
    """Return the container by the command line of the executor that a process descends from.

    A standalone worker starts executors without a variable that names the container.
    """
    while pid > 1:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (OSError, UnicodeDecodeError):
            return ""
        values = dict(zip(words, words[1:], strict=False))
        if values.keys() >= {"--app-id", "--executor-id"}:
            return standalone_container(values["--app-id"], int(values["--executor-id"]))
        pid = int(stat.rpartition(") ")[2].split()[1])
    return ""


def processes_in_containers(cluster: Path) -> dict[int, str]:
    """Return the processes in all containers of a cluster, with their containers."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            is_inside = is_of_cluster(process, cluster)
        except OSError:
            continue
        if is_inside and (container := container_of(int(process.name))):
            found[int(process.name)] = container
    return found


class Leftovers:
    """Compares what a case leaves with what was there when this was created.

    Args:
        cluster: the cluster's directory.
        manager: its cluster manager.
        root: root of the case on the lake.
        application: id of the tests' application, whose master goes on.
    """

    def __init__(
        self, cluster: Path, manager: ClusterManager, root: LakePath, application: str
    ) -> None:
        self._cluster = cluster
        self._manager = manager
        self._root = root
        self._before = self._files()
        self._application = application
        self._kubectl = kubectl_of(cluster) if isinstance(manager, KubernetesManager) else None
        self._ended_before = {
            pod["metadata"]["uid"]
            for pod in self._listed_pods()
            if pod["status"]["phase"] in _ENDED
        }
        self._master = f"_{application.removeprefix('application_')}_01_000001"

    def gpus_back(self, ended: float) -> float:
        """Return the seconds from the end until the cluster manager counted no GPU in use.

        Args:
            ended: when the launch had ended, by time.monotonic().

        Raises:
            AssertionError: it still counts some.
        """

        def used() -> int:
            return self._manager.gpus()[0]

        allowed = BACK_SECONDS + max(ended - time.monotonic(), -BACK_SECONDS / 2)
        assert until(lambda: used() == 0, allowed, step=0.05), f"{used()} GPUs are in use"
        return max(time.monotonic() - ended, 0.0)

    def check(self, version: int | None, *, is_driver_killed: bool = False) -> None:
        """Check that nothing else is left.

        Args:
            version: the published version of the model, or None.
            is_driver_killed: whether nobody could delete the pods that have ended.

        Raises:
            AssertionError: something is left; the message says what.
        """
        assert until(lambda: not self._processes(), _CLEAN_SECONDS), self._processes()
        ended = _ENDED if is_driver_killed else ()
        pods = dict[str, str]()

        def has_no_pod() -> bool:
            pods.clear()
            pods.update((name, phase) for name, phase in self._pods() if phase not in ended)
            return not pods

        assert until(has_no_pod, _CLEAN_SECONDS, step=0.5), pods
        assert until(lambda: not self._left(), _CLEAN_SECONDS), self._left()
        held = self._leases()
        assert until(lambda: not self._leases(), _CLEAN_SECONDS), held
        self._check_models(version)

    def _processes(self) -> dict[int, str]:
        found = processes_in_containers(self._cluster)
        return {
            pid: one
            for pid, one in found.items()
            if not one.endswith(self._master) and not self._is_of_session(pid)
        }

    def _is_of_session(self, pid: int) -> bool:
        """Return whether a process is in an executor without GPUs of the tests' application.

        On Kubernetes, an executor that has checked the image stays for a while.
        """
        environ = _environ_of(pid)
        key = (environ.get(_APPLICATION), environ.get(_PROFILE))
        return key == (self._application, _DEFAULT_PROFILE)

    def _pods(self) -> list[tuple[str, str]]:
        """Return name and phase of the listed pods, without those of the tests' session.

        The pods of a driver that an earlier case has killed do not count either.
        """
        return [
            (str(pod["metadata"]["name"]), str(pod["status"]["phase"]))
            for pod in self._listed_pods()
            if not self._is_session_pod(pod) and pod["metadata"]["uid"] not in self._ended_before
        ]

    def _listed_pods(self) -> list[dict[str, Any]]:
        if self._kubectl is None:
            return []
        pods = self._kubectl("get", "pods", "--selector", APPLICATION, is_json=True)["items"]
        return list(pods)

    def _is_session_pod(self, pod: Mapping[str, Any]) -> bool:
        labels = pod["metadata"]["labels"]
        key = (labels[APPLICATION], labels.get(PROFILE))
        return key == (self._application, _DEFAULT_PROFILE)

    def _files(self) -> set[Path]:
        """What is below the nodes' local directories, and what is named after hopsgpu in TMPDIR."""
        local = [
            *self._cluster.glob("nodes/*/local/usercache/*/appcache/*/container_*"),
            *self._cluster.glob("nodes/*/local/spark-*/*/hopsgpu-executor-*"),
            # The kubelet has a directory for the volumes of each pod, which the pod's ID names.
            *self._cluster.glob("nodes/*/lib-kubelet/pods/*"),
        ]
        temporary = Path(tempfile.gettempdir()).glob("hopsgpu*")
        return {*(file for file in temporary if not file.name.startswith(_SESSION)), *local}

    def _left(self) -> set[Path]:
        left = self._files() - self._before
        if left and self._kubectl is not None:
            uids = {
                pod["metadata"]["uid"] for pod in self._listed_pods() if self._is_session_pod(pod)
            }
            left = {file for file in left if file.name not in uids}
        return left

    def _leases(self) -> list[str]:
        own = "".join(file.read_text() for file in self._cluster.glob("nodes/*/bin/nvidia-smi"))
        return [one.address for one in read_leases({}) if one.is_held and one.address in own]

    def _check_models(self, version: int | None) -> None:
        model = self._root / "models" / MODEL
        names = model.names()
        versions = [name for name in names if name.isdigit()]
        assert versions == ([] if version is None else [str(version)]), names
        staging = model / "_staging"
        assert until(lambda: not staging.names(), _CLEAN_SECONDS), staging.names()
