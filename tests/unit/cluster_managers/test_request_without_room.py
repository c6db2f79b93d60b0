"""When a gang that does not fit asks YARN anyway: only where YARN may grant it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from hopsgpu.cluster_managers.demand import Demand
from hopsgpu.cluster_managers.request_without_room import why_request_without_room
from hopsgpu.cluster_managers.resources import NOTHING, Amount
from hopsgpu.cluster_managers.shortage import Shortage, shortage
from hopsgpu.cluster_managers.snapshot import Queue, Snapshot, User
from hopsgpu.cluster_managers.yarn.amounts import DEFAULT_GPU_RESOURCE
from hopsgpu.cluster_managers.yarn.queues import chain_of, preemptable_amount
from hopsgpu.cluster_managers.yarn.rest_answers import nodes_of, queues_of
from hopsgpu.core.queue_policy import Bound
from tests.unit.cluster_managers.test_capacity import DATA, Recorded, node, snap

PREEMPTION = "YARN preempts other queues that are above their shares"
# Two nodes of 2 GPUs; queues `own` and `other` have a share of 2 GPUs each, and may have all.
NODE = Amount(2, 16, 65536)
WHOLE, SHARE = NODE * 2, NODE
ONE = Amount(1, 2, 4096)


def gpus(number: int) -> Amount:
    return ONE * number


def queue(path: str, used: int, **more: Any) -> Queue:
    return Queue(path, "RUNNING", True, WHOLE, SHARE, gpus(used), NODE, **more)


def situation(
    own: int, other: int, *, preempts: bool = True, user: User | None = None, **own_queue: Any
) -> Snapshot:
    """Return a snapshot in which the queues use so many GPUs; the nodes are filled in order."""
    used = own + other
    queues = (
        dataclasses.replace(queue("root.own", own), **own_queue),
        queue("root.other", other, is_preemptable=preempts),
    )
    return snap(
        node("node1", NODE, gpus(min(used, 2))),
        node("node2", NODE, gpus(max(used - 2, 0))),
        queues=queues[:1],
        used=gpus(used),
        user=user or User("alice"),
        preemptable=preemptable_amount(queues, "root.own"),
    )


def why(executors: int, there: Snapshot, held: int = 0, container: Amount = ONE) -> str:
    demand = Demand(container, executors)
    return why_request_without_room(demand, there, shortage(demand, there, held), held)


@pytest.mark.parametrize(
    ("executors", "own", "other", "preempts", "held", "reason"),
    [
        # Room for all: nothing to decide.
        (2, 0, 2, True, 0, ""),
        # The issue of most clusters: 2 of 4 GPUs are free, and YARN does not preempt.
        (4, 0, 2, False, 0, ""),
        (2, 0, 4, False, 0, ""),
        # It does, and the queue lacks as much of its share as the gang needs.
        (2, 0, 4, True, 0, PREEMPTION),
        (2, 0, 3, True, 0, PREEMPTION),
        (1, 1, 3, True, 0, PREEMPTION),
        # The gang needs more than the share: a part of it would come, and be given back.
        (3, 0, 4, True, 0, ""),
        (4, 0, 4, True, 0, ""),
        (2, 1, 3, True, 0, ""),
        # The queue has its share, or others have no more than theirs.
        (1, 2, 2, True, 0, ""),
        (1, 4, 0, True, 0, ""),
        # The gang has one of its two executors already.
        (2, 1, 3, True, 1, PREEMPTION),
        (2, 1, 3, False, 1, ""),
    ],
)
def test_a_gang_asks_without_room_only_where_yarn_preempts_enough_for_it(
    executors: int, own: int, other: int, preempts: bool, held: int, reason: str
) -> None:
    assert why(executors, situation(own, other, preempts=preempts), held) == reason


def test_memory_is_preempted_too() -> None:
    """Nodes have free GPUs, but others have their memory."""
    large = Amount(1, 2, 40000)
    full = Amount(0, 2, 65000)
    queues = (queue("root.own", 0), dataclasses.replace(queue("root.other", 0), used=full * 2))
    for preempts, reason in ((True, PREEMPTION), (False, "")):
        others = dataclasses.replace(queues[1], is_preemptable=preempts)
        there = snap(
            node("node1", NODE, full),
            node("node2", NODE, full),
            queues=queues[:1],
            preemptable=preemptable_amount((queues[0], others), "root.own"),
        )
        assert shortage(Demand(large, 1), there).is_gpu_shortage is False
        assert why(1, there, container=large) == reason


def test_the_share_of_a_parent_counts() -> None:
    there = situation(2, 2)
    parent = dataclasses.replace(queue("root.p", 2, is_preemptable=True), guaranteed=WHOLE)
    assert why(1, there) == ""
    others = queue("root.p.b", 0), queue("root.c", 4, is_preemptable=True)
    above = dataclasses.replace(
        there,
        queues=(there.queues[0], parent, there.queues[-1]),
        preemptable=preemptable_amount(others, "root.own"),
    )
    assert why(1, above) == PREEMPTION


def test_a_limit_of_the_user_is_not_preempted_away() -> None:
    limited = User("alice", gpus(1), gpus(0))
    assert why(1, situation(1, 3)) == PREEMPTION
    assert why(1, situation(1, 3, user=limited)) == ""


def test_a_limit_that_is_exceeded_is_not_enforced() -> None:
    at_limit = situation(2, 0, preempts=False, maximum=SHARE)
    assert why(1, at_limit) == ""
    beyond = situation(3, 0, preempts=False, maximum=SHARE)
    assert shortage(Demand(ONE, 1), beyond).bound is Bound.QUEUE
    assert why(1, beyond) == "more is used than the limit in queue root.own allows"
    # Full nodes are full, whatever the limits are.
    assert why(2, beyond) == ""


def test_yarn_exceeds_the_limit_of_a_user_by_one_container() -> None:
    # The largest container has 2 GPUs.
    for used, reason in (
        (gpus(3), ""),
        (Amount(4, 40, 140000), "more is used than the limit in queue root.own allows"),
    ):
        there = situation(1, 1, preempts=False, user=User("alice", used, gpus(1)))
        assert shortage(Demand(ONE, 1), there).bound is Bound.USER
        assert why(1, there) == reason


def test_free_gpus_on_other_nodes_are_not_preempted() -> None:
    spread = Shortage(Bound.NODES, "")
    there = situation(0, 2)
    assert there.preemptable == NOTHING
    assert why_request_without_room(Demand(gpus(2), 1), there, spread) == ""


@pytest.mark.parametrize("version", ["3.3.6", "3.4.2", "3.5.0"])
def test_what_the_capacity_scheduler_says_about_preemption(version: str) -> None:
    recorded = json.loads((DATA / f"rest-{version}.json").read_text())["2 nodes, 2 applications"]
    nodes = nodes_of(json.loads(recorded["/ws/v1/cluster/nodes"]), DEFAULT_GPU_RESOURCE)
    text = recorded["/ws/v1/cluster/scheduler"]
    for says, is_preemptable in (("true", False), ("false", True)):
        answer = json.loads(
            text.replace('"preemptionDisabled":true', f'"preemptionDisabled":{says}')
        )
        default, *_ = chain_of(queues_of(answer, "", nodes, DEFAULT_GPU_RESOURCE), "default")
        assert default.is_preemptable is is_preemptable
        assert default.share == default.guaranteed
        assert default.share.gpus == 2


@pytest.mark.parametrize(
    ("setting", "preemptable", "gpus_above"),
    [("true", True, 1), ("true", False, 0), ("false", True, 0), (None, True, 0)],
)
def test_the_fair_scheduler_preempts_up_to_its_fair_shares(
    setting: str | None, preemptable: bool, gpus_above: int
) -> None:
    manager = Fair("fair", setting)
    for child in manager.answers["scheduler"]["scheduler"]["schedulerInfo"]["rootQueue"][
        "childQueues"
    ]["queue"]:
        child["preemptable"] = preemptable
        child["fairResources"] = resources(1)
    app = manager.answers["apps"]["apps"]["app"][0]
    app["queue"] = "root.pct"
    for _ in range(2):
        there = manager.snapshot(app["id"], "alice")
    assert there.queues[0].share.gpus == 1
    # root.a has 2 GPUs, and its share is 1.
    assert there.preemptable.gpus == gpus_above
    assert sum("scheduler.fair.preemption" in path for path in manager.asked) == 1


class Fair(Recorded):
    def __init__(self, name: str, preemption: str | None) -> None:
        super().__init__(name)
        self._preemption = preemption

    def ask(self, path: str) -> Any:
        if path.endswith("yarn.scheduler.fair.preemption") and self._preemption is not None:
            self.asked.append(path)
            return {"property": {"value": self._preemption}}
        return super().ask(path)


def resources(number: int) -> dict[str, Any]:
    entries = [("yarn.io/gpu", number), ("vcores", 2), ("memory-mb", 4096)]
    listed = [{"name": name, "value": value} for name, value in entries]
    return {"resourceInformations": {"resourceInformation": listed}}
