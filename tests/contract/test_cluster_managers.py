"""One contract of cluster managers: YARN, real standalone masters, and Kubernetes."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from hopsgpu.cluster_managers.kubernetes.kind import Kubernetes
from hopsgpu.cluster_managers.kubernetes.pod_template import DISCOVERY_PATH
from hopsgpu.cluster_managers.manager import ClusterManager
from hopsgpu.cluster_managers.resources import total
from hopsgpu.cluster_managers.snapshot import Snapshot
from hopsgpu.cluster_managers.standalone.manager import StandaloneManager
from hopsgpu.cluster_managers.yarn.manager import YarnManager
from hopsgpu.errors import HopsGpuError
from hopsgpu.storage.spark_defaults import spark_defaults
from tests.bounds import HANG_SECONDS
from tests.conftest import until
from tests.contract.standalone_daemons import Standalone, kill, standalone, write_discovery

DRIVER = Path(__file__).with_name("profile_driver.py")
HOSTS = ("127.0.0.1", "127.0.0.2")
SILENT = "http://127.0.0.1:1"


@dataclass
class Application:
    """A running application of `profile_driver`."""

    id: str
    process: subprocess.Popen[str]

    def command(self, text: str) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{text}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def hold(self, executors: int, gpus: int = 1) -> int:
        return int(self.command(f"hold {executors} {gpus}"))

    def kills(self, profile: int, manager: ClusterManager) -> bool:
        """Kill the executors of a profile; return whether the cluster manager shows none.

        An executor that was granted last registers later.
        """
        self.command(f"kill {profile}")
        held = manager.held_executors(self.id, profile)
        return not held.containers and not held.pending

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(HANG_SECONDS) == 0


@dataclass
class Site:
    """A cluster manager under test.

    Attributes:
        silent: a client of a cluster manager that does not answer.
        unknown: ID of an application that it does not know.
        other: ID of an application of another kind of cluster manager.
        gpus: number of GPUs.
    """

    manager: ClusterManager
    silent: ClusterManager
    master: str
    discovery: Path
    unknown: str
    other: str

    @contextlib.contextmanager
    def application(self, name: str = "contract") -> Iterator[Application]:
        with run_driver(self.master, name, self.discovery) as application:
            yield application


@contextlib.contextmanager
def run_driver(master: str, name: str, discovery: Path) -> Iterator[Application]:
    environ = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    if master.startswith("k8s"):
        # Pods do not reach loopback addresses.
        environ["SPARK_LOCAL_IP"] = os.environ["SPARK_LOCAL_IP"]
    process = subprocess.Popen(
        [sys.executable, str(DRIVER), master, name, str(discovery)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environ,
    )
    with process:
        try:
            assert process.stdout is not None
            yield Application(process.stdout.readline().strip(), process)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def masters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    """A master with two workers, each of which has two GPUs."""
    with standalone(tmp_path_factory.mktemp("standalone")) as cluster:
        cluster.start_master()
        for host in HOSTS:
            cluster.start_worker(host)
        assert until(lambda: running(cluster.manager()) == 2)
        yield cluster


def running(manager: ClusterManager) -> int:
    """The number of running nodes; 0 while the cluster manager does not answer."""
    try:
        return sum(node.state == "RUNNING" for node in manager.nodes())
    except HopsGpuError:
        return 0


@pytest.fixture(
    params=[
        pytest.param("yarn", marks=pytest.mark.yarn),
        "standalone",
        pytest.param("kubernetes", marks=pytest.mark.kubernetes),
    ]
)
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Site:
    discovery = write_discovery(tmp_path)
    if request.param == "yarn":
        setting = {"yarn.resourcemanager.webapp.address": SILENT.partition("//")[2]}.get
        manager = request.getfixturevalue("manager")
        yarn_id = "application_1_0001"
        silent = YarnManager(setting)
        return Site(manager, silent, "yarn", discovery, yarn_id, "app-20260101000000-0009")
    if request.param == "kubernetes":
        return kubernetes_site(request.getfixturevalue("manager"), tmp_path)
    cluster = request.getfixturevalue("masters")
    return Site(
        manager=cluster.manager(),
        silent=StandaloneManager(cluster.url, (SILENT,)),
        master=cluster.url,
        discovery=discovery,
        unknown="app-20260101000000-0009",
        other="application_1_0001",
    )


def kubernetes_site(manager: ClusterManager, directory: Path) -> Site:
    kubeconfig = directory / "silent"
    content = yaml.safe_load(Path(os.environ["KUBECONFIG"]).read_text())
    content["clusters"][0]["cluster"] = {"server": "https://127.0.0.1:1"}
    kubeconfig.write_text(yaml.safe_dump(content))
    silent = Kubernetes().connect(
        {"spark.master": "k8s://https://127.0.0.1:1"}, {"KUBECONFIG": str(kubeconfig)}
    )
    return Site(
        manager=manager,
        silent=silent,
        master=spark_defaults(os.environ)["spark.master"],
        discovery=Path(DISCOVERY_PATH),
        unknown="spark-00000000000000000000000000000000",
        other="application_1_0001",
    )


def app_in(snapshot: Snapshot) -> int:
    """The GPUs that a snapshot's own application has."""
    return total(a.used for a in snapshot.applications if a.id == snapshot.application_id).gpus


def test_what_an_application_has_is_seen_until_it_is_released(site: Site) -> None:
    manager, began = site.manager, time.time()
    used_before, gpu_count = manager.gpus()
    assert running(manager) == 2 and gpu_count == 4
    with site.application() as application:
        id_ = application.id
        assert manager.end_of(id_) == ""
        report = manager.report(id_)
        assert report is not None and not report.has_ended
        user = manager.caller()
        assert app_in(manager.snapshot(id_, user)) == 0

        profile = application.hold(2)
        assert until(lambda: len(manager.held_executors(id_, profile).containers) == 2)
        held = manager.held_executors(id_, profile)
        assert held.pending == 0 and {*held.containers.values()} <= {
            n.host for n in manager.nodes()
        }
        assert manager.held_executors(id_, profile + 1).containers == {}
        assert until(lambda: manager.gpus()[0] == used_before + 2)
        assert until(lambda: app_in(manager.snapshot(id_, user)) == 2)
        overview = manager.overview(user)
        ours = next(app for app in overview.applications if app.id == id_)
        assert (ours.name, ours.used.gpus) == ("contract", 2)
        assert ours.user == user
        with_gpus = [c for c in overview.containers[id_] if c.size.gpus]
        assert {c.id for c in with_gpus} == {*held.containers}
        assert manager.why_lost(id_, "exited", next(iter(held.containers.values()))) == "exited"

        assert until(lambda: application.kills(profile, manager))
        assert until(lambda: manager.gpus()[0] == used_before)
        assert until(lambda: not manager.are_gpus_ending())
        assert manager.held_executors(id_, profile).pending == 0
        application.stop()
    assert until(lambda: manager.end_of(id_) != "")
    assert "FINISHED" in manager.end_of(id_)
    report = manager.report(id_)
    assert report is not None and report.has_ended and report.state == "FINISHED"
    assert manager.ended_since(began)[id_] == report
    assert id_ not in manager.ended_since(time.time() + 3600)
    with pytest.raises(HopsGpuError, match=id_):
        manager.snapshot(id_, user)
    assert "FINISHED" in manager.why_lost(id_, "", HOSTS[0])


def test_the_gpus_of_a_killed_driver_come_back(site: Site) -> None:
    manager = site.manager
    used_before = manager.gpus()[0]
    with site.application() as application:
        profile = application.hold(1, 2)
        assert until(lambda: len(manager.held_executors(application.id, profile).containers) == 1)
        application.process.kill()
        assert until(lambda: manager.end_of(application.id) != "")
    assert until(lambda: manager.gpus()[0] == used_before)


def test_requests_that_do_not_fit_are_pending(site: Site) -> None:
    manager = site.manager
    used_before = manager.gpus()[0]
    with site.application() as application:
        profile = application.hold(3, 2)

        def shown() -> tuple[int, int]:
            held = manager.held_executors(application.id, profile)
            return len(held.containers), held.pending

        assert until(lambda: shown() == (2, 1)), shown()
        assert until(lambda: application.kills(profile, manager)), shown()
    assert until(lambda: manager.gpus()[0] == used_before)


def test_an_unknown_application_is_an_error(site: Site) -> None:
    manager = site.manager
    calls: list[Callable[[], object]] = [
        lambda: manager.end_of(site.unknown),
        lambda: manager.report(site.unknown),
        lambda: manager.held_executors(site.unknown, 1),
        lambda: manager.snapshot(site.unknown, "alice"),
    ]
    for call in calls:
        with pytest.raises(HopsGpuError):
            call()
    assert manager.report(site.other) is None is manager.report("local-1")
    assert manager.why_lost(site.unknown, "exited", HOSTS[0]).endswith("exited")


def test_a_silent_cluster_manager_is_an_error(site: Site) -> None:
    manager = site.silent
    calls: list[Callable[[], object]] = [
        manager.nodes,
        manager.check_submission,
        lambda: manager.snapshot(site.unknown, "alice"),
        lambda: manager.overview("alice"),
        lambda: manager.held_executors(site.unknown, 1),
        lambda: manager.end_of(site.unknown),
        lambda: manager.report(site.unknown),
        lambda: manager.ended_since(0.0),
    ]
    for call in calls:
        with pytest.raises(HopsGpuError, match="127.0.0.1:1"):
            call()
    assert "could not be asked" in manager.why_lost(site.unknown, "exited", "node1")


def test_a_dead_worker_is_the_reason_of_a_loss(masters: Standalone, tmp_path: Path) -> None:
    manager = masters.manager()
    with run_driver(masters.url, "loss", write_discovery(tmp_path)) as application:
        profile = application.hold(2, 2)
        assert until(lambda: len(manager.held_executors(application.id, profile).containers) == 2)
        kill(masters.workers[HOSTS[1]])
        assert until(lambda: "is DEAD" in manager.why_lost(application.id, "", HOSTS[1]))
        assert manager.why_lost(application.id, "exited", HOSTS[0]) == "exited"
        states = {node.host: node.state for node in manager.nodes()}
        assert states == {HOSTS[0]: "RUNNING", HOSTS[1]: "LOST"}
        held = manager.held_executors(application.id, profile)
        assert {*held.containers.values()} == {HOSTS[0]} and held.pending == 1
        assert manager.gpus() == (2, 2)
        # The new worker gets the executor that the application lacks.
        masters.start_worker(HOSTS[1])
        assert until(lambda: manager.gpus() == (4, 4))
    assert until(lambda: manager.gpus()[0] == 0)


def test_a_standby_master_takes_over(tmp_path: Path) -> None:
    with standalone(tmp_path) as cluster:
        recovery = {
            "spark.deploy.recoveryMode": "ZOOKEEPER",
            "spark.deploy.zookeeper.url": cluster.start_zookeeper(),
        }
        first = cluster.start_master(recovery)
        assert until(lambda: cluster.manager().pages != "" and is_active(cluster.manager()))
        cluster.start_master(recovery)
        cluster.start_worker(HOSTS[0])
        manager = cluster.manager()
        assert until(lambda: running(manager) == 1)
        assert manager.pages == cluster.addresses[0]
        standby = StandaloneManager(cluster.url, cluster.addresses[1:])
        assert until(lambda: is_standby(standby))
        with run_driver(cluster.url, "failover", write_discovery(tmp_path)) as application:
            profile = application.hold(1)
            assert until(
                lambda: len(manager.held_executors(application.id, profile).containers) == 1
            )
            before = manager.held_executors(application.id, profile)
            kill(first)
            assert until(lambda: is_active(manager))
            assert manager.pages == cluster.addresses[1]
            assert until(lambda: manager.held_executors(application.id, profile) == before)
            assert manager.end_of(application.id) == ""


def is_active(manager: ClusterManager) -> bool:
    try:
        manager.check_submission()
    except HopsGpuError:
        return False
    return True


def is_standby(manager: ClusterManager) -> bool:
    try:
        manager.check_submission()
    except HopsGpuError as error:
        return "is STANDBY" in str(error)
    return False


def test_the_pages_of_a_master_with_tokens_need_one(tmp_path: Path) -> None:
    key = b"k" * 32
    name = "org.apache.spark.ui.JWSFilter"
    encoded = base64.urlsafe_b64encode(key).decode()
    token_file = tmp_path / "token"
    token_file.touch(0o600)
    with standalone(tmp_path) as cluster:
        cluster.start_master({"spark.ui.filters": name, f"spark.{name}.param.secretKey": encoded})
        without = cluster.manager()
        assert until(lambda: "token_file" in why_refused(without))
        refusal = why_refused(without)
        assert "HTTP 403" in refusal and "~/.netrc" in refusal
        token_file.write_text(signed_token(b"x" * 32))
        with_token = cluster.manager(token_file)
        assert f"refused the token of {token_file}" in why_refused(with_token)
        token_file.write_text(signed_token(key))
        assert with_token.nodes() == ()
        with pytest.raises(HopsGpuError, match="does not know app-20260101000000-0009"):
            with_token.held_executors("app-20260101000000-0009", 1)


def why_refused(manager: ClusterManager) -> str:
    try:
        manager.nodes()
    except HopsGpuError as error:
        return str(error)
    return ""


def signed_token(key: bytes) -> str:
    """A JSON Web Signature (RFC 7515) that an administrator would give to users."""

    def encode(content: bytes) -> str:
        return base64.urlsafe_b64encode(content).rstrip(b"=").decode()

    header, payload = {"alg": "HS256", "typ": "JWT"}, {"user": "alice"}
    text = ".".join(encode(json.dumps(part).encode()) for part in (header, payload))
    return f"{text}.{encode(hmac.digest(key, text.encode(), hashlib.sha256))}"
