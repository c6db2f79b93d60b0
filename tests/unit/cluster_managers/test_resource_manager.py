"""The ResourceManager's REST: addresses from Hadoop's settings, and what is read of nodes.

The answers are those of a real one, shortened; the cluster tests ask a real one.
"""

from __future__ import annotations

import logging
import ssl
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import requests

from hopsgpu.cluster_managers.capacity import check_container, cores_per_gpu
from hopsgpu.cluster_managers.http_client import NoAnswer, NotUnderstood
from hopsgpu.cluster_managers.resources import Amount
from hopsgpu.cluster_managers.snapshot import Node
from hopsgpu.cluster_managers.yarn.resource_manager import ResourceManager, web_addresses
from hopsgpu.cluster_managers.yarn.rest_client import get_json
from hopsgpu.errors import CapacityError, ConfigError, HopsGpuError
from tests.bounds import HANG_SECONDS
from tests.private_certificate import private_certificate
from tests.unit.cluster_managers.test_capacity import yarn_answers
from tests.unit.rest import Daemon, serving

NODES: dict[str, Any] = {"/ws/v1/cluster/nodes": {"nodes": None}}
SECONDS = (10.0, 30.0)


@pytest.mark.parametrize(
    ("settings", "addresses"),
    [
        ({"webapp.address": "rm:8088"}, ("http://rm:8088",)),
        ({"hostname": "rm"}, ("http://rm:8088",)),
        (
            {"hostname": "rm", "webapp.address": "${yarn.resourcemanager.hostname}:8088"},
            ("http://rm:8088",),
        ),
        ({"http": "HTTPS_ONLY", "webapp.https.address": "rm:8090"}, ("https://rm:8090",)),
        (
            {
                "ha.enabled": "true",
                "ha.rm-ids": "a, b",
                "webapp.address.a": "one:8088",
                "hostname.b": "two",
            },
            ("http://one:8088", "http://two:8088"),
        ),
        (
            {
                "http": "https_only",
                "ha.enabled": "TRUE",
                "ha.rm-ids": "rm1,rm2",
                "webapp.address.rm1": "one:8088",
                "webapp.https.address.rm1": "one:8190",
                "webapp.https.address.rm2": "${yarn.resourcemanager.hostname}:8090",
                "hostname.rm2": "two",
            },
            ("https://one:8190", "https://two:8090"),
        ),
        ({}, ()),
    ],
)
def test_web_addresses(settings: dict[str, str], addresses: tuple[str, ...]) -> None:
    full = {f"yarn.resourcemanager.{k}": v for k, v in settings.items() if k != "http"}
    if "http" in settings:
        full["yarn.http.policy"] = settings["http"]
    assert web_addresses(full.get) == addresses


def node(cores: int, gpus: int, state: str = "RUNNING") -> Node:
    return Node("n:1", "n", state, Amount(gpus, cores, 1024), Amount(0, 0, 0))


def test_the_share_of_cores_is_that_of_the_poorest_node() -> None:
    assert cores_per_gpu((node(16, 2), node(9, 4), node(64, 0))) == 1
    assert cores_per_gpu((node(16, 2), node(2, 2, "LOST"))) == 7
    assert cores_per_gpu((node(1, 4),)) == 1
    assert cores_per_gpu(()) == 1


def test_a_container_that_fits_nowhere_names_the_bounds() -> None:
    nodes = (node(8, 2), node(64, 8, "LOST"))
    largest = Amount(8, 32, 2048)
    check_container(Amount(2, 8, 1024), largest, nodes)
    for wanted in (Amount(4, 8, 1024), Amount(2, 9, 1024), Amount(2, 8, 1025)):
        with pytest.raises(CapacityError, match=r"node n has 2 GPUs, 8 cores, 1024 MiB") as error:
            check_container(wanted, largest, nodes)
        assert str(wanted) in str(error.value)
    with pytest.raises(CapacityError, match="largest container has 1 GPU,"):
        check_container(Amount(2, 8, 1024), Amount(1, 32, 2048), nodes)


@pytest.mark.parametrize("addresses", [(), ("http://127.0.0.1:1",)])
def test_no_answer_says_where_it_was_asked(addresses: tuple[str, ...]) -> None:
    with pytest.raises(HopsGpuError, match="HADOOP_CONF_DIR") as error:
        ResourceManager(addresses).nodes()
    assert all(address in str(error.value) for address in addresses)


def test_of_two_resource_managers_the_one_that_answers_is_asked_first() -> None:
    with serving(NODES) as daemon:
        manager = ResourceManager(("http://127.0.0.1:1", daemon.url))
        assert manager.nodes() == ()
        assert manager.nodes() == ()
    assert daemon.asked == ["/ws/v1/cluster/nodes"] * 2
    with pytest.raises(HopsGpuError) as error:
        manager.nodes()
    assert str(error.value).startswith(
        f"the ResourceManager does not answer ({daemon.url}: Connection refused;"
        " http://127.0.0.1:1: Connection refused). Is YARN up"
    )


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((500, "boom"), "HTTP 500 Internal Server Error"),
        ((403, "no"), "HTTP 403 Forbidden"),
        ((200, "<html>log in</html>"), "its answer is not JSON"),
        ((401, "basic is wanted"), "HTTP 401 Unauthorized"),
        # As a real NodeManager said whose nvidia-smi failed.
        (
            (
                503,
                '{"RemoteException":{"exception":"YarnException","message":"Failed to\\nrun it"}}',
            ),
            "HTTP 503 Service Unavailable: Failed to run it",
        ),
        ((503, "[1]"), "HTTP 503 Service Unavailable"),
        # As a real standby said, and a redirect without a target or a text.
        (
            (307, "Can not find any active RM. Will retry in next 2 seconds.\nHA Zookeeper"),
            "Can not find any active RM. Will retry in next 2 seconds.",
        ),
        ((307, ""), "HTTP 307 Temporary Redirect"),
    ],
)
def test_why_there_is_no_answer_in_a_few_words(answer: object, reason: str) -> None:
    with serving({"/x": answer}) as daemon, pytest.raises(NoAnswer) as error:
        get_json(f"{daemon.url}/x", SECONDS)
    assert str(error.value) == reason


def test_a_name_that_nobody_knows() -> None:
    with pytest.raises(NoAnswer) as error:
        get_json("http://nowhere.invalid:1/x", SECONDS)
    assert "0x" not in str(error.value)
    assert len(str(error.value)) < 60


def test_an_answer_that_does_not_come() -> None:
    release = threading.Event()
    try:
        with serving({"/x": lambda: release.wait(HANG_SECONDS) and {}}) as daemon:
            with pytest.raises(NoAnswer, match="^timed out$"):
                get_json(f"{daemon.url}/x", (1.0, 0.2))
            release.set()
    finally:
        release.set()


# Kerberos: the handshake against a server that plays it, with a stand-in for requests-gssapi.


class Ticket(requests.auth.AuthBase):
    """Sends a token as HTTPSPNEGOAuth would."""

    token = "dGlja2V0"

    def __init__(self, *, opportunistic_auth: bool) -> None:
        assert opportunistic_auth

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = f"Negotiate {self.token}"
        return request


@pytest.fixture
def gssapi(monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.SimpleNamespace(HTTPSPNEGOAuth=Ticket)
    monkeypatch.setitem(sys.modules, "requests_gssapi", package)


@pytest.mark.usefixtures("gssapi")
def test_kerberos_where_it_is_wanted() -> None:
    with serving(NODES, token=Ticket.token) as daemon:
        assert ResourceManager((daemon.url,)).nodes() == ()
    assert daemon.tokens == [None, f"Negotiate {Ticket.token}"]


@pytest.mark.usefixtures("gssapi")
def test_no_ticket_is_shown_where_none_is_wanted() -> None:
    with serving(NODES) as daemon:
        ResourceManager((daemon.url,)).nodes()
    assert daemon.tokens == [None]


KLIST = """Default principal: alice@LAKE.EXAMPLE

11/26/26 12:47:19  11/26/66 22:47:19  krbtgt/LAKE.EXAMPLE@LAKE.EXAMPLE"""


@pytest.mark.usefixtures("gssapi")
@pytest.mark.parametrize(
    ("klist", "words"),
    [
        (None, r"run kinit\. Is there a ticket \(klist\)"),
        ("exit 1", "there is no Kerberos ticket: run kinit"),
        (f"echo '{KLIST}'", r"there is a ticket of alice@LAKE\.EXAMPLE; .*clock"),
    ],
)
def test_a_ticket_that_is_refused(
    klist: str | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if klist is not None:
        (tmp_path / "klist").write_text(f"#!/bin/sh\n{klist}\n")
        (tmp_path / "klist").chmod(0o755)
    with serving(NODES, token="of another") as daemon:
        with pytest.raises(HopsGpuError, match=rf"requires Kerberos .* user: {words}") as error:
            ResourceManager((daemon.url,)).nodes()
        assert daemon.url in str(error.value)
    assert len(daemon.asked) == 2


def test_kerberos_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "requests_gssapi", None)
    with (
        serving(NODES, token=Ticket.token) as daemon,
        pytest.raises(ConfigError, match=r"pip install 'hopsgpu\[kerberos\]', then run kinit"),
    ):
        ResourceManager((daemon.url,)).nodes()


# HTTPS with a certificate that a private authority has signed.


@pytest.fixture
def private(tmp_path: Path) -> tuple[Path, ssl.SSLContext]:
    """A certificate that is its own authority, and a server's end of TLS with it."""
    pem, both = private_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(both)
    return pem, context


def test_https_with_a_private_authority(
    private: tuple[Path, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, context = private

    def addresses(daemon: Daemon) -> tuple[str, ...]:
        settings = {
            "yarn.http.policy": "HTTPS_ONLY",
            "yarn.resourcemanager.webapp.https.address": daemon.address,
        }
        return web_addresses(settings.get)

    with serving(NODES, tls=context) as daemon:
        with pytest.raises(HopsGpuError, match="REQUESTS_CA_BUNDLE"):
            ResourceManager(addresses(daemon)).nodes()
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(authority))
        assert ResourceManager(addresses(daemon)).nodes() == ()


# Answers that are not understood, and logs.


def recorded_answers(name: str) -> dict[str, Any]:
    info = {"clusterInfo": {"hadoopVersion": "3.3.6", "state": "STARTED"}}
    return {**yarn_answers(name), "/ws/v1/cluster/info": info}


def test_a_missing_field_is_named_with_address_and_version() -> None:
    answers = recorded_answers("capacity_half")
    del answers["/ws/v1/cluster/nodes"]["nodes"]["node"][1]["nodeHostName"]
    with serving(answers) as daemon, pytest.raises(NotUnderstood) as error:
        ResourceManager((daemon.url,)).nodes()
    assert str(error.value).startswith(
        f"the ResourceManager at {daemon.url} (Hadoop 3.3.6) answered /ws/v1/cluster/nodes in an"
        " unknown form: the field nodes.node[1].nodeHostName is missing. Is"
    )


def test_a_daemon_that_does_not_report_its_version() -> None:
    with serving({"/ws/v1/cluster/nodes": []}) as daemon, pytest.raises(NotUnderstood) as error:
        ResourceManager((daemon.url,)).nodes()
    assert "(Hadoop of unknown version) answered /ws/v1/cluster/nodes" in str(error.value)
    assert "it is not an object with fields (but list)" in str(error.value)


def test_a_launch_goes_on_without_what_it_does_not_need(caplog: pytest.LogCaptureFixture) -> None:
    answers = recorded_answers("capacity_half")
    apps = answers["/ws/v1/cluster/apps"]["apps"]["app"]
    ours = next(app for app in apps if app["user"] == "alice")
    with serving(answers) as daemon:
        whole = ResourceManager((daemon.url,)).snapshot(ours["id"], "alice")
    assert whole.problems == () and whole.user.limit is not None
    apps.append({**ours, "id": "application_2_0001", "startedTime": "yesterday"})
    root = answers["/ws/v1/cluster/scheduler"]["scheduler"]["schedulerInfo"]
    for queue in root["queues"]["queue"]:
        queue["userLimitFactor"] = "half"
    with serving(answers) as daemon:
        found = ResourceManager((daemon.url,)).snapshot(ours["id"], "alice")
    assert (found.queues, found.nodes) == (whole.queues, whole.nodes)
    assert found.applications == () and found.user.limit is None
    first, second = found.problems
    assert first.startswith("hopsgpu continues without what other applications have: the Resource")
    assert "(Hadoop 3.3.6)" in first and ".app[1].startedTime has" in first
    assert second.startswith("hopsgpu continues without the limit of user alice in queue root.")
    assert ".userLimitFactor has an unexpected form (ValueError" in second
    assert all(problem in caplog.messages for problem in found.problems)


def test_which_resource_manager_did_not_answer_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "hopsgpu.cluster_managers")
    with serving({**NODES, "/ws/v1/cluster/apps": (503, "busy")}) as daemon:
        manager = ResourceManager(("http://127.0.0.1:1", daemon.url))
        manager.nodes()
        with pytest.raises(HopsGpuError):
            manager.ask("/ws/v1/cluster/apps?states=RUNNING")
    said = [record.message for record in caplog.records if record.levelno == logging.INFO]
    assert said[:2] == [
        "the ResourceManager at http://127.0.0.1:1 did not answer /ws/v1/cluster/nodes: Connection"
        f" refused; next: {daemon.url}",
        f"the ResourceManager at {daemon.url} answers",
    ]
    assert said[2].startswith(
        f"the ResourceManager at {daemon.url} did not answer /ws/v1/cluster/apps: HTTP 503"
    )
    assert f"GET {daemon.url}/ws/v1/cluster/nodes: HTTP 200" in caplog.messages
