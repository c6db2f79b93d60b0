"""HTTP to daemons: bounds of answers, and tokens that no other address gets."""

from __future__ import annotations

import contextlib
import gzip
import threading

import pytest

from hopsgpu.cluster_managers import http_client
from hopsgpu.cluster_managers.http_client import NoAnswer, exchange
from tests.unit.rest import AnsweringHandler, http_server, serving

SECONDS = (10.0, 30.0)


def test_an_answer_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "MAX_ANSWER_BYTES", 1000)
    with serving({"/fits": (200, "x" * 1000), "/exceeds": (200, "x" * 1001)}) as daemon:
        assert exchange("GET", f"{daemon.url}/fits", SECONDS).text == "x" * 1000
        with pytest.raises(NoAnswer, match="more than the 1000 bytes"):
            exchange("GET", f"{daemon.url}/exceeds", SECONDS)


def test_an_answer_ends_in_time() -> None:
    ended = threading.Event()

    class SlowHandler(AnsweringHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # the client gives up
                while not ended.wait(0.05):
                    self.wfile.write(b"x")

    with (
        http_server(SlowHandler) as server,
        pytest.raises(NoAnswer, match=r"did not end within 0\.6 s"),
    ):
        exchange("GET", f"http://127.0.0.1:{server.server_address[1]}/", (10.0, 0.1))
    ended.set()


def test_the_status_of_an_error_is_kept() -> None:
    with serving({"/": (403, "x" * 10**6)}) as daemon, pytest.raises(NoAnswer) as error:
        exchange("GET", f"{daemon.url}/", SECONDS)
    assert error.value.status == 403 and str(error.value) == "HTTP 403 Forbidden"


def test_a_redirect_takes_no_token_to_another_address() -> None:
    with serving({"/": (200, "{}")}) as other:
        moved = (307, "", {"Location": f"{other.url}/"})
        with serving({"/": moved}) as daemon:
            assert exchange("GET", f"{daemon.url}/", SECONDS, token="secret").text == "{}"
            assert daemon.tokens == ["Bearer secret"]
    assert other.tokens == [None]


def test_values_that_are_no_json() -> None:
    with serving({"/": (200, "[" * 10**5)}) as daemon:
        answer = exchange("GET", f"{daemon.url}/", SECONDS)
    with pytest.raises(NoAnswer, match="not JSON"):
        answer.parse_json()


@pytest.mark.parametrize("content", [b"", b"{}", b"x" * 10**6])
def test_compressed_answers(content: bytes) -> None:
    class CompressingHandler(AnsweringHandler):
        def do_GET(self) -> None:
            self.answer(gzip.compress(content), **{"Content-Encoding": "gzip"})

    with http_server(CompressingHandler) as server:
        url = f"http://127.0.0.1:{server.server_address[1]}/"
        assert exchange("GET", url, SECONDS).body == content


def test_an_answer_that_breaks_off() -> None:
    class BreakingHandler(AnsweringHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"x" * 10)

    with http_server(BreakingHandler) as server, pytest.raises(NoAnswer):
        exchange("GET", f"http://127.0.0.1:{server.server_address[1]}/", SECONDS)
