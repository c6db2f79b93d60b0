"""What others can write or send, in a few thousand random and mutated forms.

Nothing but the documented error, no hang, and no growth of the memory.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import hmac
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import uvicorn

from hopsgpu.artifacts import manifest
from hopsgpu.control.channel import ChannelError
from hopsgpu.control.handshake import UnreachableError, connect
from hopsgpu.control.server import serve
from hopsgpu.core import queue_policy, run_record
from hopsgpu.core.queue_policy import QueueFile, read_queue
from hopsgpu.errors import StoreError
from hopsgpu.monitoring.exposition import serving
from hopsgpu.monitoring.observation import Look
from hopsgpu.web.access import Server
from hopsgpu.web.listener import ServerOptions, uvicorn_config
from hopsgpu.web.routes import application
from tests.bounds import HANG_SECONDS
from tests.soak.fuzzing import COUNT, Fuzzer, bounded_growth, each_in_time
from tests.unit.records import put_run
from tests.unit.web.site import KNOWN, sources_of

NOW = 1_795_300_000_000
APPLICATION = "application_1795300000000_0001"
TICKET = queue_policy.Ticket(
    filed=NOW - 5000,
    id="0123abcd",
    is_growth=False,
    executors=4,
    gpus=2,
    queue=queue_policy.queue_tag("root.default"),
    bound=queue_policy.Bound.CLUSTER,
    passed=0,
    application=APPLICATION,
)
OFFER = queue_policy.Offer("0123abcd", 4, 2, 1, TICKET.queue, APPLICATION, "fit")
NAMES = (
    *(TICKET.name, TICKET.name.replace("gang", "grow"), OFFER.name, "draft-0123abcd"),
    *(queue_policy.turn_name(3), queue_policy.asking_name(3, APPLICATION)),
)
RUN = "fit-20261122-201502-3fa1c0"
SECRET = b"s" * 32


def test_names_of_queue_files() -> None:
    fuzzer = Fuzzer()

    def directories() -> Iterator[list[QueueFile]]:
        for _ in range(COUNT):
            files = []
            for _ in range(fuzzer.random.randrange(1, 12)):
                name = fuzzer.random.choice(NAMES)
                if fuzzer.random.random() < 0.8:
                    name = fuzzer.mutate(name.encode()).decode(errors="surrogateescape")
                modified = NOW + fuzzer.random.choice((0, -1000, -(10**9), 10**15, -(10**18)))
                files.append(QueueFile(name, modified, fuzzer.random.choice("ab")))
            yield files

    def read(files: list[QueueFile]) -> None:
        queue = read_queue(files, NOW)
        assert queue.next_generation < 10**12
        assert len(queue.tickets) + len(queue.offers) + len(queue.ignored) <= len(files)
        for ticket, user in queue.tickets:
            queue.rank_of(ticket, user)
            queue_policy.count_passes(TICKET, queue, queue)
            queue_policy.describe_excess(queue, ticket)
            offers = dict(enumerate(offer for offer, _ in queue.offers))
            queue_policy.split_among_offers(ticket, offers, 0)
        queue_policy.first_ticket_to_serve(queue, "a", ["root.default"])
        queue_policy.describe_promised(queue)
        queue_policy.stale_files(files, "a", NOW)
        assert all(str(ignored) for ignored in queue.ignored)

    each_in_time(directories(), read)


@pytest.fixture
def record(tmp_path: Path) -> bytes:
    """A valid record of a search, which has all kinds of fields."""
    return (put_run(tmp_path, RUN, search={}) / "run.json").read_bytes()


def test_records_of_runs(record: bytes) -> None:
    fuzzer = Fuzzer()
    parsed = 0

    def read(content: bytes) -> None:
        nonlocal parsed
        with suppress(StoreError):
            run_record.fields_of(run_record.parse(content))
            parsed += 1

    each_in_time((fuzzer.mutate_json(record) for _ in range(COUNT)), read)
    assert parsed > COUNT / 100, "nearly no input got beyond the first check"


def test_manifests() -> None:
    fuzzer = Fuzzer()
    url = "hdfs://nn:1/root/models/digits/3/manifest.json"
    content = {
        **{"schema": 1, "name": "digits", "version": 3, "time": "2026-11-22T20:15:02.000Z"},
        **{"digest": manifest.DIGEST, "framework": "torch", "metrics": {"loss": 0.5, "a": "NaN"}},
        **{"signature": {"inputs": [1]}, "parameters": None, "data": [], "tags": ["best"]},
        **{"user": "ann", "run_id": RUN, "application": APPLICATION, "code_digest": None},
        **{"hopsgpu": "1", "publication": "0123"},
        "files": {
            "a/b.pt": {"bytes": 3, "digest": "0" * 32},
            "c": {"bytes": 0, "digest": "1" * 32},
        },
    }
    valid = json.dumps(content).encode()
    assert manifest.parse(valid, url).files
    parsed = 0

    def read(mutated: bytes) -> None:
        nonlocal parsed
        with suppress(StoreError):
            assert all(".." not in path.split("/") for path in manifest.parse(mutated, url).files)
            parsed += 1

    each_in_time((fuzzer.mutate_json(valid) for _ in range(COUNT)), read)
    assert parsed > COUNT / 100, "nearly no input got beyond the first check"


def shut_down(connection: socket.socket) -> None:
    """End what is sent, raising a ConnectionError if the other end has closed the connection."""
    try:
        connection.shutdown(socket.SHUT_WR)
    except OSError as error:
        # After a reset, the connection counts as none, which has no class of its own.
        if error.errno != errno.ENOTCONN:
            raise
        raise ConnectionResetError(error.errno, error.strerror) from error


def exchange(address: tuple[str, int], sent: bytes) -> bytes:
    """Send bytes and end; return what the server sent until it closed the connection."""
    with socket.create_connection(address, HANG_SECONDS) as connection:
        received = b""
        # The server may close the connection first.
        with suppress(ConnectionError):
            connection.sendall(sent)
            shut_down(connection)
            while part := connection.recv(2**16):
                received += part
        return received


def proof(role: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(SECRET, role + first + second, hashlib.sha256)


def test_handshakes_that_a_driver_receives() -> None:
    fuzzer = Fuzzer()
    with serve(SECRET, "127.0.0.1") as server:

        def send(change: bool) -> None:
            with socket.create_connection(("127.0.0.1", server.port), HANG_SECONDS) as connection:
                hello = connection.recv(40, socket.MSG_WAITALL)
                nonce = fuzzer.random.randbytes(32)
                answer = b"hopsgpu1" + nonce + proof(b"agent", hello[8:], nonce)
                if not change:
                    connection.sendall(answer)
                    assert connection.recv(32, socket.MSG_WAITALL)
                    # Frames that are not authentic.
                    answer = fuzzer.mutate(b"\0\0\0\x02" + bytes(8) + b"{}" + bytes(32))
                else:
                    answer = fuzzer.mutate(answer)
                with suppress(ConnectionError):
                    connection.sendall(answer)
                    shut_down(connection)
                    while connection.recv(2**16):
                        pass

        each_in_time((fuzzer.random.random() < 0.8 for _ in range(COUNT)), send)
        asyncio.run(connect_once(server.port))


async def connect_once(port: int) -> None:
    (await connect("127.0.0.1", port, SECRET)).abort()


def test_handshakes_that_an_agent_receives() -> None:
    fuzzer = Fuzzer()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello, proof = b"hopsgpu1" + fuzzer.random.randbytes(32), fuzzer.random.randbytes(32)
        with suppress(ConnectionError):
            writer.write(fuzzer.mutate(hello) + fuzzer.mutate(proof))
            writer.write_eof()
            await reader.read()
        writer.close()

    async def try_all() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        for _ in range(COUNT):
            before = time.process_time()
            with suppress(ChannelError, UnreachableError):
                channel = await connect("127.0.0.1", port, SECRET, pauses=())
                channel.abort()
            assert time.process_time() - before < 1
        server.close()

    with bounded_growth():
        asyncio.run(asyncio.wait_for(try_all(), HANG_SECONDS))


def requests_to(fuzzer: Fuzzer, paths: tuple[str, ...], cookie: str) -> Iterator[bytes]:
    for _ in range(COUNT):
        method = fuzzer.random.choice(("GET", "GET", "GET", "HEAD", "POST", "OPTIONS", "PUT"))
        body = b"form=the-form&x=1" if method in ("POST", "PUT") else b""
        lines = [
            f"{method} {fuzzer.random.choice(paths)} HTTP/1.1",
            "Host: 127.0.0.1",
            "Connection: close",
            *([f"Cookie: {cookie}"] if cookie else []),
            "Origin: http://127.0.0.1",
            "Accept: text/html;q=0.9, application/openmetrics-text; version=1.0.0",
            *([f"Content-Length: {len(body)}"] if body else []),
        ]
        whole = "\r\n".join([*lines, "", ""]).encode() + body
        if fuzzer.random.random() < 0.5:
            yield fuzzer.mutate(whole)
        else:
            head, _, rest = whole.partition(b" HTTP/1.1\r\n")
            path = bytes(byte for byte in fuzzer.mutate(head) if byte > 32)
            yield head[:4] + path[4:] + b" HTTP/1.1\r\n" + rest


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.") else 0


def test_requests_to_the_pages(tmp_path: Path, record: bytes) -> None:
    fuzzer = Fuzzer()
    root = tmp_path / "lake" / "hopsgpu"
    put_run(root, RUN, search={})
    mutated = []
    while len(mutated) < 60:
        content = fuzzer.mutate_json(record)
        with suppress(StoreError):
            run_record.parse(content)
            mutated.append(f"fit-20261122-201502-{len(mutated):06x}")
            put_run(root, mutated[-1])
            (root / "runs" / mutated[-1] / "run.json").write_bytes(content)
    paths = ("/", "/queue", "/runs", "/models", "/usage", "/usage?days=7", "/static/page.js")
    paths += (f"/runs/lake/{RUN}", f"/runs/lake/{RUN}/logs/rank-0.log?offset=5")
    paths += ("/runs?state=running&user=ann", f"/runs/lake/{RUN}/cancel", "/?token=the-token")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        where = Server(address[1])
        app = application(sources_of(root), KNOWN, where, 60.0)
        server = uvicorn.Server(uvicorn_config(app, ServerOptions()))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            cookie = f"{where.cookie}={KNOWN.session}"

            def send(request: bytes) -> None:
                assert status_of(exchange(address, request)) < 500, request

            for run in mutated:
                head = f"GET /runs/lake/{run} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close"
                send(f"{head}\r\nCookie: {cookie}\r\n\r\n".encode())
            each_in_time(requests_to(fuzzer, paths, cookie), send)
        finally:
            server.should_exit = True
            thread.join()


class Idle:
    """A cluster without anything that could be observed."""

    def look(self) -> Look:
        return Look(time=0.0, sources={})


def test_requests_to_the_exporter(capfd: pytest.CaptureFixture[str]) -> None:
    fuzzer = Fuzzer()
    with serving(Idle(), "127.0.0.1", 0) as url:
        port = int(url.rpartition(":")[2].partition("/")[0])

        def send(request: bytes) -> None:
            assert status_of(exchange(("127.0.0.1", port), request)) in (*range(500), 501, 505)

        paths = ("/metrics", "/", "/favicon.ico", "/metrics?name[]=hopsgpu_up&name[]=x")
        each_in_time(requests_to(fuzzer, paths, ""), send)
    assert "Traceback" not in capfd.readouterr().err
