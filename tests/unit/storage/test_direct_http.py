"""Hadoop's daemons are asked directly, whatever proxies the environment names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from hopsgpu.cluster_managers.yarn.rest_client import get_json
from hopsgpu.storage.lake import LakePath
from tests.proxy import Proxy, refusing_proxy
from tests.unit.rest import AnsweringHandler, http_server, serving

SECONDS = (5.0, 5.0)


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy of the environment, for every address."""
    with refusing_proxy() as found:
        for name, value in found.variables.items():
            monkeypatch.setenv(name, value)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        yield found


class Redirects(AnsweringHandler):
    """A daemon of two roles, one of which sends to the other: a standby, or a NameNode."""

    def do_GET(self) -> None:
        if "there" not in self.path and "op=GETFILESTATUS" not in self.path:
            return self._redirect()
        status = {"type": "FILE", "length": 7, "owner": "alice", "permission": "644"}
        whole = {"FileStatus": {**status, "modificationTime": 1, "pathSuffix": ""}}
        content = json.dumps(whole).encode() if "op=GETFILESTATUS" in self.path else b'{"a":1}'
        return self.answer(content)

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "there" in self.path:
            self.answer(b"", 201)
        else:
            self._redirect()

    def _redirect(self) -> None:
        mark = "&" if "?" in self.path else "?"
        where = f"http://{self.headers['Host']}{self.path}{mark}there=1"
        self.answer(b"", 307, Location=where)


@pytest.fixture
def redirecting() -> Iterator[str]:
    with http_server(Redirects) as server:
        yield f"127.0.0.1:{server.server_port}"


def test_the_proxy_is_one_that_programs_obey(proxy: Proxy) -> None:
    with serving({"/a": 1}) as daemon:
        assert requests.get(f"{daemon.url}/a", timeout=5).status_code == 403
        assert proxy.asked == [f"GET {daemon.url}/a HTTP/1.1"]


def test_yarn_is_asked_directly(proxy: Proxy, redirecting: str) -> None:
    with serving({"/ws/v1/cluster": {"a": 1}}) as daemon:
        assert get_json(f"{daemon.url}/ws/v1/cluster", SECONDS) == {"a": 1}
    assert get_json(f"http://{redirecting}/ws/v1/cluster", SECONDS) == {"a": 1}
    assert proxy.asked == []


def test_webhdfs_is_asked_directly(proxy: Proxy, redirecting: str) -> None:
    lake = LakePath(f"webhdfs://{redirecting}/a")
    assert lake.read() == b'{"a":1}'
    lake.client.write(lake.path, [b"x"], should_replace=True)
    assert proxy.asked == []


def test_other_settings_of_the_environment_count(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Certificates: tests/unit/cluster_managers/test_resource_manager.py."""
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login alice password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with serving({"/a": 1}) as daemon:
        get_json(f"{daemon.url}/a", SECONDS)
        assert daemon.tokens == ["Basic YWxpY2U6c2VjcmV0"]
