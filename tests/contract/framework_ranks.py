"""Processes of a gang on this machine, with the environment that frameworks.environment gives.

`python -m tests.contract.framework_ranks FILE FUNCTION KWARGS` is one of them: it calls a function
of a file and prints what it returned as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hopsgpu import frameworks
from hopsgpu.agent.addresses import find_agent_address, held_ports, interface_addresses
from hopsgpu.core.gang import GangExecutor, World, assign_ranks
from hopsgpu.frameworks.endpoints import Endpoints, endpoints_of, ports_needed
from hopsgpu.frameworks.torch import Restarts
from hopsgpu.rank.context import VARIABLE, Context
from hopsgpu.rank.exit import run_and_exit
from hopsgpu.rank.gang_world import check_world
from tests.bounds import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
_RESULT = "RESULT "
_MODULE = "tests.contract.framework_ranks"


def outer_address() -> str:
    """An IPv4 address of this machine, of another interface than loopback where there is one."""
    found = [a for own in interface_addresses().values() for a in own if ":" not in a]
    return next((a for a in found if not a.startswith("127.")), "127.0.0.1")


def local_gang(containers: int, ranks_per_container: int = 1, servers: int = 0) -> World:
    """A gang of containers without GPUs, all on this machine."""
    here = find_agent_address(outer_address())
    return assign_ranks(
        [
            GangExecutor(key, f"container_{key}", f"node{key}", here.address, (), here.interface)
            for key in range(containers)
        ],
        ranks_per_container,
        servers,
    )


@dataclass(frozen=True)
class Started:
    """Processes of a gang, by their numbers, and where they meet."""

    processes: list[subprocess.Popen[str]]
    endpoints: Endpoints


@contextlib.contextmanager
def processes(
    world: World,
    file: Path,
    function: str,
    store_port: int | None = None,
    *,
    is_checked: bool = False,
    **kwargs: Any,
) -> Iterator[Started]:
    """Starts all processes of a gang; none is left afterwards.

    Their ports are held by this process all the time, as agents hold them.

    Args:
        world: the gang.
        file: of the function.
        function: that all of them call.
        store_port: of a TCPStore that an agent serves, if one does.
        is_checked: whether the processes have a context, and check their frameworks as ranks do.
        kwargs: of the function.
    """
    with contextlib.ExitStack() as stack:
        keys = {place.container.key for place in world.processes}
        ports = {
            key: stack.enter_context(held_ports(ports_needed(world, key), outer_address())).ports
            for key in keys
        }
        endpoints = endpoints_of(world, ports, store_port)
        started = []
        for place in world.processes:
            environment = frameworks.environment(world, place, endpoints, Restarts("contract"))
            if is_checked:
                home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                _context_of(world, place.rank, home).dump(home / "context.json")
                environment[VARIABLE] = str(home / "context.json")
            process = _start(environment, file, function, kwargs)
            stack.callback(_end, process)
            started.append(process)
        yield Started(started, endpoints)


def _start(
    environment: Mapping[str, str], file: Path, function: str, kwargs: Mapping[str, Any]
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", _MODULE, str(file), function, json.dumps(kwargs)]
    # A GPU in the environment of before must not count.
    stale = {"CUDA_VISIBLE_DEVICES": "7", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **stale, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _context_of(world: World, rank: int, home: Path) -> Context:
    place = world.processes[rank]
    urls = f"file://{home}/checkpoints", f"file://{home}/logs"
    return Context(
        rank, place.local_rank, world.size, "node", (), place.role, "run", 0, home / "model", *urls
    )


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def result_of(process: subprocess.Popen[str]) -> Any:
    """What the function returned in a process."""
    output, _ = process.communicate(timeout=HANG_SECONDS)
    found = [line for line in output.splitlines() if line.startswith(_RESULT)]
    assert process.returncode == 0 and found, output
    return json.loads(found[-1].removeprefix(_RESULT))


def error_of(process: subprocess.Popen[str]) -> str:
    """The last line of a process that has failed."""
    output, _ = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 1, output
    return output.strip().splitlines()[-1]


def results(world: World, file: Path, function: str, **kwargs: Any) -> list[Any]:
    """What all processes returned, by their numbers."""
    with processes(world, file, function, **kwargs) as started:
        return [result_of(process) for process in started.processes]


def stray(address: tuple[str, int]) -> bool:
    """Whether a stranger could connect and say something that no server understands."""
    try:
        with socket.create_connection(address, HANG_SECONDS) as stranger:
            stranger.sendall(b"GET / HTTP/1.0\r\n\r\n" + bytes(range(256)))
    except ConnectionRefusedError:
        return False
    return True


def main(file: str, function: str, kwargs: str) -> int:
    """One process of a gang."""
    check_world()
    value = runpy.run_path(file)[function](**json.loads(kwargs))
    print(_RESULT + json.dumps(value), flush=True)
    return 0


if __name__ == "__main__":
    # As a rank does: an interpreter that takes torch's modules apart can crash in its threads.
    run_and_exit(lambda: main(*sys.argv[1:]))
