"""Gangs of a Spark application on YARN."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager

from pyspark import SparkContext

from hopsgpu.backends.elastic_allocator import ElasticAllocator
from hopsgpu.backends.gang_allocation import GangAllocator
from hopsgpu.backends.gang_request import Request
from hopsgpu.backends.spark.application import Application
from hopsgpu.backends.spark.container_image import image_of, refuse_other_image
from hopsgpu.backends.spark.elastic_allocator import SparkElasticAllocator
from hopsgpu.backends.spark.executor_probe import probe
from hopsgpu.backends.spark.executors import spark_allocator
from hopsgpu.backends.spark.fit import check_with_exclusions, fit_on_cluster
from hopsgpu.backends.spark.gang_allocator import SparkGangAllocator
from hopsgpu.backends.spark.jvm import Jvm
from hopsgpu.backends.spark.package_archive import ship_package
from hopsgpu.backends.spark.settings import check_python, check_session
from hopsgpu.backends.spark.yarn_driver import act_for_submitter
from hopsgpu.cluster_managers.yarn.amounts import DEFAULT_GPU_RESOURCE
from hopsgpu.cluster_managers.yarn.gpu_resource import SETTING, SPARK_SETTING, choose_gpu_resource
from hopsgpu.cluster_managers.yarn.resource_manager import ResourceManager, web_addresses
from hopsgpu.core.gang import Exclusions
from hopsgpu.core.spec import GangSpec, LaunchPlan
from hopsgpu.errors import ConfigError


class YarnApplication(Application):
    """An application whose gangs run as its executors on YARN."""

    def fit(self, spec: GangSpec) -> LaunchPlan:
        return fit_on_cluster(spec, self)

    def check_with_exclusions(self, plan: LaunchPlan, exclusions: Exclusions) -> None:
        check_with_exclusions(plan, self, exclusions)

    def missing_modules(self, modules: Collection[str]) -> tuple[str, ...]:
        with self.probing:
            unknown = [name for name in modules if name not in self.has_module]
            if unknown and (lacks := probe(self, unknown)) is not None:
                self.has_module |= {name: name not in lacks for name in unknown}
            return tuple(name for name in modules if not self.has_module.get(name, True))

    def allocate(self, request: Request) -> AbstractContextManager[GangAllocator]:
        return spark_allocator(SparkGangAllocator, self, request)

    @contextlib.contextmanager
    def allocate_elastic(self, request: Request) -> Iterator[ElasticAllocator]:
        with spark_allocator(SparkElasticAllocator, self, request) as allocator:
            allocator.start()
            yield allocator

    @property
    def image(self) -> str | None:
        return image_of(self.setting)

    def check_image(self, requested: str) -> None:
        refuse_other_image(requested, self.image)

    def is_running(self, application_id: str) -> bool:
        return not self.manager.end_of(application_id)


def yarn_application(context: SparkContext, jvm: Jvm) -> YarnApplication:
    """Return a `YarnApplication`; check the application's settings.

    Raises:
        ConfigError: the settings prevent gangs, or the Hadoop configuration here does not define
            the resource that counts GPUs.
    """
    settings = jvm.settings()
    check_session(settings)
    check_python(context.pythonExec, f"{sys.version_info[0]}.{sys.version_info[1]}")
    gpu_resource = choose_gpu_resource(settings, os.environ)
    of_spark = settings.get(SPARK_SETTING) or DEFAULT_GPU_RESOURCE
    if gpu_resource != of_spark:
        raise ConfigError(
            f"{SETTING} (or its environment variable) names {gpu_resource}, but this application"
            f" requests {of_spark}: start it with hopsgpu.session() or `hopsgpu submit`, or with"
            f" {SPARK_SETTING}={gpu_resource}"
        )
    if not jvm.has_resource(gpu_resource):
        raise ConfigError(
            f"{gpu_resource} is unknown here: resource-types.xml in HADOOP_CONF_DIR must name it in"
            f" yarn.resource-types, as on the ResourceManager; {SETTING} names the resource"
        )
    manager = ResourceManager(web_addresses(jvm.hadoop), gpu_resource=gpu_resource)
    act_for_submitter(context)
    application = YarnApplication(context, jvm, manager, ship_package(context))
    application.check_options()
    return application
