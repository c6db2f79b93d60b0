"""Servers of other projects that tests start, each on a port of its own."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.bounds import HANG_SECONDS
from tests.conftest import until


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def accepts(port: int) -> bool:
    """Whether something accepts connections on a port of this machine."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5):
        return True
    return False


@contextlib.contextmanager
def running_server(
    command: list[str],
    directory: Path,
    log: Path,
    is_ready: Callable[[], bool],
    variables: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """Run a server until the end of the block, which begins once it is ready.

    Args:
        command: its command.
        directory: its working directory.
        log: file for what it writes.
        is_ready: whether it is ready.
        variables: environment variables besides those of the test.
    """
    with log.open("wb") as output:
        server = subprocess.Popen(
            command,
            cwd=directory,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(variables or {})},
        )

    def runs_and_is_ready() -> bool:
        assert server.poll() is None, log.read_text()[-4000:]
        return is_ready()

    try:
        assert until(runs_and_is_ready), log.read_text()[-4000:]
        yield
    finally:
        server.terminate()
        server.wait(HANG_SECONDS)
