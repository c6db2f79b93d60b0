"""The client of an API server: pages, errors in the server's words, and answers without a bound."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hopsgpu.cluster_managers.http_client import NoAccess, NoAnswer, NotUnderstood
from hopsgpu.cluster_managers.kubernetes import api_client
from hopsgpu.cluster_managers.kubernetes.api_client import ApiClient, ApiError, Forbidden
from tests.bounds import HANG_SECONDS
from tests.private_certificate import private_certificate
from tests.proxy import refusing_proxy
from tests.servers import free_port
from tests.unit.cluster_managers.kubernetes.api_server import (
    OWN,
    SECONDS,
    TOKEN,
    ApiServer,
    ReceivedRequest,
    Reply,
    access_of,
    api_server,
    recorded_list,
    single,
)
from tests.unit.rest import AnsweringHandler, http_server

NODES = "/api/v1/nodes"


def client_of(server: ApiServer, **options: Any) -> ApiClient:
    return ApiClient(access_of(server.url, **options), SECONDS)


def answering(status: int, answer: Any) -> contextlib.AbstractContextManager[ApiServer]:
    return api_server({f"GET {NODES}": (status, answer)})


def in_pages(request: ReceivedRequest) -> Reply:
    following = recorded_list("page_1")["metadata"]["continue"]
    return 200, recorded_list("page_2" if request.query.get("continue") == following else "page_1")


def test_an_object_is_returned_as_it_is() -> None:
    with api_server() as server:
        client = client_of(server)
        assert client.get("/version") == single("version")[1]
        assert (client.address, client.namespace) == (server.url, "recorded")


def test_a_list_is_requested_in_pages() -> None:
    with api_server({f"GET {OWN}/pods": in_pages}) as server:
        items = list(client_of(server).items(f"{OWN}/pods", labelSelector="a=b,c in (d)"))
    assert len(items) == 8
    first, second = server.requests
    assert first.query == {"limit": "500", "labelSelector": "a=b,c in (d)"}
    following = recorded_list("page_1")["metadata"]["continue"]
    assert second.query == {**first.query, "continue": following}


def test_an_expired_page_is_an_error_in_the_servers_words() -> None:
    def answer(request: ReceivedRequest) -> Reply:
        return single("page_expired") if "continue" in request.query else in_pages(request)

    with (
        api_server({f"GET {OWN}/pods": answer}) as server,
        pytest.raises(ApiError, match="Kubernetes says: .*continue parameter is too old") as caught,
    ):
        list(client_of(server).items(f"{OWN}/pods"))
    assert (caught.value.status, caught.value.reason) == (410, "Expired")


def test_pages_without_an_end_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_client, "_MAX_PAGES", 3)
    with api_server({f"GET {OWN}/pods": (200, recorded_list("page_1"))}) as server:
        with pytest.raises(NoAnswer, match="more than the 1500 objects"):
            list(client_of(server).items(f"{OWN}/pods"))
        assert len(server.requests) == 3


@pytest.mark.parametrize("answer", [{}, {"items": {}}, {"items": None}])
def test_a_list_without_items_is_not_understood(answer: Any) -> None:
    with answering(200, answer) as server, pytest.raises(NotUnderstood, match="has no items"):
        list(client_of(server).items(NODES))


def test_items_that_are_no_objects_are_left_out() -> None:
    with answering(200, {"items": [1, {"a": 1}, None], "metadata": None}) as server:
        assert list(client_of(server).items(NODES)) == [{"a": 1}]


@pytest.mark.parametrize("answer", ["<html>Sign in</html>", "", [1], "1", "[" * 10**5])
def test_an_answer_that_is_no_json_object_is_not_understood(answer: Any) -> None:
    with (
        answering(200, answer) as server,
        pytest.raises(NotUnderstood, match=f"{server.url}{NODES}: .* not a JSON object"),
    ):
        client_of(server).get(NODES)


@pytest.mark.parametrize(("status", "answer"), [(502, "<html>Bad gateway</html>"), (500, [1])])
def test_an_error_without_words_has_its_status(status: int, answer: Any) -> None:
    with (
        answering(status, answer) as server,
        pytest.raises(ApiError, match=f"Kubernetes says: HTTP {status}") as caught,
    ):
        client_of(server).get(NODES)
    assert (caught.value.status, caught.value.reason) == (status, "")


def test_an_absent_object() -> None:
    with (
        answering(*single("pod_absent")) as server,
        pytest.raises(ApiError, match='Kubernetes says: pods "absent" not found') as caught,
    ):
        client_of(server).get(NODES)
    assert (caught.value.status, caught.value.reason) == (404, "NotFound")
    assert not isinstance(caught.value, NoAccess)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("forbidden", 'User "system:serviceaccount:recorded:default" cannot list resource "pods"'),
        ("unauthorized", "Unauthorized"),
        ("over_quota", "exceeded quota: team, requested: requests.nvidia.com/gpu=3"),
    ],
)
def test_a_refusal_has_the_servers_words_and_the_origin_of_credentials(
    name: str, words: str
) -> None:
    with answering(*single(name)) as server, pytest.raises(Forbidden) as caught:
        client_of(server).get(NODES)
    text = str(caught.value)
    assert text.startswith("Kubernetes refuses: ") and words in text
    assert "(with the credentials of /home/alice/.kube/config)" in text
    assert TOKEN not in text and isinstance(caught.value, NoAccess)


def test_a_long_message_is_cut_and_has_one_line() -> None:
    with (
        answering(500, {"message": "a\n\x0bb" * 10**5, "reason": "r" * 10**5}) as server,
        pytest.raises(ApiError) as caught,
    ):
        client_of(server).get(NODES)
    assert len(str(caught.value)) < 500 and "\n" not in str(caught.value)
    assert len(caught.value.reason) <= 400


def test_a_client_asks_on_after_an_error() -> None:
    with answering(*single("forbidden")) as server:
        client = client_of(server)
        for _ in range(3):
            with pytest.raises(Forbidden):
                client.get(NODES)
            assert client.get("/version")["gitVersion"] == "v1.34.4"


def test_the_token_is_sent_only_as_a_header() -> None:
    answers = {f"{m} /a": (200, {"kind": "Status"}) for m in ("GET", "POST", "PUT", "DELETE")}
    with api_server(answers) as server:
        client = client_of(server)
        client.get("/a", limit="1")
        client.create("/a", {"kind": "Lease"})
        client.replace("/a", {"kind": "Lease"})
        client.delete("/a", {"kind": "DeleteOptions"}, labelSelector="a=b")
        client.delete("/a")
    assert server.lines == ["GET /a", "POST /a", "PUT /a", "DELETE /a", "DELETE /a"]
    assert [r.query for r in server.requests] == [
        {"limit": "1"},
        {},
        {},
        {"labelSelector": "a=b"},
        {},
    ]
    assert [(r.body or {}).get("kind") for r in server.requests] == [
        None,
        "Lease",
        "Lease",
        "DeleteOptions",
        None,
    ]
    for request in server.requests:
        assert request.headers["authorization"] == f"Bearer {TOKEN}"
        rest = {k: v for k, v in request.headers.items() if k != "authorization"}
        assert TOKEN not in repr((request.path, request.query, request.body, rest))


def test_a_log_has_no_token(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    with answering(*single("unauthorized")) as server, pytest.raises(Forbidden):
        client_of(server).get(NODES)
    with pytest.raises(NoAnswer):
        ApiClient(access_of(server.url), SECONDS).get(NODES)
    assert NODES in caplog.text and TOKEN not in caplog.text


def test_a_token_that_is_renewed_is_sent() -> None:
    tokens = iter(["first", "second"])
    with api_server() as server:
        access = access_of(server.url)

        def renew(configuration: Any) -> None:
            configuration.api_key["authorization"] = f"Bearer {next(tokens)}"

        access.configuration.refresh_api_key_hook = renew
        client = ApiClient(access, SECONDS)
        client.get("/version")
        client.get("/version")
    assert [r.headers["authorization"] for r in server.requests] == [
        "Bearer first",
        "Bearer second",
    ]


def test_a_token_that_is_no_header_is_not_sent() -> None:
    with (
        api_server() as server,
        pytest.raises(NoAccess, match="the token of /home/alice/.kube/config is empty") as caught,
    ):
        client_of(server, token=f"{TOKEN}\nx").get("/version")
    assert TOKEN not in str(caught.value) and server.requests == []


def test_without_a_token_no_header_is_sent() -> None:
    with api_server() as server:
        access = access_of(server.url)
        access.configuration.api_key.clear()
        ApiClient(access, SECONDS).get("/version")
    assert "authorization" not in server.requests[0].headers


def test_a_redirect_is_not_followed_with_the_token() -> None:
    with api_server() as other:

        class Redirecting(AnsweringHandler):
            def do_GET(self) -> None:
                self.answer(b"{}", 302, Location=f"{other.url}/version")

        with http_server(Redirecting) as http:
            url = f"http://127.0.0.1:{http.server_address[1]}"
            with pytest.raises(ApiError, match="HTTP 302") as caught:
                ApiClient(access_of(url), SECONDS).get(NODES)
    assert caught.value.status == 302 and other.requests == []


def test_proxies_of_the_environment_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with refusing_proxy() as proxy, api_server() as server:
        for name, value in proxy.variables.items():
            monkeypatch.setenv(name, value)
        assert client_of(server).get("/version")
    assert proxy.asked == []


def test_threads_share_a_client() -> None:
    with api_server() as server:
        client = client_of(server)
        versions: list[str] = []

        def ask() -> None:
            versions.extend(str(client.get("/version")["gitVersion"]) for _ in range(5))

        threads = [threading.Thread(target=ask) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG_SECONDS)
    assert versions == ["v1.34.4"] * 60


@contextlib.contextmanager
def raw_server(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """Accept one connection, and have a function answer its request; yield the URL."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def run() -> None:
            with contextlib.suppress(OSError):
                connection, _ = listening.accept()
                with connection:
                    connection.recv(65536)
                    serve(connection)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            thread.join(HANG_SECONDS)


def test_an_endless_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_client, "MAX_ANSWER_BYTES", 10**6)

    def serve(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        while True:
            connection.sendall(b" " * 65536)

    with raw_server(serve) as url:
        client = ApiClient(access_of(url), SECONDS)
        with pytest.raises(NoAnswer, match="more than the 1000000 accepted bytes"):
            client.get(NODES)
        del client


def test_an_answer_in_chunks_that_come_slowly_is_given_up() -> None:
    limit = 0.2
    began = time.monotonic()

    def serve(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while time.monotonic() - began < 60:
            connection.sendall(b"1\r\n \r\n")
            time.sleep(limit / 4)

    with raw_server(serve) as url:
        client = ApiClient(access_of(url), (10.0, limit))
        with pytest.raises(NoAnswer, match="did not end in time"):
            client.get(NODES)
        assert time.monotonic() - began < 30
        del client


def test_an_answer_that_comes_byte_by_byte_is_given_up() -> None:
    limit = 0.2
    began = time.monotonic()

    def serve(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        while time.monotonic() - began < 60:
            connection.sendall(b" ")
            time.sleep(limit / 4)

    with raw_server(serve) as url:
        with pytest.raises(NoAnswer, match=f"server at {url} did not end in time"):
            ApiClient(access_of(url), (10.0, limit)).get(NODES)
        assert time.monotonic() - began < 30


def test_a_client_asks_on_after_an_answer_that_was_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(api_client, "MAX_ANSWER_BYTES", 10**5)
    with api_server({"GET /a": (200, " " * 10**6)}) as server:
        client = client_of(server)
        for _ in range(3):
            with pytest.raises(NoAnswer, match="accepted bytes"):
                client.get("/a")
            assert client.get("/version")["gitVersion"] == "v1.34.4"


def test_a_server_that_is_not_there_and_a_name_that_is_unknown() -> None:
    for url, reason in (
        (f"http://127.0.0.1:{free_port()}", "Connection refused"),
        ("http://absent.invalid", "(?i:name)"),
    ):
        with pytest.raises(NoAnswer, match=f"server at {url} does not answer: .*{reason}"):
            ApiClient(access_of(url), SECONDS).get(NODES)


def test_a_server_that_says_nothing_is_given_up() -> None:
    finish = threading.Event()

    def serve(connection: socket.socket) -> None:
        finish.wait(HANG_SECONDS)

    with raw_server(serve) as url:
        try:
            with pytest.raises(NoAnswer, match=f"server at {url} does not answer: timed out"):
                ApiClient(access_of(url), (10.0, 0.2)).get(NODES)
        finally:
            finish.set()


def test_a_server_that_ends_within_an_answer() -> None:
    with (
        raw_server(lambda c: c.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{")) as url,
        pytest.raises(NoAnswer, match="does not answer: .*1 bytes read"),
    ):
        ApiClient(access_of(url), SECONDS).get(NODES)


def test_a_server_that_speaks_something_else() -> None:
    with (
        raw_server(lambda c: c.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")) as url,
        pytest.raises(NoAnswer, match=f"the API server at {url} does not answer: .*SSH-2.0"),
    ):
        ApiClient(access_of(url), SECONDS).get(NODES)


@pytest.fixture
def tls_server(tmp_path: Path) -> Iterator[tuple[str, Path, list[str | None]]]:
    """The URL of an HTTPS server, its certificate, and the tokens that it received."""
    authority, pair = private_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair)
    tokens: list[str | None] = []

    class Handler(AnsweringHandler):
        def do_GET(self) -> None:
            tokens.append(self.headers.get("Authorization"))
            self.answer(json.dumps({"gitVersion": "v1"}).encode())

    with http_server(Handler, context) as http:
        yield f"https://127.0.0.1:{http.server_address[1]}", authority, tokens


def test_the_authority_of_the_kubeconfig_is_trusted(
    tls_server: tuple[str, Path, list[str | None]],
) -> None:
    url, authority, tokens = tls_server
    access = access_of(url)
    access.configuration.ssl_ca_cert = str(authority)
    assert ApiClient(access, SECONDS).get("/version") == {"gitVersion": "v1"}
    assert tokens == [f"Bearer {TOKEN}"]


def test_a_certificate_of_another_authority_gets_no_token(
    tls_server: tuple[str, Path, list[str | None]],
) -> None:
    url, _, tokens = tls_server
    with pytest.raises(NoAnswer, match="does not answer: .*(?i:certificate)"):
        ApiClient(access_of(url), SECONDS).get("/version")
    assert tokens == []


def test_a_certificate_counts_for_the_name_that_the_kubeconfig_has(
    tls_server: tuple[str, Path, list[str | None]],
) -> None:
    url, authority, tokens = tls_server
    access = access_of(url)
    access.configuration.ssl_ca_cert = str(authority)
    access.configuration.tls_server_name = "another.name"
    with pytest.raises(NoAnswer, match="another.name"):
        ApiClient(access, SECONDS).get("/version")
    assert tokens == []


def test_without_verification_any_certificate_serves(
    tls_server: tuple[str, Path, list[str | None]],
) -> None:
    access = access_of(tls_server[0])
    access.configuration.verify_ssl = False
    with pytest.warns(match="Unverified HTTPS request"):
        assert ApiClient(access, SECONDS).get("/version")


def changes_of(*lines: bytes) -> Callable[[socket.socket], None]:
    """Return what answers a watch with these lines, the last of which comes late."""

    def serve(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        for line in lines:
            # A line may arrive in parts.
            connection.sendall(line[:5])
            time.sleep(0.05)
            connection.sendall(line[5:] + b"\n")

    return serve


def test_a_watch_yields_changes_as_they_come() -> None:
    lines = [b'{"type": "ADDED", "object": {"a": 1}}', b'{"type": "DELETED", "object": {"a": 2}}']
    with raw_server(changes_of(*lines)) as url:
        changes = list(ApiClient(access_of(url), SECONDS).watch("/pods", 5.0))
    assert changes == [("ADDED", {"a": 1}), ("DELETED", {"a": 2})]


@pytest.mark.parametrize(
    ("line", "error", "words"),
    [
        (b"[1]", NotUnderstood, "no change of an object"),
        (b"<html>", NotUnderstood, "no change of an object"),
        (
            b'{"type": "ERROR", "object": {"code": 410, "message": "too old resource version"}}',
            ApiError,
            "too old resource version",
        ),
    ],
)
def test_a_watch_that_is_none_is_an_error(line: bytes, error: type[Exception], words: str) -> None:
    with raw_server(changes_of(line)) as url, pytest.raises(error, match=words):
        list(ApiClient(access_of(url), SECONDS).watch("/pods", 5.0))


def test_a_line_of_a_watch_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_client, "_MAX_LINE_BYTES", 1000)
    with raw_server(changes_of(b"x" * 100_000)) as url:
        client = ApiClient(access_of(url), SECONDS)
        with pytest.raises(NoAnswer, match="more than 1000 bytes"):
            list(client.watch("/pods", 5.0))


def test_who_may_not_watch_is_refused_in_the_servers_words() -> None:
    with api_server({"GET /pods": single("forbidden")}) as server:
        with pytest.raises(Forbidden, match="cannot list resource"):
            list(client_of(server).watch("/pods", 5.0))
        assert server.requests[0].query == {"watch": "true", "timeoutSeconds": "5"}
