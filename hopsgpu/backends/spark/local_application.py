"""Gangs of a Spark application with a local master: on this machine, without YARN."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import TypeVar

from pyspark import SparkContext

from hopsgpu.backends.elastic_allocator import ElasticAllocator
from hopsgpu.backends.gang_allocation import GangAllocator
from hopsgpu.backends.gang_application import GangApplication
from hopsgpu.backends.gang_request import Request
from hopsgpu.backends.local.containers import Containers, local_allocator
from hopsgpu.backends.local.elastic_allocator import LocalElasticAllocator
from hopsgpu.backends.local.gang_allocator import LocalGangAllocator
from hopsgpu.backends.local.machine import check_gpus, fit_on_machine, own_gpus, this_machine
from hopsgpu.backends.spark.container_image import refuse_image
from hopsgpu.backends.spark.jvm import Jvm
from hopsgpu.core.gang import Exclusions
from hopsgpu.core.spec import GangSpec, LaunchPlan
from hopsgpu.errors import CapacityError, DiscoveryError

_Allocator = TypeVar("_Allocator", LocalGangAllocator, LocalElasticAllocator)


class LocalApplication(GangApplication):
    """An application whose gangs are processes of this machine."""

    def fit(self, spec: GangSpec) -> LaunchPlan:
        spec, shape, warnings = fit_on_machine(
            spec, this_machine(should_list_gpus=bool(spec.gpus.per_worker))
        )
        return LaunchPlan(spec, 1, spec.workers, shape, "", {}, {}, warnings)

    def check_with_exclusions(self, plan: LaunchPlan, exclusions: Exclusions) -> None:
        if exclusions.hosts:
            raise CapacityError(
                f"{', '.join(sorted(exclusions.hosts))} failed an earlier attempt, and there is no"
                " other machine"
            )
        addresses = [gpu for _, gpu in exclusions.gpus]
        check_gpus(plan.shape.gpus, own_gpus(), plan.spec.gpu_type, addresses)

    def missing_modules(self, modules: Collection[str]) -> tuple[str, ...]:
        # The container's hello message reports missing modules as early as a query would.
        return ()

    def allocate(self, request: Request) -> AbstractContextManager[GangAllocator]:
        return self._allocate(LocalGangAllocator, request)

    def allocate_elastic(self, request: Request) -> AbstractContextManager[ElasticAllocator]:
        return self._allocate(LocalElasticAllocator, request)

    def _allocate(
        self, kind: Callable[[Request, Containers], _Allocator], request: Request
    ) -> AbstractContextManager[_Allocator]:
        return local_allocator(
            kind,
            request,
            user=None if self.jvm.is_kerberized() else self.user,
            heartbeat=self.heartbeat,
            ports=self.ports,
        )

    @property
    def image(self) -> str | None:
        return None

    def check_image(self, requested: str) -> None:
        refuse_image(requested, "a local master")

    def is_running(self, application_id: str) -> bool:
        return False


def local_application(context: SparkContext, jvm: Jvm) -> LocalApplication:
    """Return a `LocalApplication`; print to stderr how it differs from YARN.

    Raises:
        ConfigError: an option is invalid.
    """
    application = LocalApplication(context, jvm)
    application.check_options()
    print(
        f"hopsgpu: spark.master is {jvm.setting('spark.master')}, so gangs run on this machine"
        f" ({_describe_machine()}): no YARN, no queue, and only GPUs are reserved; runs and models"
        f" go to {application.root}",
        file=sys.stderr,
        flush=True,
    )
    return application


def _describe_machine() -> str:
    try:
        machine = this_machine()
    except DiscoveryError as error:  # only a launch with GPUs needs the list
        return str(error)
    return f"{machine}; ranks run on its {'GPUs' if machine.gpus else 'CPUs'}"
