"""Other users of a machine, and web pages in its browsers, against the development cluster.

A page whose owner resolves its name to this machine (DNS rebinding) sends requests here with that
name in the Host header, and can read the answers.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from pwd import struct_passwd
from urllib.parse import urlsplit

import pytest
import requests

from hopsgpu.devcluster import status
from hopsgpu.devcluster.local_users import other_login_users, warn_of_users
from hopsgpu.monitoring.exposition import serving
from hopsgpu.monitoring.observation import Look
from tests.bounds import HANG_SECONDS

EVIL = "page.example"
# What a page would read or do first, by daemon.
PATHS = {
    "namenode": ("/jmx", "/conf", "/logs/", "/webhdfs/v1/?op=LISTSTATUS&user.name=root"),
    "datanode": ("/jmx", "/webhdfs/v1/a?op=OPEN&user.name=root&namenoderpcaddress=x&offset=0"),
    "resourcemanager": ("/ws/v1/cluster/info", "/conf", "/logs/", "/cluster", "/static/yarn.css"),
    "node1": ("/ws/v1/node/info", "/logs/", "/node", "/terminal/x"),
}


def status_codes(url: str, path: str, host: str) -> tuple[int, int]:
    """Return the answers to a request that reads, and to one that writes."""
    headers = {"Host": f"{host}:{urlsplit(url).port}"}
    codes = []
    for method in ("GET", "PUT"):
        answer = requests.request(
            method, f"{url}{path}", headers=headers, timeout=HANG_SECONDS, allow_redirects=False
        )
        codes.append(answer.status_code)
    return codes[0], codes[1]


@pytest.fixture(scope="module")
def pages(cluster_dir: Path) -> dict[str, str]:
    """Daemon → URL of its pages."""
    return {daemon.name: daemon.web for daemon in status(cluster_dir).daemons if daemon.web}


@pytest.mark.parametrize("daemon", PATHS)
def test_no_daemon_answers_a_page_whose_name_leads_to_this_machine(
    pages: dict[str, str], daemon: str
) -> None:
    url = pages[daemon]
    for path in PATHS[daemon]:
        for host in (EVIL, f"127.0.0.1.{EVIL}", "localhost.evil", "127.0.0.1x", ""):
            assert status_codes(url, path, host) == (403, 403), (path, host)


@pytest.mark.parametrize("daemon", PATHS)
def test_the_daemons_answer_under_their_own_names(pages: dict[str, str], daemon: str) -> None:
    url = pages[daemon]
    for host in ("127.0.0.1", "localhost", "LOCALHOST", "node1", socket.gethostname(), "[::1]"):
        assert 403 not in status_codes(url, PATHS[daemon][0], host), host


def test_a_request_without_the_header_is_refused(pages: dict[str, str]) -> None:
    for url in pages.values():
        address = urlsplit(url)
        assert address.hostname
        with socket.create_connection((address.hostname, address.port or 0), HANG_SECONDS) as sock:
            sock.sendall(b"GET /jmx HTTP/1.0\r\n\r\n")
            assert b" 403 " in sock.recv(100)


class Idle:
    """A cluster without anything that could be observed."""

    def look(self) -> Look:
        return Look(time=0.0, sources={})


@pytest.fixture(scope="module")
def exporter() -> Iterator[str]:
    with serving(Idle(), "127.0.0.1", 0, ["proxy.example"]) as url:
        yield url


def test_the_exporter_answers_no_page_whose_name_leads_to_this_machine(exporter: str) -> None:
    for host in (EVIL, "localhost.evil", ""):
        headers = {"Host": host}
        answer = requests.get(exporter, headers=headers, timeout=HANG_SECONDS)
        assert answer.status_code == 403
        assert "--allow-host" in answer.text and "hopsgpu_" not in answer.text
    for host in ("127.0.0.1", "localhost:1", socket.gethostname(), "proxy.example"):
        answer = requests.get(exporter, headers={"Host": host}, timeout=HANG_SECONDS)
        assert answer.status_code == 200, host


def entry(name: str, uid: int, shell: str = "/bin/bash") -> struct_passwd:
    return struct_passwd((name, "x", uid, uid, "", "/", shell))


def test_other_people_of_the_machine_are_named_with_the_remedy() -> None:
    machine = [
        entry("root", 0),
        entry("me", 1000),
        entry("zoe", 1001, ""),
        # Directory services number people beyond 65,535.
        entry("ann", 70_000),
        entry("ben", 1002, "/usr/sbin/nologin"),
        entry("eve", 1003, "/bin/false"),
        entry("daemon", 2),
        entry("nobody", 65534, "/bin/sh"),
    ]
    assert other_login_users(machine, 1000) == ["ann", "zoe"]
    assert other_login_users(machine, 0) == ["ann", "me", "zoe"]
    assert other_login_users(machine[:2], 1000) == []
    warning = warn_of_users(["a", "b", "c", "d", "e"], "me")
    assert "(a, b, c and 2 more)" in warning
    assert "run code as me" in warning and "--kerberos" in warning
