"""Start daemons and wait until they are ready."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from hopsgpu.devcluster import probe
from hopsgpu.devcluster.certificates import Certificates
from hopsgpu.devcluster.config import ClusterSpec
from hopsgpu.devcluster.config_files import container_environ
from hopsgpu.devcluster.daemons import (
    MARKER,
    last_lines,
    marker,
    members,
    spawn,
    stop,
    uninterrupted,
)
from hopsgpu.devcluster.hadoop_jars import DaemonJars
from hopsgpu.devcluster.java import QUICK
from hopsgpu.devcluster.layout import (
    DATANODE,
    FAILOVER_CONTROLLERS,
    KDC,
    MASTER,
    MASTERS,
    NAMENODE,
    NAMENODES,
    RESOURCEMANAGERS,
    ZOOKEEPER,
    ClusterLayout,
    node_names,
)
from hopsgpu.devcluster.realm import (
    DAEMON_USERS,
    USERS,
    Realm,
    container_variables,
    kdc_command,
    kdc_variables,
    make_directories,
    realm_of,
)
from hopsgpu.devcluster.site_files import GPU_PLUGIN
from hopsgpu.devcluster.standby import arguments_of
from hopsgpu.devcluster.state import ClusterState, save
from hopsgpu.errors import ClusterError
from hopsgpu.units import count_of

log = logging.getLogger(__name__)

_HADOOP = "org.apache.hadoop"
_CONTROLLER = f"{_HADOOP}.hdfs.tools.DFSZKFailoverController"
_MAIN = {
    **dict.fromkeys(NAMENODES, f"{_HADOOP}.hdfs.server.namenode.NameNode"),
    **dict.fromkeys(FAILOVER_CONTROLLERS, _CONTROLLER),
    DATANODE: f"{_HADOOP}.hdfs.server.datanode.DataNode",
    **dict.fromkeys(RESOURCEMANAGERS, f"{_HADOOP}.yarn.server.resourcemanager.ResourceManager"),
    ZOOKEEPER: "org.apache.zookeeper.server.ZooKeeperServerMain",
}
_NODEMANAGER = f"{_HADOOP}.yarn.server.nodemanager.NodeManager"
_HEAP_MIB = {
    **dict.fromkeys(NAMENODES, 256),
    DATANODE: 192,
    **dict.fromkeys(RESOURCEMANAGERS, 320),
    ZOOKEEPER: 64,
    **dict.fromkeys(FAILOVER_CONTROLLERS, 64),
}
# The sum of the heaps of all NodeManagers.
_NODES_HEAPS_MIB = 1132
# Hadoop before 3.5 uses internals of more packages of the JDK.
_OPENED = ("java.lang", "java.util", "java.io", "java.net")
_POLL_S = 0.1
_READY_S = 120.0
# A NodeManager stops its containers within this time, and then only waits to delete their logs.
GRACE_S = 4.0
# The variables that a daemon and its containers inherit from the shell. A real cluster's machines
# do not have the user's other settings either.
_INHERITED = ("HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH")


def heap_mib(daemon: str, nodes: int) -> int:
    """Return a daemon's maximum heap; up to eight nodes and without HA, all use less than 2 GB."""
    if daemon in _HEAP_MIB:
        return _HEAP_MIB[daemon]
    return min(256, max(128, _NODES_HEAPS_MIB // nodes))


class DaemonStarter:
    """Starts daemons, and stops them again if an error occurs.

    Attributes:
        state: has every process started so far; saved at each start.
        started: daemon → time of the start, in epoch seconds.
    """

    def __init__(self, layout: ClusterLayout, state: ClusterState, jars: DaemonJars) -> None:
        self.state = self._before = state
        self._layout = layout
        self._jars = jars
        self._realm = realm_of(layout, state.spec)
        self.started: dict[str, float] = {}

    @contextmanager
    def stop_on_failure(self) -> Iterator[DaemonStarter]:
        try:
            yield self
        except BaseException:
            # The marker also finds a daemon's containers, but no process in its exec(2), whose
            # environment cannot be read.
            ours = [self.state.processes[daemon] for daemon in self.started]
            marked = [m for daemon in self.started for m in members(self._layout.root, daemon)]
            stop({*ours, *marked}, GRACE_S)
            save(self._layout, self._before)
            raise

    def start(self, daemon: str) -> None:
        """Start one daemon; `wait_ready` waits until it is ready."""
        layout = self._layout
        # A NodeManager that was killed leaves its containers behind.
        stop(members(layout.root, daemon), GRACE_S)
        if daemon == KDC:
            argv = kdc_command(Realm(layout.realm))
        else:
            argv = self._command(daemon, _MAIN.get(daemon, _NODEMANAGER))
        home = layout.root if daemon in MASTERS else layout.node(daemon)
        for directory in (home, layout.temporary(daemon)):
            directory.mkdir(parents=True, exist_ok=True)
        environ = self._environ(daemon)
        with uninterrupted():
            process = spawn(argv, environ, home, layout.log(daemon))
            self.state = self.state.with_process(daemon, process)
            self.started[daemon] = time.time()
        save(layout, self.state)

    def log(self, daemon: str) -> Path:
        return self._layout.log(daemon)

    def format_namenode(self) -> None:
        """Create the file system at the first start in a directory."""
        layout, has_two = self._layout, self.state.spec.namenode_ha
        if layout.format_marker.exists():
            before = layout.format_marker.read_text(encoding="utf-8") or self._jars.version
            version, _, pair = before.partition(" ")
            if version != self._jars.version:
                raise ClusterError(
                    f"Hadoop {version} created the HDFS in {layout.root}, and"
                    f" {self._jars.version} may not read it: use another --dir, or remove this one"
                )
            if bool(pair) != has_two:
                raise ClusterError(
                    f"the HDFS in {layout.root} was created for {'two' if pair else 'one'} NameNode"
                    f"{'s' if pair else ''}: use another --dir, or remove this one"
                )
            return
        # Remove the leftovers of an interrupted format.
        for part in (*map(layout.name, NAMENODES), layout.edits, layout.data):
            shutil.rmtree(part, ignore_errors=True)
        options = (*arguments_of(NAMENODE, self.state.spec), "-format", "-nonInteractive")
        self._run(NAMENODE, _MAIN[NAMENODE], options, "formatting HDFS", (0,))
        if has_two:
            # The second NameNode starts with the same image of an empty file system.
            shutil.copytree(layout.name(), layout.name(NAMENODES[1]))
        text = f"{self._jars.version}{' two NameNodes' if has_two else ''}"
        layout.format_marker.write_text(text, encoding="utf-8")

    def prepare_election(self) -> None:
        """Create the znode at which the failover controllers elect a NameNode."""
        controller = FAILOVER_CONTROLLERS[0]
        options = (*arguments_of(controller, self.state.spec), "-formatZK", "-nonInteractive")
        # Status 2: the znode exists, because only ZooKeeper was restarted.
        self._run(controller, _CONTROLLER, options, "preparing ZooKeeper", (0, 2))

    def _run(
        self, daemon: str, main: str, options: Sequence[str], purpose: str, accepted: Sequence[int]
    ) -> None:
        """Run a program with a daemon's settings, and wait for its end."""
        argv = [*self._command(daemon, main, has_options=False), *options]
        # A name of its own: the daemon with its own name may be alive.
        name = f"{daemon}{options[-2]}"
        log = self._layout.logs / f"{name}.log"
        for directory in (log.parent, self._layout.temporary(daemon)):
            directory.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as out:
            environ = {**self._environ(daemon), MARKER: marker(self._layout.root, name)}
            process = None
            try:
                # On Ctrl-C, subprocess.run() would not wait for the end of the process.
                process = subprocess.Popen(argv, env=environ, stdout=out, stderr=out)
                status = process.wait()
            finally:
                if process is not None:
                    process.kill()
                    process.wait()
                # Use the marker: an interrupt may have lost the reference to a started process.
                stop(members(self._layout.root, name), GRACE_S)
        if status not in accepted:
            raise ClusterError(f"{purpose} failed ({log}):\n{last_lines(log)}")

    def _command(self, daemon: str, main: str, *, has_options: bool = True) -> list[str]:
        conf = self._layout.conf(daemon)
        spec = self.state.spec
        path = f"{conf}:{self._jars.class_path}"
        if spec.https:
            path = f"{Certificates(self._layout.certificates).daemon_conf}:{path}"
        conf_file = [str(self._layout.zookeeper_conf)] if daemon == ZOOKEEPER else []
        return [
            f"{self.state.java}/bin/java",
            f"-Xmx{heap_mib(daemon, self.state.spec.nodes)}m",
            *QUICK,
            *(self._realm.java_options if self._realm else ()),
            "-XX:+ExitOnOutOfMemoryError",
            f"-XX:ErrorFile={self._layout.logs}/{daemon}-crash-%p.log",
            *(f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in _OPENED),
            "-Djava.net.preferIPv4Stack=true",
            f"-Djdk.net.hosts.file={self._layout.hosts}",
            f"-Dlog4j2.configurationFile={conf / 'log4j2-daemon.properties'}",
            f"-Dlog4j.configuration=file:{conf / 'log4j-daemon.properties'}",
            f"-Djava.io.tmpdir={self._layout.temporary(daemon)}",
            *("-cp", path),
            main,
            *((*arguments_of(daemon, spec), *conf_file) if has_options else ()),
        ]

    def _environ(self, daemon: str) -> dict[str, str]:
        environ = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        # A node's health check asks the node's own nvidia-smi, as its containers do.
        if daemon == KDC:
            node = kdc_variables(Realm(self._layout.realm))
        elif daemon in MASTERS:
            node = container_variables(self._realm) if self._realm else {}
        else:
            node = container_environ(self._layout, daemon, self._realm)
        return environ | {
            "PATH": os.environ.get("PATH", os.defpath),
            **node,
            "JAVA_HOME": self.state.java,
            # A node's health check records a hang there for its next run.
            "TMPDIR": str(self._layout.temporary(daemon)),
            "HADOOP_CONF_DIR": str(self._layout.conf(daemon)),
            MARKER: marker(self._layout.root, daemon),
        }


def start_all(starter: DaemonStarter, daemons: list[str]) -> None:
    """Start daemons, in parallel as far as possible."""
    if KDC in daemons:
        # The other daemons get their tickets when they start.
        starter.start(KDC)
        _await_port(starter, KDC)
    nodes = node_names(starter.state.spec.nodes)
    # The ResourceManager takes longest and needs no file system.
    for daemon in (ZOOKEEPER, *RESOURCEMANAGERS, *nodes, *NAMENODES, DATANODE):
        if daemon in daemons:
            if daemon == NAMENODE:
                starter.format_namenode()
            starter.start(daemon)
    if ZOOKEEPER in daemons and starter.state.spec.namenode_ha:
        _await_port(starter, ZOOKEEPER)
        starter.prepare_election()
    for daemon in FAILOVER_CONTROLLERS:
        if daemon in daemons:
            starter.start(daemon)


def _await_port(starter: DaemonStarter, daemon: str) -> None:
    port, log_file = starter.state.ports[f"{daemon}.rpc"], starter.log(daemon)
    deadline = time.monotonic() + _READY_S
    while True:
        with contextlib.suppress(OSError), socket.create_connection((MASTER, port), _POLL_S):
            return
        if not starter.state.processes[daemon].alive or time.monotonic() > deadline:
            raise ClusterError(f"{daemon} does not answer ({log_file}):\n{last_lines(log_file)}")
        time.sleep(_POLL_S)


def wait_ready(
    layout: ClusterLayout, state: ClusterState, user: str, started: Mapping[str, float]
) -> None:
    """Poll the daemons until all of them are ready.

    Args:
        user: gets a home directory in HDFS.
        started: daemon → time of the start, in epoch seconds, for the daemons of this `up`.

    Raises:
        ClusterError: a daemon ended (the message has the last lines of its log), or the deadline
            passed.
    """
    realm = realm_of(layout, state.spec)
    ask = probe.probe_of(layout, state)
    steps: dict[str, Callable[[], bool]] = {
        "HDFS": ask.is_hdfs_ready,
        "HDFS's /tmp and /user": lambda: _are_directories_ready(ask, layout, state, realm, user),
        "YARN": lambda: _are_nodes_registered(ask, state, started),
    }
    deadline = time.monotonic() + _READY_S
    for what, is_ready in steps.items():
        while not is_ready():
            _raise_if_ended(layout, state)
            if time.monotonic() > deadline:
                nodes = ask.nodes() or ()
                states = ", ".join(
                    f"{n.name} {n.state} with {count_of(n.gpus, 'GPU')}" for n in nodes
                )
                raise ClusterError(
                    f"{what} is not ready after {_READY_S:.0f} s (nodes: {states or 'none'}); "
                    f"the logs are in {layout.logs}"
                )
            time.sleep(_POLL_S)
    _raise_if_ended(layout, state)


def _raise_if_ended(layout: ClusterLayout, state: ClusterState) -> None:
    for daemon in state.dead:
        log = layout.log(daemon)
        raise ClusterError(f"{daemon} ended during startup ({log}):\n{last_lines(log)}")


def _are_directories_ready(
    ask: probe.Probe, layout: ClusterLayout, state: ClusterState, realm: Realm | None, user: str
) -> bool:
    """Create the directories that HDFS users need; return whether all exist.

    /user is writable for all. On a Kerberized cluster another user could create a user's home
    first, so the homes are created here and only their owners may read them.
    """
    if realm:
        superuser = DAEMON_USERS[0]
        homes = {f"/user/{name}": (0o700, name) for name in USERS}
        shared = {path: (0o1777, superuser) for path in ("/tmp", "/user")}
        error = make_directories(realm, layout.client, state.filesystem, {**shared, **homes})
        log.debug("HDFS's directories: %s", error or "created")
        return not error
    directories = (("/tmp", "1777"), ("/user", "1777"), (f"/user/{user}", "755"))
    return all(ask.make_directory(path, user, mode) for path, mode in directories)


def _are_nodes_registered(
    ask: probe.Probe, state: ClusterState, started: Mapping[str, float]
) -> bool:
    """Return whether every node runs with its GPUs, and has reported since its last start."""
    running = {
        node.name
        for node in ask.nodes() or ()
        if node.state == "RUNNING"
        and _expected_gpus(state.spec, node.name) in (None, node.gpus)
        and node.heard >= started.get(node.name, 0.0)
    }
    return running >= set(node_names(state.spec.nodes))


def _expected_gpus(spec: ClusterSpec, node: str) -> int | None:
    """Return how many GPUs a node must report; None if the user configures the plugin."""
    overrides = {**spec.conf.sites.get("yarn-site", {}), **spec.conf.nodes.get(node, {})}
    is_overridden = any(name.startswith(GPU_PLUGIN) for name in overrides)
    return None if is_overridden else spec.gpus_per_node
