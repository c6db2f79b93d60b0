"""Gangs of a Spark application that are its executors on a cluster manager."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager

from hopsgpu.backends.elastic_allocator import ElasticAllocator
from hopsgpu.backends.gang_allocation import GangAllocator
from hopsgpu.backends.gang_request import Request
from hopsgpu.backends.spark.application import Application
from hopsgpu.backends.spark.elastic_allocator import SparkElasticAllocator
from hopsgpu.backends.spark.executor_probe import probe
from hopsgpu.backends.spark.executors import spark_allocator
from hopsgpu.backends.spark.fit import check_with_exclusions, fit_on_cluster
from hopsgpu.backends.spark.gang_allocator import SparkGangAllocator
from hopsgpu.core.gang import Exclusions
from hopsgpu.core.spec import GangSpec, LaunchPlan


class ClusterApplication(Application):
    """An application whose gangs run as its executors."""

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

    def is_running(self, application_id: str) -> bool:
        return not self.manager.end_of(application_id)
