"""One real YARN and HDFS for each worker, or for all, and one Spark application on it.

GPUs are simulated where this machine has none; everything else is the real thing.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Protocol
from xml.etree import ElementTree

import pytest
from pyspark.sql import SparkSession

import hopsgpu
from hopsgpu import devcluster
from hopsgpu.backends.spark.pyspark_archives import VARIABLE as ARCHIVES
from hopsgpu.backends.spark.pyspark_archives import with_bytecode
from hopsgpu.cluster_managers.manager import ClusterManager
from hopsgpu.cluster_managers.manager_table import configured_manager
from hopsgpu.cluster_managers.yarn.manager import YarnManager
from hopsgpu.cluster_managers.yarn.resource_manager import ResourceManager
from hopsgpu.devcluster.layout import ClusterLayout
from hopsgpu.devcluster.realm import REALM, Realm
from hopsgpu.launcher import arguments
from hopsgpu.storage.kerberos import sign_in
from tests.bounds import HANG_SECONDS

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
# Released executors are back much sooner, those that Spark gives up as idle after 60 s.
BACK_SECONDS = 45.0
CONTAINERS_ENV = "yarn.nodemanager.admin-env"
# Who closes a file asks again when the NameNode has not heard of its last block yet, which is the
# rule for small files; by default after 400 ms, in which WebHDFS serves nobody else either.
CLOSE = "dfs.client.block.write.locateFollowingBlock"
HDFS_SITE = {f"{CLOSE}.initial.delay.ms": "10", f"{CLOSE}.retries": "11"}
# When a session, or a worker of it, began: seconds of time.monotonic.
BEGAN = pytest.StashKey[float]()
# Starts the cluster that all workers of a session have.
STARTING = pytest.StashKey[Thread]()
# Names the directory of the cluster that all workers of a session have.
ONE_CLUSTER = "HOPSGPU_TESTS_ONE_CLUSTER"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--one-cluster",
        action="store_true",
        help="give all workers one cluster: for tests that use its HDFS, and no daemons and GPUs",
    )
    parser.addoption("--record", action="store_true", help="store the results for their page")
    parser.addoption(
        "--standalone", action="store_true", help="on a standalone master in place of YARN"
    )
    parser.addoption("--kubernetes", action="store_true", help="on Kubernetes in place of YARN")
    parser.addoption("--kerberos", action="store_true", help="on a Kerberized cluster, as alice")
    parser.addoption(
        "--begin-within",
        type=float,
        metavar="SECONDS",
        help="skip, and count, the tests that have not begun so long after the session",
    )
    parser.addoption(
        "--begin-at",
        type=int,
        default=0,
        metavar="N",
        help="begin with the Nth test, counted round, and end with those before it",
    )


class CountsGpus(Protocol):
    """A cluster manager, or YARN's own client."""

    def gpus(self) -> tuple[int, int]: ...


class TritonFirst(MetaPathFinder):
    """Has a process import torch's Triton before TensorFlow.

    The other way round their two copies of LLVM end the process with SIGABRT, which is what happens
    to tests in an order in which one of torch's optimizers follows one of TensorFlow.
    """

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "tensorflow":
            with contextlib.suppress(ImportError):  # torch without GPUs may have none
                import_module("triton")


def pytest_configure(config: pytest.Config) -> None:
    sys.meta_path.insert(0, TritonFirst())
    config.stash[BEGAN] = time.monotonic()
    if config.getoption("one_cluster") and not hasattr(config, "workerinput"):
        # Workers inherit it.
        shared = os.environ[ONE_CLUSTER] = tempfile.mkdtemp(prefix="hopsgpu-tests-")
        # Up by the time of the first test that wants it, if tests without a cluster come first.
        start = functools.partial(
            devcluster.up,
            Path(shared, "cluster"),
            nodes=1,
            conf=conf_of_cluster(shared),
            keep_classes=True,
            say=lambda _: None,
        )
        config.stash[STARTING] = Thread(target=start)
        config.stash[STARTING].start()


def conf_of_cluster(tmpdir: str) -> dict[str, dict[str, object]]:
    # Containers inherit nothing: theirs would be /tmp, as a node's is.
    return {"yarn-site": {f"{CONTAINERS_ENV}.TMPDIR": tmpdir}, "hdfs-site": {**HDFS_SITE}}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("standalone") or config.getoption("kubernetes"):
        of_yarn = [item for item in items if item.get_closest_marker("yarn") is not None]
        config.hook.pytest_deselected(items=of_yarn)
        items[:] = [item for item in items if item not in of_yarn]
    # Pods count their processes themselves, and have addresses of their own.
    absent = "one_machine" if config.getoption("kubernetes") else "kubernetes"
    others = [item for item in items if item.get_closest_marker(absent) is not None]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]
    # After others have chosen among them. Where time is short, each test has its turn to be early.
    begin = config.getoption("begin_at") % max(len(items), 1)
    items[:] = items[begin:] + items[:begin]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    # Before fixtures: a cluster would take a minute.
    seconds = item.config.getoption("begin_within")
    if seconds is not None and time.monotonic() - item.config.stash[BEGAN] > seconds:
        pytest.skip(f"had not begun within {seconds:g} s: run it with `make soak`")


def pytest_unconfigure(config: pytest.Config) -> None:
    if config.getoption("one_cluster") and not hasattr(config, "workerinput"):
        directory = os.environ.pop(ONE_CLUSTER)
        config.stash[STARTING].join()
        devcluster.down(Path(directory, "cluster"))
        shutil.rmtree(directory)


@pytest.fixture(scope="session", autouse=True)
def own_tmpdir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """TMPDIR of this session and of what it starts, in which nothing of another session is."""
    directory = tmp_path_factory.mktemp("tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(directory))
        patch.setattr(tempfile, "tempdir", None)
        yield directory


@pytest.fixture(scope="session")
def hadoop() -> str | None:
    """The daemons' version; None for the one that PySpark includes."""
    return None


@pytest.fixture(scope="session")
def kerberos(pytestconfig: pytest.Config) -> bool:
    """Whether the cluster is Kerberized; all is then done as alice, with her keytab."""
    return bool(pytestconfig.getoption("kerberos"))


@pytest.fixture(scope="session")
def is_standalone(pytestconfig: pytest.Config) -> bool:
    """Whether the cluster has a standalone master in place of YARN."""
    return bool(pytestconfig.getoption("standalone"))


@pytest.fixture(scope="session")
def is_kubernetes(pytestconfig: pytest.Config) -> bool:
    """Whether the cluster has Kubernetes in place of YARN."""
    return bool(pytestconfig.getoption("kubernetes"))


@pytest.fixture(scope="session")
def is_yarn(is_standalone: bool, is_kubernetes: bool) -> bool:
    return not (is_standalone or is_kubernetes)


@pytest.fixture(scope="session")
def site_conf() -> Callable[[Path], dict[str, dict[str, object]]]:
    """Gives further properties of the cluster in a directory, by file."""
    return lambda directory: {}


@pytest.fixture(scope="session")
def cluster_dir(
    tmp_path_factory: pytest.TempPathFactory,
    own_tmpdir: Path,
    hadoop: str | None,
    kerberos: bool,
    is_standalone: bool,
    is_kubernetes: bool,
    site_conf: Callable[[Path], dict[str, dict[str, object]]],
) -> Iterator[Path]:
    shared = os.environ.get(ONE_CLUSTER)
    directory = Path(shared, "cluster") if shared else tmp_path_factory.mktemp("cluster")
    conf = conf_of_cluster(shared or str(own_tmpdir))
    for file, properties in site_conf(directory).items():
        conf[file] = {**conf.get(file, {}), **properties}
    if is_standalone or is_kubernetes:
        conf.pop("yarn-site")
    if kerberos:
        keytab = Realm(ClusterLayout.at(directory).realm).keytab("alice")
        conf["spark-defaults"] = {
            "spark.kerberos.principal": f"alice@{REALM}",
            "spark.kerberos.keytab": str(keytab),
            # With which renewed tokens are sent to ranks.
            "spark.authenticate": "true",
            "spark.network.crypto.enabled": "true",
        }
    try:
        # Of workers that share it all wait for the one that is starting.
        devcluster.up(
            directory,
            hadoop=hadoop,
            kerberos=kerberos or None,
            is_standalone=is_standalone or None,
            is_kubernetes=is_kubernetes or None,
            conf=conf,
            keep_classes=True,
        )
        yield directory
    finally:
        if not shared:
            devcluster.down(directory)


@pytest.fixture(scope="session")
def cluster_env(cluster_dir: Path) -> Iterator[dict[str, str]]:
    """The cluster's variables, set in this process too."""
    variables = devcluster.environment(cluster_dir)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield dict(os.environ)


@pytest.fixture(scope="session")
def hdfs_url(cluster_env: dict[str, str]) -> str:
    """`fs.defaultFS` of the cluster."""
    site = ElementTree.parse(Path(cluster_env["HADOOP_CONF_DIR"]) / "core-site.xml")
    properties = {p.findtext("name"): p.findtext("value") for p in site.iter("property")}
    return str(properties["fs.defaultFS"])


@pytest.fixture(scope="session")
def spark(cluster_env: dict[str, str]) -> Iterator[SparkSession]:
    # A session goes without the copies of PySpark that another worker's is creating.
    assert until(lambda: ARCHIVES in with_bytecode(os.environ))
    few = {
        "spark.dynamicAllocation.maxExecutors": 8,
        "spark.sql.shuffle.partitions": 2,
        # Two tasks of ETL in one executor rather than in two.
        "spark.executor.cores": 2,
    }
    session = hopsgpu.session("cluster-tests", conf=few)
    try:
        yield session
    finally:
        session.stop()


@pytest.fixture(scope="session")
def manager(cluster_env: dict[str, str], cluster_dir: Path, kerberos: bool) -> ClusterManager:
    """The cluster manager of this session: YARN, or what the options name."""
    if kerberos:
        # A test without a session in this process has no other ticket.
        keytab = Realm(ClusterLayout.at(cluster_dir).realm).keytab("alice")
        sign_in(f"alice@{REALM}", str(keytab), os.environ)
    return configured_manager(cluster_env)


@pytest.fixture(scope="session")
def resource_manager(manager: ClusterManager) -> ResourceManager:
    """YARN's own client, for tests with the marker `yarn`."""
    assert isinstance(manager, YarnManager)
    return manager.resource_manager


@pytest.fixture
def nothing_warmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests whose ranks want no framework: held gangs import none ahead.

    It would take each executor seconds of a core, and the first launch waits for it.
    """
    monkeypatch.setattr(arguments, "likely_imports", lambda: ())


def until(holds: Callable[[], bool], seconds: float = HANG_SECONDS, *, step: float = 0.1) -> bool:
    """Poll something that nobody announces; return whether it holds within some seconds."""
    deadline = time.monotonic() + seconds
    while not (held := holds()) and time.monotonic() < deadline:
        time.sleep(step)
    return held


def gone(pid: int) -> bool:
    """Whether a process of this machine has ended, all its threads with their files too."""
    process = Path(f"/proc/{pid}")
    try:
        ended = "State:\tZ" in (process / "status").read_text()
        return ended and len(list((process / "task").iterdir())) <= 1
    except (FileNotFoundError, ProcessLookupError):
        return True


def as_in_a_terminal() -> None:
    """For `preexec_fn` of what gets a Ctrl-C.

    A shell that runs the tests in the background has them, and their children, ignore it.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def executors_of(spark: SparkSession) -> tuple[str, ...]:
    """Spark's IDs of all executors of an application."""
    ids = spark.sparkContext._jsc.sc().schedulerBackend().getExecutorIds()
    return tuple(str(ids.apply(index)) for index in range(ids.size()))


def gpus_become(manager: CountsGpus, wanted: int, seconds: float = BACK_SECONDS) -> bool:
    """Whether the cluster manager counts so many GPUs in use within some seconds."""
    return until(lambda: manager.gpus()[0] == wanted, seconds)


@pytest.fixture
def gpus_back(manager: ClusterManager) -> Iterator[Callable[[], int]]:
    """Gives the count in use; at the end of the test it must be what it was before."""
    before = manager.gpus()[0]
    yield lambda: manager.gpus()[0]
    assert gpus_become(manager, before), f"{manager.gpus()} GPUs in use, {before} before"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports an example by name; it travels to the ranks as a module beside a script does."""

    def load(name: str) -> ModuleType:
        spec = spec_from_file_location(name, EXAMPLES / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load
