"""Gangs of a Spark application on YARN."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager

from pyspark import SparkContext

from hopsgpu.backends.elastic_executors import ElasticLease
from hopsgpu.backends.grant import Owner
from hopsgpu.backends.lease_request import Request
from hopsgpu.backends.spark.application import Application
from hopsgpu.backends.spark.elastic import YarnElasticLease
from hopsgpu.backends.spark.executor_probe import probe
from hopsgpu.backends.spark.executors import leased_executors
from hopsgpu.backends.spark.fit import check_again, fit_on_yarn
from hopsgpu.backends.spark.jvm import Jvm
from hopsgpu.backends.spark.lease import GpuLease
from hopsgpu.backends.spark.package_archive import ship_package
from hopsgpu.backends.spark.settings import check_python, check_session
from hopsgpu.backends.spark.yarn_driver import act_for_submitter
from hopsgpu.core.gang import Exclusions
from hopsgpu.core.spec import GangSpec, LaunchPlan
from hopsgpu.errors import ConfigError
from hopsgpu.yarn.resource_manager import ResourceManager, web_addresses
from hopsgpu.yarn.resources import GPU


class OnYarn(Application):
    """A `Site` whose gangs run in containers of YARN, as executors of this application."""

    def fit(self, spec: GangSpec) -> LaunchPlan:
        return fit_on_yarn(spec, self)

    def check_again(self, plan: LaunchPlan, avoid: Exclusions) -> None:
        check_again(plan, self, avoid)

    def lacking(self, modules: Collection[str]) -> tuple[str, ...]:
        with self.probing:
            unknown = [name for name in modules if name not in self.has_module]
            if unknown and (lacks := probe(self, unknown)) is not None:
                self.has_module |= {name: name not in lacks for name in unknown}
            return tuple(name for name in modules if not self.has_module.get(name, True))

    def lease(self, request: Request) -> AbstractContextManager[Owner]:
        return leased_executors(GpuLease, self, request)

    @contextlib.contextmanager
    def elastic(self, request: Request) -> Iterator[ElasticLease]:
        with leased_executors(YarnElasticLease, self, request) as lease:
            lease.start()
            yield lease

    def goes_on(self, application_id: str) -> bool:
        return not self.manager.end_of(application_id)


def on_yarn(context: SparkContext, jvm: Jvm) -> OnYarn:
    """Return the site of an application on YARN; check the application's settings.

    Raises:
        ConfigError: the settings prevent gangs, or the Hadoop configuration here does not define
            GPUs.
    """
    check_session(jvm.settings())
    check_python(context.pythonExec, f"{sys.version_info[0]}.{sys.version_info[1]}")
    if not jvm.knows_resource(GPU):
        raise ConfigError(
            f"{GPU} is unknown here: resource-types.xml in HADOOP_CONF_DIR must name it in"
            " yarn.resource-types, as on the ResourceManager"
        )
    manager = ResourceManager(web_addresses(jvm.hadoop))
    act_for_submitter(context)
    application = OnYarn(context, jvm, manager, ship_package(context))
    application.check_options()
    return application
