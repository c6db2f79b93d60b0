"""Ends of the control channel in processes of their own, which can be stopped and killed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hopsgpu.control.channel import Channel
from hopsgpu.control.handshake import connect
from hopsgpu.control.server import serve
from tests.bounds import HANG_SECONDS


async def _talk(channel: Channel) -> None:
    """Says hello, and each word that it is told."""
    await channel.send("hello")
    while (message := await channel.receive()) is not None:
        await channel.send("echo", message.payload, **message.fields)


async def _agents(port: int, secret: bytes, number: int, options: dict[str, Any]) -> None:
    channels = [await connect("127.0.0.1", port, secret, **options) for _ in range(number)]
    await asyncio.gather(*map(_talk, channels))


async def _flood(port: int, secret: bytes, number: int, options: dict[str, Any]) -> None:
    """Sends so many frames of 64 KiB as the driver takes, and says how far it came at the end."""
    channel = await connect("127.0.0.1", port, secret, **options)
    for counted in range(number):
        await channel.send("output", bytes(65536), number=counted)
    await channel.send("all")
    while await channel.receive() is not None:
        pass


def _driver(secret: bytes, heartbeat: float) -> None:
    with serve(secret, "127.0.0.1", heartbeat=heartbeat) as server:
        print(server.port, flush=True)
        for _ in itertools.count():
            server.next_event(HANG_SECONDS)


def main() -> None:
    role, *arguments = pickle.load(sys.stdin.buffer)
    if role == "driver":
        _driver(*arguments)
    else:
        asyncio.run({"agents": _agents, "flood": _flood}[role](*arguments))


@contextlib.contextmanager
def process(role: str, *arguments: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process with one of the roles above; killed at the end."""
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.unit.peers"],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdin.write(pickle.dumps((role, *arguments)))
        child.stdin.close()
        yield child
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


if __name__ == "__main__":
    main()
