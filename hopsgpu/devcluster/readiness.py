"""The conditions under which a cluster is ready.

Each function returns "" if its condition is met, else what is missing, as it continues "waiting
for".
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from hopsgpu.backends.gang_queue import DEFAULT_PARTITION
from hopsgpu.backends.gang_queue_root import gang_queue_root
from hopsgpu.cluster_managers.yarn.amounts import DEFAULT_GPU_RESOURCE
from hopsgpu.cluster_managers.yarn.manager import cluster_name
from hopsgpu.cluster_managers.yarn.resource_manager import web_addresses
from hopsgpu.devcluster import probe
from hopsgpu.devcluster.config import ClusterSpec
from hopsgpu.devcluster.daemons import last_lines
from hopsgpu.devcluster.layout import API_SERVER, ClusterLayout, node_names
from hopsgpu.devcluster.realm import DAEMON_USERS, USERS, Realm, make_directories, realm_of
from hopsgpu.devcluster.site_files import GPU_PLUGIN
from hopsgpu.devcluster.standalone import GPU_RESOURCE
from hopsgpu.devcluster.startup_wait import StartupWait
from hopsgpu.devcluster.state import ClusterState
from hopsgpu.errors import ClusterError
from hopsgpu.storage.hadoop_conf import HadoopConf
from hopsgpu.units import count_of

log = logging.getLogger(__name__)


def wait_ready(
    wait: StartupWait,
    layout: ClusterLayout,
    state: ClusterState,
    user: str,
    started: Mapping[str, float],
) -> None:
    """Poll the daemons until all of them are ready.

    Args:
        user: gets a home directory in HDFS.
        started: daemon → time of the start, in epoch seconds, for the daemons of this `up`.

    Raises:
        ClusterError: a daemon ended (the message has the last lines of its log), the deadline
            passed, or the daemons make no progress.
    """
    realm = realm_of(layout, state.spec)
    ask = probe.probe_of(layout, state)
    conditions: list[Callable[[], str]] = [
        lambda: describe_unready_hdfs(ask.hdfs()),
        lambda: _describe_missing_directories(ask, layout, state, realm, user),
        lambda: describe_unready_masters(ask.masters()),
        lambda: describe_unready_nodes(ask.nodes(), state.spec, started),
    ]

    def find_unmet() -> str:
        while conditions:
            unmet = conditions[0]()
            raise_if_ended(layout, state)
            if unmet:
                return unmet
            conditions.pop(0)
        return ""

    wait.until_met(find_unmet, state.processes, state.ports.values())


def raise_if_ended(layout: ClusterLayout, state: ClusterState) -> None:
    ended = [
        f"{daemon} ended during startup ({layout.log(daemon)}):\n{last_lines(layout.log(daemon))}"
        for daemon in state.dead
    ]
    if ended:
        raise ClusterError("\n".join(ended))


def describe_unready_hdfs(hdfs: probe.HdfsStatus) -> str:
    """Describe what is missing until a NameNode is active and out of safe mode, and the DataNode
    is running.

    The DataNode is asked too: a NameNode takes ten minutes to notice that a DataNode has ended.
    """
    silent = [daemon for daemon, role in hdfs.roles.items() if role is None]
    if silent:
        return f"{' and '.join(silent)} to answer"
    if list(hdfs.roles.values()).count("active") != 1:
        roles = ", ".join(f"{daemon} is {role}" for daemon, role in hdfs.roles.items())
        return f"one NameNode to become active ({roles})"
    if hdfs.datanode_states is None:
        return "datanode to answer"
    if not hdfs.live_datanodes:
        return "datanode to register with the NameNode"
    if hdfs.file_system != "Operational":
        return "the NameNode to leave safe mode"
    if "RUNNING" not in hdfs.datanode_states:
        return f"datanode to be RUNNING (it is {' and '.join(hdfs.datanode_states) or 'starting'})"
    return ""


def _describe_missing_directories(
    ask: probe.Probe, layout: ClusterLayout, state: ClusterState, realm: Realm | None, user: str
) -> str:
    """Create the directories that HDFS users need.

    /user is writable for all. On a Kerberized cluster another user could create a user's home
    first, so the homes are created here and only their owners may read them. The same holds for the
    directories of the queue of gangs, whose owner could remove all tickets.
    """
    if realm:
        superuser = DAEMON_USERS[0]
        homes = {f"/user/{name}": (0o700, name) for name in USERS}
        paths = ("/tmp", "/user", *_gang_queue_paths(layout))
        shared = {path: (0o1777, superuser) for path in paths}
        error = make_directories(realm, layout.client, state.filesystem, {**shared, **homes})
        log.debug("HDFS's directories: %s", error or "created")
        return error and f"HDFS to create /tmp and /user ({error.splitlines()[-1]})"
    for path, mode in (("/tmp", "1777"), ("/user", "1777"), (f"/user/{user}", "755")):
        if error := ask.make_directory(path, user, mode):
            return f"HDFS to create {path} ({error})"
    return ""


def _gang_queue_paths(layout: ClusterLayout) -> list[str]:
    """Return the directories that lead to the queue of gangs, the first one first."""
    setting = HadoopConf.load({"HADOOP_CONF_DIR": str(layout.client)}).get
    cluster = cluster_name(setting, web_addresses(setting))
    directory, names = gang_queue_root(None, setting("fs.defaultFS"), cluster)
    paths = []
    for name in (*names, DEFAULT_PARTITION):
        directory /= name
        paths.append(directory.path)
    return paths


def describe_unready_masters(masters: Mapping[str, str]) -> str:
    """Describe what is missing until all Masters answer, and one of them is ALIVE.

    Args:
        masters: Master → its state, "" if it does not answer; empty on YARN.
    """
    if silent := [daemon for daemon, state in masters.items() if not state]:
        return f"{' and '.join(silent)} to answer"
    if masters and probe.ALIVE not in masters.values():
        states = ", ".join(f"{daemon} is {state}" for daemon, state in masters.items())
        return f"a Master to become ALIVE ({states})"
    return ""


def describe_unready_nodes(
    nodes: Sequence[probe.NodeStatus] | None, spec: ClusterSpec, started: Mapping[str, float]
) -> str:
    """Describe what is missing until every node runs with its GPUs, and has reported since its last
    start.

    Args:
        nodes: the nodes that the active ResourceManager or Master knows; None without one.
    """
    if nodes is None:
        return f"{' or '.join(spec.resourcemanagers or spec.masters or (API_SERVER,))} to answer"
    names = node_names(spec.nodes)
    by_name = {node.name: node for node in nodes}
    problems = {
        name: problem
        for name in names
        if (problem := _node_problem(by_name.get(name), spec, name, started.get(name, 0.0)))
    }
    if not problems:
        return ""
    ready = f"{len(names) - len(problems)} of {count_of(len(names), 'node')}"
    details = "; ".join(f"{name} {problem}" for name, problem in problems.items())
    of_what = "YARN's nodes"
    if not spec.is_yarn:
        of_what = "the Workers" if spec.is_standalone else "the nodes"
    return f"{of_what} ({ready} ready; {details})"


def _node_problem(
    node: probe.NodeStatus | None, spec: ClusterSpec, name: str, started: float
) -> str:
    if node is None:
        return "has not registered"
    if node.heard < started:
        return "has not reported since it was started"
    if not node.is_running:
        return f"is {node.state}{f': {node.health_report}' if node.health_report else ''}"
    expected = _expected_gpus(spec, name)
    if expected not in (None, node.gpus):
        return f"has {node.gpus} of {count_of(expected or 0, 'GPU')}"
    return ""


def _expected_gpus(spec: ClusterSpec, node: str) -> int | None:
    """Return how many GPUs a node must report; None if the user configures what is counted."""
    if spec.is_kubernetes:
        return spec.counted_gpus
    overrides = {**spec.conf.sites.get("yarn-site", {}), **spec.conf.nodes.get(node, {})}
    is_overridden = any(name.startswith((GPU_PLUGIN, GPU_RESOURCE)) for name in overrides)
    is_overridden |= spec.gpu_resource != DEFAULT_GPU_RESOURCE
    return None if is_overridden else spec.counted_gpus
