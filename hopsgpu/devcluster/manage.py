"""`up`, `down` and the environment of clients, for the command line and tests."""

from __future__ import annotations

import os
import pwd
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hopsgpu.devcluster import boot, config_files, kubernetes, standalone
from hopsgpu.devcluster.certificates import Certificates, create_certificates
from hopsgpu.devcluster.class_archive import archive_of, make_archive
from hopsgpu.devcluster.config import ClusterSpec, SiteConf, parse_conf, read_conf
from hopsgpu.devcluster.daemons import members, stop
from hopsgpu.devcluster.docker import check_docker, docker_url, release_mounts
from hopsgpu.devcluster.hadoop_jars import (
    daemon_jars,
    hadoop_version,
    pyspark_home,
    spark_versions,
)
from hopsgpu.devcluster.host_check import compile_host_check
from hopsgpu.devcluster.java import find_java
from hopsgpu.devcluster.kubernetes_network import create_network, network_of
from hopsgpu.devcluster.kubernetes_programs import find_programs
from hopsgpu.devcluster.layout import (
    CONTAINERD,
    DATANODE,
    DOCKERD,
    KDC,
    MASTER,
    NAMENODES,
    ClusterLayout,
)
from hopsgpu.devcluster.local_users import other_login_users, warn_of_users
from hopsgpu.devcluster.node_gpus import plan_gpus
from hopsgpu.devcluster.ports import held_ports, port_names
from hopsgpu.devcluster.readiness import wait_ready
from hopsgpu.devcluster.realm import (
    REALM,
    USERS,
    Realm,
    check_programs,
    client_variables,
    create_realm,
    realm_of,
)
from hopsgpu.devcluster.startup_wait import StartupWait
from hopsgpu.devcluster.state import ClusterState, load, locked, save
from hopsgpu.errors import ClusterError
from hopsgpu.units import count_of

Say = Callable[[str], object]
_MAX_SWEEPS = 5


@dataclass(frozen=True)
class ClusterInfo:
    """A running cluster.

    Attributes:
        directory: directory of its state, data and logs.
        gpus: "real", "simulated" or "none", and why.
        resourcemanager: URL of the ResourceManager's pages and REST interface; "" without YARN.
        master: URL of the Spark Masters or the API server, as `spark.master` takes it; "" on YARN.
        logs: daemon → log.
        started: daemons that this `up` started; none if the cluster was running.
    """

    directory: Path
    nodes: int
    gpus_per_node: int
    gpus: str
    filesystem: str
    resourcemanager: str
    master: str
    logs: dict[str, Path]
    started: tuple[str, ...]


def up(
    dir: str | Path | None = None,
    *,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    hadoop: str | None = None,
    kerberos: bool | None = None,
    privacy: bool | None = None,
    simple_web: bool | None = None,
    token_lifetimes: tuple[float, float] | None = None,
    https: bool | None = None,
    namenode_ha: bool | None = None,
    resourcemanager_ha: bool | None = None,
    preemption: bool | None = None,
    has_docker: bool | None = None,
    mig: str | None = None,
    is_standalone: bool | None = None,
    has_master_ha: bool | None = None,
    is_kubernetes: bool | None = None,
    conf: str | Path | Mapping[str, Any] | None = None,
    timeout: float | None = None,
    say: Say = print,
    keep_classes: bool = False,
) -> ClusterInfo:
    """Start a cluster, or its missing daemons, and wait until it is ready.

    The wait lasts as long as the daemons make progress: log something new, open ports, or compute.
    After an error, or an interrupt, daemons that run keep running, and the next `up` continues with
    them.

    The arguments that are not listed are the attributes of `ClusterSpec`. None means the setting of
    the running cluster, else the default.

    Args:
        dir: the cluster's directory; None means `~/.hopsgpu/cluster`.
        gpus_per_node: number of GPUs per node, real ones if nvidia-smi answers, else simulated.
        hadoop: other versions than that of the installed PySpark are downloaded once.
        conf: a YAML file, or its content, a mapping of site file → property → value.
        timeout: seconds after which `up` fails even if the daemons make progress.
        say: receives one line at a time.
        keep_classes: whether to cache the classes that Spark's JVMs load (about 200 MB), unless
            they are cached. Caching takes half a minute, and later JVMs start faster. A cluster
            without YARN uses a cache, but creates none.

    Raises:
        ConfigError: a value is invalid.
        ClusterError: Java or the packages are missing, a daemon does not start, or the cluster runs
            with other settings.
    """
    layout = ClusterLayout.at(dir)
    layout.check()
    wait = StartupWait(layout, say, timeout)
    settings = {
        "nodes": nodes,
        "gpus_per_node": gpus_per_node,
        "hadoop": hadoop,
        "kerberos": kerberos,
        "privacy": privacy,
        "simple_web": simple_web,
        "token_lifetimes": token_lifetimes,
        "https": https,
        "namenode_ha": namenode_ha,
        "resourcemanager_ha": resourcemanager_ha,
        "preemption": preemption,
        "has_docker": has_docker,
        "mig": mig,
        "is_standalone": is_standalone,
        "has_master_ha": has_master_ha,
        "is_kubernetes": is_kubernetes,
        "conf": _conf(conf),
    }
    settings = {name: value for name, value in settings.items() if value is not None}
    requested = ClusterSpec(**settings)  # type: ignore[arg-type]
    with locked(layout, say, wait.deadline):
        before = load(layout)
        if before and before.is_running:
            _check_same_settings(before.spec, settings, layout)
            _check_same_spark(before, layout)
            spec, missing = before.spec, before.missing
            if missing:
                say(f"starting the missing daemons: {', '.join(missing)}")
        else:
            spec = requested
            missing = [*spec.daemons]
            _stop_everything(layout, before)
            before = replace(before, processes={}) if before else None
        if before and not missing:
            # Wait: the `up` that started the daemons may have ended before they were ready.
            state = before
            wait_ready(wait, layout, state, config_files.user_name(), {})
            if not wait.has_waited:
                say(f"the cluster in {layout.root} is already running")
                return _info(layout, state, ())
        else:
            state = _start(layout, before, spec, missing, wait, say)
        # The classes of YARN's client are loaded by a request to its ResourceManager.
        can_cache = keep_classes and state.spec.is_yarn
        if can_cache and (archive := archive_of(Path(state.java), pyspark_home())):
            url = f"{state.filesystem}/tmp/hopsgpu-classes"
            make_archive(archive, layout, _client_environ(layout, state), url, say)
    info = _info(layout, state, tuple(missing))
    manager = f"YARN {info.resourcemanager}"
    if info.master:
        manager = f"{'Kubernetes' if state.spec.is_kubernetes else 'Spark'} {info.master}"
    say(f"up after {wait.seconds:.1f} s: HDFS {info.filesystem}, {manager}")
    if realm := realm_of(layout, state.spec):
        say(
            f"realm {REALM} with the users {' and '.join(USERS)}; then"
            f" kinit -kt {realm.keytab(USERS[0])} {USERS[0]}"
        )
    elif people := other_login_users(pwd.getpwall(), os.getuid()):
        say(warn_of_users(people, config_files.user_name()))
    return info


def _start(
    layout: ClusterLayout,
    before: ClusterState | None,
    spec: ClusterSpec,
    missing: list[str],
    wait: StartupWait,
    say: Say,
) -> ClusterState:
    java, spark = find_java(), pyspark_home()
    programs = find_programs(os.environ) if spec.is_kubernetes else {}
    if spec.kerberos:
        check_programs(spec)
    if spec.has_docker:
        check_docker(layout)
    # Record the version: an `up` with another PySpark may restart dead daemons later.
    spec = replace(spec, hadoop=spec.hadoop or hadoop_version(spark))
    # For Masters alone, ZooKeeper runs from PySpark's jars.
    needs_zookeeper = spec.namenode_ha or spec.resourcemanager_ha
    jars = daemon_jars(
        java,
        spark,
        spec.hadoop,
        say,
        needs_zookeeper=needs_zookeeper,
        timeout=wait.seconds_left,
    )
    host_check = compile_host_check(java, jars, layout.logs / "host-check.log")
    gpus = plan_gpus(layout.root, spec.nodes, spec.gpus_per_node, spec.mig_profiles)
    say(f"GPUs: {spec.nodes} × {spec.gpus_per_node}, {gpus.source}")
    if spec.is_kubernetes:
        network = network_of(layout.root)
        create_network(network, layout.logs / "network.log")
        spec = replace(spec, address=network.host)
    recorded = before.processes if before else {}
    running = {daemon: p for daemon, p in recorded.items() if daemon not in missing}
    with _ports(layout, before, spec, missing) as ports:
        state = ClusterState(
            spec=spec,
            gpus=gpus.source,
            java=str(java.home),
            ports=ports,
            processes=running,
            spark=spark_versions(spark)[0] if spec.is_standalone else "",
        )
        if KDC in missing:
            create_realm(Realm(layout.realm), layout, ports[f"{KDC}.rpc"])
        if spec.https:
            create_certificates(Certificates(layout.certificates), layout, java.home)
        config_files.write_conf(layout, state, gpus)
        if spec.is_kubernetes:
            kubernetes.create_keys(layout)
            kubernetes.write_files(layout, spec, gpus, programs, state.java)
        for daemon in missing:
            say(f"{daemon}: log {layout.log(daemon)}")
        starter = boot.DaemonStarter(layout, state, jars, host_check, wait, programs)
        boot.start_all(starter, missing)
        wait_ready(wait, layout, starter.state, config_files.user_name(), starter.started)
    return starter.state


@contextmanager
def _ports(
    layout: ClusterLayout, before: ClusterState | None, spec: ClusterSpec, missing: list[str]
) -> Iterator[dict[str, int]]:
    """Provide every port of the cluster, with those of the missing daemons reserved."""
    recorded = before.ports if before else {}
    names = port_names(spec.daemons)
    wanted = [n for n in names if n.partition(".")[0] in missing]
    with held_ports(wanted, recorded, master=spec.address) as held:
        lost = [n for n, port in held.items() if port != recorded.get(n)]
        if before and before.processes and lost:
            raise ClusterError(
                f"another program now uses the port of {', '.join(lost)}, and running daemons of "
                f"{layout.root} rely on it: `hopsgpu cluster down`, then `up`"
            )
        yield {n: held.get(n, recorded.get(n, 0)) for n in names}


def down(dir: str | Path | None = None, say: Say = print) -> None:
    """Stop every process of a cluster; keep its HDFS files, its logs and its ports."""
    layout = ClusterLayout.at(dir)
    if not layout.root.is_dir():
        say(f"no cluster in {layout.root}")
        return
    with locked(layout, say):
        state = load(layout)
        ended = _stop_everything(layout, state)
        if state:
            save(layout, replace(state, processes={}))
    stopped = f"down: {count_of(ended, 'process', 'processes')} ended"
    say(stopped if ended else f"no cluster runs in {layout.root}")


def environment(dir: str | Path | None = None) -> dict[str, str]:
    """Return the environment variables that point this Python's Spark, or Hadoop, at a cluster.

    Raise ClusterError if no cluster runs there.
    """
    layout = ClusterLayout.at(dir)
    state = load(layout)
    if state is None or not state.is_running:
        raise ClusterError(f"no cluster runs in {layout.root}: hopsgpu cluster up{_option(dir)}")
    _check_same_spark(state, layout)
    with locked(layout, lambda _: None):
        return _client_environ(layout, state)


def _client_environ(layout: ClusterLayout, state: ClusterState) -> dict[str, str]:
    spark, realm = pyspark_home(), realm_of(layout, state.spec)
    bundle = str(Certificates(layout.certificates).bundle)
    return {
        "JAVA_HOME": state.java,
        "SPARK_HOME": str(spark),
        "HADOOP_CONF_DIR": str(layout.client),
        "YARN_CONF_DIR": str(layout.client),
        "SPARK_CONF_DIR": str(config_files.write_spark_conf(layout, state, spark)),
        # Otherwise Spark uses an external address for its pages, and warns.
        "SPARK_LOCAL_IP": state.spec.address,
        "PYSPARK_PYTHON": sys.executable,
        **(client_variables(realm) if realm else {}),
        **({"REQUESTS_CA_BUNDLE": bundle} if state.spec.https else {}),
        **({"DOCKER_HOST": docker_url(layout)} if state.spec.has_docker else {}),
        **(kubernetes.client_variables(layout) if state.spec.is_kubernetes else {}),
    }


def _stop_everything(layout: ClusterLayout, state: ClusterState | None) -> int:
    """Stop the daemons, then leftovers of their containers; return the number of processes."""
    processes = dict(state.processes) if state else {}
    stopped = 0
    # NodeManagers stop their containers, Workers their executors. HDFS must outlive all processes
    # that write to it.
    late = {d: p for d, p in processes.items() if d in (*NAMENODES, DATANODE, DOCKERD)}
    # dockerd ends its containers, for which it needs containerd.
    last = {d: p for d, p in processes.items() if d == CONTAINERD}
    early = {d: p for d, p in processes.items() if d not in {**late, **last}}
    for group in (early, late, last):
        alive = [p for p in group.values() if p.alive]
        stop(alive, boot.GRACE_S)
        stopped += len(alive)
    # Repeat: the list lacks a process that is just being started.
    for _ in range(_MAX_SWEEPS):
        leftovers = members(layout.root)
        if not leftovers:
            release_mounts(layout)
            kubernetes.release(layout)
            shutil.rmtree(layout.scratch, ignore_errors=True)
            return stopped
        stop(leftovers, 2.0)
        stopped += len(leftovers)
    pids = ", ".join(str(p.pid) for p in leftovers)
    raise ClusterError(f"cannot end every process of {layout.root}: {pids} remain")


def _conf(conf: str | Path | Mapping[str, Any] | None) -> SiteConf | None:
    if conf is None:
        return None
    return parse_conf(conf) if isinstance(conf, Mapping) else read_conf(conf)


def _check_same_settings(
    spec: ClusterSpec, settings: Mapping[str, object], layout: ClusterLayout
) -> None:
    different = [name for name, value in settings.items() if getattr(spec, name) != value]
    if different:
        raise ClusterError(
            f"the cluster in {layout.root} runs with other settings ({', '.join(different)} differ;"
            f" it has {count_of(spec.nodes, 'node')} of {count_of(spec.gpus_per_node, 'GPU')}"
            f"{', a Spark Master' if spec.is_standalone else ''}"
            f"{', Kubernetes' if spec.is_kubernetes else ''}"
            f"{', Kerberos' if spec.kerberos else ''}{', HTTPS' if spec.https else ''} and Hadoop"
            f" {spec.hadoop}): "
            "`hopsgpu cluster down` first, or use another --dir"
        )


def _check_same_spark(state: ClusterState, layout: ClusterLayout) -> None:
    """Refuse clients and Workers of another Spark than the cluster's: they do not fit together."""
    if state.spark and state.spark != (version := spark_versions(pyspark_home())[0]):
        raise ClusterError(
            f"the Masters and Workers in {layout.root} run Spark {state.spark}, and this Python has"
            f" PySpark {version}: use a Python with PySpark {state.spark}, or another --dir"
        )


def _option(dir: str | Path | None) -> str:
    return "" if dir is None else f" --dir {shlex.quote(str(dir))}"


def _master_of(layout: ClusterLayout, state: ClusterState) -> str:
    if state.spec.is_standalone:
        return standalone.master_url(state.spec, state.ports)
    return kubernetes.master_url(layout) if state.spec.is_kubernetes else ""


def _info(layout: ClusterLayout, state: ClusterState, started: tuple[str, ...]) -> ClusterInfo:
    return ClusterInfo(
        directory=layout.root,
        nodes=state.spec.nodes,
        gpus_per_node=state.spec.gpus_per_node,
        gpus=state.gpus,
        filesystem=state.filesystem,
        resourcemanager=f"{state.spec.scheme}://{MASTER}:{state.ports['resourcemanager.web']}"
        if state.spec.is_yarn
        else "",
        master=_master_of(layout, state),
        logs={daemon: layout.log(daemon) for daemon in state.processes},
        started=started,
    )
