"""Queries of the daemons, the ResourceManager and the NameNode, over HTTP."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from hopsgpu.devcluster.layout import MASTER
from hopsgpu.devcluster.realm import Realm, SignInError, signed_in_as_superuser
from hopsgpu.yarn.answer_lists import join_repeated, with_lists

_SECONDS = 5
_GPU = "yarn.io/gpu"


@dataclass(frozen=True)
class NodeStatus:
    """A NodeManager as the ResourceManager sees it.

    Attributes:
        memory: memory in MiB, like memory_used.
        heard: when its health was last reported, in epoch seconds.
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
        ports: the cluster's.
        realm: the realm whose tickets the web addresses require; None if they require none.
    """

    ports: Mapping[str, int]
    realm: Realm | None = None

    def nodes(self) -> tuple[NodeStatus, ...] | None:
        """Return the nodes that the ResourceManager knows; None if it does not answer."""
        port = self.ports["resourcemanager.http"]
        answer = self._get(f"http://{MASTER}:{port}/ws/v1/cluster/nodes")
        if answer is None:
            return None
        found = [_node(n) for n in (answer.get("nodes") or {}).get("node") or []]
        return tuple(sorted(found, key=lambda n: (len(n.name), n.name)))

    def hdfs_ready(self) -> bool:
        """Return whether the NameNode is out of safe mode and its DataNode is running.

        Both are asked, because a NameNode takes ten minutes to notice that a DataNode is gone.
        """
        name = self._bean("namenode", "NameNode", "FSNamesystemState")
        data = self._bean("datanode", "DataNode", "DataNodeInfo")
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
        """Create an HDFS directory with exactly this mode, or set the mode of an existing one."""
        import requests

        base = f"http://{MASTER}:{self.ports['namenode.http']}/webhdfs/v1{path}"
        try:
            with requests.Session() as session:
                session.trust_env = False
                for op in ("MKDIRS", "SETPERMISSION"):
                    parameters = {"op": op, "user.name": user, "permission": mode}
                    session.put(base, params=parameters, timeout=_SECONDS).raise_for_status()
        except requests.RequestException:
            return False
        return True

    def _bean(self, daemon: str, service: str, name: str) -> dict[str, Any]:
        """Return one of a daemon's JMX beans; empty if it does not answer."""
        port = self.ports[f"{daemon}.http"]
        url = f"http://{MASTER}:{port}/jmx?qry=Hadoop:service={service},name={name}"
        beans = (self._get(url) or {}).get("beans") or [{}]
        return dict(beans[0])

    def _get(self, url: str) -> dict[str, Any] | None:
        """Return a JSON object from a daemon; None if it does not answer with one."""
        import requests

        signed_in = signed_in_as_superuser(self.realm) if self.realm else nullcontext()
        try:
            with signed_in as auth, requests.Session() as session:
                # A proxy, meant for outside hosts, cannot reach a daemon on loopback.
                session.trust_env = False
                headers = {"Accept": "application/json"}
                answer = session.get(url, timeout=_SECONDS, headers=headers, auth=auth)
                answer.raise_for_status()
                content = with_lists(answer.json(object_pairs_hook=join_repeated))
        except (requests.RequestException, SignInError, ValueError):
            return None
        return content if isinstance(content, dict) else None


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
