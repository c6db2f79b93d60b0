"""Queries the daemons over HTTP."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hopsgpu.devcluster.certificates import Certificates
from hopsgpu.devcluster.config import ClusterSpec
from hopsgpu.devcluster.layout import DATANODE, MASTER, ClusterLayout
from hopsgpu.devcluster.realm import Realm, SignInError, realm_of, signed_in_as_superuser
from hopsgpu.devcluster.state import ClusterState
from hopsgpu.yarn.answer_lists import join_repeated, with_lists

if TYPE_CHECKING:
    from requests import Session

_SECONDS = 5
_GPU = "yarn.io/gpu"


@dataclass(frozen=True)
class NodeStatus:
    """A NodeManager as the ResourceManager sees it. The memory is in MiB.

    Attributes:
        heard: time of the last health report, in epoch seconds.
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


@dataclass(frozen=True)
class Probe:
    """Queries of a cluster's daemons.

    Attributes:
        realm: the realm whose tickets the web addresses require, or None.
        authority: file of the authority's certificate; "" without HTTPS.
    """

    spec: ClusterSpec
    ports: Mapping[str, int]
    realm: Realm | None = None
    authority: str = ""

    def nodes(self) -> tuple[NodeStatus, ...] | None:
        """Return the nodes that the active ResourceManager knows; None if none is active."""
        for daemon in self.spec.resourcemanagers:
            answer = self._get(f"{self._base(daemon)}/ws/v1/cluster/nodes")
            if answer is not None:
                nodes = [_node(n) for n in (answer.get("nodes") or {}).get("node") or []]
                return tuple(sorted(nodes, key=lambda n: (len(n.name), n.name)))
        return None

    def is_hdfs_ready(self) -> bool:
        """Return whether a NameNode is active and out of safe mode, and the DataNode is running.

        The DataNode is asked too: a NameNode takes ten minutes to notice that a DataNode has ended.
        """
        roles = {
            daemon: self._bean(daemon, "NameNode", "NameNodeStatus").get("State")
            for daemon in self.spec.namenodes
        }
        active = [daemon for daemon, role in roles.items() if role == "active"]
        if len(active) != 1 or None in roles.values():
            return False
        name = self._bean(active[0], "NameNode", "FSNamesystemState")
        data = self._bean(DATANODE, "DataNode", "DataNodeInfo")
        try:
            actors = json.loads(data.get("BPServiceActorInfo") or "[]")
        except ValueError:
            return False
        return (
            name.get("FSState") == "Operational"
            and int(name.get("NumLiveDataNodes", 0)) > 0
            and any(actor.get("ActorState") == "RUNNING" for actor in actors)
        )

    def make_directory(self, path: str, user: str, mode: str) -> bool:
        """Create an HDFS directory with exactly this mode; return whether that succeeded.

        The mode of an existing directory is set too.
        """
        import requests

        def is_done_by(daemon: str) -> bool:
            url = f"{self._base(daemon)}/webhdfs/v1{path}"
            try:
                with self._session() as session:
                    for op in ("MKDIRS", "SETPERMISSION"):
                        parameters = {"op": op, "user.name": user, "permission": mode}
                        session.put(url, params=parameters, timeout=_SECONDS).raise_for_status()
            except requests.RequestException:
                return False
            return True

        # A standby NameNode refuses.
        return any(map(is_done_by, self.spec.namenodes))

    def _base(self, daemon: str) -> str:
        return f"{self.spec.scheme}://{MASTER}:{self.ports[f'{daemon}.web']}"

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
    )


def _node(answer: Mapping[str, Any]) -> NodeStatus:
    return NodeStatus(
        name=str(answer.get("nodeHostName", "")),
        state=str(answer.get("state", "")),
        gpus=_gpus(answer.get("totalResource")),
        gpus_used=_gpus(answer.get("usedResource")),
        memory=int(answer.get("usedMemoryMB", 0)) + int(answer.get("availMemoryMB", 0)),
        memory_used=int(answer.get("usedMemoryMB", 0)),
        cores=int(answer.get("usedVirtualCores", 0)) + int(answer.get("availableVirtualCores", 0)),
        cores_used=int(answer.get("usedVirtualCores", 0)),
        heard=int(answer.get("lastHealthUpdate", 0)) / 1000,
    )


def _gpus(resource: Any) -> int:
    informations = ((resource or {}).get("resourceInformations") or {}).get("resourceInformation")
    return sum(int(i.get("value", 0)) for i in informations or [] if i.get("name") == _GPU)
