"""The doctor's facts: of a node, of this machine, logs over HTTP, Hadoop's configuration."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hopsgpu.backends.spark import spark_versions
from hopsgpu.cluster_managers.resources import NOTHING, Amount
from hopsgpu.cluster_managers.snapshot import Node, Queue, Snapshot, User
from hopsgpu.cluster_managers.yarn.node_manager import NodeManagers
from hopsgpu.cluster_managers.yarn.resource_manager import ResourceManager
from hopsgpu.core.run_values import RunStatus
from hopsgpu.core.spec import ExecutorShape
from hopsgpu.devcluster.site_files import xml_text
from hopsgpu.doctor import facts as gather
from hopsgpu.doctor import node_probe, probe_gang, session_checks
from hopsgpu.doctor.container_logs import ContainerLogs, last_reason
from hopsgpu.doctor.machine_checks import DriverMachine
from hopsgpu.doctor.probe_session import first_cause
from hopsgpu.doctor.yarn_probe import YarnProbe
from hopsgpu.errors import GangTimeout, HopsGpuError
from hopsgpu.storage.bounded_calls import BoundedCall
from tests.bounds import HANG_SECONDS
from tests.unit.cluster_managers.test_cluster_gpus import yarn_answers
from tests.unit.cluster_managers.test_resource_manager import Ticket
from tests.unit.doctor.test_checks import CLUSTER, NODE, gpu_node, gpus
from tests.unit.rest import serving


def test_the_version_of_a_java_is_in_its_directory(tmp_path: Path) -> None:
    (tmp_path / "release").write_text('IMPLEMENTOR="x"\nJAVA_VERSION="17.0.15"\nOS_NAME="Linux"\n')
    assert spark_versions.java_version(tmp_path) == "17.0.15"
    assert spark_versions.java_version(tmp_path / "none") == ""


def test_the_version_of_an_executors_spark_is_on_its_class_path(tmp_path: Path) -> None:
    for name in ("spark-core_2.13-4.3.0.jar", "spark-sql_2.13-4.3.0.jar"):
        (tmp_path / "libs" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "libs" / name).touch()
    path = {"CLASSPATH": "{{PWD}}:{{PWD}}/other/*:{{PWD}}/libs/*:/etc/hadoop"}
    assert node_probe.spark_version(path, tmp_path) == "4.3.0"
    assert node_probe.spark_version(path, tmp_path / "none") == ""
    (tmp_path / "libs" / "spark-core_2.13-4.3.0.jar").rename(
        tmp_path / "libs" / "spark-core_2.13-4.4.0-SNAPSHOT.jar"
    )
    assert spark_versions.jar_version(tmp_path / "libs") == "4.4.0-SNAPSHOT"
    (tmp_path / "libs").rename(tmp_path / "jars")
    worker = {"SPARK_HOME": str(tmp_path)}
    assert node_probe.spark_version(worker, tmp_path / "none") == "4.4.0-SNAPSHOT"
    assert node_probe.spark_version({**worker, **path}, tmp_path / "none") == ""


LOOKS = """
import json, sys
from hopsgpu.doctor.node_probe import frameworks
found = {f.name: [f.version, f.cuda] for f in frameworks()}
print(json.dumps([found, sorted({"torch", "tensorflow", "jax"} & sys.modules.keys())]))
"""


def test_frameworks_are_told_without_importing_them(tmp_path: Path) -> None:
    """The packages are fakes with the files that are read."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "torch" / "version.py").write_text("__version__ = '9.1+cu126'\ncuda = '12.6'\n")
    built = tmp_path / "tensorflow" / "python" / "platform"
    built.mkdir(parents=True)
    (tmp_path / "tensorflow" / "__init__.py").write_text("raise RuntimeError('imported')")
    (built / "build_info.py").write_text("build_info = {'cuda_version': '12.5.1'}\n")
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("raise RuntimeError('imported')")
    for name, version in (("tensorflow", "9.2"), ("jax", "9.3"), ("jax_cuda13_plugin", "9.3")):
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).resolve().parents[3]}"}
    ran = subprocess.run(
        [sys.executable, "-c", LOOKS], env=env, capture_output=True, text=True, check=True
    )
    expected = {
        "torch": ["9.1+cu126", "12.6"],
        "tensorflow": ["9.2", "12.5.1"],
        "jax": ["9.3", "13"],
    }
    assert json.loads(ran.stdout) == [expected, []]


class _Yarn(BaseHTTPRequestHandler):
    """A stand-in for a NodeManager with one log, and a ResourceManager; both want a ticket."""

    log = b"starting\nERROR Executor: x\nhopsgpu discovery: no nvidia-smi here\n\tat java.x\n"
    app: Mapping[str, Any] = {"id": "application_1_2", "user": "a b", "state": "ACCEPTED"}

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/ws/v1/node/containers/container_e1_2_3/logs/stderr":
            self._answer(200, self.log)
        elif path == "/ws/v1/cluster/apps":
            self._answer(200, json.dumps({"apps": {"app": [self.app]}}).encode())
        else:
            self._answer(404, b"no such thing")

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(self.server.refuses or 202, body)  # type: ignore[attr-defined]

    def _answer(self, status: int, body: bytes) -> None:
        if self.headers.get("Authorization") != f"Negotiate {Ticket.token}":
            status, body = 401, b"who are you?"
        elif self.command == "PUT" and status == 202:
            self.server.put = (self.path, json.loads(body))  # type: ignore[attr-defined]
            self.server.killed.set()  # type: ignore[attr-defined]
        self.send_response(status)
        if status == 401:
            self.send_header("WWW-Authenticate", "Negotiate")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    package = types.SimpleNamespace(HTTPSPNEGOAuth=Ticket)
    monkeypatch.setitem(sys.modules, "requests_gssapi", package)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Yarn) as server:
        server.refuses = 0  # type: ignore[attr-defined]
        server.killed = threading.Event()  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def logs(daemon: Any, tmp_path: Path) -> ContainerLogs:
    (tmp_path / "hosts").write_text("127.0.0.1 a b\n")
    setting = {"hopsgpu.hosts": str(tmp_path / "hosts")}.get
    nodes = [
        # Nobody listens on port 1.
        Node("a:1", "a", "RUNNING", NOTHING, NOTHING, web="a:1"),
        Node("b:1", "b", "RUNNING", NOTHING, NOTHING, web=f"b:{daemon.server_port}"),
    ]
    return ContainerLogs(nodes, NodeManagers(setting))


def test_why_a_container_ended_is_in_its_nodes_log(logs: ContainerLogs) -> None:
    assert logs.reason("container_e1_2_3", "b") == "no nvidia-smi here"
    with pytest.raises(HopsGpuError, match="HTTP 404"):
        logs.reason("container_e1_2_4", "b")
    with pytest.raises(HopsGpuError, match="Connection refused"):
        logs.reason("container_e1_2_3", "a")
    with pytest.raises(HopsGpuError, match="reports no NodeManager on elsewhere"):
        logs.reason("container_e1_2_3", "elsewhere")


@pytest.mark.parametrize("refuses", [0, 403])
def test_an_application_that_does_not_start_is_killed_where_a_ticket_is_wanted(
    daemon: Any, refuses: int
) -> None:
    daemon.refuses = refuses

    def start() -> None:
        daemon.killed.wait(HANG_SECONDS)
        raise OSError("Application application_1_2 was killed")

    starting = BoundedCall("starts", start)
    no_logs: Any = None
    manager = ResourceManager(("http://127.0.0.1:1", f"http://127.0.0.1:{daemon.server_port}"))
    try:
        probe = YarnProbe(CLUSTER.gpus, (), {}, manager, no_logs)
        waited = "the application has not started within 7 s"
        said, fix = probe.give_up("tag", waited, starting)
    finally:
        daemon.killed.set()
    assert "maximum-am-resource-percent" in fix
    assert said.startswith("the application has not started within 7 s; it is ACCEPTED: no reason")
    if refuses:
        assert "it is still running (http://127.0.0.1:1: Connection refused; " in said
        assert "HTTP 403 Forbidden" in said
        assert said.endswith("yarn application -kill application_1_2")
    else:
        assert "left behind" not in said
        path = "/ws/v1/cluster/apps/application_1_2/state?user.name=a%20b"
        assert daemon.put == (path, {"state": "KILLED"})


@pytest.mark.parametrize("name", ["fair", "capacity_half"])
def test_the_resource_manager_knows_gpus_where_a_node_has_some(name: str) -> None:
    """A FairScheduler, and an old CapacityScheduler, report no sum over all partitions."""
    info = {"clusterInfo": {"resourceManagerVersion": "3.1.1"}}
    rest = {"/ws/v1/cluster/info": info, "/ws/v1/cluster/metrics": {"clusterMetrics": {}}}
    with serving({**yarn_answers(name), **rest}) as manager:
        setting = {"yarn.resourcemanager.webapp.address": manager.address}.get
        assert gather.yarn_facts(setting, "yarn.io/gpu").has_gpu_type
        for one in manager.answers["/ws/v1/cluster/nodes"]["nodes"]["node"]:
            one["totalResource"] = one["usedResource"] = {}
        assert not gather.yarn_facts(setting, "yarn.io/gpu").has_gpu_type


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("x\n26/11/21 ERROR Main: y\nz\n", "26/11/21 ERROR Main: y"),
        ("java.io.IOException: gone\n\tat a.b\n", "java.io.IOException: gone"),
        ("x\ny\n\n", "y"),
        # What the script writes of its choice is no reason for an end.
        ("hopsgpu discovery INFO: gives out GPU-1, healthy\nERROR Main: y\n", "ERROR Main: y"),
        ("", ""),
    ],
)
def test_without_the_scripts_word_the_last_error_counts(log: str, reason: str) -> None:
    assert last_reason(log) == reason


def waiting(hosts: tuple[str, ...] = (), why: str = "YARN has not granted 1") -> RunStatus:
    return RunStatus("r", "waiting", 0, len(hosts), 2, hosts, why, 1.0)


def test_a_gang_whose_containers_end_again_is_not_waited_for(logs: ContainerLogs) -> None:
    watched = probe_gang._GangWatch(["a", "b"], logs.reason)
    watched.record(waiting(), {})
    assert not watched.is_decided
    watched.record(waiting(), {"container_e1_2_3": "b", "container_e1_2_5": "elsewhere"})
    assert watched.failed == {"b": "no nvidia-smi here"}
    assert not watched.is_decided
    watched.record(waiting(("a",)), {"container_e1_2_3": "b"})
    assert watched.is_decided


class _BusyLogs:
    def __init__(self) -> None:
        self.answers = [HopsGpuError("not now"), "no nvidia-smi here"]

    def reason(self, container: str, host: str) -> str:
        assert (container, host) == ("container_1", "b")
        answer = self.answers.pop(0)
        if isinstance(answer, HopsGpuError):
            raise answer
        return answer


def test_a_log_that_cannot_be_read_is_tried_again() -> None:
    logs: Any = _BusyLogs()
    watched = probe_gang._GangWatch(["a", "b"], logs.reason)
    watched.record(waiting(("a",)), {"container_1": "b"})
    assert not watched.is_decided
    watched.record(waiting(("a",)), {"container_1": "b"})
    assert watched.failed == {"b": "no nvidia-smi here"}
    assert watched.is_decided
    watched.record(waiting(("a",)), {"container_1": "b"})  # is not read again


def test_a_log_is_tried_once_more_when_the_gang_ends() -> None:
    logs: Any = _BusyLogs()
    watched = probe_gang._GangWatch(["a", "b"], logs.reason)
    watched.record(waiting(("a",)), {"container_1": "b"})
    late = GangTimeout("1 of 2 executors came", granted=1, wanted=2)
    assert watched.failure_result(late).failed == {"b": "no nvidia-smi here"}


def test_a_container_that_ended_without_a_log_has_failed(logs: ContainerLogs) -> None:
    late = GangTimeout("1 of 2 executors came", granted=1, wanted=2)
    watched = probe_gang._GangWatch(["a", "b"], logs.reason)
    watched.record(waiting(("b",)), {"container_1": "a", "container_2": "b"})
    found = watched.failure_result(late)
    (why,) = found.failed.values()
    assert "container_1" in why and "Connection refused" in why
    assert set(found.uninspected) == {"b"}


def watched_gang(came: tuple[str, ...], failed: dict[str, str]) -> Any:
    watched = probe_gang._GangWatch(["a", "b", "c"], _BusyLogs().reason)
    watched.record(waiting(came), {})
    watched.failed.update(failed)
    return watched


def test_a_node_that_is_slow_does_not_keep_the_others_from_being_looked_at() -> None:
    late = GangTimeout("2 of 3 executors came", granted=2, wanted=3)
    found = watched_gang(("a", "c"), {}).failure_result(late)
    assert (set(found.skipped), set(found.uninspected)) == ({"b"}, {"a", "c"})
    assert "YARN has not granted 1" in found.skipped["b"] and found.uninspected["a"]
    # Nothing says which of them would do better.
    assert watched_gang((), {}).failure_result(late).uninspected == {}
    failed = {"b": "no nvidia-smi"}
    found = watched_gang(("a",), failed).failure_result(late)
    assert (found.failed, set(found.skipped), set(found.uninspected)) == (failed, {"c"}, {"a"})
    # One that fails may have kept the others from coming, or have ended the application.
    for found in (
        watched_gang((), failed).failure_result(late),
        watched_gang(("a",), failed).failure_result(OSError("no")),
    ):
        assert (found.failed, found.skipped, set(found.uninspected)) == (failed, {}, {"a", "c"})
    # What is no matter of nodes would befall another gang too.
    found = watched_gang(("a",), {}).failure_result(OSError("no"))
    assert found.uninspected == {}
    assert found.skipped == dict.fromkeys("abc", "the gang failed")


class _Sessions:
    """Applications in which some nodes are slow, and one fails; records what each leaves out."""

    def __init__(self, slow: list[str]) -> None:
        self.slow = slow
        self.excluded: list[str | None] = []

    @contextlib.contextmanager
    def started(self, conf: Mapping[str, str], *_: object) -> Iterator[Any]:
        self.excluded.append(conf.get("spark.yarn.exclude.nodes"))
        yield types.SimpleNamespace(sparkContext=types.SimpleNamespace(applicationId="app"))

    def try_nodes(self, hosts: Sequence[str], *_: object) -> probe_gang.ProbeResult:
        slow = next((host for host in self.slow if host in hosts), None)
        if slow is not None:
            left = {host: "others did not come" for host in hosts if host != slow}
            error = GangTimeout("late", granted=len(left), wanted=len(hosts))
            return probe_gang.ProbeResult(skipped={slow: "slow"}, uninspected=left, error=error)
        return probe_gang.ProbeResult(
            tuple(replace(NODE, host=host) for host in hosts), seconds=1.0
        )


@pytest.mark.parametrize(
    ("slow", "excluded", "state", "seen"),
    [
        ([], ["x"], "ok", "ran on 4 nodes (a, b, c, d)"),
        (["b"], ["x", "x,b"], "unknown", "ran on 3 nodes (a, c, d); 1 not checked"),
        (["b", "d"], ["x", "x,b", "x,b,d"], "unknown", "ran on 2 nodes (a, c); 2 not checked"),
        # It does not go on for ever.
        (["b", "d", "a"], ["x", "x,b", "x,b,d"], "unknown", "ran nowhere; 4 not checked"),
    ],
)
def test_nodes_are_left_out_until_a_gang_is_whole(
    slow: list[str],
    excluded: list[str],
    state: str,
    seen: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    played = _Sessions(slow)
    monkeypatch.setattr(session_checks, "started", played.started)
    monkeypatch.setattr(session_checks, "try_nodes", played.try_nodes)
    hosts = ("a", "b", "c", "d")
    none: Any = None
    cluster = YarnProbe(gpus(*map(gpu_node, hosts)), hosts, {}, none, none)
    here = DriverMachine(17, "", "3.11.7", "", "4.3.0", "4.3.0", "")
    conf = {"spark.yarn.exclude.nodes": "x"}
    doctor = session_checks.Sessions(cluster, here, conf, 1.0)
    checks = {check.name: check for check in doctor.checks()}
    assert played.excluded == excluded
    assert (checks["discovery"].state.value, checks["discovery"].seen) == (state, seen)
    assert checks["gang"].state.value == ("unknown" if len(slow) > 2 else "ok")


class _Application:
    """A stand-in for an application that may have so many executors."""

    def __init__(self, snapshot: Snapshot, most: int) -> None:
        self._snapshot, self._most = snapshot, most
        self.looks = 0

    def snapshot(self, most_seconds: float) -> Snapshot:
        self.looks += 1
        return self._snapshot

    def setting(self, name: str) -> str | None:
        return str(self._most) if name == "spark.dynamicAllocation.maxExecutors" else None


@pytest.mark.parametrize(
    ("queue", "most", "expected"), [(2000, 2000, 1250), (37, 2000, 37), (2000, 40, 40), (0, 9, 1)]
)
def test_how_many_nodes_at_once_is_found_in_one_look(queue: int, most: int, expected: int) -> None:
    big = Amount(8, 64, 2**19)
    nodes = tuple(Node(f"n{i}:1", f"n{i}", "RUNNING", big, NOTHING) for i in range(1250))
    maximum = replace(big * 2000, gpus=queue)
    chain = (Queue("root.q", "RUNNING", True, maximum, big, NOTHING, big),)
    application: Any = _Application(Snapshot("a", "", nodes, chain, User("u")), most)
    assert probe_gang.largest_gang(1250, ExecutorShape(1, 1, 512, 512), application) == expected
    assert application.looks == 1


def test_what_hangs_is_given_up_and_may_be_asked_again() -> None:
    gate = threading.Event()
    hanging = BoundedCall("hangs", lambda: gate.wait(HANG_SECONDS))
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        hanging.result(0.05)
    assert time.monotonic() - began < HANG_SECONDS
    gate.set()
    assert hanging.result(HANG_SECONDS) is True

    def fail() -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        BoundedCall("fails", fail).result(HANG_SECONDS)


def test_the_cause_of_a_java_error_is_its_own_line() -> None:
    error = "An error occurred while calling None.x.\n: java.lang.E: too much\n\tat a.b(C.java)\n"
    assert first_cause(error) == "java.lang.E: too much"
    assert first_cause("plain\nwords") == "plain"
    assert first_cause("") == "no reason given"


def conf_dir(path: Path, **files: dict[str, str]) -> dict[str, str]:
    path.mkdir()
    for name, properties in files.items():
        (path / f"{name.replace('_', '-')}.xml").write_text(xml_text(properties))
    return {"HADOOP_CONF_DIR": str(path)}


def test_the_hadoop_configuration(tmp_path: Path) -> None:
    core = {"fs.defaultFS": "hdfs://nn:8020"}
    site = {"yarn.resourcemanager.hostname": "rm"}
    types = {"yarn.resource-types": " yarn.io/gpu, other"}
    environ = conf_dir(tmp_path / "a", core_site=core, yarn_site=site, resource_types=types)
    client, setting = gather.client_facts(environ)
    assert client.problem == ""
    assert client.managers == ("http://rm:8088",)
    assert client.types == ("yarn.io/gpu", "other")
    assert gather.lake_root({}, {"HADOOP_USER_NAME": "me"}, setting) == (
        "hdfs://nn:8020/user/me/hopsgpu"
    )
    # YARN reads the name in yarn-site.xml too.
    environ = conf_dir(tmp_path / "b", core_site=core, yarn_site={**site, **types})
    assert gather.client_facts(environ)[0].types == ("yarn.io/gpu", "other")
    environ = conf_dir(tmp_path / "c", core_site=core, yarn_site=site)
    assert gather.client_facts(environ)[0].types is None
    (tmp_path / "c" / "resource-types.xml").write_text("<configuration>")
    assert "resource-types.xml" in gather.client_facts(environ)[0].problem
    assert "HADOOP_CONF_DIR" in gather.client_facts({})[0].problem


def test_the_root_of_the_lake_is_named_by_property_then_variable() -> None:
    environ = {"HOPSGPU_ROOT": "hdfs://a/x/"}
    root = gather.lake_root({"spark.hopsgpu.root": "hdfs://b/y"}, environ, lambda name: None)
    assert root == "hdfs://b/y"
    assert gather.lake_root({}, environ, lambda name: None) == "hdfs://a/x"


def test_a_users_number_where_a_container_has_no_name_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nobody(number: int) -> object:
        raise KeyError(number)

    monkeypatch.setattr("pwd.getpwuid", nobody)
    root = gather.lake_root({}, {}, {"fs.defaultFS": "hdfs://a"}.get)
    assert root == f"hdfs://a/user/{os.getuid()}/hopsgpu"


def test_the_lake_is_written_renamed_read_and_left_empty(tmp_path: Path) -> None:
    facts = gather.lake_facts(f"file://{tmp_path}/root")
    assert facts.problem == ""
    assert list((tmp_path / "root").iterdir()) == []
    (tmp_path / "file").touch()
    assert "cannot create" in gather.lake_facts(f"file://{tmp_path}/file/root").problem


def test_this_machine(tmp_path: Path) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'java.specification.version = 1.8'; echo 'java.home = /j'\n")
    java.chmod(0o755)
    (tmp_path / "jars").mkdir()
    (tmp_path / "jars" / "spark-core_2.13-4.1.0.jar").touch()
    environ = {"JAVA_HOME": str(tmp_path), "SPARK_HOME": str(tmp_path), "PATH": "/nowhere"}
    here = gather.machine_facts(environ, {})
    assert (here.java, here.java_at) == (8, f"{java}, by JAVA_HOME")
    assert here.spark == "4.1.0"
    assert here.executors_python == f"{sys.executable} (this Python)"
    assert gather.machine_facts({**environ, "PYSPARK_PYTHON": "py"}, {}).executors_python == (
        "py (PYSPARK_PYTHON)"
    )
    none = gather.machine_facts({"PATH": "/nowhere"}, {"spark.pyspark.python": "./env/python"})
    assert none.java is None
    assert none.executors_python == "./env/python (spark.pyspark.python)"


def test_without_a_cluster_one_line_says_so_and_the_exit_code_is_1() -> None:
    names = ("HADOOP_CONF_DIR", "YARN_CONF_DIR", "HOPSGPU_ROOT")
    env = {name: value for name, value in os.environ.items() if name not in names}

    def ran(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "hopsgpu.cli.main", "doctor", *arguments],
            env=env,
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
            check=False,
        )

    told = ran("--json")
    assert told.returncode == 1
    checks = {check["name"]: check for check in map(json.loads, told.stdout.splitlines())}
    assert checks["hadoop conf"]["state"] == "wrong"
    assert "HADOOP_CONF_DIR" in checks["hadoop conf"]["mend"]
    # What it takes a cluster for is not listed as unknown, again and again.
    assert set(checks) == {"java", "spark", "python", "hadoop conf", "settings"}
    told = ran()
    assert told.returncode == 1
    (about,) = (line for line in told.stdout.splitlines() if "HADOOP_CONF_DIR" in line)
    assert about.split()[:3] == ["wrong", "hadoop", "conf"] and "hopsgpu cluster env" in about
    assert "fix" not in told.stdout and told.stdout.endswith(" 1 wrong, 0 unknown\n")
    told = ran("--conf", "spark.x")
    assert (told.returncode, told.stdout) == (1, "")
    assert told.stderr.startswith("hopsgpu: --conf spark.x: must be NAME=VALUE")
