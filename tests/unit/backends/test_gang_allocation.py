"""What a lease knows of its agents and of the jobs that run them."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from hopsgpu.backends.gang_allocation import GangAllocation, keep_all


class Job:
    def __init__(self) -> None:
        self.ended = threading.Event()

    def reason(self, seconds: float) -> str:
        return "it ended"

    def loss(self, seconds: float) -> str:
        return ""


def lease(own: dict[int, Job], job: Job) -> tuple[GangAllocation, set[int]]:
    """A lease of three agents, and those of them that are connected."""
    connected = {0, 1, 2}
    server: Any = SimpleNamespace(is_connected=connected.__contains__)
    containers: Any = tuple(SimpleNamespace(key=key) for key in range(3))
    return (
        GangAllocation(server, containers, job, lambda reason, host: reason, keep_all, bytes, own),
        connected,
    )


def test_where_one_job_runs_all_agents_its_end_is_the_end_of_all() -> None:
    job = Job()
    whole, connected = lease({}, job)
    assert not whole.keys_without_job
    job.ended.set()
    connected.remove(1)
    assert whole.keys_without_job == {0, 2}


def test_where_each_executor_has_a_job_the_others_have_theirs() -> None:
    own = {key: Job() for key in range(3)}
    any_of_them = Job()
    several, connected = lease(own, any_of_them)
    own[1].ended.set()
    any_of_them.ended.set()
    assert several.keys_without_job == {1}
    connected.remove(1)
    assert not several.keys_without_job
