"""Leases of applications: which ones count, until when, and how they are written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hopsgpu.cluster_managers.kubernetes.application_leases import (
    APPLICATION_ID,
    LEASE_SECONDS,
    RENEW_SECONDS,
    ApplicationLease,
    lease_body,
    lease_name,
    lease_of,
    leases_of,
)
from hopsgpu.core.run_record import ApplicationReport
from tests.unit.cluster_managers.kubernetes import api_server
from tests.unit.cluster_managers.kubernetes.api_server import APPLICATION

STARTED = 1796061600.0
RECORDED = ApplicationLease(APPLICATION, "train", "alice", STARTED, STARTED + 600.5)


def recorded_lease() -> Any:
    return api_server.single("lease_created")[1]


def test_a_recorded_lease() -> None:
    assert lease_of(recorded_lease()) == RECORDED


def test_a_lease_is_read_as_it_is_written() -> None:
    assert lease_of(lease_body(RECORDED)) == RECORDED
    body, answer = lease_body(RECORDED), recorded_lease()
    assert body["spec"] == answer["spec"]
    for name in ("name", "labels", "annotations"):
        assert body["metadata"][name] == answer["metadata"][name]
    assert body["metadata"].keys() == {"name", "labels", "annotations"}


def test_a_lease_names_the_pod_of_its_driver() -> None:
    inside = replace(RECORDED, pod="driver")
    assert lease_of(lease_body(inside, "17")) == inside
    metadata = lease_body(inside, "17")["metadata"]
    assert metadata["resourceVersion"] == "17"
    # It stays when the pod is deleted, so that readers know the application.
    assert "ownerReferences" not in metadata


@pytest.mark.parametrize("name", ["../../secrets/s", "a/log", "a?b", "A", "-a", "a" * 254])
def test_an_annotation_that_names_no_pod_is_ignored(name: str) -> None:
    lease = lease_of(lease_body(replace(RECORDED, pod=name)))
    assert lease is not None and lease.pod == ""


def test_a_lease_expires_after_its_time() -> None:
    assert RENEW_SECONDS * 3 < LEASE_SECONDS
    last = RECORDED.renewed
    assert RECORDED.is_running(last + 59.9) and not RECORDED.is_running(last + 60)
    assert RECORDED.report(last + 1) == ApplicationReport("RUNNING", "", False)
    assert RECORDED.report(last + 75) == ApplicationReport(
        "LOST", "its driver has not renewed its Lease for 75 s", True
    )


def test_a_driver_whose_clock_is_ahead_runs() -> None:
    assert RECORDED.is_running(RECORDED.renewed - 30)


def test_a_foreign_lease_with_the_label_but_another_name_is_none() -> None:
    items = api_server.recorded_list("leases")["items"]
    assert [item["metadata"]["name"] for item in items] == ["foreign", lease_name(APPLICATION)]
    assert leases_of(items) == {APPLICATION: RECORDED}
    assert leases_of(items[:1]) == {}


@pytest.mark.parametrize(
    "id_", ["", "app-1", "spark-", "spark-A", "spark-a/b", "spark-a b", f"spark-{'a' * 64}"]
)
def test_a_label_that_is_no_id_of_spark_is_none(id_: str) -> None:
    answer = recorded_lease()
    answer["metadata"]["labels"] = {"hopsgpu/application": id_}
    answer["metadata"]["name"] = lease_name(id_)
    assert lease_of(answer) is None
    assert APPLICATION_ID.fullmatch(id_) is None


def test_a_lease_without_times_has_expired() -> None:
    answer = recorded_lease()
    answer["spec"] = None
    lease = lease_of(answer)
    assert lease is not None and not lease.is_running(STARTED)


def test_long_names_are_cut_on_both_ways() -> None:
    long = ApplicationLease(APPLICATION, "n" * 10**5, "u" * 10**5, STARTED, STARTED)
    annotations = lease_body(long)["metadata"]["annotations"]
    assert [len(value) for value in annotations.values()] == [200, 200]
    answer = recorded_lease()
    answer["metadata"]["annotations"]["hopsgpu/name"] = "n" * 10**5
    lease = lease_of(answer)
    assert lease is not None and len(lease.name) == 200


def test_a_lease_that_is_dated_ahead_does_not_live_forever() -> None:
    lease = ApplicationLease("spark-1", "train", "alice", 0.0, 1000.0)
    assert lease.is_running(1000.0 - 59) and lease.is_running(1000.0 + 59)
    assert not lease.is_running(1000.0 - 61) and lease.report(900.0).has_ended
