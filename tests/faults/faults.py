"""The faults: how each is injected, and how each kind of launch must end.

An injection is a context manager. On entry two ranks or trials run, of a fault that is `early`
nothing does yet; when it has been left, the cluster is whole again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

import hopsgpu
from hopsgpu import devcluster
from hopsgpu.artifacts.runs import RunStore
from hopsgpu.cluster_managers.kubernetes.manager import KubernetesManager
from hopsgpu.cluster_managers.manager import ClusterManager
from hopsgpu.cluster_managers.yarn.manager import YarnManager
from hopsgpu.devcluster.kubernetes_network import INTERFACE
from hopsgpu.devcluster.layout import (
    DATANODE,
    NAMENODE,
    RESOURCEMANAGERS,
    SPARK_MASTERS,
    ClusterLayout,
)
from hopsgpu.linux import comm
from hopsgpu.storage.lake import LakePath
from tests.bounds import HANG_SECONDS
from tests.cluster.test_gpus import said_by
from tests.conftest import gone, until
from tests.contention import start_script
from tests.faults.launches import DriverLaunch, Kind, Launch, OwnLaunch
from tests.faults.leftovers import container_of, processes_in_containers
from tests.faults.page import KUBERNETES, STANDALONE, YARN
from tests.faults.training import Note
from tests.kubernetes.kubectl import Kubectl, kubectl_of
from tests.processes import family, outer_pid, signal_all

HEARTBEAT_SECONDS = 5
_CUT_SECONDS = 60.0
# Half of the cluster is guaranteed to it.
OTHER_QUEUE = "other"
# This application bypasses the queue of gangs: it requests executors from YARN at once.
_PREEMPTS = """
    import sys, time
    import hopsgpu
    from hopsgpu.backends.spark.resource_profiles import build_profile
    from hopsgpu.core.spec import ExecutorShape

    context = hopsgpu.session("preempts", conf={"spark.yarn.queue": sys.argv[1]}).sparkContext
    profile = build_profile(ExecutorShape(1, 1, 512, 1024))
    print("asks", flush=True)
    context.parallelize(range(2), 2).withResources(profile).map(lambda _: time.sleep(600)).collect()
"""
SMALL: Mapping[str, Any] = {
    "memory_per_worker": "512m",
    "cores_per_worker": 1,
    "progress": "off",
}
STATES = ("requested", "waiting", "granted", "ready", "starting", "running")


@dataclass(frozen=True)
class Raises:
    """The launch ends with this error, which says this (a regular expression)."""

    error: str
    says: str


@dataclass(frozen=True)
class GoesOn:
    """Another world or try follows, and the launch succeeds.

    Attributes:
        says: a regular expression that a warning matches; "" where there is none.
    """

    says: str = ""


@dataclass(frozen=True)
class TrialFails:
    """The trial fails, and says this (a regular expression); the others complete."""

    says: str


@dataclass(frozen=True)
class Unharmed:
    """The same ranks train on, and the launch succeeds."""


Expected = Raises | GoesOn | TrialFails | Unharmed


@dataclass
class Case:
    """What a launch runs on, and the launch once it has begun."""

    cluster: Path
    manager: ClusterManager
    spark: SparkSession
    root: LakePath
    begun: Launch | None = None

    @property
    def launch(self) -> Launch:
        """The launch."""
        assert self.begun is not None, "the fault comes before it"
        return self.begun

    def note(self, number: int = 1) -> Note:
        """Return what a rank, or trial, of the first world has said."""
        return next(note for note in self.launch.notes() if note.number == number)

    def host(self) -> str:
        """Return the node without our application master, which only YARN has."""
        if not isinstance(self.manager, YarnManager):
            return "node2"
        tracked = self.spark.sparkContext.applicationId
        app = self.manager.resource_manager.ask(f"/ws/v1/cluster/apps/{tracked}")["app"]
        master = app["amHostHttpAddress"].partition(":")[0]
        return "node1" if master == "node2" else "node2"

    @property
    def is_on_kubernetes(self) -> bool:
        return isinstance(self.manager, KubernetesManager)

    @property
    def kubectl(self) -> Kubectl:
        """What runs kubectl as the administrator."""
        return kubectl_of(self.cluster)

    def pid(self, note: Note) -> int:
        """Return the ID of a rank's process on this machine: a pod counts its own processes."""
        return outer_pid(note.container, note.pid) if self.is_on_kubernetes else note.pid

    def victim(self) -> Note:
        """Return a rank or trial that runs on that node."""
        host = self.host()
        return next(note for note in self.launch.notes() if note.host == host)


Injection = Callable[[Case], AbstractContextManager[None]]


@dataclass(frozen=True)
class Fault:
    """A row of the matrix.

    Attributes:
        name: of the row.
        expected: what each kind does; a kind that is missing does not apply.
        inject: what befalls the launch.
        early: whether it befalls the launch before two ranks run.
        before: whether it comes before the launch does.
        options: of the launch.
        of_kind: further options of one kind.
        launches: whether it is a launch of its own, which has GPUs until it is left.
        holds_up: whether nobody can clean a node up before it is over.
        driver: whether the launch has a driver of its own.
        conf: settings of that driver's session.
        environ: variables of the launch's driver.
        not_for: why a kind is missing.
        managers: the cluster managers to which it applies.
        not_on: why a cluster manager is missing to which the fault could apply.
        on_standalone: what a gang does on a standalone master, if not the same as on YARN.
        on_kubernetes: what each kind does on Kubernetes, if not the same as on YARN.
    """

    name: str
    expected: Mapping[Kind, Expected]
    inject: Injection
    early: bool = False
    before: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    of_kind: Mapping[Kind, Mapping[str, Any]] = field(default_factory=dict)
    launches: bool = False
    holds_up: bool = False
    driver: bool = False
    conf: Mapping[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    not_for: Mapping[Kind, str] = field(default_factory=dict)
    managers: tuple[str, ...] = (YARN, STANDALONE, KUBERNETES)
    not_on: Mapping[str, str] = field(default_factory=dict)
    on_standalone: Expected | None = None
    on_kubernetes: Mapping[Kind, Expected] = field(default_factory=dict)

    def kinds_on(self, manager: str) -> list[Kind]:
        """Return the kinds that are tested; on a standalone master, only a gang is."""
        kinds = [Kind.GANG] if manager == STANDALONE else list(Kind)
        return [kind for kind in kinds if manager in self.managers and kind in self.expected]

    def expected_on(self, manager: str, kind: Kind) -> Expected:
        """Return what a kind does."""
        if manager == STANDALONE and self.on_standalone is not None:
            return self.on_standalone
        if manager == KUBERNETES and kind in self.on_kubernetes:
            return self.on_kubernetes[kind]
        return self.expected[kind]

    def options_for(self, kind: Kind) -> dict[str, Any]:
        """Return all options of a launch of this kind."""
        return {**self.options, **self.of_kind.get(kind, {})}

    def ranks_of(self, kind: Kind) -> int:
        """Return how many ranks, or trials, run at a time."""
        options = self.options_for(kind)
        if kind is Kind.SEARCH:
            return int(options.get("max_concurrent", 2))
        workers = options.get("workers", 2)
        return int(workers[1] if isinstance(workers, tuple) else workers)


def everywhere(expected: Expected) -> dict[Kind, Expected]:
    """Return the same for all kinds."""
    return dict.fromkeys(Kind, expected)


def each(gang: Expected, elastic: Expected, search: Expected) -> dict[Kind, Expected]:
    """Return what each kind does."""
    return {Kind.GANG: gang, Kind.ELASTIC: elastic, Kind.SEARCH: search}


def ordered(what: str) -> Injection:
    """Have rank, or trial, 1 do something."""

    @contextlib.contextmanager
    def inject(case: Case) -> Iterator[None]:
        case.launch.order(1, what)
        yield

    return inject


@contextlib.contextmanager
def hangs(case: Case) -> Iterator[None]:
    """Have rank, or trial, 1 hang, and the others return."""
    case.launch.order(1, "hangs")
    case.launch.wait_until_performed()
    case.launch.go()
    yield


def process_beside(note: Note, words: bytes) -> int:
    """Return the process in a rank's container that was started with these words."""
    for process in Path("/proc").glob("[0-9]*"):
        pid = int(process.name)
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ")
        except OSError:
            continue
        if words in command and container_of(pid) == note.container:
            return pid
    raise LookupError(f"{note.container} has no process of {words!r}")


def executor_of(note: Note) -> int:
    """Return the JVM of a rank's container."""
    return next(
        pid
        for pid in processes_beside(note)
        if comm(pid) == "java" and b"--executor-id" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )


def processes_beside(note: Note) -> list[int]:
    """Return all processes in a rank's container."""
    pids = (int(process.name) for process in Path("/proc").glob("[0-9]*"))
    return [pid for pid in pids if container_of(pid) == note.container]


def agent_of(note: Note) -> int:
    """Return the agent in a rank's container: Spark's Python worker that runs the task."""
    found = []
    for pid in processes_beside(note):
        try:
            stat = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
            above = int(stat[1])
            commands = [Path(f"/proc/{one}/cmdline").read_bytes() for one in (pid, above)]
        except OSError:
            continue
        if all(b"pyspark.worker" in command for command in commands):
            found.append((int(stat[19]), pid))
    return max(found)[1]


def process_daemon_of(note: Note) -> int:
    """Return the process daemon of a rank's container."""
    return process_beside(note, b"hopsgpu.agent.process_daemon")


@contextlib.contextmanager
def fork_server_killed(case: Case) -> Iterator[None]:
    """Kill the parent of rank, or trial, 1."""
    stat = Path(f"/proc/{case.pid(case.note())}/stat").read_text()
    os.kill(int(stat.rpartition(") ")[2].split()[1]), signal.SIGKILL)
    yield


def killed(which: Callable[[Note], int]) -> Injection:
    """Kill a process of the container of rank, or trial, 1."""

    @contextlib.contextmanager
    def inject(case: Case) -> Iterator[None]:
        os.kill(which(case.note()), signal.SIGKILL)
        yield

    return inject


def frozen(which: Callable[[Note], int]) -> Injection:
    """Freeze a process of the container of rank, or trial, 1."""

    @contextlib.contextmanager
    def inject(case: Case) -> Iterator[None]:
        pid = which(case.note())
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    return inject


def pid_of(cluster: Path, daemon: str) -> int:
    """Return the pid of a daemon of the cluster."""
    return next(one.pid for one in devcluster.status(cluster).daemons if one.name == daemon)


def kill_daemon(cluster: Path, daemon: str) -> None:
    """Kill a daemon of the cluster; return when it is gone."""
    pid = pid_of(cluster, daemon)
    os.kill(pid, signal.SIGKILL)
    assert until(lambda: gone(pid))


@contextlib.contextmanager
def node_daemon_killed(case: Case) -> Iterator[None]:
    host = case.victim().host
    kill_daemon(case.cluster, host)
    case.launch.go_elsewhere(host)
    try:
        yield
    finally:
        devcluster.up(case.cluster, say=lambda _: None)
        assert until(lambda: devcluster.status(case.cluster).healthy)


def clock_off(seconds: int) -> Injection:
    """Have a node's clock, for its NodeManager and all in its containers, go ahead or behind."""

    @contextlib.contextmanager
    def inject(case: Case) -> Iterator[None]:
        host = case.host()
        pid = pid_of(case.cluster, host)
        command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
        pairs = Path(f"/proc/{pid}/environ").read_text().split("\0")[:-1]
        clock = {
            "LD_PRELOAD": _libfaketime(),
            "FAKETIME": f"{seconds:+d}",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            # Else each wait of the JVM returns at once, and it takes all cores.
            "FAKETIME_FORCE_MONOTONIC_FIX": "0",
        }
        site = ClusterLayout.at(case.cluster).conf(host) / "yarn-site.xml"
        kill_daemon(case.cluster, host)
        # `up` writes the file anew.
        properties = "".join(
            f"<property><name>yarn.nodemanager.admin-env.{name}</name><value>{value}</value>"
            "</property>"
            for name, value in clock.items()
        )
        end = "</configuration>"
        site.write_text(site.read_text().replace(end, properties + end))
        environ = dict(pair.split("=", 1) for pair in pairs) | clock
        with (case.cluster / "logs" / "other-clock.log").open("w") as log:
            node = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
        try:
            assert until(lambda: abs(_clock_of(case.manager, host) - seconds) < 600)
            yield
        finally:
            node.kill()
            node.wait()
            devcluster.up(case.cluster, say=lambda _: None)
            assert until(lambda: devcluster.status(case.cluster).healthy)

    return inject


def _libfaketime() -> str:
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    assert found, "install libfaketime: apt install faketime (Debian and Ubuntu)"
    return str(found[0])


def _clock_of(manager: ClusterManager, host: str) -> float:
    """Return how far a NodeManager's clock was ahead of ours at its last report."""
    assert isinstance(manager, YarnManager)
    nodes = manager.resource_manager.ask("/ws/v1/cluster/nodes")["nodes"]["node"]
    (reported,) = (one["lastHealthUpdate"] for one in nodes if one["nodeHostName"] == host)
    return float(reported) / 1000 - time.time()


def restarted(daemon: str) -> Injection:
    """Kill a daemon of the masters, and start it again at once."""

    @contextlib.contextmanager
    def inject(case: Case) -> Iterator[None]:
        kill_daemon(case.cluster, daemon)
        devcluster.up(case.cluster, say=lambda _: None)
        yield

    return inject


@contextlib.contextmanager
def safe_mode(case: Case) -> Iterator[None]:
    """Put the NameNode into safe mode for some seconds, in which the launch ends."""
    jvm, conf = case.spark.sparkContext._jvm, case.spark.sparkContext._jsc.hadoopConfiguration()
    files = jvm.org.apache.hadoop.fs.FileSystem.get(conf)
    actions = jvm.org.apache.hadoop.fs.SafeModeAction
    assert files.setSafeMode(actions.ENTER)
    leaves = threading.Timer(5.0, lambda: files.setSafeMode(actions.LEAVE))
    leaves.start()
    try:
        yield
    finally:
        leaves.join()
        assert not files.setSafeMode(actions.LEAVE)


@contextlib.contextmanager
def no_quota(case: Case) -> Iterator[None]:
    """Leave no room for another byte below the models' directory."""
    jvm, conf = case.spark.sparkContext._jvm, case.spark.sparkContext._jsc.hadoopConfiguration()
    files = jvm.org.apache.hadoop.fs.FileSystem.get(conf)
    models = jvm.org.apache.hadoop.fs.Path((case.root / "models").url)
    none = 9223372036854775807  # HdfsConstants.QUOTA_DONT_SET
    files.mkdirs(models)
    files.setQuota(models, none, 1)
    try:
        case.launch.go()
        yield
    finally:
        files.setQuota(models, none, -1)


def sockets_of(pids: Iterable[int]) -> set[str]:
    """Return the inodes of all sockets of some processes."""
    found = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):
                found.add(str(descriptor.readlink()).removeprefix("socket:[").removesuffix("]"))
    return found


def connections_near(pids: Iterable[int]) -> dict[tuple[str, str], str]:
    """Return the inodes of the TCP connections in the networks of processes, by both ends."""
    networks = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            networks[Path(f"/proc/{pid}/ns/net").readlink()] = pid
    found = {}
    for pid in networks.values():
        for table in ("tcp", "tcp6"):
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                    fields = line.split()
                    if fields[3] == "01":
                        local, remote = map(_end_of, fields[1:3])
                        found[local, remote] = fields[9]
    return found


def _end_of(field: str) -> str:
    """Return address and port of an end, the same for IPv4 and for IPv4 in a socket of IPv6."""
    address, _, port = field.rpartition(":")
    return f"{address[-8:]}:{port}"


def ports_between(here: Iterable[int], there: Iterable[int]) -> set[int]:
    """Return the ports of the second processes' TCP connections with the first ones."""
    here, there = list(here), list(there)
    own, others = sockets_of(here), sockets_of(there)
    connections = connections_near([*here, *there])
    return {
        int(local.rpartition(":")[2], 16)
        for (local, remote), inode in connections.items()
        if inode in others and connections.get((remote, local)) in own
    }


def has_own_network() -> bool:
    """Return whether this process has a network without a way out, as `make faults` gives it.

    A cluster on Kubernetes adds an interface to it, which leads to its pods.
    """
    names = {name for _, name in socket.if_nameindex()}
    return names == {"lo"} or names == {"lo", *(n for n in names if n.startswith(INTERFACE))}


def _ip(*words: object) -> None:
    subprocess.run(["ip", *map(str, words)], check=True, capture_output=True)


Rule = tuple[object, ...]


def _rules_of_ports(case: Case, containers: Collection[str]) -> list[Rule]:
    """Return rules of routing that drop what the driver and containers of this machine send."""
    there = [pid for pid, one in processes_in_containers(case.cluster).items() if one in containers]
    ports = ports_between(family(os.getpid()), there)
    assert ports, "no connections"
    return [
        ("pref", 10, "ipproto", "tcp", end, port, "blackhole")
        for port in ports
        for end in ("sport", "dport")
    ]


def _rules_of_pods(case: Case, containers: Collection[str]) -> list[Rule]:
    """Return rules of routing that drop what the driver and pods send."""
    names = [container.rpartition("/")[2] for container in containers]
    pods = (case.kubectl("get", "pod", name, is_json=True) for name in names)
    addresses = [pod["status"]["podIP"] for pod in pods]
    return [
        ("pref", 10, way, address, "blackhole") for address in addresses for way in ("from", "to")
    ]


@contextlib.contextmanager
def cut_off(case: Case) -> Iterator[None]:
    """Drop all that the driver and the containers of one node say to each other, for 60 s."""
    assert has_own_network(), "run it by: make faults"
    host = case.victim().host
    containers = {note.container for note in case.launch.notes() if note.host == host}
    if case.is_on_kubernetes:
        rules = _rules_of_pods(case, containers)
    else:
        rules = _rules_of_ports(case, containers)
    # Rules count in their order, and that of local addresses is the first.
    _ip("rule", "add", "pref", 100, "lookup", "local")
    _ip("rule", "del", "pref", 0)
    for rule in rules:
        _ip("rule", "add", *rule)
    _ip("route", "flush", "cache")
    over = time.monotonic() + _CUT_SECONDS
    case.launch.go_elsewhere(host)
    try:
        yield
        time.sleep(max(over - time.monotonic(), 0.0))  # nobody tells
    finally:
        for rule in rules:
            _ip("rule", "del", *rule)
        _ip("rule", "add", "pref", 0, "lookup", "local")
        _ip("rule", "del", "pref", 100)


def driver_of(case: Case) -> int:
    assert isinstance(case.launch, DriverLaunch)
    return case.launch.driver.pid


@contextlib.contextmanager
def driver_interrupted(case: Case) -> Iterator[None]:
    os.kill(driver_of(case), signal.SIGINT)
    yield


@contextlib.contextmanager
def driver_killed(case: Case) -> Iterator[None]:
    os.kill(driver_of(case), signal.SIGKILL)
    yield


@contextlib.contextmanager
def driver_frozen(case: Case) -> Iterator[None]:
    """Freeze the driver until its ranks have ended."""
    pids = [case.pid(note) for note in case.launch.notes()]
    signal_all(driver_of(case), signal.SIGSTOP)
    try:
        assert until(lambda: all(map(gone, pids)), 6 * HEARTBEAT_SECONDS), "ranks live on"
    finally:
        signal_all(driver_of(case), signal.SIGCONT)
    yield


def cancelled_at(state: str) -> Injection:
    """Cancel the launch at a state, or at the next one if it was short."""

    @contextlib.contextmanager
    def inject(case: Case) -> Iterator[None]:
        launch = case.launch
        assert isinstance(launch, OwnLaunch) and launch.run is not None
        at = STATES.index(state)

        def reached() -> bool:
            return launch.state not in STATES[:at]

        assert until(reached, step=0.002)
        launch.run.cancel()
        yield

    return inject


@contextlib.contextmanager
def cancelled_from_outside(case: Case) -> Iterator[None]:
    """Do what `hopsgpu runs cancel` does."""
    store = RunStore(case.root.url)
    (run_id,) = (case.root / "runs").names(only_directories=True)
    store.ask_to_cancel(run_id)
    yield


@contextlib.contextmanager
def another_holds_all(case: Case) -> Iterator[None]:
    """Have another gang hold all GPUs, from before the launch on."""
    with hopsgpu.hold(workers=4, **SMALL):
        yield


@contextlib.contextmanager
def another_wants(case: Case) -> Iterator[None]:
    """Have another gang want three of the four GPUs, which must get them at last."""
    other = hopsgpu.submit(os.getpid, workers=3, **SMALL)
    try:
        yield
    except BaseException:
        other.cancel()
        raise
    finally:
        assert other.wait(HANG_SECONDS), "the other gang does not end"
    assert len(other.result().values) == 3


@contextlib.contextmanager
def preempted(case: Case) -> Iterator[None]:
    """Have an application of a queue with a guarantee want two of the GPUs that all are in use."""
    other = start_script({**os.environ}, _PREEMPTS, OTHER_QUEUE)
    try:
        assert other.stdout is not None and other.stdout.readline() == "asks\n"
        if case.launch.kind is Kind.SEARCH:
            # The trials that are left end: theirs is the room for the others.
            pids = [note.pid for note in case.launch.notes()]
            assert until(lambda: any(map(gone, pids))), "nothing is preempted"
            case.launch.go()
        yield
    finally:
        other.kill()
        other.communicate()


@contextlib.contextmanager
def nothing(case: Case) -> Iterator[None]:
    """Leave it to what is launched."""
    yield


@contextlib.contextmanager
def port_taken(case: Case) -> Iterator[None]:
    """Listen on the only port that the control channel may have, at all addresses."""
    with socket.create_server(("", 0)) as taken, _variable("HOPSGPU_PORTS") as give:
        port = taken.getsockname()[1]
        give(f"{port}-{port}")
        yield


@contextlib.contextmanager
def _variable(name: str) -> Iterator[Callable[[str], None]]:
    def give(value: str) -> None:
        os.environ[name] = value

    before = os.environ.get(name)
    try:
        yield give
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


def listening() -> list[tuple[str, int]]:
    """Return the TCP sockets on which this process listens."""
    inodes = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(str(descriptor.readlink()))
    found = []
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
            address, port = fields[1].split(":")
            host = socket.inet_ntoa(bytes.fromhex(address)[::-1])
            found.append((host, int(port, 16)))
    return found


@contextlib.contextmanager
def strangers(case: Case) -> Iterator[None]:
    """Connect to the control channel: say nothing, go at once, or talk nonsense."""
    ranks = processes_in_containers(case.cluster)
    # Spark listens too, and serves one connection after the other on some ports.
    ports = ports_between(ranks, [os.getpid()])
    places = [place for place in listening() if place[1] in ports]
    assert places, "no control channel"
    with contextlib.ExitStack() as stack:
        for place in places:
            for said in (None, b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 65536, b"\0" * 8):
                connection = stack.enter_context(socket.create_connection(place, 5))
                # Who listens may hang up before all is said.
                with contextlib.suppress(OSError):
                    if said is None:
                        connection.close()
                    elif said:
                        connection.sendall(said)
        time.sleep(1.0)  # what they have said is read
        yield


@contextlib.contextmanager
def discovery_fails(case: Case) -> Iterator[None]:
    """Have the nvidia-smi of one node fail."""
    with said_by(case.cluster / "nodes" / "node2", lambda _: "#!/bin/sh\nexit 9\n"):
        yield


def ends_first(says: str, error: str = "RankFailed") -> Raises:
    """Return the end of a launch by the failure of rank 1."""
    return Raises(error, rf"rank 1 on node\d \(container \S+, GPU GPU-\S+\) {says}")


def loses(says: str) -> tuple[Raises, GoesOn, GoesOn]:
    """Return what a loss does to each kind."""
    return Raises("RankFailed", says), GoesOn(says), GoesOn()


LOST = r"the executor of rank 1 on node\d was lost \(container \S+\): "


def unpicklable() -> Callable[..., bool]:
    """Return a function that refers to what cannot be pickled."""
    lock = threading.Lock()

    def refer(*given: object, **more: object) -> bool:
        return lock.locked()

    return refer


BAD_GPU = Raises("GangTimeout", r" GPU-(?!GPU-)\S+ of node2 is bad: nvidia-smi failed")

# Launches that hold, or want, all GPUs of the cluster.
ALL_GPUS: Mapping[Kind, Mapping[str, Any]] = {
    Kind.GANG: {"workers": 4},
    Kind.ELASTIC: {"workers": (1, 4)},
    Kind.SEARCH: {"trials": 4, "max_concurrent": 4},
}

# Launches that do not fit one node, of which elastic ones and searches can do with one.
MORE_THAN_A_NODE: Mapping[Kind, Mapping[str, Any]] = {
    Kind.GANG: {"workers": 4},
    Kind.ELASTIC: {"workers": (1, 4)},
    Kind.SEARCH: {"max_concurrent": 4},
}

COMMON_FAULTS = (
    Fault(
        "a rank raises",
        each(
            ends_first("raised ValueError: it has had enough"),
            ends_first("raised ValueError: it has had enough"),
            TrialFails("ValueError: it has had enough"),
        ),
        ordered("raises"),
    ),
    Fault(
        "a rank exits with 9",
        each(
            ends_first("called sys.exit: exit code 9"),
            ends_first("called sys.exit: exit code 9"),
            TrialFails("called sys.exit: exit code 9"),
        ),
        ordered("exits"),
    ),
    Fault(
        "a rank is killed (SIGKILL)",
        each(
            ends_first("was ended by SIGKILL"),
            GoesOn("was ended by SIGKILL"),
            TrialFails("was ended by SIGKILL"),
        ),
        ordered("is killed"),
    ),
    Fault(
        "a rank hangs (`run_timeout`)",
        each(
            ends_first("was still running after run_timeout=15 s", "RunTimeout"),
            ends_first("was still running after run_timeout=15 s", "RunTimeout"),
            TrialFails("15 s"),
        ),
        hangs,
        options={"run_timeout": "15s"},
    ),
    Fault("a rank floods its log (64 MiB)", everywhere(Unharmed()), ordered("floods")),
    Fault(
        "a rank is out of memory",
        each(
            ends_first("exceeded its memory limit"),
            ends_first("exceeded its memory limit"),
            TrialFails("exceeded its memory limit"),
        ),
        ordered("fills memory"),
    ),
    Fault(
        "a rank's disk is full",
        each(
            ends_first(r"raised OSError: \[Errno 28\].*: the disk of node\d is full"),
            ends_first(r"raised OSError: \[Errno 28\].*: the disk of node\d is full"),
            TrialFails(r"the disk of node\d is full"),
        ),
        ordered("fills its disk"),
    ),
    Fault(
        "a rank's GPU is lost",
        each(
            ends_first(r"raised RuntimeError: CUDA error: GPU is lost: GPU GPU-\S+ of node\d"),
            GoesOn(r"GPU GPU-\S+ of node\d is broken or lost"),
            TrialFails(r"GPU GPU-\S+ of node\d is broken or lost"),
        ),
        ordered("loses its GPU"),
    ),
    Fault("the executor is killed", each(*loses(LOST)), killed(executor_of)),
    Fault(
        "the executor's JVM is frozen",
        everywhere(Unharmed()),
        frozen(executor_of),
        managers=(STANDALONE, KUBERNETES),
    ),
    Fault("the agent is killed", each(*loses(LOST)), killed(agent_of)),
    Fault(
        "the agent is frozen",
        each(*loses(LOST + f"no heartbeat for {HEARTBEAT_SECONDS} s")),
        frozen(agent_of),
    ),
    Fault(
        "the process daemon is killed",
        each(
            ends_first("was ended by SIG"),
            GoesOn("was ended by SIG"),
            TrialFails("was ended by SIG"),
        ),
        killed(process_daemon_of),
        # The last one runs where the killed process was.
        of_kind={Kind.SEARCH: {"trials": 3}},
    ),
    Fault(
        "the fork server is killed",
        each(
            ends_first("was ended by SIG"),
            GoesOn("was ended by SIG"),
            TrialFails("was ended by SIG"),
        ),
        fork_server_killed,
        # The last one runs where the killed process was.
        of_kind={Kind.SEARCH: {"trials": 3}},
    ),
    Fault(
        "the NodeManager is killed, and stays away",
        each(
            Raises("RankFailed", r"its NodeManager was lost: it did not report"),
            GoesOn(r"its NodeManager was lost: it did not report"),
            GoesOn(),
        ),
        node_daemon_killed,
        holds_up=True,
        options={"placement": "spread"},
        # So many that some are on each node.
        of_kind={Kind.SEARCH: {"trials": 4, "max_concurrent": 4}},
        managers=(YARN,),
    ),
    Fault(
        "the standalone worker is killed, and stays away",
        {Kind.GANG: Raises("RankFailed", r"its worker is DEAD")},
        node_daemon_killed,
        holds_up=True,
        options={"placement": "spread"},
        managers=(STANDALONE,),
    ),
    Fault(
        "the network between driver and node is cut for 60 s",
        each(
            Raises("RankFailed", f"no heartbeat for {HEARTBEAT_SECONDS} s"),
            GoesOn(f"no heartbeat for {HEARTBEAT_SECONDS} s"),
            GoesOn(),
        ),
        cut_off,
        options={"placement": "spread"},
        # So many that some are on each node.
        of_kind={Kind.SEARCH: {"trials": 4, "max_concurrent": 4}},
        managers=(YARN, KUBERNETES),
    ),
    Fault(
        "the ResourceManager is restarted",
        everywhere(Unharmed()),
        restarted(RESOURCEMANAGERS[0]),
        managers=(YARN,),
    ),
    Fault(
        "the standalone master is restarted",
        {Kind.GANG: Unharmed()},
        restarted(SPARK_MASTERS[0]),
        managers=(STANDALONE,),
    ),
    Fault("the NameNode is in safe mode for 5 s", everywhere(Unharmed()), safe_mode),
    Fault("the NameNode is restarted", everywhere(Unharmed()), restarted(NAMENODE)),
    Fault("the DataNode is restarted", everywhere(Unharmed()), restarted(DATANODE)),
    Fault(
        "the lake's quota is full",
        {
            Kind.GANG: Raises("StoreError", "quota"),
            Kind.ELASTIC: Raises("StoreError", "quota"),
        },
        no_quota,
        not_for={Kind.SEARCH: "its trials publish no model"},
    ),
    Fault(
        "the driver is interrupted (Ctrl-C)",
        everywhere(Raises("KeyboardInterrupt", "")),
        driver_interrupted,
        driver=True,
    ),
    Fault(
        "the driver is killed (SIGKILL)",
        everywhere(Raises("killed", "")),
        driver_killed,
        driver=True,
    ),
    Fault(
        "the driver is frozen",
        each(
            Raises("RankFailed", r"the executor of rank \d on node\d was lost"),
            GoesOn(r"the executor of rank \d on node\d was lost"),
            GoesOn(),
        ),
        driver_frozen,
        driver=True,
    ),
    *(
        Fault(
            f"the launch is cancelled while {state}",
            {
                Kind.GANG: Raises("Cancelled", "was cancelled"),
                Kind.ELASTIC: Raises("Cancelled", "was cancelled"),
            },
            cancelled_at(state),
            early=True,
            not_for={Kind.SEARCH: "a search is cancelled from outside"},
        )
        for state in STATES[:-1]
    ),
    Fault(
        "the launch is cancelled from outside while running",
        each(
            Raises("Cancelled", "was cancelled"),
            Raises("Cancelled", "was cancelled"),
            Raises("Cancelled", "was cancelled"),
        ),
        cancelled_from_outside,
    ),
    Fault(
        "`acquire_timeout` passes",
        everywhere(Raises("GangTimeout", r"this application uses 4 GPUs")),
        another_holds_all,
        before=True,
        early=True,
        launches=True,
        options={"acquire_timeout": "6s"},
    ),
    Fault(
        "another gang competes for the GPUs",
        everywhere(Unharmed()),
        another_wants,
        before=True,
        early=True,
        launches=True,
        options={"acquire_timeout": "5m"},
        of_kind={
            Kind.GANG: {"workers": 3},
            Kind.ELASTIC: {"workers": (2, 4)},
            Kind.SEARCH: {"trials": 4, "max_concurrent": 4},
        },
    ),
    Fault(
        "another gang waits for its GPUs",
        {Kind.GANG: Unharmed(), Kind.ELASTIC: GoesOn(), Kind.SEARCH: Unharmed()},
        another_wants,
        launches=True,
        of_kind=ALL_GPUS,
    ),
    Fault(
        "containers are preempted",
        each(Raises("RankFailed", "preempt"), GoesOn("preempt"), GoesOn()),
        preempted,
        launches=True,
        of_kind=ALL_GPUS,
        managers=(YARN,),
    ),
    Fault(
        "the discovery of GPUs fails on one node",
        each(Raises("GangTimeout", "ended unexpectedly on node2"), Unharmed(), Unharmed()),
        discovery_fails,
        before=True,
        early=True,
        options={"acquire_timeout": "40s"},
        of_kind=MORE_THAN_A_NODE,
        # The executors start: the worker has listed its GPUs before, and a pod gets their names.
        on_standalone=BAD_GPU,
        on_kubernetes={Kind.GANG: BAD_GPU},
    ),
    Fault(
        "a node's clock is an hour ahead",
        each(
            Raises("GangTimeout", r"ended unexpectedly on node\d.*the node.s clock"),
            Unharmed(),
            Unharmed(),
        ),
        clock_off(3600),
        before=True,
        early=True,
        options={"acquire_timeout": "40s"},
        of_kind=MORE_THAN_A_NODE,
        managers=(YARN,),
        not_on={KUBERNETES: "all pods have the clock of this machine"},
    ),
    Fault(
        "the function cannot be pickled",
        everywhere(Raises("ConfigError", "lock")),
        nothing,
        early=True,
        options={"train_fn": unpicklable()},
    ),
    Fault(
        "the executors' Python has another version",
        everywhere(Raises("ConfigError", r"the executors' Python .*3\.9.*but the driver's is")),
        nothing,
        early=True,
        driver=True,
        environ={"PYSPARK_PYTHON": "/usr/bin/python3.9"},
    ),
    Fault(
        "the control channel's port is taken",
        everywhere(Raises("ConfigError", r"spark\.hopsgpu\.ports")),
        port_taken,
        before=True,
        early=True,
    ),
    Fault("strangers connect to the control channel", everywhere(Unharmed()), strangers),
)
