"""A cluster at REST level: answers that Hadoop 3.5 gave, scaled to many nodes, queues and jobs."""

from __future__ import annotations

import contextlib
import copy
import json
import multiprocessing
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_RECORDED = Path(__file__).parents[2] / "tests/unit/hadoop_answers/rest-3.5.0.json"
_SITUATION = "2 nodes, 2 applications"
_API = "/ws/v1/cluster"
_APPS = f"{_API}/apps?states=RUNNING&deSelects=resourceRequests,timeouts"
_NODE = "/ws/v1/node/resources/yarn.io%2Fgpu"
_GPU = "yarn.io/gpu"
_SCALED = ("memory-mb", "vcores", _GPU)
_START_SECONDS = 60.0
_SPAWN = multiprocessing.get_context("spawn")


class ScaledAnswers:
    """The answers of a ResourceManager and its NodeManagers, by path.

    Half of the GPUs are in use: application n has all GPUs of nodes 2n and 2n + 1, up to half of
    the nodes.

    Args:
        nodes: number of nodes.
        gpus: number of GPUs of each node.
        queues: number of leaf queues.
        users: number of users with a running application.
        web: host and port at which all NodeManagers are reached.
    """

    def __init__(self, nodes: int, gpus: int, queues: int, users: int, web: str) -> None:
        self._nodes, self._gpus, self._queues, self._web = nodes, gpus, queues, web
        recorded = json.loads(_RECORDED.read_text())[_SITUATION]
        answers = {path: json.loads(text) for path, text in recorded.items()}
        apps = answers[_APPS]["apps"]["app"]
        # The one that has a GPU.
        self._app = next(app for app in apps if app["runningContainers"] > 1)
        self._apps = [self._application(number) for number in range(min(users, nodes // 4))]
        self._containers = answers[
            f"{_API}/apps/{self._app['id']}/appattempts/{_attempt(self._app['id'])}/containers"
        ]
        node = answers[f"{_API}/nodes"]["nodes"]["node"][0]
        device = next(answer for path, answer in answers.items() if path.endswith(_NODE))
        self.texts = {path: json.dumps(answer) for path, answer in answers.items()}
        self.texts[f"{_API}/nodes"] = json.dumps(
            {"nodes": {"node": [self._node(node, number) for number in range(nodes)]}}
        )
        self.texts[f"{_API}/scheduler"] = json.dumps(self._scheduler(answers[f"{_API}/scheduler"]))
        self.texts[_APPS] = json.dumps({"apps": {"app": self._apps}})
        for number, app in enumerate(self._apps):
            path = f"{_API}/apps/{app['id']}/appattempts/{_attempt(app['id'])}/containers"
            self.texts[path] = json.dumps({"container": self._held(number, app["id"])})
        self.texts[_NODE] = json.dumps(self._devices(device))

    @property
    def application(self) -> tuple[str, str]:
        """Return the id and the user of a running application."""
        return self._apps[0]["id"], self._apps[0]["user"]

    def _node(self, recorded: Any, number: int) -> Any:
        node = copy.deepcopy(recorded)
        node["nodeHostName"] = f"node{number}"
        node["id"], node["nodeHTTPAddress"] = f"node{number}:8041", self._web
        used = number < 2 * len(self._apps)
        sizes = {"memory-mb": 1_000_000, "vcores": 12 * self._gpus, _GPU: self._gpus}
        _resize(node["totalResource"], sizes)
        _resize(node["usedResource"], {name: size * used for name, size in sizes.items()})
        _resize(node["availableResource"], {n: size * (not used) for n, size in sizes.items()})
        return node

    def _application(self, number: int) -> Any:
        app = copy.deepcopy(self._app)
        before, app["id"] = app["id"], f"application_1795688235418_{number + 1:04d}"
        app["amContainerLogs"] = app["amContainerLogs"].replace(
            before.removeprefix("application"), app["id"].removeprefix("application")
        )
        app["user"], app["name"] = f"user{number}", f"job {number}"
        app["queue"] = f"root.default{number % self._queues}"
        app["masterNodeId"] = f"node{2 * number}:8041"
        app["runningContainers"] = 2 * self._gpus
        for usage in app["resourceInfo"]["resourceUsagesByPartition"]:
            _resize(usage["used"], {_GPU: 2 * self._gpus})
        return app

    def _held(self, number: int, application: str) -> list[Any]:
        """Return an application's containers, of one GPU each."""
        recorded = self._containers["container"][-1]
        held = []
        for index in range(2 * self._gpus):
            container = copy.deepcopy(recorded)
            of = application.removeprefix("application")
            container["containerId"] = f"container{of}_01_{index + 2:06d}"
            node = f"node{2 * number + index // self._gpus}:8041"
            container["assignedNodeId"] = container["nodeId"] = node
            held.append(container)
        return held

    def _scheduler(self, recorded: Any) -> Any:
        answer = copy.deepcopy(recorded)
        info = answer["scheduler"]["schedulerInfo"]
        leaf = info["queues"]["queue"][0]
        _enlarge(leaf, self._nodes * self._gpus)
        queues = []
        for number in range(self._queues):
            queue = copy.deepcopy(leaf)
            queue["queueName"] = f"{leaf['queueName']}{number}"
            queue["queuePath"] = f"root.{queue['queueName']}"
            queues.append(queue)
        info["queues"]["queue"] = queues
        _enlarge(info["capacities"], self._nodes * self._gpus)
        _enlarge(info["maximumAllocation"], self._nodes * self._gpus)
        return answer

    def _devices(self, recorded: Any) -> Any:
        answer = copy.deepcopy(recorded)
        information = answer["gpuDeviceInformation"]
        gpu = information["gpu"][0]
        information["gpu"] = [
            {**gpu, "minor_number": number, "uuid": f"{gpu['uuid']}-{number}"}
            for number in range(self._gpus)
        ]
        return answer


def _attempt(application: str) -> str:
    return f"appattempt{application.removeprefix('application')}_000001"


def _resize(resource: Any, sizes: dict[str, int]) -> None:
    for entry in resource["resourceInformations"]["resourceInformation"]:
        entry["value"] = sizes.get(entry["name"], entry["value"])


def _enlarge(value: Any, gpus: int) -> None:
    """Give a queue as much of everything as the whole cluster has, where it may have some."""
    if isinstance(value, list):
        for one in value:
            _enlarge(one, gpus)
    elif isinstance(value, dict):
        large = value.get("name") in _SCALED and int(value.get("value", 0)) > 0
        if large and int(value["value"]) < 2**62:
            value["value"] = gpus if value["name"] == _GPU else 1_000_000_000
        for one in value.values():
            _enlarge(one, gpus)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        assert isinstance(self.server, _Serving)
        text = self.server.texts.get(self.path)
        if text is None:
            self.send_error(404)
            return
        content = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the tables clean."""


class _Serving(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256
    texts: dict[str, str]


def _serve(pipe: Connection, sizes: tuple[int, int, int, int]) -> None:
    """Run the process of the ResourceManager and of all NodeManagers."""
    with _Serving(("127.0.0.1", 0), _Handler) as serving:
        web = f"127.0.0.1:{serving.server_port}"
        answers = ScaledAnswers(*sizes, web)
        serving.texts = answers.texts
        pipe.send((web, answers.application))
        serving.serve_forever()


@contextlib.contextmanager
def served(nodes: int, gpus: int, queues: int, users: int) -> Iterator[tuple[str, tuple[str, str]]]:
    """Serve the answers from a process of their own while inside.

    Args:
        nodes: number of nodes.
        gpus: number of GPUs of each node.
        queues: number of leaf queues.
        users: number of users with a running application.

    Yields:
        Host and port of the ResourceManager; id and user of a running application.
    """
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=_serve, args=(theirs, (nodes, gpus, queues, users)))
    process.start()
    theirs.close()
    try:
        if not ours.poll(_START_SECONDS):
            raise RuntimeError("the simulated ResourceManager did not start")
        yield ours.recv()
    finally:
        process.kill()
        process.join()
