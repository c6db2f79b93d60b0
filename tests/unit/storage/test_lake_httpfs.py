"""WebHDFS against a stand-in that answers as HttpFS does, by its documentation."""

from __future__ import annotations

import http.server
import json
from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

import pytest

from hopsgpu.errors import StoreError
from hopsgpu.storage.lake import LakePath
from tests.unit.rest import AnsweringHandler, http_server

FILE = {
    "type": "FILE",
    "length": 7,
    "owner": "alice",
    "permission": "644",
    "modificationTime": 1000,
    "pathSuffix": "",
}


class HttpFs(AnsweringHandler):
    """Redirects an upload to itself, and renames whatever is asked."""

    def do_GET(self) -> None:
        asked = parse_qs(urlsplit(self.path).query)["op"][0]
        if asked == "OPEN":
            self.answer(b"content")
        else:
            self.answer(json.dumps({"FileStatus": FILE}).encode())

    def do_PUT(self) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        if "op=CREATE" in self.path and "data=true" not in self.path:
            where = f"http://{self.headers['Host']}{self.path}&data=true"
            self.answer(b"", 307, Location=where)
        else:
            self.answer(b'{"boolean": true}')

    do_POST = do_PUT
    do_DELETE = do_PUT


@pytest.fixture
def server() -> Iterator[http.server.ThreadingHTTPServer]:
    with http_server(HttpFs) as server:
        server.asked = []  # type: ignore[attr-defined]
        yield server


def test_httpfs_is_read_only(server: http.server.ThreadingHTTPServer) -> None:
    lake = LakePath(f"webhdfs://127.0.0.1:{server.server_port}/models")
    assert (lake / "f").stat().size == 7
    assert (lake / "f").read() == b"content"
    for call in (
        lake.make,
        lake.remove,
        lambda: lake.set_mode(0o700),
        lambda: lake.rename(lake / "other"),
        lambda: (lake / "f").write(b"x"),
        lambda: (lake / "f").create(b"x"),
        lambda: (lake / "f").replace(b"x"),
    ):
        with pytest.raises(StoreError, match="HttpFS.*hdfs://") as raised:
            call()
        assert raised.value.kind == "unsupported"
    # The only requests are those for uploads, which did not begin.
    asked: list[str] = server.asked  # type: ignore[attr-defined]
    assert asked and all("op=CREATE" in path and "data=true" not in path for path in asked)


def test_file_that_is_replaced_after_its_stat_is_read_completely(
    server: http.server.ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = LakePath(f"webhdfs://127.0.0.1:{server.server_port}/models/f")
    for length in (1, 100):
        monkeypatch.setitem(FILE, "length", length)
        assert file.read() == b"content"
