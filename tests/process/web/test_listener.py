"""`hopsgpu web` as a process: its URL, its end, and what it refuses to do."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.bounds import HANG_SECONDS
from tests.conftest import as_in_a_terminal, until
from tests.private_certificate import private_certificate
from tests.unit.records import put_run

RUN = "fit-20261122-201502-3fa1c0"


def environ(home: Path) -> dict[str, str]:
    others = ("HADOOP_CONF_DIR", "YARN_CONF_DIR", "HOPSGPU_ROOT", "SPARK_HOME", "SPARK_CONF_DIR")
    kept = {name: value for name, value in os.environ.items() if name not in others}
    return {**kept, "HOME": str(home)}


@contextmanager
def started(home: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process, and the URL that it printed."""
    command = [sys.executable, "-m", "hopsgpu.cli.main", "web", "--port", "0", *options]
    process = subprocess.Popen(
        command,
        env=environ(home),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=as_in_a_terminal,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("The pages are at "), line
        yield process, line.removeprefix("The pages are at ").strip()
    finally:
        process.kill()
        process.wait()


def refused(home: Path, *options: str) -> str:
    """What it says when it does not start."""
    command = [sys.executable, "-m", "hopsgpu.cli.main", "web", *options]
    ran = subprocess.run(
        command,
        env=environ(home),
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (1, ""), ran.stderr
    assert len(ran.stderr.splitlines()) == 1
    return ran.stderr


def get(
    url: str, path: str, headers: dict[str, str], context: ssl.SSLContext | None = None
) -> http.client.HTTPResponse:
    """An answer, to a path that no client makes another one of."""
    place = urlsplit(url)
    host, port = str(place.hostname), place.port
    connection = (
        http.client.HTTPConnection(host, port, timeout=HANG_SECONDS)
        if context is None
        else http.client.HTTPSConnection(host, port, timeout=HANG_SECONDS, context=context)
    )
    connection.request("GET", path, headers=headers)
    return connection.getresponse()


def opened(url: str, context: ssl.SSLContext | None = None) -> dict[str, str]:
    """Headers with the cookie that the URL gives."""
    place = urlsplit(url)
    answer = get(url, f"{place.path}?{place.query}", {}, context)
    assert answer.status == 303
    return {"Cookie": str(answer.headers["Set-Cookie"]).partition(";")[0]}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_it_is_told_to_end(tmp_path: Path, number: signal.Signals) -> None:
    put_run(tmp_path / "hopsgpu", RUN)
    with started(tmp_path) as (process, url):
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{43}", url)
        assert get(url, "/runs", {}).status == 401
        cookie = opened(url)
        answer = get(url, "/runs", cookie)
        assert answer.status == 200 and RUN in answer.read().decode()
        assert answer.headers.get("Server") is None
        for path in ("/runs/x/../../../etc/passwd", "/static/../routes.py", "/models/x/../../y"):
            assert get(url, path, cookie).status == 404, path
        process.send_signal(number)
        assert until(lambda: process.poll() is not None)
        assert process.returncode == (0 if number == signal.SIGINT else -number)
        assert process.stderr is not None
        said = process.stderr.read()
        # The token is printed once, and no request is.
        assert url.partition("token=")[2] not in said and "Traceback" not in said
        with socket.socket() as other, pytest.raises(ConnectionRefusedError):
            other.connect(("127.0.0.1", urlsplit(url).port or 0))


def test_it_ends_while_a_browser_keeps_its_connection(tmp_path: Path) -> None:
    with started(tmp_path) as (process, url):
        place = urlsplit(url)
        with socket.create_connection((str(place.hostname), place.port or 0)) as idle:
            idle.sendall(b"GET / HTTP/1.1\r\n")
            process.send_signal(signal.SIGINT)
            assert until(lambda: process.poll() is not None)


def test_a_port_that_is_taken_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused(tmp_path, "--port", str(port))
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in said


def test_other_machines_get_nothing_without_tls_by_mistake(tmp_path: Path) -> None:
    said = refused(tmp_path, "--host", "0.0.0.0", "--port", "0")
    assert "--plain-http" in said and "cancel your runs" in said and "ssh -L" in said
    assert "--host no-such-host.invalid" in refused(tmp_path, "--host", "no-such-host.invalid")
    with started(tmp_path, "--host", "0.0.0.0", "--plain-http") as (_, url):
        assert urlsplit(url).hostname == socket.gethostname().lower()


def test_with_a_certificate_it_speaks_tls_alone(tmp_path: Path) -> None:
    certificate, both = private_certificate(tmp_path)
    context = ssl.create_default_context(cafile=str(certificate))
    with started(tmp_path, "--certfile", str(both)) as (_, url):
        assert url.startswith("https://127.0.0.1:")
        assert get(url, "/", opened(url, context), context).status == 200
        with pytest.raises((OSError, http.client.HTTPException)):
            get(url, "/", {})
    # Without its key.
    assert "must be the certificate as PEM" in refused(tmp_path, "--certfile", str(certificate))
    assert "name the certificate too" in refused(tmp_path, "--keyfile", str(both))


def test_an_unknown_package_is_named(tmp_path: Path) -> None:
    (tmp_path / "uvicorn.py").write_text("raise ImportError('no uvicorn here')")
    command = [sys.executable, "-m", "hopsgpu.cli.main", "web", "--port", "0"]
    env = {**environ(tmp_path), "PYTHONPATH": str(tmp_path)}
    ran = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )
    assert ran.returncode == 1
    assert "pip install 'hopsgpu[web]' (no uvicorn here)" in ran.stderr
