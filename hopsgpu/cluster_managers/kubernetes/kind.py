"""Kubernetes as a kind of cluster manager."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hopsgpu.cluster_managers.kind import ManagerKind
from hopsgpu.cluster_managers.kubernetes.api_client import SECONDS
from hopsgpu.cluster_managers.kubernetes.credentials import (
    MASTER_PREFIX,
    NAMESPACE,
    load_access,
)
from hopsgpu.cluster_managers.kubernetes.gpu_resource import kubernetes_gpu_resource
from hopsgpu.cluster_managers.kubernetes.manager import KubernetesManager
from hopsgpu.cluster_managers.kubernetes.pod_template import node_rules
from hopsgpu.cluster_managers.kubernetes.submitted_drivers import SUBMISSION

IMAGE = "spark.kubernetes.container.image"
# The image's Python, on its PATH; this machine's has another path there.
PYTHON_OF_IMAGE = "python3"
_EXECUTOR_IMAGE = "spark.kubernetes.executor.container.image"
_ALLOCATOR = "spark.kubernetes.allocation.pods.allocator"
# After an executor that ended with code 137, Spark 4 would give all later executors one core. Gangs
# with several cores would then never start.
RECOVERY_MODE = "spark.kubernetes.allocation.recoveryMode.enabled"
_WAIT = "spark.kubernetes.submission.waitAppCompletion"
_DRIVER_LABEL = "spark.kubernetes.driver.label."
_BATCH_DELAY = "spark.kubernetes.allocation.batch.delay"
# Spark creates pods in steps of the batch delay, after which the API server lists them.
_SETTLE_SECONDS = 1.0


def image_of(setting: Callable[[str], str | None]) -> str | None:
    """Return the image of executors; None or "" if no property names one."""
    return setting(_EXECUTOR_IMAGE) or setting(IMAGE)


class Kubernetes(ManagerKind):
    """An API server of Kubernetes, with executors as pods in one namespace."""

    title = "Kubernetes"
    masters = "k8s://https://HOST:PORT"
    has_shell = False
    has_queues = False
    queue_replacement = (
        f"the namespace takes the place of a queue, with its quotas: set {NAMESPACE}, with --conf"
    )
    has_images = True
    session_settings: Mapping[str, str] = {
        # A gang's pods are created in one step. By default there are ten, one second apart.
        "spark.kubernetes.allocation.batch.size": "256",
        _BATCH_DELAY: "200ms",
        RECOVERY_MODE: "false",
        # Spark requests an executor again if the API server does not list its pod after this time:
        # the server may have been away. Spark's default is ten minutes.
        "spark.kubernetes.allocation.executor.timeout": "60s",
        # Spark notices within this time that pods started and ended.
        "spark.kubernetes.executor.eventProcessingInterval": "200ms",
        # Executors that failed long ago do not count towards the limit that ends the application.
        "spark.executor.failuresValidityInterval": "10min",
        # An API server that refuses pods, such as for a full quota, refuses several in a second.
        "spark.executor.maxNumFailures": "100000",
    }

    def image_settings(self, image: str) -> Mapping[str, str]:
        return {IMAGE: image}

    def has_master(self, master: str) -> bool:
        return master.strip().startswith(MASTER_PREFIX)

    def find_problems(self, setting: Callable[[str], str | None]) -> list[str]:
        return []

    def find_refusals(self, setting: Callable[[str], str | None]) -> list[str]:
        findings = []
        if not image_of(setting):
            findings.append(
                f"{IMAGE} is not set: name an image with Spark, Python and the packages of the"
                " ranks, or pass image= to hopsgpu.session(); docs/kubernetes.md shows how to build"
                " one"
            )
        if (setting(RECOVERY_MODE) or "false").strip().lower() == "true":
            findings.append(
                f"{RECOVERY_MODE}=true: after an executor that ran out of memory, Spark would give"
                " the next ones a single core, and gangs would wait forever; set it to false"
            )
        allocator = setting(_ALLOCATOR)
        if allocator not in (None, "direct"):
            findings.append(
                f"{_ALLOCATOR}={allocator}: Spark could not end single executors; set it to direct"
            )
        return findings

    def submission_settings(
        self, tag: str, setting: Callable[[str], str | None]
    ) -> Mapping[str, str]:
        return {_WAIT: "false", **({f"{_DRIVER_LABEL}{SUBMISSION}": tag} if tag else {})}

    def settle_seconds(self, setting: Callable[[str], str | None]) -> float:
        return _SETTLE_SECONDS

    def connect(
        self,
        properties: Mapping[str, str],
        environ: Mapping[str, str],
        hadoop: Callable[[str], str | None] | None = None,
        seconds: tuple[float, float] | None = None,
    ) -> KubernetesManager:
        gpu_resource = kubernetes_gpu_resource(properties, environ)
        return KubernetesManager(
            load_access(properties, environ),
            gpu_resource=gpu_resource,
            rules=node_rules(properties, gpu_resource),
            seconds=seconds or SECONDS,
        )
