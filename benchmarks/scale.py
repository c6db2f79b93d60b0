"""What a look at a large cluster costs, and what many waiting gangs cost the NameNode.

The cluster is simulated at REST level: recorded answers, scaled. Each look runs in a process of its
own, so that its memory and its imports count.
"""

from __future__ import annotations

import concurrent.futures
import http.client
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import channel
from benchmarks.simulation.waiting_gangs import WaitingGangs, cost_of
from benchmarks.simulation.yarn_answers import served
from benchmarks.table import heading, row

_NODES, _GPUS, _QUEUES, _USERS = 1000, 10, 100, 250
_GANGS = 500
_ROUNDS = 3
_MOST_SECONDS = 2.0
_MOST_MIB = 200.0
_MOST_OPERATIONS = 50.0
_WARM_UP_SECONDS, _COUNTED_SECONDS = 120.0, 120.0
_RANKS = 1000
_UNANSWERED = "it is still asked"
_LONGEST_LOOK_SECONDS = 60.0
# Neither this process's memory nor its modules are to count.
_SPAWN = multiprocessing.get_context("spawn")
_LINES: Mapping[str, WaitingGangs] = {
    "gangs of one size": WaitingGangs(_GANGS),
    "gangs of 6 sizes": WaitingGangs(_GANGS, executors=(1, 2, 4, 8, 16, 32)),
    "half at the limits of 5 queues": WaitingGangs(
        _GANGS, (1, 2, 4, 8, 16, 32), limited=5, share_limited=0.5
    ),
    "one killed every 5 s": WaitingGangs(
        _GANGS, (1, 2, 4, 8, 16, 32), limited=5, share_limited=0.5, killed_seconds=5.0
    ),
}


@dataclass(frozen=True)
class Cluster:
    """The simulated cluster.

    Attributes:
        manager: host and port of the ResourceManager.
        application: id of a running application.
        user: its user.
        directory: a directory for this look alone.
    """

    manager: str
    application: str
    user: str
    directory: Path

    def setting(self, name: str) -> str | None:
        """Return a property of Hadoop's configuration."""
        return self.settings.get(name)

    @property
    def settings(self) -> Mapping[str, str]:
        """Return the properties that are set."""
        return {
            "yarn.resourcemanager.webapp.address": self.manager,
            "fs.defaultFS": f"file://{self.directory}",
        }

    def configure(self) -> None:
        """Write the properties, and let this process's Hadoop configuration be these."""
        for name, prefix in (("core", "fs."), ("yarn", "yarn.")):
            properties = "".join(
                f"<property><name>{key}</name><value>{value}</value></property>"
                for key, value in self.settings.items()
                if key.startswith(prefix)
            )
            text = f"<configuration>{properties}</configuration>"
            (self.directory / f"{name}-site.xml").write_text(text)
        os.environ["HADOOP_CONF_DIR"] = str(self.directory)
        os.environ["HOPSGPU_ROOT"] = f"file://{self.directory}/root"


def measure(rounds: int = _ROUNDS) -> dict[str, object]:
    """Measure all, and print each target beside the figure.

    Args:
        rounds: how often to look.

    Returns:
        By look "seconds", "cpu" (seconds) and "MiB" of each round; by line the operations per
        second; the figures of the control channel.
    """
    looks = _looks(rounds)
    lines = {name: _line(name, given) for name, given in _LINES.items()}
    ranks = channel.measure(_RANKS, 1)
    return {"looks": looks, "line": lines, "ranks": ranks}


def _looks(rounds: int) -> dict[str, dict[str, list[float]]]:
    heading(f"a look at {_NODES:,} nodes with {_NODES * _GPUS:,} GPUs, {_QUEUES} queues")
    figures: dict[str, dict[str, list[float]]] = {}
    with served(_NODES, _GPUS, _QUEUES, _USERS) as (manager, (application, user)):
        for name, look in LOOKS.items():
            measured = []
            for _ in range(rounds):
                with tempfile.TemporaryDirectory() as directory:
                    given = Cluster(manager, application, user, Path(directory))
                    measured.append(_alone(look, given))
            figures[name] = {key: [one[key] for one in measured] for key in measured[0]}
            row(f"{name}, s", figures[name]["seconds"])
            row(f"{name}, s of a core", figures[name]["cpu"])
            row(f"{name}, MiB at most", figures[name]["MiB"])
    print()
    for name, figure in figures.items():
        seconds, mib = statistics.median(figure["seconds"]), max(figure["MiB"])
        _judge(f"{name}: {seconds:.2f} s", f"under {_MOST_SECONDS:g} s", seconds < _MOST_SECONDS)
        _judge(f"{name}: {mib:.0f} MiB", f"under {_MOST_MIB:g} MiB", mib < _MOST_MIB)
    return figures


def _judge(figure: str, target: str, is_met: bool) -> None:
    print(f"{figure:44} (target: {target}) {'pass' if is_met else 'MISS'}", flush=True)


def _alone(look: Callable[[Cluster], None], given: Cluster) -> dict[str, float]:
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=_SPAWN) as pool:
        return pool.submit(_measured, look, given).result()


def _measured(look: Callable[[Cluster], None], given: Cluster) -> dict[str, float]:
    """Run the process of a look."""
    given.configure()
    began, cpu = time.monotonic(), time.process_time()
    look(given)
    return {
        "seconds": time.monotonic() - began,
        "cpu": time.process_time() - cpu,
        "MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def _preflight(given: Cluster) -> None:
    """Check that a gang of 1,000 GPUs can be granted, and what keeps it from that now."""
    from hopsgpu.cluster_managers.capacity import check_possible, cores_per_gpu
    from hopsgpu.cluster_managers.demand import Demand, container_of
    from hopsgpu.cluster_managers.shortage import shortage
    from hopsgpu.cluster_managers.yarn.resource_manager import ResourceManager, web_addresses
    from hopsgpu.core.spec import GangSpec, shape_of

    manager = ResourceManager(web_addresses(given.setting))
    snapshot = manager.snapshot(given.application, given.user)
    shape = shape_of(GangSpec("scale", workers=1000), cores_per_gpu(snapshot.running))
    demand = Demand(container_of(shape), 1000)
    check_possible(demand, snapshot)
    shortage(demand, snapshot)


def _preflight_by_type(given: Cluster) -> None:
    """Do the same for GPUs of a product, for which all NodeManagers are asked."""
    from hopsgpu.cluster_managers.yarn.node_manager import NodeManagers
    from hopsgpu.cluster_managers.yarn.resource_manager import ResourceManager, web_addresses
    from hopsgpu.core.gpu_types import has_type

    _preflight(given)
    nodes = ResourceManager(web_addresses(given.setting)).nodes()
    answers = NodeManagers(given.setting).devices(nodes)
    with_type = [
        name
        for name, devices in answers.devices.items()
        if any(has_type(gpu.name, "A100") for gpu in devices.gpus)
    ]
    if len(with_type) != len(nodes):
        raise RuntimeError(f"{len(with_type)} of {len(nodes)} nodes answered")


def _gpus(given: Cluster) -> None:
    """Run `hopsgpu gpus`."""
    from click.testing import CliRunner

    from hopsgpu.cli.gpus import gpus

    result = CliRunner().invoke(gpus, [], catch_exceptions=False)
    _check(result.output, given)


def _exporter(given: Cluster) -> None:
    """Observe once, and write what Prometheus reads."""
    from prometheus_client import CollectorRegistry, generate_latest

    from hopsgpu.monitoring.exposition import LookCollector
    from hopsgpu.monitoring.observation import Monitor
    from hopsgpu.storage.lake_root import given_roots

    registry = CollectorRegistry()
    root = os.environ["HOPSGPU_ROOT"]
    monitor = Monitor(
        os.environ,
        lambda: given_roots((root,)),
        lambda _: None,
        look_seconds=_LONGEST_LOOK_SECONDS,
    )
    registry.register(LookCollector(monitor))
    _check(generate_latest(registry).decode(), given)


def _page(given: Cluster) -> None:
    """Serve the page of the cluster, and get it once."""
    from starlette.testclient import TestClient

    from hopsgpu.web.access import Secrets, Server
    from hopsgpu.web.page_sources import live_sources
    from hopsgpu.web.routes import application

    known, port = Secrets.fresh(), 8420
    sources = live_sources((os.environ["HOPSGPU_ROOT"],), os.environ)
    app = application(sources, known, Server(port))
    client = TestClient(app, base_url=f"http://127.0.0.1:{port}", follow_redirects=False)
    client.get(f"/?token={known.token}")
    answer = client.get("/")
    began = time.monotonic()
    # A page does not wait long for YARN, and has the answer when it renews itself.
    while _UNANSWERED in answer.text and time.monotonic() - began < _LONGEST_LOOK_SECONDS:
        answer = client.get("/")
    if answer.status_code != http.client.OK:
        raise RuntimeError(f"HTTP {answer.status_code}")
    _check(answer.text, given)


def _check(text: str, given: Cluster) -> None:
    """Check that a look shows the cluster."""
    if f"node{_NODES - 1}" not in text or given.user not in text:
        raise RuntimeError(f"not the whole cluster: {text[:2000]}")


LOOKS: Mapping[str, Callable[[Cluster], None]] = {
    "preflight": _preflight,
    "preflight with gpu_type": _preflight_by_type,
    "hopsgpu gpus": _gpus,
    "exporter": _exporter,
    "page": _page,
}


def _line(name: str, given: WaitingGangs) -> dict[str, float | Sequence[float]]:
    cost = cost_of(given, _WARM_UP_SECONDS, _COUNTED_SECONDS)
    print(f"\n{given.gangs} gangs wait: {name}")
    for operation, count in sorted(cost.operations.items()):
        print(f"  {operation:16}{count / cost.seconds:8.1f} a second")
    rate, delays = cost.per_second, cost.delays or [0.0]
    print(f"  busiest second: {cost.busiest} operations; {cost.looks / cost.seconds:.1f} looks")
    print(f"  a turn is taken {statistics.median(delays):.2f} s after GPUs become free,")
    print(f"  at most {max(delays):.2f} s, of {len(delays)}")
    _judge(
        f"{rate:.1f} operations a second", f"under {_MOST_OPERATIONS:g}", rate < _MOST_OPERATIONS
    )
    return {"operations": rate, "busiest": cost.busiest, "delays": delays}


if __name__ == "__main__":
    measure()
