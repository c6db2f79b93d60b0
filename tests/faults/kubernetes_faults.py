"""The faults that only Kubernetes has: how each is injected, and how each launch must end.

Source: the Kubernetes documentation, "Disruptions", "API-initiated Eviction", "Safely Drain a
Node", "Pod Priority and Preemption", "Resource Quotas" and "Device Plugins".
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hopsgpu
from hopsgpu import devcluster
from hopsgpu.cluster_managers.kubernetes.nodes import NOT_READY
from hopsgpu.devcluster.kubernetes_images import PAUSE_IMAGE
from hopsgpu.devcluster.layout import API_SERVER
from tests.conftest import gone, until
from tests.faults.faults import (
    ALL_GPUS,
    LOST,
    MORE_THAN_A_NODE,
    SMALL,
    Case,
    Fault,
    Injection,
    Raises,
    Unharmed,
    each,
    everywhere,
    loses,
    node_daemon_killed,
    nothing,
    pid_of,
    restarted,
)
from tests.faults.launches import Kind
from tests.faults.page import KUBERNETES
from tests.faults.training import Note
from tests.kubernetes.kubectl import evict
from tests.processes import family, inner_pid

_AWAY_SECONDS = 30.0
_GPU = "nvidia.com/gpu"
_QUOTA = {
    "apiVersion": "v1",
    "kind": "ResourceQuota",
    "metadata": {"name": "gpus", "namespace": "default"},
    "spec": {"hard": {f"requests.{_GPU}": "2"}},
}
_PRIORITY = {
    "apiVersion": "scheduling.k8s.io/v1",
    "kind": "PriorityClass",
    "metadata": {"name": "urgent"},
    "value": 1000,
}
_ABSENT = {
    "spark.kubernetes.container.image": "hopsgpu.local/absent:1",
    "spark.kubernetes.container.image.pullPolicy": "Never",
}


def _pod_of(note: Note) -> str:
    """Return the name of a rank's pod."""
    return note.container.rpartition("/")[2]


@contextlib.contextmanager
def pod_deleted(case: Case) -> Iterator[None]:
    """Delete the pod of rank, or trial, 1."""
    case.kubectl("delete", "pod", "--wait=false", _pod_of(case.note()))
    yield


@contextlib.contextmanager
def pod_evicted(case: Case) -> Iterator[None]:
    """Evict the pod of rank, or trial, 1."""
    evict(case.kubectl, _pod_of(case.note()))
    yield


@contextlib.contextmanager
def node_drained(case: Case) -> Iterator[None]:
    """Cordon a node and evict all executors from it, as `kubectl drain` does."""
    host = case.victim().host
    case.kubectl("cordon", host)
    try:
        for note in case.launch.notes():
            if note.host == host:
                evict(case.kubectl, _pod_of(note))
        case.launch.go_elsewhere(host)
        yield
    finally:
        case.kubectl("uncordon", host)
        _await_whole(case)


def _urgent_pod(number: int) -> dict[str, Any]:
    container = {"name": "urgent", "image": PAUSE_IMAGE, "resources": {"limits": {_GPU: "1"}}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"urgent-{number}", "namespace": "default"},
        "spec": {
            "priorityClassName": "urgent",
            "terminationGracePeriodSeconds": 0,
            "containers": [container],
        },
    }


@contextlib.contextmanager
def pods_preempted(case: Case) -> Iterator[None]:
    """Have two pods of a higher priority want GPUs while all GPUs are in use."""
    urgent = {"apiVersion": "v1", "kind": "List", "items": [_urgent_pod(1), _urgent_pod(2)]}
    case.kubectl("apply", "--filename", "-", stdin=_PRIORITY)
    try:
        pids = [case.pid(note) for note in case.launch.notes()]
        case.kubectl("apply", "--filename", "-", stdin=urgent)
        if case.launch.kind is Kind.SEARCH:
            # The trials that are left end: theirs is the room for the others.
            assert until(lambda: any(map(gone, pids))), "nothing is preempted"
            case.launch.go()
        yield
    finally:
        case.kubectl("delete", "--ignore-not-found", "--filename", "-", stdin=urgent)
        case.kubectl("delete", "--ignore-not-found", "--filename", "-", stdin=_PRIORITY)


def _await_whole(case: Case) -> None:
    """Wait until all nodes are ready and have their GPUs."""

    def is_whole() -> bool:
        return devcluster.status(case.cluster).healthy and case.manager.gpus()[1] == 4

    assert until(is_whole), case.manager.nodes()


def _daemon_of(case: Case, node: str, name: str) -> tuple[int, int]:
    """Return the first process of a node, and the node's daemon with a name."""
    processes = family(pid_of(case.cluster, node))
    first = next(pid for pid in processes if inner_pid(pid) == 1)
    return first, next(pid for pid in processes if _name_of(pid) == name)


def _name_of(pid: int) -> str:
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    return Path(os.fsdecode(command.split(b"\0")[0])).name


@contextlib.contextmanager
def _kept_away(case: Case, node: str, name: str) -> Iterator[None]:
    """Kill a daemon of a node, and do not let the node start it again while inside."""
    first, daemon = _daemon_of(case, node, name)
    os.kill(first, signal.SIGSTOP)
    try:
        os.kill(daemon, signal.SIGKILL)
        assert until(lambda: gone(daemon))
        yield
    finally:
        os.kill(first, signal.SIGCONT)
        _await_whole(case)


@contextlib.contextmanager
def kubelet_restarted(case: Case) -> Iterator[None]:
    """Kill the kubelet of a node, which then starts again."""
    host = case.victim().host
    _, before = _daemon_of(case, host, "kubelet")
    os.kill(before, signal.SIGKILL)

    def is_back() -> bool:
        with contextlib.suppress(OSError, StopIteration):
            return _daemon_of(case, host, "kubelet")[1] != before
        return False

    assert until(is_back)
    try:
        yield
    finally:
        _await_whole(case)


@contextlib.contextmanager
def kubelet_killed(case: Case) -> Iterator[None]:
    """Kill the kubelet of a node, whose pods then run on, until Kubernetes gives up the node."""
    with _kept_away(case, case.victim().host, "kubelet"):
        assert until(lambda: NOT_READY in {node.state for node in case.manager.nodes()})
        yield


@contextlib.contextmanager
def node_killed(case: Case) -> Iterator[None]:
    """Kill all processes of a node."""
    try:
        with node_daemon_killed(case):
            yield
    finally:
        _await_whole(case)


@contextlib.contextmanager
def plugin_killed(case: Case) -> Iterator[None]:
    """Kill the device plugin of a node, whose kubelet then has no GPUs for further pods."""
    with _kept_away(case, case.host(), "gpu-device-plugin"):
        assert until(lambda: case.manager.gpus()[1] == 2)
        yield


@contextlib.contextmanager
def api_server_away(case: Case) -> Iterator[None]:
    """Stop the API server for a while, in which the ranks train."""
    server = pid_of(case.cluster, API_SERVER)
    os.kill(server, signal.SIGSTOP)
    back = threading.Timer(_AWAY_SECONDS, os.kill, (server, signal.SIGCONT))
    back.start()
    try:
        back.join()
        yield
    finally:
        back.cancel()
        os.kill(server, signal.SIGCONT)


def api_server_away_at_end(seconds: float) -> Injection:
    """Stop the API server for a while, in which the launch ends."""

    @contextlib.contextmanager
    def inject(case: Case) -> Iterator[None]:
        server = pid_of(case.cluster, API_SERVER)
        os.kill(server, signal.SIGSTOP)
        back = threading.Timer(seconds, os.kill, (server, signal.SIGCONT))
        back.start()
        try:
            yield
        finally:
            back.cancel()
            back.join()
            os.kill(server, signal.SIGCONT)

    return inject


@contextlib.contextmanager
def quota_of_two(case: Case) -> Iterator[None]:
    """Allow the namespace two GPUs."""
    case.kubectl("apply", "--filename", "-", stdin=_QUOTA)
    try:
        assert until(lambda: "gpus" in str(case.manager.snapshot("", "").queues))
        yield
    finally:
        case.kubectl("delete", "--filename", "-", stdin=_QUOTA)


@contextlib.contextmanager
def quota_used_up(case: Case) -> Iterator[None]:
    """Have another gang use up the quota of the namespace."""
    with quota_of_two(case), hopsgpu.hold(workers=2, **SMALL):
        yield


KUBERNETES_FAULTS = (
    Fault(
        "a pod is deleted",
        each(*loses(LOST + ".*deleted")),
        pod_deleted,
        managers=(KUBERNETES,),
    ),
    Fault(
        "a pod is evicted by the API",
        each(*loses(LOST + "its pod was evicted")),
        pod_evicted,
        managers=(KUBERNETES,),
    ),
    Fault(
        "a node is drained",
        each(*loses(r"was lost \(container \S+\): its pod was evicted")),
        node_drained,
        options={"placement": "spread"},
        # So many that some are on each node.
        of_kind={Kind.SEARCH: {"trials": 4, "max_concurrent": 4}},
        managers=(KUBERNETES,),
    ),
    Fault(
        "pods of a higher priority preempt executors",
        each(*loses("its pod was preempted for one of higher priority")),
        pods_preempted,
        launches=True,
        of_kind=ALL_GPUS,
        managers=(KUBERNETES,),
    ),
    Fault(
        "a kubelet is killed, and starts again",
        everywhere(Unharmed()),
        kubelet_restarted,
        options={"placement": "spread"},
        of_kind={Kind.SEARCH: {"trials": 4, "max_concurrent": 4}},
        managers=(KUBERNETES,),
    ),
    Fault(
        "a kubelet is killed, and stays away",
        everywhere(Unharmed()),
        kubelet_killed,
        holds_up=True,
        options={"placement": "spread"},
        of_kind={Kind.SEARCH: {"trials": 4, "max_concurrent": 4}},
        managers=(KUBERNETES,),
    ),
    Fault(
        "a node is killed, and stays away",
        # The driver notices it before Kubernetes does, which takes 10 s.
        each(*loses(r"its node may be down|no heartbeat for 5 s|its node node\d is not ready")),
        node_killed,
        holds_up=True,
        options={"placement": "spread"},
        of_kind={Kind.SEARCH: {"trials": 4, "max_concurrent": 4}},
        managers=(KUBERNETES,),
    ),
    Fault(
        "a device plugin is killed while ranks run, and stays away",
        everywhere(Unharmed()),
        plugin_killed,
        options={"placement": "spread"},
        of_kind={Kind.SEARCH: {"trials": 4, "max_concurrent": 4}},
        managers=(KUBERNETES,),
    ),
    Fault(
        "a device plugin is killed before the launch, and stays away",
        each(Raises("CapacityError", "node2: 2 GPUs cannot be allocated"), Unharmed(), Unharmed()),
        plugin_killed,
        before=True,
        early=True,
        of_kind=MORE_THAN_A_NODE,
        managers=(KUBERNETES,),
    ),
    Fault(
        "the API server is restarted",
        everywhere(Unharmed()),
        restarted(API_SERVER),
        managers=(KUBERNETES,),
    ),
    Fault(
        "the API server does not answer for 30 s while ranks run",
        everywhere(Unharmed()),
        api_server_away,
        managers=(KUBERNETES,),
    ),
    Fault(
        "the API server does not answer for 15 s as the launch ends",
        everywhere(Unharmed()),
        api_server_away_at_end(15.0),
        managers=(KUBERNETES,),
    ),
    Fault(
        "the namespace's quota is too small",
        each(Raises("CapacityError", "ResourceQuota default/gpus"), Unharmed(), Unharmed()),
        quota_of_two,
        before=True,
        early=True,
        of_kind=MORE_THAN_A_NODE,
        managers=(KUBERNETES,),
    ),
    Fault(
        "another gang uses up the namespace's quota (`acquire_timeout`)",
        everywhere(Raises("GangTimeout", "ResourceQuota default/gpus")),
        quota_used_up,
        before=True,
        early=True,
        launches=True,
        options={"acquire_timeout": "6s"},
        managers=(KUBERNETES,),
    ),
    Fault(
        "the image does not exist",
        everywhere(
            Raises("ConfigError", r"ErrImageNeverPull.*spark\.kubernetes\.container\.image")
        ),
        nothing,
        early=True,
        driver=True,
        conf=_ABSENT,
        managers=(KUBERNETES,),
    ),
)
