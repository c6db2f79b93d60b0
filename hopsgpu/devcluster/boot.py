"""Starts daemons, in the order in which they need each other."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hopsgpu.devcluster import kubernetes, standalone
from hopsgpu.devcluster.certificates import Certificates
from hopsgpu.devcluster.class_archive import archive_of
from hopsgpu.devcluster.config_files import container_environ
from hopsgpu.devcluster.daemons import (
    MARKER,
    DaemonProcess,
    last_lines,
    marker,
    members,
    spawn,
    stop,
    uninterrupted,
)
from hopsgpu.devcluster.docker import docker_command, is_listening, socket_of
from hopsgpu.devcluster.hadoop_jars import DaemonJars, pyspark_home
from hopsgpu.devcluster.java import QUICK
from hopsgpu.devcluster.layout import (
    API_SERVER,
    CONTAINERD,
    DATANODE,
    DOCKERD,
    ETCD,
    FAILOVER_CONTROLLERS,
    KDC,
    KUBERNETES_DAEMONS,
    MASTERS,
    NAMENODE,
    NAMENODES,
    RESOURCEMANAGERS,
    SPARK_MASTERS,
    ZOOKEEPER,
    ClusterLayout,
    node_names,
)
from hopsgpu.devcluster.probe import probe_of
from hopsgpu.devcluster.readiness import describe_unready_masters, raise_if_ended
from hopsgpu.devcluster.realm import (
    Realm,
    container_variables,
    kdc_command,
    kdc_variables,
    realm_of,
)
from hopsgpu.devcluster.standby import arguments_of
from hopsgpu.devcluster.startup_wait import StartupWait, listening_ports
from hopsgpu.devcluster.state import ClusterState, save
from hopsgpu.errors import ClusterError

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
    **dict.fromkeys(SPARK_MASTERS, 256),
    **dict.fromkeys(FAILOVER_CONTROLLERS, 64),
}
# The sum of the heaps of all NodeManagers, or Workers.
_NODES_HEAPS_MIB = 1132
# Hadoop before 3.5 uses internals of more packages of the JDK.
_OPENED = ("java.lang", "java.util", "java.io", "java.net")
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
    """Starts daemons. A started daemon keeps running when a later step fails.

    Attributes:
        state: has every process started so far; saved at each start.
        started: daemon → time of the start, in epoch seconds.

    Args:
        programs: the programs of Kubernetes by name; empty without it.
    """

    def __init__(
        self,
        layout: ClusterLayout,
        state: ClusterState,
        jars: DaemonJars,
        host_check: Path,
        wait: StartupWait,
        programs: Mapping[str, Path],
    ) -> None:
        self.layout = layout
        self.state = state
        self.wait = wait
        self._jars = jars
        self.programs = programs
        self._host_check = host_check
        self._spark = pyspark_home()
        self._realm = realm_of(layout, state.spec)
        self.started: dict[str, float] = {}

    def start(self, daemon: str) -> None:
        """Start one daemon; `wait_ready` waits until it is ready."""
        layout = self.layout
        # A NodeManager that was killed leaves its containers behind, and a Worker its executors.
        stop(members(layout.root, daemon), GRACE_S)
        if daemon == KDC:
            argv = kdc_command(Realm(layout.realm))
        elif daemon in (CONTAINERD, DOCKERD):
            argv = docker_command(daemon, layout)
        elif self._is_of_kubernetes(daemon):
            argv = kubernetes.command_of(daemon, layout, self.programs)
        elif self._is_in_spark(daemon):
            argv = self._spark_command(daemon)
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

    def check_format(self) -> None:
        """Refuse an HDFS that was created for other daemons."""
        layout = self.layout
        if not layout.format_marker.exists():
            return
        before = layout.format_marker.read_text(encoding="utf-8") or self._jars.version
        version, _, pair = before.partition(" ")
        if version != self._jars.version:
            raise ClusterError(
                f"Hadoop {version} created the HDFS in {layout.root}, and"
                f" {self._jars.version} may not read it: use another --dir, or remove this one"
            )
        if bool(pair) != self.state.spec.namenode_ha:
            raise ClusterError(
                f"the HDFS in {layout.root} was created for {'two' if pair else 'one'} NameNode"
                f"{'s' if pair else ''}: use another --dir, or remove this one"
            )

    def format_namenode(self) -> None:
        """Create the file system at the first start in a directory."""
        layout, has_two = self.layout, self.state.spec.namenode_ha
        if layout.format_marker.exists():
            return
        # Remove the leftovers of an interrupted format.
        for part in (*map(layout.name, NAMENODES), layout.edits, layout.data):
            shutil.rmtree(part, ignore_errors=True)
        options = (*arguments_of(NAMENODE, self.state.spec), "-format", "-nonInteractive")
        self._run(NAMENODE, _MAIN[NAMENODE], options, "the format of HDFS", (0,))
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
        self._run(controller, _CONTROLLER, options, "the preparation of ZooKeeper", (0, 2))

    def _run(
        self, daemon: str, main: str, options: Sequence[str], purpose: str, accepted: Sequence[int]
    ) -> None:
        """Run a program with a daemon's settings, and wait for its end."""
        argv = [*self._command(daemon, main, has_options=False), *options]
        # A name of its own: the daemon with its own name may be alive.
        name = f"{daemon}{options[-2]}"
        log = self.layout.logs / f"{name}.log"
        for directory in (log.parent, self.layout.temporary(daemon)):
            directory.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as out:
            environ = {**self._environ(daemon), MARKER: marker(self.layout.root, name)}
            process = None
            try:
                # On Ctrl-C, subprocess.run() would not wait for the end of the process.
                process = subprocess.Popen(argv, env=environ, stdout=out, stderr=out)
                self._await_end(process, name, purpose)
            finally:
                if process is not None:
                    process.kill()
                    process.wait()
                # Use the marker: an interrupt may have lost the reference to a started process.
                stop(members(self.layout.root, name), GRACE_S)
        if process.returncode not in accepted:
            raise ClusterError(f"{purpose} failed ({log}):\n{last_lines(log)}")

    def _await_end(self, process: subprocess.Popen[bytes], name: str, purpose: str) -> None:
        def find_unmet() -> str:
            return purpose if process.poll() is None else ""

        self.wait.until_met(find_unmet, {name: DaemonProcess.of(process.pid)})

    def _is_of_kubernetes(self, daemon: str) -> bool:
        spec = self.state.spec
        return spec.is_kubernetes and daemon in (*KUBERNETES_DAEMONS, *node_names(spec.nodes))

    def _is_in_spark(self, daemon: str) -> bool:
        """Return whether a daemon runs from PySpark's jars alone."""
        spec = self.state.spec
        return spec.is_standalone and daemon in (ZOOKEEPER, *spec.masters, *node_names(spec.nodes))

    def _spark_command(self, daemon: str) -> list[str]:
        layout, state = self.layout, self.state
        archive = archive_of(Path(state.java), self._spark)
        if daemon == ZOOKEEPER:
            command = [_MAIN[daemon], str(layout.zookeeper_conf)]
        else:
            command = standalone.command_of(daemon, layout, state.spec, state.ports)
        return [
            *self._java(daemon),
            *(archive.options.split() if archive else ()),
            # The jars come first, as the archive of their classes requires.
            *("-cp", f"{self._spark}/jars/*:{layout.conf(daemon)}"),
            *command,
        ]

    def _command(self, daemon: str, main: str, *, has_options: bool = True) -> list[str]:
        conf = self.layout.conf(daemon)
        spec = self.state.spec
        path = f"{conf}:{self._host_check}:{self._jars.class_path}"
        if spec.https:
            path = f"{Certificates(self.layout.certificates).daemon_conf}:{path}"
        conf_file = [str(self.layout.zookeeper_conf)] if daemon == ZOOKEEPER else []
        return [
            *self._java(daemon),
            *("-cp", path),
            main,
            *((*arguments_of(daemon, spec), *conf_file) if has_options else ()),
        ]

    def _java(self, daemon: str) -> list[str]:
        """Return the JVM of a daemon, with its options except the class path."""
        conf = self.layout.conf(daemon)
        return [
            f"{self.state.java}/bin/java",
            f"-Xmx{heap_mib(daemon, self.state.spec.nodes)}m",
            *QUICK,
            *(self._realm.java_options if self._realm else ()),
            "-XX:+ExitOnOutOfMemoryError",
            f"-XX:ErrorFile={self.layout.logs}/{daemon}-crash-%p.log",
            *(f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in _OPENED),
            "-Djava.net.preferIPv4Stack=true",
            f"-Djdk.net.hosts.file={self.layout.hosts}",
            f"-Dlog4j2.configurationFile={conf / 'log4j2-daemon.properties'}",
            f"-Dlog4j.configuration=file:{conf / 'log4j-daemon.properties'}",
            f"-Djava.io.tmpdir={self.layout.temporary(daemon)}",
        ]

    def _environ(self, daemon: str) -> dict[str, str]:
        environ = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        # A node's health check asks the node's own nvidia-smi, as its containers do.
        if daemon == KDC:
            node = kdc_variables(Realm(self.layout.realm))
        elif daemon in MASTERS:
            node = container_variables(self._realm) if self._realm else {}
        else:
            node = container_environ(self.layout, daemon, self._realm)
        if daemon != ZOOKEEPER and self._is_in_spark(daemon):
            node |= standalone.environ_of(daemon, self.layout, self._spark)
        return environ | {
            "PATH": os.environ.get("PATH", os.defpath),
            **node,
            "JAVA_HOME": self.state.java,
            # A node's health check records a hang there for its next run.
            "TMPDIR": str(self.layout.temporary(daemon)),
            "HADOOP_CONF_DIR": str(self.layout.conf(daemon)),
            MARKER: marker(self.layout.root, daemon),
        }


def start_all(starter: DaemonStarter, daemons: list[str]) -> None:
    """Start daemons, in parallel as far as possible."""
    starter.check_format()
    if KDC in daemons:
        # The other daemons get their tickets when they start.
        starter.start(KDC)
        _await_port(starter, KDC)
    for daemon in (CONTAINERD, DOCKERD):
        if daemon in daemons:
            starter.start(daemon)
            _await_socket(starter, daemon)
    spec = starter.state.spec
    if ZOOKEEPER in daemons:
        starter.start(ZOOKEEPER)
    _start_cluster_managers(starter, daemons)
    _start_hdfs(starter, daemons)
    nodes = [node for node in node_names(spec.nodes) if node in daemons]
    if spec.is_standalone:
        _start_workers(starter, nodes)
    if spec.is_kubernetes:
        for daemon in nodes:
            starter.start(daemon)


def _start_cluster_managers(starter: DaemonStarter, daemons: list[str]) -> None:
    """Start ResourceManagers and nodes, or Masters, which take longest and need no file system."""
    spec = starter.state.spec
    managers = [d for d in (*RESOURCEMANAGERS, *spec.masters) if d in daemons]
    nodes = node_names(spec.nodes) if spec.is_yarn else ()
    if spec.is_kubernetes:
        _start_control_plane(starter, daemons)
    if managers and spec.has_master_ha:
        # A Master gives up if ZooKeeper does not answer.
        _await_port(starter, ZOOKEEPER)
    for daemon in (*managers, *(node for node in nodes if node in daemons)):
        starter.start(daemon)


def _start_control_plane(starter: DaemonStarter, daemons: list[str]) -> None:
    for daemon in KUBERNETES_DAEMONS:
        if daemon in daemons:
            starter.start(daemon)
            if daemon == API_SERVER:
                _await_api_server(starter)


def _await_api_server(starter: DaemonStarter) -> None:
    """Wait until the API server answers, and create the objects that clients need."""
    layout, processes = starter.layout, starter.state.processes

    def find_unmet() -> str:
        raise_if_ended(layout, starter.state)
        return kubernetes.describe_unready_api_server(layout)

    starter.wait.until_met(find_unmet, {name: processes[name] for name in (ETCD, API_SERVER)})
    kubernetes.create_objects(layout, starter.programs)


def _start_hdfs(starter: DaemonStarter, daemons: list[str]) -> None:
    for daemon in (*NAMENODES, DATANODE):
        if daemon in daemons:
            if daemon == NAMENODE:
                starter.format_namenode()
            starter.start(daemon)
    controllers = [daemon for daemon in FAILOVER_CONTROLLERS if daemon in daemons]
    if controllers:
        _await_port(starter, ZOOKEEPER)
        starter.prepare_election()
    for daemon in controllers:
        starter.start(daemon)


def _start_workers(starter: DaemonStarter, workers: list[str]) -> None:
    if workers:
        # A Worker that finds no ALIVE Master retries only after 5 to 15 s.
        _await_master(starter)
    for daemon in workers:
        starter.start(daemon)


def _await_socket(starter: DaemonStarter, daemon: str) -> None:
    path, processes = socket_of(daemon, starter.layout), starter.state.processes

    def find_unmet() -> str:
        raise_if_ended(starter.layout, starter.state)
        return "" if is_listening(path) else f"{daemon} to listen on {path}"

    starter.wait.until_met(find_unmet, {daemon: processes[daemon]})


def _await_master(starter: DaemonStarter) -> None:
    ask = probe_of(starter.layout, starter.state)

    def find_unmet() -> str:
        unmet = describe_unready_masters(ask.masters())
        raise_if_ended(starter.layout, starter.state)
        return unmet

    starter.wait.until_met(find_unmet, starter.state.processes)


def _await_port(starter: DaemonStarter, daemon: str) -> None:
    port, processes = starter.state.ports[f"{daemon}.rpc"], starter.state.processes

    def find_unmet() -> str:
        is_open = port in listening_ports()
        raise_if_ended(starter.layout, starter.state)
        return "" if is_open else f"{daemon} to listen on port {port}"

    starter.wait.until_met(find_unmet, {daemon: processes[daemon]}, (port,))
