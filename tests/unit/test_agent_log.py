"""The logs of an agent and of its process daemon: real processes, and no secret in them."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hopsgpu import own_log
from hopsgpu.control.channel import new_secret
from hopsgpu.control.peer import Driver
from hopsgpu.control.server import serve
from tests.unit.test_agent import Gang

PRIVATE = "jyT-of-the-user"
CODE = (
    "import logging, pickle, sys; from hopsgpu.agent.supervisor import run_agent;"
    "run_agent(pickle.load(sys.stdin.buffer));"
    "assert not logging.getLogger().handlers; assert logging.getLogger('hopsgpu').propagate"
)


@pytest.fixture(params=["info", "debug"])
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def gang(tmp_path: Path, level: str) -> Iterator[Gang]:
    """As that of test_agent, in a container of YARN's."""
    logs = tmp_path / "yarn-logs"
    for directory in (logs, tmp_path / "container", tmp_path / "lake" / "runs" / "r" / "logs"):
        directory.mkdir(parents=True)
    with serve(new_secret(), "127.0.0.1") as server:
        driver = Driver("127.0.0.1", server.port, server._secret, None, log=level)
        process = subprocess.Popen(
            [sys.executable, "-c", CODE],
            cwd=tmp_path / "container",
            env={**os.environ, "CONTAINER_ID": "container_7", "LOG_DIRS": f"{logs},/other"},
            stdin=subprocess.PIPE,
        )
        assert process.stdin is not None
        process.stdin.write(pickle.dumps(driver))
        process.stdin.close()
        try:
            yield Gang(server, process, tmp_path / "lake")
        finally:
            process.kill()
            process.wait()


def fails(said: str) -> None:
    print(said)
    raise ValueError(said)


def files(tmp_path: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in (tmp_path / "yarn-logs").iterdir()}


def test_an_agent_and_its_daemon_log_what_they_do_and_no_secret(
    gang: Gang, tmp_path: Path, level: str
) -> None:
    gang.run(fails, PRIVATE, frameworks=("json",), USERS_TOKEN=PRIVATE)
    gang.wait_for("ended")
    secret = gang.server._secret
    gang.server.end_all()
    assert gang.process.wait(60) == 0
    logs = files(tmp_path)
    agent = logs.pop(own_log.AGENT)
    ((name, daemon),) = logs.items()
    assert "agent of container_7 on " in agent
    assert "r: attempt 0: starts ranks 0" in agent
    assert "r: rank 0 ended: exit code 1, raised" in agent
    assert name in [own_log.daemon_file(int(line.split()[3])) for line in daemon.splitlines()[:1]]
    assert "process daemon of keeper-" in daemon
    assert "a task is gone" in daemon
    is_debug = level == "debug"
    assert ("from the driver: run, " in agent) is is_debug
    assert ("fork server " in daemon) is is_debug
    assert (" forked\n" in daemon) is is_debug
    said = agent + daemon
    for hidden in (PRIVATE, secret.hex(), repr(secret)[2:-1], "USERS_TOKEN"):
        assert hidden not in said
