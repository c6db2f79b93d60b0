"""How the release of a gang removes requests; Spark and the cluster manager are stood in for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from hopsgpu.backends.spark import release
from hopsgpu.backends.spark.executors import Executors
from hopsgpu.cluster_managers.manager import HeldExecutors

PROFILE = 3


class Cluster:
    """A request that stays until it is removed, and Spark's target of executors.

    Attributes:
        target: number of executors that Spark wants; one less at each poll.
        is_counted: whether Spark counts a task of a lost executor.
        removed_at: Spark's target at each removal.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self.pending = 1
        self.is_counted = False
        self.removed_at: list[int] = []

    def end_rest(self, profile_id: int) -> None:
        assert profile_id == PROFILE
        self.removed_at.append(self.target)
        self.pending = 0

    def is_target_at_most(self, executors: int) -> bool:
        self.target = max(self.target - 1, int(self.is_counted))
        return self.target <= executors

    def executors(self) -> Executors:
        manager = SimpleNamespace(title="Kubernetes", are_gpus_ending=lambda: False)
        application = SimpleNamespace(jvm=None, manager=manager, end_rest=self.end_rest)
        stand_in: Any = SimpleNamespace(
            application=application,
            profile=SimpleNamespace(id=PROFILE),
            server=SimpleNamespace(disconnect_all=lambda: None),
            is_target_at_most=self.is_target_at_most,
            kill_idle=lambda busy: None,
            held_containers=lambda: HeldExecutors({}, self.pending),
        )
        return cast(Executors, stand_in)


def test_requests_are_removed_once_spark_wants_no_executor() -> None:
    cluster = Cluster(target=3)
    released = release.release_executors(cluster.executors(), [], is_whole=True)
    assert released.is_confirmed and released.problem is None
    assert set(cluster.removed_at) == {0}


def test_a_lost_executor_without_a_visible_task_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(release, "UNREACHABLE_SECONDS", 0.0)
    cluster, given_up = Cluster(target=3), list[str]()

    def give_up(executors: set[str]) -> None:
        given_up.extend(executors)
        cluster.is_counted = False

    stand_in: Any = cluster.executors()
    cluster.is_counted = True
    stand_in.busy_ids, stand_in.registered_ids = tuple, lambda: ("7",)
    stand_in.application.jvm = SimpleNamespace(give_up=give_up, end_containers=lambda given: None)
    assert release.release_executors(stand_in, [], is_whole=True).is_confirmed
    assert given_up == ["7"] and set(cluster.removed_at) == {0}
