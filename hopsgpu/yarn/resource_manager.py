"""The ResourceManager's REST interface.

Source of paths and fields: the Hadoop documentation, "ResourceManager REST API's".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hopsgpu.errors import CapacityError, HopsGpuError

GPU = "yarn.io/gpu"
_SECONDS = 10.0


@dataclass(frozen=True)
class Amount:
    """Resources, as the ResourceManager counts them.

    Attributes:
        gpus: `yarn.io/gpu`.
        cores: virtual cores.
        memory_mib: MiB.
    """

    gpus: int
    cores: int
    memory_mib: int

    def __str__(self) -> str:
        return f"{self.gpus} GPUs, {self.cores} cores, {self.memory_mib} MiB"


@dataclass(frozen=True)
class Node:
    """A NodeManager, as the ResourceManager sees it."""

    id: str
    host: str
    state: str
    total: Amount
    used: Amount


@dataclass(frozen=True)
class Held:
    """Containers that an application has, and asks for, under one priority.

    Attributes:
        containers: ids of those granted and not yet ended.
        pending: how many more are asked for.
    """

    containers: tuple[str, ...]
    pending: int


def _amount(resource: Mapping[str, Any] | None) -> Amount:
    """An Amount from REST's `resourceInformations`; absent means none."""
    listed = ((resource or {}).get("resourceInformations") or {}).get("resourceInformation", [])
    values = {entry["name"]: int(entry["value"]) for entry in listed}
    return Amount(values.get(GPU, 0), values.get("vcores", 0), values.get("memory-mb", 0))


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

    def nodes(self) -> tuple[Node, ...]:
        """All nodes, whatever their state."""
        listed = (self._get("/ws/v1/cluster/nodes").get("nodes") or {}).get("node", [])
        return tuple(
            Node(
                id=node["id"],
                host=node["nodeHostName"],
                state=node["state"],
                total=_amount(node.get("totalResource")),
                used=_amount(node.get("usedResource")),
            )
            for node in listed
        )

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
        scheduled = _amount(metrics.get("totalUsedResourcesAcrossPartition"))
        return max(self.gpus()[0] - scheduled.gpus, 0)

    def largest_container(self) -> Amount:
        """The largest container that the scheduler grants to anybody."""
        import requests

        path = "/ws/v1/cluster/apps/new-application"
        answer = self._get(path, requests.post)["maximum-resource-capability"]
        return _amount(answer)

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
        for address in self.addresses:
            try:
                # A standby answers with a redirect to the active one.
                answer = ask(
                    address + path, headers={"Accept": "application/json"}, timeout=_SECONDS
                )
                answer.raise_for_status()
                return answer.json()
            except (requests.RequestException, ValueError) as error:
                problems.append(f"{address}: {error}")
        raise HopsGpuError(
            "the ResourceManager does not answer ("
            + ("; ".join(problems) or "no web address in the Hadoop configuration")
            + "). Is YARN up, and is HADOOP_CONF_DIR that of the cluster?"
        )


def check_container(wanted: Amount, largest: Amount, nodes: tuple[Node, ...]) -> None:
    """Whether a container can ever be granted; one that cannot would end the whole application.

    Raises:
        CapacityError: it is above the scheduler's largest container, or every node's total.
    """
    bounds = {"the scheduler's largest container": largest}
    bounds |= {f"node {node.host}": node.total for node in nodes if node.state == "RUNNING"}
    fits = [name for name, bound in bounds.items() if _within(wanted, bound)]
    if "the scheduler's largest container" in fits and len(fits) > 1:
        return
    raise CapacityError(
        f"an executor of {wanted} fits nowhere: "
        + "; ".join(f"{name} has {bound}" for name, bound in bounds.items())
        + ". Lower memory_per_worker, cores_per_worker or gpus_per_worker"
    )


def _within(wanted: Amount, bound: Amount) -> bool:
    return (
        wanted.gpus <= bound.gpus
        and wanted.cores <= bound.cores
        and wanted.memory_mib <= bound.memory_mib
    )


def cores_per_gpu(nodes: tuple[Node, ...]) -> int:
    """The smallest share of cores per GPU among running nodes with GPUs.

    One core of each node is left for an application master or ETL; at least 1.
    """
    shares = [
        (node.total.cores - 1) // node.total.gpus
        for node in nodes
        if node.state == "RUNNING" and node.total.gpus > 0
    ]
    return max(min(shares, default=1), 1)
