"""The logs of an agent and of its process daemon: real processes, and no secret in them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hopsgpu.artifacts.run_logs import log_sizes, parse_log_name
from hopsgpu.attempts.rank_output import Outputs
from hopsgpu.core import own_log
from hopsgpu.core.gang import GangExecutor, assign_ranks
from hopsgpu.display.base import NoDisplay
from hopsgpu.storage.lake import LakePath
from tests.bounds import HANG_SECONDS
from tests.process.agent.test_agent import AGENT, Gang, serve_agent

PRIVATE = "jyT-of-the-user"
CHECKED_AGENT = (
    f"import logging; {AGENT}"
    "assert not logging.getLogger().handlers; assert logging.getLogger('hopsgpu').propagate"
)


@pytest.fixture(params=["info", "debug"])
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def gang(tmp_path: Path, level: str) -> Iterator[Gang]:
    """As that of test_agent, in a container of YARN's."""
    logs = tmp_path / "yarn-logs"
    for directory in (logs, tmp_path / "container"):
        directory.mkdir()
    environment = {**os.environ, "CONTAINER_ID": "container_7", "LOG_DIRS": f"{logs},/other"}
    options = {"cwd": tmp_path / "container", "env": environment}
    command = [sys.executable, "-c", CHECKED_AGENT]
    with serve_agent(tmp_path / "lake", command, level, **options) as gang:
        yield gang


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
    (sent,) = [message.payload.decode() for message in gang.seen if message.kind == "agent-log"]
    assert "container_7" in sent.splitlines()[0]
    assert "r: rank 0 ended: exit code 1, raised" in sent
    assert "hopsgpu: the log of its process daemon:\n" in sent and "process daemon of" in sent
    secret = gang.server._secret
    gang.server.disconnect_all()
    assert gang.process.wait(HANG_SECONDS) == 0
    logs = files(tmp_path)
    agent = logs.pop(own_log.AGENT_FILE)
    ((name, daemon),) = logs.items()
    assert "agent of container_7 on " in agent
    assert "r: attempt 0: starts ranks 0" in agent
    assert "r: rank 0 ended: exit code 1, raised" in agent
    assert name in [own_log.daemon_file(int(line.split()[3])) for line in daemon.splitlines()[:1]]
    assert "process daemon of process-daemon-" in daemon
    assert "a task has disconnected" in daemon
    is_debug = level == "debug"
    assert ("from the driver: run, " in agent) is is_debug
    assert "started fork server " in daemon and " is ready\n" in daemon
    assert ("request: spawn" in daemon) is is_debug
    assert (" forked\n" in daemon) is is_debug
    said = agent + daemon + sent
    for hidden in (PRIVATE, secret.hex(), repr(secret)[2:-1], "USERS_TOKEN"):
        assert hidden not in said


def test_an_agent_sends_its_log_of_failures_alone(gang: Gang) -> None:
    gang.run(os.getpid)
    gang.wait_for("ended")
    assert "agent-log" not in [message.kind for message in gang.seen]
    gang.run(time.sleep, 600)
    gang.wait_for("started")
    gang.stop()
    gang.wait_for("ended")
    assert [message.kind for message in gang.seen][-2:] == ["agent-log", "ended"]


def test_the_end_of_a_log_is_whole_lines(tmp_path: Path) -> None:
    file = tmp_path / "a.log"
    assert own_log.read_last_lines(file, 10) == b""
    file.write_bytes(b"one\ntwo\n")
    assert own_log.read_last_lines(file, 100) == b"one\ntwo\n"
    assert own_log.read_last_lines(file, 7) == b"two\n"
    (tmp_path / "a.log.1").write_bytes(b"minus one\nzero\n")
    assert own_log.read_last_lines(file, 15) == b"zero\none\ntwo\n"


@pytest.mark.parametrize("failed", [True, False])
def test_logs_of_agents_come_to_the_lake_with_those_of_a_failure(
    tmp_path: Path, *, failed: bool
) -> None:
    containers = [GangExecutor(key, f"c{key}", f"node{key}", "127.0.0.1", ()) for key in (4, 7)]
    before = set(Path("/proc/self/fd").iterdir())
    with Outputs(assign_ranks(containers, 1), NoDisplay()) as outputs:
        outputs.set_agent_log(1, b"at first")
        outputs.set_agent_log(1, b"said\n")
        if failed:
            outputs.request_agent_log_upload()
        sizes = {"rank-0.log": 0, "rank-1.log": 0}
        assert outputs.sizes() == {**sizes, **({"agent-1.log": 5} if failed else {})}
        for _, upload in outputs.take_over().uploads(LakePath(f"file://{tmp_path}/logs")):
            upload()
    assert (tmp_path / "logs" / "agent-1.log").exists() is failed
    assert not failed or (tmp_path / "logs" / "agent-1.log").read_bytes() == b"said\n"
    assert len(set(Path("/proc/self/fd").iterdir())) <= len(before)
    assert parse_log_name("logs/agent-1.log") is None
    found = log_sizes(LakePath(f"file://{tmp_path}"))
    assert [log.rank for log in found] == [0, 1]
