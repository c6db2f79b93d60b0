"""The ResourceManager's REST interface.

Source of paths and fields: the Hadoop documentation, "ResourceManager REST API's".
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hopsgpu.errors import HopsGpuError
from hopsgpu.yarn.amounts import amount_of, total
from hopsgpu.yarn.answers import (
    INCREMENTS,
    MINIMUMS,
    Containers,
    app_answer,
    apps_of,
    containers_of,
    master_of,
    nodes_of,
    queues_of,
    rounding_of,
    shared_partitions,
    silent_apps,
    user_of,
)
from hopsgpu.yarn.queues import chain_of
from hopsgpu.yarn.snapshot import Node, Queue, Rounding, Snapshot

# To connect, and to be answered.
_SECONDS = (3.0, 10.0)
# Of applications whose GPUs are told by their containers only.
_MOST_ASKED = 8
_SCHEDULER = "/ws/v1/cluster/scheduler"


@dataclass(frozen=True)
class Held:
    """Containers that an application has, and asks for, under one priority.

    Attributes:
        containers: ids of those granted and not yet ended.
        pending: how many more are asked for.
    """

    containers: tuple[str, ...]
    pending: int


def web_addresses(setting: Callable[[str], str | None]) -> tuple[str, ...]:
    """Base URLs of the ResourceManagers' web addresses, from Hadoop's configuration.

    Args:
        setting: a property's value, or None.
    """
    secure = setting("yarn.http.policy") == "HTTPS_ONLY"
    name = "yarn.resourcemanager.webapp" + (".https.address" if secure else ".address")
    scheme = "https" if secure else "http"
    ids = []
    if setting("yarn.resourcemanager.ha.enabled") == "true":
        ids = [i.strip() for i in (setting("yarn.resourcemanager.ha.rm-ids") or "").split(",")]
    suffixes = [f".{i}" for i in ids if i] or [""]
    found = [a for suffix in suffixes if (a := _web_address(setting, name, suffix, secure))]
    return tuple(f"{scheme}://{address}" for address in found)


def _web_address(
    setting: Callable[[str], str | None], name: str, suffix: str, secure: bool
) -> str | None:
    # Hadoop's own default is "${yarn.resourcemanager.hostname}:8088", unresolved with HA.
    given = setting(name + suffix)
    if given and "${" not in given:
        return given
    host = setting("yarn.resourcemanager.hostname" + suffix)
    return f"{host}:{8090 if secure else 8088}" if host else None


class ResourceManager:
    """Asks the ResourceManager; the active one of several answers."""

    def __init__(self, addresses: tuple[str, ...]) -> None:
        self.addresses = addresses
        self._rounds: Rounding | None = None
        # Of several the active one; a host that is down would be waited for at each question.
        self._answered: str | None = None

    def nodes(self) -> tuple[Node, ...]:
        """All nodes, whatever their state."""
        return nodes_of(self._get("/ws/v1/cluster/nodes"))

    def snapshot(self, application_id: str, user: str, partition: str | None = None) -> Snapshot:
        """One look at all that decides what an application can get.

        Three requests to a CapacityScheduler, once two more; the FairScheduler's applications
        do not tell their GPUs and are asked one by one, some of them.

        Args:
            application_id: ours, running.
            user: who runs it.
            partition: the node label that is asked for; None for the application's own.

        Raises:
            HopsGpuError: no answer, or the application is not among the running ones.
        """
        apps = self._get("/ws/v1/cluster/apps?states=RUNNING&deSelects=resourceRequests,timeouts")
        ours = app_answer(apps, application_id)
        if ours is None:
            raise HopsGpuError(
                f"the ResourceManager does not list {application_id} among the running"
                " applications: has it ended, or is HADOOP_CONF_DIR that of another cluster?"
            )
        said = self._get(_SCHEDULER)
        nodes = self.nodes()
        label = (ours.get("appNodeLabelExpression") or "") if partition is None else partition
        shared = self._shared(nodes, label)
        chain = chain_of(queues_of(said, label, nodes), ours["queue"])
        inside = total(n.total for n in nodes if n.state == "RUNNING" and n.partition == label)
        rounding = self._rounding(said)
        containers = self._containers_of(silent_apps(apps, application_id, _MOST_ASKED))
        return Snapshot(
            application_id=application_id,
            partition=label,
            nodes=nodes,
            queues=chain,
            user=user_of(said, chain[0], user, label, inside, rounding.smallest),
            applications=apps_of(apps, shared | {label}, containers),
            master=master_of(ours, containers.get(application_id, ())),
            shared=shared,
            rounding=rounding,
        )

    def queues(self) -> tuple[Queue, ...]:
        """All queues, each parent before its children, for nodes without a label."""
        return queues_of(self._get(_SCHEDULER), "", self.nodes())

    def _containers_of(self, attempts: Mapping[str, str]) -> dict[str, Containers]:
        """What applications have, by id; without those that have just ended or hide it."""
        found = {}
        for application_id, attempt in attempts.items():
            path = f"/ws/v1/cluster/apps/{application_id}/appattempts/{attempt}/containers"
            with contextlib.suppress(HopsGpuError):
                found[application_id] = containers_of(self._get(path))
        return found

    def _shared(self, nodes: tuple[Node, ...], label: str) -> frozenset[str]:
        # Only requests without a label are served from idle nodes that have one.
        if label or not any(node.partition for node in nodes):
            return frozenset()
        return shared_partitions(self._get("/ws/v1/cluster/get-node-labels"))

    def _rounding(self, scheduler: Any) -> Rounding:
        """Asked once: a ResourceManager reads it when it starts."""
        if self._rounds is None:
            fair = scheduler["scheduler"]["schedulerInfo"]["type"] == "fairScheduler"
            names = MINIMUMS + INCREMENTS if fair else MINIMUMS
            self._rounds = rounding_of({name: self._configured(name) for name in names}, fair)
        return self._rounds

    def _configured(self, name: str) -> int | None:
        """A number of the ResourceManager's configuration; None where it is not told."""
        try:
            return int(self._get(f"/conf?name={name}")["property"]["value"])
        except (HopsGpuError, KeyError, ValueError):
            return None

    def gpus(self) -> tuple[int, int]:
        """(used, total) GPUs of the running nodes."""
        running = [node for node in self.nodes() if node.state == "RUNNING"]
        return sum(n.used.gpus for n in running), sum(n.total.gpus for n in running)

    def gpus_ending(self) -> int:
        """GPUs whose container the scheduler has let go and whose node still has it.

        A node's share is free for others only once the node has reported the end; of the
        whole cluster, whoever's they are.
        """
        metrics = self._get("/ws/v1/cluster/metrics")["clusterMetrics"]
        scheduled = amount_of(metrics.get("totalUsedResourcesAcrossPartition"))
        return max(self.gpus()[0] - scheduled.gpus, 0)

    def held(self, application_id: str, priority: int) -> Held:
        """What an application has under a priority; Spark's is the resource profile's id."""
        app = self._app(application_id)
        attempts = self._get(f"/ws/v1/cluster/apps/{application_id}/appattempts")
        attempt = attempts["appAttempts"]["appAttempt"][-1]["appAttemptId"]
        listed = self._get(f"/ws/v1/cluster/apps/{application_id}/appattempts/{attempt}/containers")
        containers = (listed or {}).get("container", [])
        # One request is repeated for its host, its rack and any place ("*").
        pending = sum(
            int(request["numContainers"])
            for request in app.get("resourceRequests", [])
            if request["priority"] == priority and request["resourceName"] == "*"
        )
        ids = (c["containerId"] for c in containers if int(c["priority"]) == priority)
        return Held(tuple(ids), pending)

    def _app(self, application_id: str) -> Any:
        return self._get(f"/ws/v1/cluster/apps/{application_id}")["app"]

    def _get(self, path: str, ask: Callable[..., Any] | None = None) -> Any:
        import requests

        ask = requests.get if ask is None else ask
        problems = []
        for address in sorted(self.addresses, key=lambda one: one != self._answered):
            try:
                # A standby answers with a redirect to the active one.
                answer = ask(
                    address + path, headers={"Accept": "application/json"}, timeout=_SECONDS
                )
                answer.raise_for_status()
                self._answered = address
                return answer.json()
            except (requests.RequestException, ValueError) as error:
                problems.append(f"{address}: {error}")
        raise HopsGpuError(
            "the ResourceManager does not answer ("
            + ("; ".join(problems) or "no web address in the Hadoop configuration")
            + "). Is YARN up, and is HADOOP_CONF_DIR that of the cluster?"
        )
