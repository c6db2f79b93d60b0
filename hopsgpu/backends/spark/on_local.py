"""Gangs of a Spark application with a local master: on this machine, without YARN."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import TypeVar

from pyspark import SparkContext

from hopsgpu.backends.elastic_executors import ElasticLease
from hopsgpu.backends.grant import Owner
from hopsgpu.backends.lease_request import Request
from hopsgpu.backends.local.containers import Containers, leased_containers
from hopsgpu.backends.local.elastic import LocalElasticLease
from hopsgpu.backends.local.lease import LocalLease
from hopsgpu.backends.local.machine import check_gpus, fit_on_machine, own_gpus, this_machine
from hopsgpu.backends.spark.application_base import SparkApplication
from hopsgpu.backends.spark.jvm import Jvm
from hopsgpu.core.gang import Exclusions
from hopsgpu.core.spec import GangSpec, LaunchPlan
from hopsgpu.errors import CapacityError, DiscoveryError

_Lease = TypeVar("_Lease", LocalLease, LocalElasticLease)


class OnLocal(SparkApplication):
    """A `Site` whose gangs are processes of this machine."""

    def fit(self, spec: GangSpec) -> LaunchPlan:
        spec, shape, warnings = fit_on_machine(spec, this_machine(gpus=bool(spec.gpus.per_worker)))
        return LaunchPlan(spec, 1, spec.workers, shape, "", {}, {}, warnings)

    def check_again(self, plan: LaunchPlan, avoid: Exclusions) -> None:
        if avoid.hosts:
            raise CapacityError(
                f"{', '.join(sorted(avoid.hosts))} failed an earlier attempt, and there is no other"
                " machine"
            )
        addresses = [gpu for _, gpu in avoid.gpus]
        check_gpus(plan.shape.gpus, own_gpus(), plan.spec.gpu_type, addresses)

    def lacking(self, modules: Collection[str]) -> tuple[str, ...]:
        # The container's introduction says it, and a separate question would not be quicker.
        return ()

    def lease(self, request: Request) -> AbstractContextManager[Owner]:
        return self._leased(LocalLease, request)

    def elastic(self, request: Request) -> AbstractContextManager[ElasticLease]:
        return self._leased(LocalElasticLease, request)

    def _leased(
        self, kind: Callable[[Request, Containers], _Lease], request: Request
    ) -> AbstractContextManager[_Lease]:
        return leased_containers(
            kind,
            request,
            user=None if self.jvm.is_kerberized() else self.user,
            heartbeat=self.heartbeat,
            ports=self.ports,
        )

    def goes_on(self, application_id: str) -> bool:
        return False


def on_local(context: SparkContext, jvm: Jvm) -> OnLocal:
    """Return the site of an application with a local master; print how it differs from YARN.

    The line goes to stderr.

    Raises:
        ConfigError: an option is invalid.
    """
    application = OnLocal(context, jvm)
    application.check_options()
    print(
        f"hopsgpu: spark.master is {jvm.setting('spark.master')}, so gangs run on this machine"
        f" ({_has()}): no YARN, no queue, and only GPUs are reserved; runs and models go to"
        f" {application.root}",
        file=sys.stderr,
        flush=True,
    )
    return application


def _has() -> str:
    """Return the resources that a gang can have here, in words."""
    try:
        machine = this_machine()
    except DiscoveryError as error:  # only a launch that wants GPUs fails by it
        return str(error)
    return f"{machine}; ranks run on its {'GPUs' if machine.gpus else 'CPUs'}"
