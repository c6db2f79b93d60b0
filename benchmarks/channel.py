"""The control channel with many ranks: the time to connect all, and the driver's cost."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.table import heading, row
from hopsgpu.control.channel import new_secret
from hopsgpu.control.peer import DriverEndpoint, connect_to_driver
from hopsgpu.control.server import ControlServer, serve
from hopsgpu.linux import allow_descriptors

_AGENTS = 1000
_PROCESSES = 2
_ROUNDS = 3
_ROUND_TRIPS = 2000
# Each end sends three heartbeats in this time.
_HEARTBEAT = 3.0
_STEADY_SECONDS = 5.0
_LONGEST_SECONDS = 60.0
# Neither this process's memory nor its descriptors are to count.
_SPAWN = multiprocessing.get_context("spawn")


def measure(agents: int = _AGENTS, rounds: int = _ROUNDS) -> dict[str, dict[str, list[float]]]:
    """Measure agents that join and send only heartbeats, and one of which answers.

    Returns:
        For "plain" and "tls", one figure of each round: seconds until all have said hello
        ("join"), the driver's share of a core and its growth in MiB in the steady state with
        heartbeats each second ("cpu", "memory"), and the median of small round trips in
        milliseconds ("round trip").
    """
    heading(f"{agents} agents on the control channel")
    figures = {}
    for name, encrypted in (("plain", False), ("tls", True)):
        measured = [_in_process(agents, encrypted) for _ in range(rounds)]
        figures[name] = {key: [one[key] for one in measured] for key in measured[0]}
        row(f"{name}: all said hello, s", figures[name]["join"])
        row(f"{name}: driver, share of a core", figures[name]["cpu"])
        row(f"{name}: driver, MiB", figures[name]["memory"])
        row(f"{name}: round trip, ms", figures[name]["round trip"])
    slowest = max(figures["plain"]["join"] + figures["tls"]["join"])
    busiest = max(figures["plain"]["cpu"] + figures["tls"]["cpu"])
    print(f"\nall are there after {slowest:.2f} s at most (target: under 5),")
    print(f"and the driver takes {busiest:.0%} of a core at most (target: under one)")
    return figures


def _in_process(agents: int, encrypted: bool) -> dict[str, float]:
    ours, theirs = _SPAWN.Pipe()
    # Not a daemon: it has children.
    driver = _SPAWN.Process(target=_drive, args=(theirs, agents, encrypted))
    driver.start()
    theirs.close()
    try:
        measured: dict[str, float] = ours.recv()
        return measured
    finally:
        driver.join(_LONGEST_SECONDS)
        if driver.is_alive():
            driver.kill()


def _drive(results: Connection, agents: int, encrypted: bool) -> None:
    """Run the driver's process."""
    allow_descriptors(agents)
    secret = new_secret()
    with (
        serve(secret, "127.0.0.1", heartbeat=_HEARTBEAT, encrypted=encrypted) as server,
        _simulated(agents) as simulating,
    ):
        driver = DriverEndpoint(
            "127.0.0.1",
            server.port,
            secret,
            None,
            heartbeat=_HEARTBEAT,
            certificate=server.certificate,
        )
        before = _resident()
        began = time.monotonic()
        for process in simulating:
            process.send(driver)
        peers = [_next_from(server) for _ in range(agents)]
        joined = time.monotonic() - began
        cpu, wall = time.process_time(), time.monotonic()
        lost = server.next_event(_STEADY_SECONDS)
        if lost is not None:
            raise RuntimeError(f"{lost} in the steady state")
        share = (time.process_time() - cpu) / (time.monotonic() - wall)
        grown = _resident() - before
        trips = [_round_trip(server, peers[0]) for _ in range(_ROUND_TRIPS)]
    results.send(
        {
            "join": joined,
            "cpu": share,
            "memory": grown,
            "round trip": 1000 * statistics.median(trips),
        }
    )


def _next_from(server: ControlServer) -> int:
    event = server.next_event(_LONGEST_SECONDS)
    if event is None or event.message is None:
        raise RuntimeError(f"{event} where a message was awaited")
    return event.peer


def _round_trip(server: ControlServer, peer: int) -> float:
    began = time.perf_counter()
    server.send(peer, "say")
    _next_from(server)
    return time.perf_counter() - began


@contextlib.contextmanager
def _simulated(agents: int) -> Iterator[list[Connection]]:
    """Start processes with that many agents in all, which wait for the driver's address."""
    pipes, processes = [], []
    try:
        for number in range(_PROCESSES):
            ours, theirs = _SPAWN.Pipe()
            share = len(range(number, agents, _PROCESSES))
            process = _SPAWN.Process(target=_simulate, args=(theirs, share))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        for pipe in pipes:
            pipe.recv()
        yield pipes
    finally:
        for process in processes:
            process.kill()
            process.join()


def _simulate(pipe: Connection, agents: int) -> None:
    allow_descriptors(agents)
    pipe.send(os.getpid())
    driver: DriverEndpoint = pipe.recv()
    asyncio.run(_agents(driver, agents))


async def _agents(driver: DriverEndpoint, agents: int) -> None:
    await asyncio.gather(*(_agent(driver) for _ in range(agents)))


async def _agent(driver: DriverEndpoint) -> None:
    channel = await connect_to_driver(driver)
    while await channel.receive() is not None:
        await channel.send("said")


def _resident() -> float:
    """Return the memory of this process in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
