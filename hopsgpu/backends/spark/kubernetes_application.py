"""Gangs of a Spark application on Kubernetes."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from pyspark import SparkContext
from pyspark.resource import ResourceProfile

from hopsgpu.backends.gang_queue import DEFAULT_PARTITION
from hopsgpu.backends.gang_queue_root import find_hosted_queues
from hopsgpu.backends.gang_request import Request
from hopsgpu.backends.queue_directory import GangQueueDirectory
from hopsgpu.backends.spark.cluster_application import ClusterApplication
from hopsgpu.backends.spark.container_image import refuse_other_image
from hopsgpu.backends.spark.executor_admission import ExecutorAdmissions
from hopsgpu.backends.spark.hadoop_conf_archive import ship_hadoop_conf
from hopsgpu.backends.spark.jvm import Jvm
from hopsgpu.backends.spark.jvm_threads import start_daemon
from hopsgpu.backends.spark.kubernetes_image_check import check_image
from hopsgpu.backends.spark.kueue_admission import kueue_admissions
from hopsgpu.backends.spark.package_archive import ship_package
from hopsgpu.backends.spark.resource_profiles import (
    DEFAULT_PROFILE,
    ProfilePool,
    build_kubernetes_profile,
)
from hopsgpu.backends.spark.settings import check_python, check_session
from hopsgpu.cluster_managers.demand import container_of
from hopsgpu.cluster_managers.flavors import Flavors
from hopsgpu.cluster_managers.kubernetes import kueue
from hopsgpu.cluster_managers.kubernetes.application_leases import RENEW_SECONDS, ApplicationLease
from hopsgpu.cluster_managers.kubernetes.kind import RECOVERY_MODE, image_of
from hopsgpu.cluster_managers.kubernetes.kueue_queue import KueueQueue
from hopsgpu.cluster_managers.kubernetes.manager import KubernetesManager
from hopsgpu.cluster_managers.kubernetes.nodes import NOT_READY
from hopsgpu.cluster_managers.kubernetes.pod_template import (
    TEMPLATE,
    Placing,
    admission_template,
    example_pod,
    executor_template,
    gang_template,
    spark_resource,
)
from hopsgpu.cluster_managers.manager import StartProblem
from hopsgpu.cluster_managers.manager_table import required_kind
from hopsgpu.errors import ConfigError, HopsGpuError

log = logging.getLogger(__name__)

_DRIVER_POD = "spark.kubernetes.driver.pod.name"
_REQUEST_CORES = "spark.kubernetes.executor.request.cores"
# Shortest time between two searches for pods of nodes that do not report.
_STRANDED_SECONDS = 2.0
# Shortest time between two deletions of what is left of a profile.
_REST_SECONDS = 0.5


@dataclass
class KubernetesApplication(ClusterApplication):
    """An application whose gangs run as pods."""

    manager: KubernetesManager
    _image_lock: threading.Lock = field(default_factory=threading.Lock)
    _is_image_checked: bool = False
    _stranded_at: float = float("-inf")
    _rest_ended_at: float = float("-inf")

    @property
    def can_prefer_hosts(self) -> bool:
        # The scheduler chooses the nodes of pods without knowing the tasks; a gang's pod template
        # has the rules.
        return False

    def check_marker(self, marker: str, gpu_type: str) -> None:
        raise ConfigError(
            f"spark.hopsgpu.markers names {marker} for gpu_type={gpu_type!r}, but only YARN marks"
            " nodes with resources: remove it; on Kubernetes, labels of nodes name their GPUs"
        )

    @property
    def image(self) -> str | None:
        return image_of(self.setting) or None

    def check_image(self, requested: str) -> None:
        refuse_other_image(requested, self.image)

    def missing_modules(self, modules: Collection[str]) -> tuple[str, ...]:
        """Return the modules that the image lacks; check the image first, once.

        Raises:
            ConfigError: no rank can run in the image.
        """
        with self._image_lock:
            if not self._is_image_checked:
                check_image(self)
                self._is_image_checked = True
        return super().missing_modules(modules)

    @functools.cached_property
    def gang_queue_dir(self) -> GangQueueDirectory:
        """Return the queue of gangs of the namespace in Leases, unless the lake can have it."""
        queues = find_hosted_queues(self.manager, self.option("locks"), self.default_fs)
        return super().gang_queue_dir if queues is None else queues / DEFAULT_PARTITION

    @functools.cached_property
    def template(self) -> dict[str, Any]:
        """Return the pod template of all executors."""
        return executor_template(self.jvm.settings(), self.manager.gpu_resource)

    @functools.cached_property
    def driver_pod(self) -> dict[str, Any] | None:
        """Return a reference to the driver's pod; None if the driver is not in one."""
        pod = self.setting(_DRIVER_POD)
        return self.manager.pod_reference(pod) if pod else None

    def admissions(self) -> contextlib.AbstractContextManager[ExecutorAdmissions]:
        """Provide what Kueue admits, if the namespace has a LocalQueue."""
        chosen = (self.option("kueue.queue") or "").strip()
        queue = None if chosen == kueue.OFF else self.manager.kueue_queue(chosen)
        if queue is None:
            return super().admissions()

        def remove_old() -> None:
            try:
                self.manager.remove_old_workloads(queue)
            except HopsGpuError as error:
                log.info("Workloads of killed drivers could not be removed: %s", error)

        remove_old()
        return kueue_admissions(
            queue, self.id, functools.partial(self._new_workload, queue), remove_old
        )

    def _new_workload(
        self, queue: KueueQueue, request: Request, is_growth: bool
    ) -> Mapping[str, Any]:
        plan, manager = request.plan, self.manager
        gpu_resource = manager.gpu_resource if plan.shape.gpus else ""
        # Only nodes of some types may be used if the gang has a type; Kueue compares labels.
        types = () if plan.hosts is None else manager.products_of(plan.hosts)
        template = admission_template(self.template, manager.rules.selector, gpu_resource, types)
        return kueue.workload_body(
            queue.version,
            queue.name,
            self.id,
            container_of(plan.shape),
            plan.executors,
            gpu_resource=manager.gpu_resource,
            template=template,
            owner=self.driver_pod,
            is_growth=is_growth,
        )

    @contextlib.contextmanager
    def placing(
        self,
        request: Request,
        profile: ResourceProfile,
        flavors: Flavors,
        excluded_hosts: Collection[str] = (),
    ) -> Iterator[None]:
        """Have Spark build executors for a gang while inside: where its nodes must be.

        Spark reads the template when it builds a pod. Other executors of this application that it
        builds meanwhile follow the same rules.
        """
        plan = request.plan
        placing = Placing(
            plan.hosts,
            frozenset(excluded_hosts),
            plan.spec.placement,
            self.id,
            profile.id,
            self.manager.gpu_resource if plan.shape.gpus else "",
            flavors,
        )
        file = self._write_template(f"gang-{profile.id}", gang_template(self.template, placing))
        before = self.setting(TEMPLATE)
        self.jvm.set_live(TEMPLATE, str(file))
        try:
            yield
        finally:
            self.jvm.set_live(TEMPLATE, before or "")

    def install_template(self) -> None:
        """Have Spark build all executors from the template of this application."""
        self.jvm.set_live(TEMPLATE, str(self._write_template("executors", self.template)))

    def _write_template(self, name: str, template: dict[str, Any]) -> Path:
        file = Path(self.package.name, f"{name}.yaml")
        file.write_text(yaml.safe_dump(template), encoding="utf-8")
        return file

    def find_start_problem(self, profile: ResourceProfile | None) -> StartProblem | None:
        """Return what keeps executors from starting, or why the API server refuses their pods."""
        if (problem := super().find_start_problem(profile)) is not None:
            return problem
        profile_id = DEFAULT_PROFILE if profile is None else profile.id
        if self.manager.has_executors(self.id, profile_id):
            return None
        return self.manager.find_refusal(self._example_pod(profile))

    def _example_pod(self, profile: ResourceProfile | None) -> dict[str, Any]:
        requests = {"cpu": "100m", "memory": "100Mi"}
        if profile is not None:
            amounts = {name: r.amount for name, r in profile.executorResources.items()}
            memory = amounts.pop("memory", 0) + amounts.pop("memoryOverhead", 0)
            cores = self.setting(_REQUEST_CORES)
            requests = {"cpu": cores or str(amounts["cores"]), "memory": f"{memory}Mi"}
            if gpus := amounts.get(spark_resource(self.manager.gpu_resource)[1]):
                requests[self.manager.gpu_resource] = str(gpus)
        return example_pod(self.template, self.jvm.settings(), self.image, requests)

    def end_executors(self, executors: Collection[str]) -> None:
        """Delete the pods of killed executors: Spark waits for seconds until it does."""
        try:
            self.manager.delete_executors(self.id, executors)
        except HopsGpuError as error:
            log.info("the pods end by themselves: %s", error)

    def end_revoked(self, executors: Collection[str], why: str) -> None:
        """Delete the pods of executors that Kueue has taken back."""
        self.manager.record_eviction(self.id, executors, why)
        self.manager.delete_executors(self.id, executors)

    def end_rest(self, profile_id: int) -> None:
        """Delete all pods of a profile.

        Spark waits for its idle timeout until it deletes pods that have not started, and kills no
        executor that has not registered. Where the API server was away, Spark is late to delete
        pods that have ended.
        """
        if time.monotonic() - self._rest_ended_at < _REST_SECONDS:
            return
        self._rest_ended_at = time.monotonic()
        try:
            self.manager.delete_profile(self.id, profile_id)
        except HopsGpuError as error:
            log.info("the rest of the pods could not be deleted: %s", error)

    def end_stranded(self, containers: Mapping[str, str]) -> None:
        """Remove pods of nodes that do not report: no kubelet confirms their end.

        The agents there have ended, because they have lost the driver, or end with the node.
        """
        if time.monotonic() - self._stranded_at < _STRANDED_SECONDS:
            return
        self._stranded_at = time.monotonic()
        try:
            lost = {node.host for node in self.manager.nodes() if node.state == NOT_READY}
            for container, host in containers.items():
                if host in lost:
                    log.info("%s does not report: removes the pod %s", host, container)
                    self.manager.remove_pod(container.rpartition("/")[2])
        except HopsGpuError as error:
            log.info("pods of lost nodes could not be removed: %s", error)


def kubernetes_application(context: SparkContext, jvm: Jvm) -> KubernetesApplication:
    """Return a `KubernetesApplication`; check the application's settings.

    Raises:
        ConfigError: the settings prevent gangs, or HDFS requires Kerberos.
        HopsGpuError: the API server does not answer.
    """
    settings = jvm.settings()
    check_session(settings)
    check_python(context.pythonExec, f"{sys.version_info[0]}.{sys.version_info[1]}")
    if jvm.is_kerberized():
        raise ConfigError(
            "the Hadoop configuration requires Kerberos, and hopsgpu passes no tokens to pods: use"
            " YARN, or a Hadoop configuration without Kerberos"
        )
    manager = required_kind(settings.get("spark.master")).connect(settings, os.environ)
    assert isinstance(manager, KubernetesManager)
    application = KubernetesApplication(
        context,
        jvm,
        manager,
        ship_package(context),
        ProfilePool(functools.partial(build_kubernetes_profile, manager.gpu_resource)),
    )
    application.install_template()
    if application.setting(RECOVERY_MODE) is None:
        # A session that was created without hopsgpu.session(); Spark reads it when it needs it.
        jvm.set_live(RECOVERY_MODE, "false")
    ship_hadoop_conf(context, application.package.name, os.environ)
    application.check_options()
    _keep_lease(application)
    return application


def _keep_lease(application: KubernetesApplication) -> None:
    """Renew the Lease of an application until its context ends, in a thread of its own."""
    context, manager = application.context, application.manager
    first = ApplicationLease(
        application.id,
        str(context.appName),
        manager.caller(),
        context.startTime / 1000,
        time.time(),
        pod=application.setting(_DRIVER_POD) or "",
    )
    ended = threading.Event()

    def keep() -> None:
        while not ended.wait(RENEW_SECONDS) and context._jsc is not None:
            try:
                manager.keep_lease(replace(first, renewed=time.time()))
            except HopsGpuError as error:
                log.warning("the Lease of %s could not be renewed: %s", application.id, error)
        end()

    def end() -> None:
        if not ended.is_set():
            ended.set()
            try:
                manager.keep_lease(replace(first, renewed=time.time(), has_ended=True))
            except HopsGpuError as error:
                log.info("the Lease of %s expires: %s", application.id, error)

    manager.keep_lease(first)
    manager.remove_old_leases()
    atexit.register(end)
    start_daemon("hopsgpu-lease", keep)
    start_daemon("hopsgpu-pods", lambda: manager.watch_executors(application.id, ended))
