"""The NodeManagers' REST interface: product, memory and driver of GPUs, and containers' logs.

Sources: the Hadoop documentation, "NodeManager REST API's"; for the GPUs' fields, Hadoop's
NMGpuResourceInfo, GpuDeviceInformation and PerGpuDeviceInformation. The names of their fields are
written in two ways: as in the XML of nvidia-smi ("product_name"), or as the classes' fields
("productName"). Only YARN's own GPU plugin describes its GPUs. A plugin of the device framework
lists numbers of devices (NMDeviceResourceInfo), and a resource without a plugin has no answer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from hopsgpu.cluster_managers.node_gpu_list import Devices, NodeAnswers, NodeGpu
from hopsgpu.cluster_managers.snapshot import Node
from hopsgpu.cluster_managers.yarn.amounts import DEFAULT_GPU_RESOURCE
from hopsgpu.cluster_managers.yarn.answer_lists import FieldTrail
from hopsgpu.cluster_managers.yarn.rest_client import NODE_MANAGER, get_json, get_text, scheme_of
from hopsgpu.errors import ConfigError, HopsGpuError
from hopsgpu.gpu.node.nvidia_smi import read_mib, read_number

# Timeouts of connection and answer. A NodeManager runs nvidia-smi before it answers, which takes
# seconds on eight GPUs without persistence mode.
_SECONDS = (2.0, 5.0)
# A log is read once, at the end of an application: a busy node may take its time.
_LOG_SECONDS = (5.0, 30.0)
_MAX_THREADS = 64
# Answers are kept, because each request costs the node a run of nvidia-smi, and a driver or GPU
# does not change while its NodeManager runs. Failures are kept for less time, because a NodeManager
# that does not answer delays each overview.
_REMEMBERED_SECONDS = 300.0
_RETRY_SECONDS = 30.0
_PATH = "/ws/v1/node/resources/"
_HOSTS = "hopsgpu.hosts"
_Answer = Mapping[str, Any]

log = logging.getLogger(__name__)


class NodeManagers:
    """A client of NodeManagers, which caches answers and, for less time, failures.

    Args:
        setting: returns a property of Hadoop's configuration, or None. `yarn.http.policy` says
            whether NodeManagers use HTTPS. `hopsgpu.hosts` names a file in the form of /etc/hosts,
            for nodes whose names only YARN's JVMs know, as on the development cluster.
        gpu_resource: name of the resource that counts GPUs.

    Raises:
        ConfigError: the hosts file cannot be read.
    """

    def __init__(
        self,
        setting: Callable[[str], str | None],
        clock: Callable[[], float] = time.monotonic,
        gpu_resource: str = DEFAULT_GPU_RESOURCE,
    ) -> None:
        self._gpu_resource = gpu_resource
        self._scheme = scheme_of(setting)
        self._addresses = _addresses(setting(_HOSTS))
        self._clock = clock
        # Answers or problems by node id, each with the time at which it expires.
        self._cache: dict[str, tuple[float, Devices | str]] = {}

    def devices(self, nodes: Sequence[Node]) -> NodeAnswers:
        """Return the GPUs of nodes, requested from all nodes in parallel with a timeout."""
        now = self._clock()
        self._cache = {name: entry for name, entry in self._cache.items() if entry[0] > now}
        # A node that has left the cluster has no address.
        asked = [node for node in nodes if node.web and node.id not in self._cache]
        if asked:
            with ThreadPoolExecutor(min(len(asked), _MAX_THREADS), "hopsgpu-nodes") as pool:
                answers = list(pool.map(self._ask, asked))
            now = self._clock()
            for node, answer in zip(asked, answers, strict=True):
                lifetime = _RETRY_SECONDS if isinstance(answer, str) else _REMEMBERED_SECONDS
                self._cache[node.id] = (now + lifetime, answer)
        answers_by_node = {n.id: self._cache[n.id][1] for n in nodes if n.id in self._cache}
        return NodeAnswers(
            devices={
                name: answer
                for name, answer in answers_by_node.items()
                if isinstance(answer, Devices)
            },
            problems={
                name: answer for name, answer in answers_by_node.items() if isinstance(answer, str)
            },
        )

    def settings(self, nodes: Sequence[Node], names: Sequence[str]) -> dict[str, dict[str, str]]:
        """Return properties of NodeManagers by host, requested from all nodes in parallel.

        A property that is not set, or that a NodeManager does not tell, is missing.
        """
        asked = [node for node in nodes if node.web]
        if not asked:
            return {}
        with ThreadPoolExecutor(min(len(asked), _MAX_THREADS), "hopsgpu-nodes") as pool:
            answers = pool.map(lambda node: self._settings(node, names), asked)
            return {node.host: values for node, values in zip(asked, answers, strict=True)}

    def _settings(self, node: Node, names: Sequence[str]) -> dict[str, str]:
        values = {}
        for name in names:
            url = f"{self.base(node.web)}/conf?{urlencode({'name': name})}"
            try:
                answer = get_json(url, _SECONDS)
            except HopsGpuError as error:
                log.debug("%s of %s is unknown: %s", name, node.host, error)
                continue
            value = (
                (answer.get("property") or {}).get("value") if isinstance(answer, Mapping) else None
            )
            if isinstance(value, str):
                values[name] = value
        return values

    def base(self, web: str) -> str:
        """Return the URL of host:port in YARN's answers, without a path."""
        host, _, port = web.rpartition(":")
        return f"{self._scheme}://{self._addresses.get(host, host)}:{port}"

    def log(self, web: str, container: str, name: str, max_bytes: int) -> str:
        """Return the end of a file of a container's log.

        Args:
            web: host:port of the NodeManager.
            name: name of the file, such as "stderr".

        Raises:
            HopsGpuError: the NodeManager does not answer, or has no such log.
        """
        path = f"/ws/v1/node/containers/{container}/logs/{name}?size=-{max_bytes}"
        text = get_text(self.base(web) + path, _LOG_SECONDS)
        # The answer has lines about the file before and after the content.
        _, header, rest = text.partition("\nLogContents:\n")
        content, after, _ = rest.rpartition("\nEnd of LogType:")
        if not header:
            return text
        return content if after else rest.partition("End of LogType:")[0]

    def _ask(self, node: Node) -> Devices | str:
        trail = FieldTrail()
        url = f"{self.base(node.web)}{_PATH}{quote(self._gpu_resource, safe='')}"
        try:
            devices = devices_of(get_json(url, _SECONDS, trail))
        except HopsGpuError as error:
            return f"the NodeManager does not describe its GPUs: {error}"
        except (AttributeError, TypeError, ValueError) as error:
            return NODE_MANAGER.misread(error, trail, _SECONDS, should_name_address=False)
        if not devices.gpus and self._gpu_resource == DEFAULT_GPU_RESOURCE:
            return (
                "the NodeManager describes no GPU (does nvidia-smi fail there, or does"
                " yarn.nodemanager.resource-plugins.gpu.allowed-gpu-devices list the GPUs?)"
            )
        return devices


def devices_of(answer: object) -> Devices:
    """Return the GPUs in a NodeManager's answer; none if the answer does not describe them."""
    fields = answer if isinstance(answer, Mapping) else {}
    information = fields.get("gpuDeviceInformation") or {}
    # Hadoop 3.5 with LinuxContainerExecutor lists its devices without fields: `[{}, {}]`.
    allowed = {_minor(device) for device in fields.get("totalGpuDevices") or []} - {None}
    listed = _field(information, "gpu", "gpus") or []
    gpus = tuple(
        NodeGpu(
            name=_text(_field(gpu, "product_name", "productName")),
            memory_mib=_memory(gpu),
            uuid=_text(gpu.get("uuid")),
            minor=_minor(gpu),
        )
        for gpu in listed
        # nvidia-smi also lists GPUs that the administrator has excluded from YARN.
        if not allowed or _minor(gpu) in (None, *allowed)
    )
    return Devices(gpus, _text(_field(information, "driver_version", "driverVersion")))


def _field(fields: _Answer, *names: str) -> Any:
    return next((fields[name] for name in names if name in fields), None)


def _text(value: Any) -> str:
    return "" if value in (None, "N/A") else str(value)


def _minor(device: _Answer) -> int | None:
    return read_number(str(_field(device, "minor_number", "minorNumber")))


def _memory(gpu: _Answer) -> int | None:
    # Old Hadoop reports "bar1_memory_usage" instead, which is not the GPU's memory.
    usage = _field(gpu, "fb_memory_usage", "gpuMemoryUsage") or {}
    all_ = _mib(_field(usage, "total", "totalMemoryMiB"))
    if all_ is not None:
        return all_
    used = _mib(_field(usage, "used", "usedMemoryMiB"))
    free = _mib(_field(usage, "free", "availMemoryMiB"))
    return None if used is None or free is None else used + free


def _mib(value: Any) -> int | None:
    """Return the MiB of 40960 or "40960 MiB"; None for -1, Hadoop's unknown value."""
    return read_mib(str(value))


def _addresses(path: str | None) -> dict[str, str]:
    if not path:
        return {}
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise ConfigError(f"{_HOSTS} in the Hadoop configuration: {error}") from error
    addresses: dict[str, str] = {}
    for address, *names in (line.partition("#")[0].split() or [""] for line in lines):
        for name in names:
            addresses.setdefault(name, address)
    return addresses
