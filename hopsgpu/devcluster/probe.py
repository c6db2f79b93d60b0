"""Queries the daemons over HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hopsgpu.cluster_managers.yarn.answer_lists import join_repeated, with_lists
from hopsgpu.devcluster import kubernetes
from hopsgpu.devcluster.certificates import Certificates
from hopsgpu.devcluster.config import ClusterSpec
from hopsgpu.devcluster.layout import DATANODE, ClusterLayout
from hopsgpu.devcluster.realm import Realm, SignInError, realm_of, signed_in_as_superuser
from hopsgpu.devcluster.state import ClusterState
from hopsgpu.errors import HopsGpuError

if TYPE_CHECKING:
    from requests import Session

# An overloaded machine's daemons need this long for their first answers.
_SECONDS = 15
# The state of a usable node on YARN, and of a usable Master or Worker.
_RUNNING, ALIVE = "RUNNING", "ALIVE"


@dataclass(frozen=True)
class NodeStatus:
    """A node as the ResourceManager, or a Spark Master, sees it. The memory is in MiB.

    Attributes:
        heard: time of the last health report, or of a Worker's heartbeat, in epoch seconds.
        health_report: why the node is not healthy; mostly "" for a healthy one.
    """

    name: str
    state: str
    gpus: int
    gpus_used: int
    memory: int
    memory_used: int
    cores: int
    cores_used: int
    heard: float
    health_report: str

    @property
    def is_running(self) -> bool:
        return self.state in (_RUNNING, ALIVE)


@dataclass(frozen=True)
class HdfsStatus:
    """HDFS as its daemons see it.

    Attributes:
        roles: NameNode → "active", "standby" or another state; None if it does not answer.
        file_system: "Operational", "safeMode", or "" if no NameNode is active.
        live_datanodes: number of DataNodes that have registered with the active NameNode.
        datanode_states: the DataNode's states, one for each NameNode that it serves; None if it
            does not answer.
    """

    roles: Mapping[str, str | None]
    file_system: str
    live_datanodes: int
    datanode_states: tuple[str, ...] | None


@dataclass(frozen=True)
class Probe:
    """Queries of a cluster's daemons.

    Attributes:
        realm: the realm whose tickets the web addresses require, or None.
        authority: file of the authority's certificate; "" without HTTPS.
        layout: the files of a cluster on Kubernetes; None for another one.
    """

    spec: ClusterSpec
    ports: Mapping[str, int]
    realm: Realm | None = None
    authority: str = ""
    layout: ClusterLayout | None = None

    def nodes(self) -> tuple[NodeStatus, ...] | None:
        """Return the nodes that the cluster manager knows; None if it does not answer."""
        if self.spec.is_standalone:
            return self._workers()
        if self.layout is not None:
            return _kubernetes_nodes(self.layout, self.spec.gpu_resource)
        for daemon in self.spec.resourcemanagers:
            answer = self._get(f"{self._base(daemon)}/ws/v1/cluster/nodes")
            if answer is not None:
                gpu_resource = self.spec.gpu_resource
                listed = (answer.get("nodes") or {}).get("node") or []
                nodes = [_node(n, gpu_resource) for n in listed]
                return tuple(sorted(nodes, key=lambda n: (len(n.name), n.name)))
        return None

    def _workers(self) -> tuple[NodeStatus, ...] | None:
        for answer in self._master_answers().values():
            if answer.get("status") == ALIVE:
                return _workers(answer)
        return None

    def masters(self) -> dict[str, str]:
        """Return Master → its state; "" if it does not answer."""
        answers = self._master_answers()
        return {daemon: str(answer.get("status", "")) for daemon, answer in answers.items()}

    def _master_answers(self) -> dict[str, dict[str, Any]]:
        return {
            daemon: self._get(f"{self._base(daemon)}/json/") or {} for daemon in self.spec.masters
        }

    def hdfs(self) -> HdfsStatus:
        roles = {
            daemon: self._bean(daemon, "NameNode", "NameNodeStatus").get("State")
            for daemon in self.spec.namenodes
        }
        active = next((daemon for daemon, role in roles.items() if role == "active"), None)
        name = self._bean(active, "NameNode", "FSNamesystemState") if active else {}
        actors = self._bean(DATANODE, "DataNode", "DataNodeInfo").get("BPServiceActorInfo")
        return HdfsStatus(
            roles,
            file_system=str(name.get("FSState", "")),
            live_datanodes=int(name.get("NumLiveDataNodes", 0)),
            datanode_states=_actor_states(actors),
        )

    def make_directory(self, path: str, user: str, mode: str) -> str:
        """Create an HDFS directory with exactly this mode; return "", or the error.

        The mode of an existing directory is set too.
        """
        import requests

        def error_of(daemon: str) -> str:
            url = f"{self._base(daemon)}/webhdfs/v1{path}"
            try:
                with self._session() as session:
                    for op in ("MKDIRS", "SETPERMISSION"):
                        parameters = {"op": op, "user.name": user, "permission": mode}
                        answer = session.put(url, params=parameters, timeout=_SECONDS)
                        if not answer.ok:
                            return f"{daemon}: status {answer.status_code}"
            except requests.RequestException as error:
                return f"{daemon}: {type(error).__name__}"
            return ""

        errors = []
        # A standby NameNode refuses.
        for daemon in self.spec.namenodes:
            if not (error := error_of(daemon)):
                return ""
            errors.append(error)
        return ", ".join(errors)

    def _base(self, daemon: str) -> str:
        return f"{self.spec.scheme}://{self.spec.address}:{self.ports[f'{daemon}.web']}"

    def _session(self) -> Session:
        import requests

        session = requests.Session()
        # A proxy for outside hosts cannot reach a daemon on loopback.
        session.trust_env = False
        session.verify = self.authority or True
        return session

    def _bean(self, daemon: str, service: str, name: str) -> dict[str, Any]:
        """Return one of a daemon's JMX beans; {} if the daemon does not answer."""
        url = f"{self._base(daemon)}/jmx?qry=Hadoop:service={service},name={name}"
        beans = (self._get(url) or {}).get("beans") or [{}]
        return dict(beans[0])

    def _get(self, url: str) -> dict[str, Any] | None:
        """Return a daemon's answer, a JSON object; None for another answer, or no answer."""
        import requests

        signed_in = signed_in_as_superuser(self.realm) if self.realm else nullcontext()
        try:
            with signed_in as auth, self._session() as session:
                # A standby ResourceManager redirects to the active one with an empty answer.
                answer = session.get(
                    url,
                    timeout=_SECONDS,
                    headers={"Accept": "application/json"},
                    auth=auth,
                    allow_redirects=False,
                )
                answer.raise_for_status()
                content = with_lists(answer.json(object_pairs_hook=join_repeated))
        except (requests.RequestException, SignInError, ValueError):
            return None
        return content if isinstance(content, dict) else None


def probe_of(layout: ClusterLayout, state: ClusterState) -> Probe:
    """Return the probe of a cluster, with the credentials that its daemons require."""
    spec = state.spec
    return Probe(
        spec,
        state.ports,
        None if spec.simple_web else realm_of(layout, spec),
        str(Certificates(layout.certificates).authority) if spec.https else "",
        layout if spec.is_kubernetes else None,
    )


def _node(answer: Mapping[str, Any], gpu_resource: str) -> NodeStatus:
    return NodeStatus(
        name=str(answer.get("nodeHostName", "")),
        state=str(answer.get("state", "")),
        gpus=_gpus(answer.get("totalResource"), gpu_resource),
        gpus_used=_gpus(answer.get("usedResource"), gpu_resource),
        memory=int(answer.get("usedMemoryMB", 0)) + int(answer.get("availMemoryMB", 0)),
        memory_used=int(answer.get("usedMemoryMB", 0)),
        cores=int(answer.get("usedVirtualCores", 0)) + int(answer.get("availableVirtualCores", 0)),
        cores_used=int(answer.get("usedVirtualCores", 0)),
        heard=int(answer.get("lastHealthUpdate", 0)) / 1000,
        health_report=str(answer.get("healthReport") or "").strip(),
    )


def _kubernetes_nodes(layout: ClusterLayout, gpu_resource: str) -> tuple[NodeStatus, ...] | None:
    try:
        nodes = kubernetes.admin_manager(layout, gpu_resource).nodes()
    except HopsGpuError:
        return None
    return tuple(
        NodeStatus(
            name=node.host,
            state=node.state,
            gpus=node.total.gpus,
            gpus_used=node.used.gpus,
            memory=node.total.memory_mib,
            memory_used=node.used.memory_mib,
            cores=node.total.cores,
            cores_used=node.used.cores,
            heard=time.time(),
            health_report=node.health,
        )
        for node in nodes
    )


def _workers(answer: Mapping[str, Any]) -> tuple[NodeStatus, ...]:
    """Return the Workers in a Master's answer, one for each host.

    After the restart of a Worker, the Master lists its predecessor for some minutes.
    """
    workers = [_worker(worker) for worker in answer.get("workers") or []]
    workers.sort(key=lambda worker: (worker.state == ALIVE, worker.heard))
    by_name = {worker.name: worker for worker in workers}
    return tuple(sorted(by_name.values(), key=lambda worker: (len(worker.name), worker.name)))


def _worker(answer: Mapping[str, Any]) -> NodeStatus:
    return NodeStatus(
        name=str(answer.get("host", "")),
        state=str(answer.get("state", "")),
        gpus=_addresses(answer.get("resources")),
        gpus_used=_addresses(answer.get("resourcesused")),
        memory=int(answer.get("memory", 0)),
        memory_used=int(answer.get("memoryused", 0)),
        cores=int(answer.get("cores", 0)),
        cores_used=int(answer.get("coresused", 0)),
        heard=int(answer.get("lastheartbeat", 0)) / 1000,
        health_report="",
    )


def _addresses(resources: Any) -> int:
    """Return the number of GPUs in a Worker's `resources` or `resourcesused`."""
    return len(((resources or {}).get("gpu") or {}).get("addresses") or [])


def _actor_states(actors: str | None) -> tuple[str, ...] | None:
    """Return the states in a DataNode's BPServiceActorInfo, which is JSON text."""
    if actors is None:
        return None
    try:
        return tuple(str(actor.get("ActorState")) for actor in json.loads(actors))
    except ValueError:
        return ()


def _gpus(resource: Any, gpu_resource: str) -> int:
    informations = ((resource or {}).get("resourceInformations") or {}).get("resourceInformation")
    return sum(int(i.get("value", 0)) for i in informations or [] if i.get("name") == gpu_resource)
