"""Answers of real daemons of Hadoop 3.3, 3.4 and 3.5, read through the REST client.

tests/unit/hadoop_answers/rest-*.json hold them as text, as the daemons wrote them: Hadoop before
3.5 writes a list of one as the element alone, and numbers of containers as strings. Each version
was asked with one node and one queue, and with two of each; without an application, with one that
has one container, and with two of which the first one has two, an executor with a GPU among them.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hopsgpu.cluster_managers.resources import Amount
from hopsgpu.cluster_managers.yarn.answer_lists import join_repeated, with_lists
from hopsgpu.cluster_managers.yarn.node_manager import devices_of
from hopsgpu.cluster_managers.yarn.resource_manager import ResourceManager

DATA = Path(__file__).parents[1] / "hadoop_answers"
VERSIONS = ["3.3.6", "3.4.2", "3.5.0"]
ONE, TWO = "1 nodes, 1 applications", "2 nodes, 2 applications"
GIB = 1024
# A GPU's executor, whose resource profile has this number and with it YARN's priority.
EXECUTOR = 1


def read(version: str) -> dict[str, dict[str, str]]:
    recorded: dict[str, dict[str, str]] = json.loads((DATA / f"rest-{version}.json").read_text())
    return recorded


class Serving(ThreadingHTTPServer):
    """Answers with recorded texts; what was not recorded is an error 404, as it was."""

    answers: dict[str, str]


class Handler(BaseHTTPRequestHandler):
    server: Serving

    def do_GET(self) -> None:
        answer = self.server.answers.get(self.path)
        if answer is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(answer.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Keep pytest's output clean."""


@pytest.fixture
def server() -> Iterator[Serving]:
    with Serving(("127.0.0.1", 0), Handler) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield serving
        serving.shutdown()
        thread.join()


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def ask(server: Serving, version: str, situation: str) -> ResourceManager:
    server.answers = read(version)[situation]
    return ResourceManager((f"http://127.0.0.1:{server.server_port}",))


def applications(server: Serving) -> list[str]:
    paths = (path.split("/") for path in server.answers)
    return sorted({path[5] for path in paths if path[3:5] == ["cluster", "apps"] and path[5:]})


def test_the_files_are_of_the_version_that_they_name(server: Serving, version: str) -> None:
    for situation in read(version):
        manager = ask(server, version, situation)
        assert manager.ask("/ws/v1/cluster/info")["clusterInfo"]["hadoopVersion"] == version


@pytest.mark.parametrize("nodes", [1, 2])
def test_nothing_runs(server: Serving, version: str, nodes: int) -> None:
    manager = ask(server, version, f"{nodes} nodes, no application")
    found = manager.nodes()
    assert [node.host for node in found] == ["node1", "node2"][:nodes]
    assert {node.total for node in found} == {Amount(2, 7, 16 * GIB)}
    assert all(node.used == Amount(0, 0, 0) and node.state == "RUNNING" for node in found)
    assert manager.gpus() == (0, 2 * nodes) and manager.gpus_ending() == 0
    queues = [queue.path for queue in manager.queues() if queue.is_leaf]
    assert queues == ["root.default", "root.training"][:nodes]
    overview = manager.overview("ada")
    assert overview.applications == () and overview.containers == {} and overview.problems == ()
    assert manager.user() == "root"
    assert with_lists(manager.ask("/ws/v1/cluster/nodes?states=LOST")) == {"nodes": {}}


def test_one_application_with_one_container(server: Serving, version: str) -> None:
    manager = ask(server, version, ONE)
    (id,) = applications(server)
    overview = manager.overview("root")
    (app,) = overview.applications
    assert (app.id, app.user, app.used) == (id, "root", Amount(0, 1, GIB))
    # Hadoop before 3.5 writes the name of the queue, and 3.5 its path.
    assert app.queue.removeprefix("root.") == "default"
    assert overview.problems == ()
    master = f"{id.replace('application', 'container')}_01_000001"
    assert list(manager.held_containers(id, 0).containers) == [master]
    assert not manager.held_containers(id, EXECUTOR).containers
    snapshot = manager.snapshot(id, "root")
    assert snapshot.problems == () and snapshot.user.used == Amount(0, 1, GIB)
    assert [node.used for node in snapshot.nodes] == [Amount(0, 1, GIB)]
    assert manager.application_state(id).state == "RUNNING" and manager.end_of(id) == ""


def test_two_applications_of_which_one_has_two_containers(server: Serving, version: str) -> None:
    manager = ask(server, version, TWO)
    overview = manager.overview("root")
    id_by_gpus = {app.used.gpus: app.id for app in overview.applications}
    assert id_by_gpus.keys() == {0, 1} and sorted(id_by_gpus.values()) == applications(server)
    first, second = id_by_gpus[1], id_by_gpus[0]
    (container,) = (held for held in overview.containers[first] if held.size.gpus)
    assert container.size.gpus == 1 and container.granted > 0
    assert list(manager.held_containers(first, EXECUTOR).containers) == [container.id]
    assert all(len(manager.held_containers(id, 0).containers) == 1 for id in (first, second))
    snapshot = manager.snapshot(second, "root")
    assert snapshot.problems == () and manager.gpus() == (1, 4)
    assert [node.used.gpus for node in snapshot.nodes if node.id == container.node] == [1]


@pytest.mark.parametrize("situation", [ONE, TWO])
def test_the_gpus_that_a_node_describes(version: str, situation: str) -> None:
    answers = {path: text for path, text in read(version)[situation].items() if path[0] != "/"}
    assert len(answers) == int(situation[0])
    for text in answers.values():
        found = devices_of(with_lists(json.loads(text, object_pairs_hook=join_repeated)))
        assert [(gpu.name, gpu.memory_mib) for gpu in found.gpus] == [("Simulated A100", 40960)] * 2
        assert len({gpu.uuid for gpu in found.gpus}) == 2
        assert found.driver == "550.54.15"
