"""An API server that answers as one of Kubernetes 1.34.4 did, with the answers of tests/unit."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from kubernetes.client import Configuration

from hopsgpu.cluster_managers.kubernetes.credentials import ApiAccess
from hopsgpu.cluster_managers.kubernetes.manager import KubernetesManager
from tests.unit.rest import AnsweringHandler, http_server

DATA = Path(__file__).parents[2] / "kubernetes_answers"
NAMESPACE, GPU = "recorded", "nvidia.com/gpu"
APPLICATION = "spark-5f0c1d2e3a4b4c5d8e9f0a1b2c3d4e5f"
OTHER_APPLICATION = "spark-00000000000000000000000000000001"
TOKEN = "zq-secret-of-the-test"
OWN = f"/api/v1/namespaces/{NAMESPACE}"
LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
LEASE = f"{LEASES}/hopsgpu-{APPLICATION}"
SELF = "/apis/authentication.k8s.io/v1/selfsubjectreviews"
ACCESS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
SECONDS = (10.0, 30.0)

Reply = tuple[int, Any]


@dataclass(frozen=True)
class ReceivedRequest:
    """A request as it arrived; names of headers are lowercase."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: Any

    @property
    def line(self) -> str:
        return f"{self.method} {self.path}"


@dataclass
class ApiServer:
    """The answers of an API server, and the requests that it received.

    Attributes:
        answers: method and path → status and JSON value, or a function that returns both for a
            request. A text is sent as it is.
    """

    answers: dict[str, Reply | Callable[[ReceivedRequest], Reply]]
    requests: list[ReceivedRequest] = field(default_factory=list)
    url: str = ""

    @property
    def lines(self) -> list[str]:
        return [request.line for request in self.requests]

    def bodies(self, method: str, path: str) -> list[Any]:
        """Return the bodies of the requests with a method and a path."""
        return [request.body for request in self.requests if request.line == f"{method} {path}"]


def recorded_list(name: str) -> Any:
    return json.loads((DATA / f"{name}.json").read_text())


def single(name: str) -> Reply:
    """Return status and JSON value of a single recorded answer."""
    answer = json.loads((DATA / "single_answers.json").read_text())[name]
    return answer["status"], answer["answer"]


def recorded_pods() -> dict[str, Any]:
    """Return the recorded pods by name."""
    pages = (recorded_list("page_1"), recorded_list("page_2"))
    return {pod["metadata"]["name"]: pod for page in pages for pod in page["items"]}


def list_of(items: list[Any]) -> dict[str, Any]:
    return {"kind": "List", "apiVersion": "v1", "metadata": {}, "items": items}


def select(items: list[Any]) -> Callable[[ReceivedRequest], Reply]:
    """Return an answer with those of some objects that a request selects."""

    def answer(request: ReceivedRequest) -> Reply:
        labels = request.query.get("labelSelector", "")
        fields = request.query.get("fieldSelector", "")
        return 200, list_of([i for i in items if _has_labels(i, labels) and _has_fields(i, fields)])

    return answer


def _has_labels(item: Mapping[str, Any], selector: str) -> bool:
    labels = item["metadata"].get("labels", {})
    for clause in filter(None, re.split(r",(?![^(]*\))", selector)):
        key, is_equation, value = clause.partition("=")
        if key not in labels or (is_equation and labels[key] != value):
            return False
    return True


def _has_fields(item: Mapping[str, Any], selector: str) -> bool:
    for clause in filter(None, selector.split(",")):
        name, unequal, value = clause.partition("!=")
        if not unequal:
            name, _, value = clause.partition("=")
        field_value: Any = item
        for part in name.split("."):
            field_value = field_value[part]
        if (field_value == value) is bool(unequal):
            return False
    return True


def recorded_answers() -> dict[str, Reply | Callable[[ReceivedRequest], Reply]]:
    """Return the answers of the moment that was recorded."""
    pods = select(list(recorded_pods().values()))
    return {
        "GET /api/v1/nodes": (200, recorded_list("nodes")),
        "GET /api/v1/pods": pods,
        f"GET {OWN}/pods": pods,
        f"GET {OWN}/events": select(recorded_list("events")["items"]),
        f"GET {OWN}/resourcequotas": (200, recorded_list("quotas")),
        f"GET {OWN}/limitranges": (200, recorded_list("limitranges")),
        f"GET {LEASES}": select(recorded_list("leases")["items"]),
        f"GET {LEASE}": (200, single("lease_created")[1]),
        "GET /version": single("version"),
        f"POST {SELF}": single("self"),
        f"POST {ACCESS}": single("allowed"),
    }


@contextlib.contextmanager
def api_server(
    answers: Mapping[str, Reply | Callable[[ReceivedRequest], Reply]] | None = None,
) -> Iterator[ApiServer]:
    """Serve the recorded answers, and others in their place, on a loopback port."""
    server = ApiServer({**recorded_answers(), **(answers or {})})

    class Handler(AnsweringHandler):
        protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            request = ReceivedRequest(
                self.command,
                parts.path,
                dict(parse_qsl(parts.query)),
                {name.lower(): value for name, value in self.headers.items()},
                json.loads(content) if content else None,
            )
            server.requests.append(request)
            entry = server.answers.get(request.line, (404, {"kind": "Status", "reason": "None"}))
            status, answer = entry(request) if callable(entry) else entry
            text = answer if isinstance(answer, str) else json.dumps(answer)
            with contextlib.suppress(ConnectionError):
                self.answer(text.encode(), status)

        do_POST = do_PUT = do_DELETE = do_GET

    with http_server(Handler) as http:
        server.url = f"http://127.0.0.1:{http.server_address[1]}"
        yield server


def access_of(url: str, namespace: str = NAMESPACE, token: str = TOKEN) -> ApiAccess:
    configuration = Configuration()
    configuration.host = url
    configuration.api_key["authorization"] = f"Bearer {token}"
    return ApiAccess(url, namespace, configuration, "/home/alice/.kube/config")


def manager_of(server: ApiServer, **options: Any) -> KubernetesManager:
    return KubernetesManager(
        access_of(server.url), **{"gpu_resource": GPU, "seconds": SECONDS, **options}
    )
