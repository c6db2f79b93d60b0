"""The Leases by which drivers report that their applications run. Pure.

A driver may run anywhere, also outside of the cluster, so Kubernetes does not know whether it
lives. Each application therefore has a Lease in its namespace, which its driver renews, and marks
as ended. Others read it for a day, such as those who ask why a run has no end.

Source: the Kubernetes documentation, "Leases".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from hopsgpu.cluster_managers.kubernetes.pods import mapping_of, seconds_of, text_of
from hopsgpu.core.run_record import ApplicationReport

# Spark's ID of an application, and the prefix of the name of its Lease.
APPLICATION_ID = re.compile(r"spark-[0-9a-z][-0-9a-z]{0,62}")
_PREFIX = "hopsgpu-"
LABEL = "hopsgpu/application"
_NAME, _USER, _ENDED = "hopsgpu/name", "hopsgpu/user", "hopsgpu/ended"
_POD = "hopsgpu/driver-pod"
# Other users can write annotations. Another text could be another path of the API server.
_POD_NAME = re.compile(r"[a-z0-9][-.a-z0-9]{0,252}")
RENEW_SECONDS = 10.0
# A driver that has not renewed its Lease for this time is lost; clocks may be apart.
LEASE_SECONDS = 60.0
# Leases of applications that ended before this time are removed.
KEPT_SECONDS = 86400.0
_MAX_NAME = 200


@dataclass(frozen=True)
class ApplicationLease:
    """An application by its Lease.

    Attributes:
        started: when the driver started, in seconds since the epoch.
        renewed: when the driver was alive last, by its own clock.
        has_ended: whether the driver has reported its end.
        pod: name of the driver's pod; "" if the driver is outside of the cluster.
    """

    id: str
    name: str
    user: str
    started: float
    renewed: float
    has_ended: bool = False
    pod: str = ""

    def is_running(self, now: float) -> bool:
        # Another user may date a Lease far ahead, which must not count as alive forever.
        return not self.has_ended and abs(now - self.renewed) < LEASE_SECONDS

    def report(self, now: float) -> ApplicationReport:
        if self.is_running(now):
            return ApplicationReport("RUNNING", "", False)
        if self.has_ended:
            return ApplicationReport("FINISHED", "", True)
        seconds = now - self.renewed
        return ApplicationReport(
            "LOST", f"its driver has not renewed its Lease for {seconds:.0f} s", True
        )


def lease_name(application_id: str) -> str:
    return f"{_PREFIX}{application_id}"


def lease_body(application: ApplicationLease, version: str = "") -> dict[str, Any]:
    """Return the Lease of an application for the API server.

    Args:
        version: the version that is replaced; "" for a new Lease.
    """
    metadata: dict[str, Any] = {
        "name": lease_name(application.id),
        "labels": {LABEL: application.id},
        "annotations": {
            _NAME: application.name[:_MAX_NAME],
            _USER: application.user[:_MAX_NAME],
            **({_ENDED: "true"} if application.has_ended else {}),
            **({_POD: application.pod} if application.pod else {}),
        },
    }
    if version:
        metadata["resourceVersion"] = version
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": metadata,
        "spec": {
            "holderIdentity": application.id,
            "leaseDurationSeconds": int(LEASE_SECONDS),
            "acquireTime": _time_text(application.started),
            "renewTime": _time_text(application.renewed),
        },
    }


def lease_of(answer: Mapping[str, Any]) -> ApplicationLease | None:
    """Return the application of a Lease; None if the Lease is not one of an application."""
    metadata, spec = mapping_of(answer, "metadata"), mapping_of(answer, "spec")
    id_ = text_of(mapping_of(metadata, "labels"), LABEL)
    if APPLICATION_ID.fullmatch(id_) is None or text_of(metadata, "name") != lease_name(id_):
        return None
    annotations = mapping_of(metadata, "annotations")
    pod = text_of(annotations, _POD)
    return ApplicationLease(
        id_,
        text_of(annotations, _NAME)[:_MAX_NAME],
        text_of(annotations, _USER)[:_MAX_NAME],
        seconds_of(spec.get("acquireTime")),
        seconds_of(spec.get("renewTime")),
        has_ended=_ENDED in annotations,
        pod=pod if _POD_NAME.fullmatch(pod) else "",
    )


def leases_of(answers: Iterable[Mapping[str, Any]]) -> dict[str, ApplicationLease]:
    """Return the applications of Leases, by ID."""
    leases = (lease for answer in answers if (lease := lease_of(answer)) is not None)
    return {lease.id: lease for lease in leases}


def _time_text(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
