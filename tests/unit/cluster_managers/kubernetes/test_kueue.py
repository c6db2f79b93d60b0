"""Kueue's objects: which queue counts, what a Workload requests, and what its conditions say."""

from __future__ import annotations

from typing import Any

import pytest

from hopsgpu.cluster_managers.flavors import Flavors
from hopsgpu.cluster_managers.kubernetes.kueue import (
    choose_queue,
    deleted_workload,
    flavors_of,
    served_version,
    workload_body,
    workload_of,
)
from hopsgpu.cluster_managers.resources import Amount
from hopsgpu.errors import ConfigError

NO_ROOM = (
    "couldn't assign flavors to pod set main: insufficient unused quota for nvidia.com/gpu in"
    " flavor gpus, 2 more needed"
)
PREEMPTION = "Preempted to accommodate a workload (UID: u, JobUID: UNKNOWN)"


def condition(type_: str, status: str, message: str = "", reason: str = "r") -> dict[str, Any]:
    return {"type": type_, "status": status, "message": message, "reason": reason}


def answer(*conditions: dict[str, Any], **status: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "w", "labels": {"hopsgpu/application": "spark-1"}},
        "status": {"conditions": [*conditions], **status},
    }


ADMITTED = answer(
    condition("QuotaReserved", "True", "Quota reserved in ClusterQueue all"),
    condition("Admitted", "True", "The workload is admitted"),
    admission={
        "podSetAssignments": [
            {"name": "main", "flavors": {"cpu": "any", "memory": "any", "nvidia.com/gpu": "a100"}}
        ]
    },
)


def body(**options: Any) -> Any:
    given: dict[str, Any] = {
        "gpu_resource": "nvidia.com/gpu",
        "template": {"spec": {}},
        "owner": None,
        "is_growth": False,
    }
    amount = Amount(2, 4, 5120)
    return workload_body("v1beta2", "gangs", "spark-1", amount, 3, **{**given, **options})


@pytest.mark.parametrize(
    ("served", "version"),
    [
        (("v1beta1", "v1beta2"), "v1beta2"),
        (("v1beta1",), "v1beta1"),
        (("v1alpha1", "v1beta1"), "v1beta1"),
        (("v2",), None),
        ((), None),
    ],
)
def test_the_newest_known_version_is_used(served: tuple[str, ...], version: str | None) -> None:
    assert served_version({"versions": [{"version": name} for name in served]}) == version


def test_which_queue_admits_gangs() -> None:
    assert choose_queue([], "", "team") is None
    assert choose_queue(["a"], "", "team") == "a"
    assert choose_queue(["a", "b"], "b", "team") == "b"
    with pytest.raises(ConfigError, match=r"several LocalQueues of Kueue \(a, b\).*kueue.queue"):
        choose_queue(["b", "a"], "", "team")
    with pytest.raises(ConfigError, match="'c'.*it has a, b.*'off'"):
        choose_queue(["b", "a"], "c", "team")
    with pytest.raises(ConfigError, match="it has none"):
        choose_queue([], "c", "team")


def test_a_gang_is_one_pod_set() -> None:
    workload = body()
    assert (workload["apiVersion"], workload["kind"]) == ("kueue.x-k8s.io/v1beta2", "Workload")
    metadata, spec = workload["metadata"], workload["spec"]
    assert (
        metadata["name"].startswith("hopsgpu-spark-1-") and metadata["name"] != body()["metadata"]
    )
    assert metadata["labels"] == {"hopsgpu/application": "spark-1"}
    assert "ownerReferences" not in metadata
    assert (spec["queueName"], spec["active"], spec["priority"]) == ("gangs", True, 0)
    (pods,) = spec["podSets"]
    assert pods["count"] == 3
    (container,) = pods["template"]["spec"]["containers"]
    assert container["resources"]["requests"] == {
        "cpu": "4",
        "memory": "5120Mi",
        "nvidia.com/gpu": "2",
    }


def test_a_growth_is_behind_gangs_and_goes_with_the_drivers_pod() -> None:
    owner = {"kind": "Pod", "uid": "u"}
    workload = body(is_growth=True, owner=owner)
    assert workload["spec"]["priority"] == -1
    assert workload["metadata"]["ownerReferences"] == [owner]


def test_kueue_learns_the_rules_for_nodes_and_nothing_else_of_the_template() -> None:
    template = {
        "spec": {
            "nodeSelector": {"pool": "gpu"},
            "tolerations": [{"operator": "Exists"}],
            "volumes": [{"name": "secret"}],
            "affinity": {},
        }
    }
    (pods,) = body(template=template)["spec"]["podSets"]
    spec = pods["template"]["spec"]
    assert spec.keys() == {"containers", "restartPolicy", "nodeSelector", "tolerations"}
    assert spec["nodeSelector"] == {"pool": "gpu"}


def test_an_admitted_workload() -> None:
    workload = workload_of(ADMITTED)
    assert (workload.name, workload.application) == ("w", "spark-1")
    assert workload.is_admitted and not workload.eviction and not workload.is_deleted
    assert workload.flavors == ("any", "a100")


def test_a_workload_that_waits_says_why() -> None:
    assert workload_of(answer()).message == ""
    workload = workload_of(answer(condition("QuotaReserved", "False", NO_ROOM, "Pending")))
    assert not workload.is_admitted
    assert workload.message == (
        "insufficient unused quota for nvidia.com/gpu in flavor gpus, 2 more needed"
    )


def test_admission_checks_are_named_while_they_wait() -> None:
    checks = [
        {"name": "ready", "state": "Ready", "message": "yes"},
        {"name": "nodes", "state": "Pending", "message": "2 nodes are created"},
    ]
    reserved = condition("QuotaReserved", "True", "Quota reserved")
    workload = workload_of(answer(reserved, admissionChecks=checks))
    assert workload.message == (
        "the quota is reserved, and admission checks wait: nodes 2 nodes are created"
    )


def test_an_eviction_names_its_reason() -> None:
    evicted = condition("Evicted", "True", PREEMPTION, "Preempted")
    workload = workload_of(answer(*ADMITTED["status"]["conditions"], evicted))
    assert workload.is_admitted
    assert workload.eviction == f"Kueue preempted the gang: {PREEMPTION}"
    evicted = condition("Evicted", "True", "The workload is deactivated", "Deactivated")
    workload = workload_of(answer(evicted))
    assert workload.eviction == "Kueue evicted the gang: The workload is deactivated"
    assert workload.message == "The workload is deactivated"
    assert not workload_of(answer(condition("Evicted", "False", "old"))).eviction


def test_a_deleted_workload_is_evicted() -> None:
    present = answer()
    present["metadata"]["deletionTimestamp"] = "2026-11-30T19:10:10Z"
    for workload in (deleted_workload("w", "spark-1"), workload_of(present)):
        assert workload.eviction == "Kueue evicted the gang: its Workload was deleted"
        assert workload.is_deleted and not workload.is_admitted


def test_flavors_name_the_nodes() -> None:
    spot = {"key": "spot", "operator": "Exists"}
    answers = [
        {"spec": {"nodeLabels": {"pool": "a"}, "tolerations": [spot]}},
        {"spec": {}},
        {"spec": {"nodeLabels": {"type": "a100"}}},
    ]
    assert flavors_of(answers) == Flavors({"pool": "a", "type": "a100"}, (spot,))
