"""Unpacking of Python environments, each by a process that outlives the requesting task."""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hopsgpu.agent import fork_servers
from hopsgpu.agent.reaper import ExitStatus, Reaper
from hopsgpu.core.bounded_reads import read_end, read_file
from hopsgpu.errors import StoreError
from hopsgpu.storage.node_copies import find_copy, shared_directories

log = logging.getLogger(__name__)

# Not imported here: the imports of that module would slow the start of the process daemon.
_MODULE = "hopsgpu.packaging.python_env.unpacker"
_DIRECTORY = "hopsgpu-environments"
_LOG_TAIL_BYTES = 1000

_Reply = Callable[..., None]


def places_of(environ: Mapping[str, str], container: Path) -> list[Path]:
    """Return the application's directories of environments, one on each disk of the node.

    Args:
        container: directory to use if YARN names none in LOCAL_DIRS.
    """
    return shared_directories(environ, container, _DIRECTORY)


class EnvironmentUnpacker:
    """The processes that unpack environments for a container's ranks.

    A process continues when its requester disconnects: a placeholder requests an environment that
    the agent uses later.
    """

    def __init__(self, directory: Path, mark: Mapping[str, str], reaper: Reaper) -> None:
        self._directory = directory
        self._mark = mark
        self._reaper = reaper
        self._replies: dict[int, tuple[str, list[_Reply]]] = {}

    def prepare(self, env: Mapping[str, Any], variables: Mapping[str, str], reply: _Reply) -> None:
        """Start to unpack an environment, or reply at once if it is unpacked.

        Args:
            env: fields of a PythonEnv.
            variables: variables of the requesting task, with which the process reaches the lake.
            reply: receives `home`, or `problem` and `configured`.

        Raises:
            OSError: no process could be started.
        """
        digest = str(env["digest"])
        places = places_of(variables, self._directory)
        if (unpacked := find_copy(places, digest)) is not None:
            reply(home=str(unpacked))
            return
        for digest_in_work, replies in self._replies.values():
            if digest_in_work == digest:
                replies.append(reply)
                return
        request = {
            "env": dict(env),
            "places": [str(place) for place in places],
            "answer": str(self._answer(digest)),
        }
        with tempfile.TemporaryFile() as input_file, self._log(digest).open("wb") as output:
            input_file.write(json.dumps(request).encode())
            input_file.seek(0)
            pid = fork_servers.start_process(
                [sys.executable, "-P", "-m", _MODULE, str(os.getpid())],
                stdin=input_file,
                cwd=self._directory,
                env={**variables, **self._mark},
                stdout=output,
            )
        log.info("pid %d unpacks the Python environment %s", pid, digest)
        self._reaper.kept.add(pid)
        self._replies[pid] = (digest, [reply])

    def on_exit(self, status: ExitStatus) -> None:
        """Reply to the requesters if the child was to unpack an environment."""
        if status.pid not in self._replies:
            return
        digest, replies = self._replies.pop(status.pid)
        code = os.waitstatus_to_exitcode(status.status)
        log.info("pid %d, which unpacks %s, exited with code %d", status.pid, digest, code)
        answer = self._answer(digest)
        try:
            outcome = json.loads(read_file(answer))
            answer.unlink()
        except (OSError, ValueError, StoreError):
            output = read_end(self._log(digest), _LOG_TAIL_BYTES)
            problem = f"the process that unpacks the Python environment ended with {code}: {output}"
            outcome = {"problem": problem, "configured": False}
        for reply in replies:
            reply(**outcome)

    def _answer(self, digest: str) -> Path:
        return self._directory / f"environment-{digest}.json"

    def _log(self, digest: str) -> Path:
        return self._directory / f"environment-{digest}.log"
