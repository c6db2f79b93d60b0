"""A Spark application of plain PySpark that holds GPUs for tests, as commands on its input say.

Arguments: master, name, and the path of a discovery script. Each line of its input is a command:
`hold EXECUTORS GPUS` prints the ID of the resource profile whose executors it requests, `kill ID`
ends the tasks of a profile and kills its executors that have registered, and the end of the input
ends the application.
The first line of the output is the application's ID.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from pyspark import InheritableThread, SparkConf, SparkContext
from pyspark.resource import (
    ExecutorResourceRequests,
    ResourceProfile,
    ResourceProfileBuilder,
    TaskResourceRequests,
)

from hopsgpu.backends.spark.jvm import Jvm
from hopsgpu.backends.spark.kubernetes_application import kubernetes_application

_FEW = {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",
    "spark.dynamicAllocation.minExecutors": "0",
    "spark.dynamicAllocation.initialExecutors": "0",
    "spark.executor.instances": "0",
    "spark.executor.cores": "1",
    "spark.executor.memory": "512m",
    "spark.python.task.killTimeout": "200ms",
    "spark.ui.enabled": "false",
}


def profile_of(gpus: int, discovery: str) -> ResourceProfile:
    executor = ExecutorResourceRequests().cores(1).memory("512m")
    # Only Kubernetes needs the vendor.
    executor.resource("gpu", gpus, discoveryScript=discovery, vendor="nvidia.com")
    task = TaskResourceRequests().cpus(1).resource("gpu", gpus)
    return ResourceProfileBuilder().require(executor).require(task).build


def hold(_: Iterator[int]) -> Iterator[int]:
    time.sleep(3600)
    return iter(())


class Driver:
    """The application; tasks of a profile are a job whose group is the profile's ID."""

    def __init__(self, context: SparkContext, discovery: str) -> None:
        self._context = context
        self._discovery = discovery
        self._jobs: dict[int, threading.Thread] = {}

    def hold(self, executors: int, gpus: int) -> int:
        profile = profile_of(gpus, self._discovery)

        def run() -> None:
            self._context.setJobGroup(str(profile.id), "hold", interruptOnCancel=True)
            rdd = self._context.parallelize(range(executors), executors).withResources(profile)
            try:
                rdd.mapPartitions(hold).count()
            except Exception as error:  # noqa: BLE001 - the cancellation ends the job with an error
                print(f"the job ended: {type(error).__name__}", file=sys.stderr)

        # The ID is given when the profile is first used on the JVM's side.
        self._context.parallelize([0], 1).withResources(profile)
        self._jobs[profile.id] = InheritableThread(target=run, daemon=True)
        self._jobs[profile.id].start()
        return profile.id

    def kill(self, profile: int) -> None:
        self._context.cancelJobGroup(str(profile))
        self._jobs[profile].join()
        scala: Any = self._context._jsc.sc()
        backend = scala.schedulerBackend()
        targets = scala.executorAllocationManager().get()
        # Spark replaces executors that are killed while its target includes them.
        while (
            target := targets.numExecutorsTargetPerResourceProfileId().get(profile)
        ).isDefined() and target.get():
            time.sleep(0.05)
        ids = [
            str(backend.getExecutorIds().apply(i)) for i in range(backend.getExecutorIds().size())
        ]
        of_profile = [i for i in ids if backend.getExecutorResourceProfileId(i) == profile]
        converted = self._context._jvm.org.apache.spark.api.python.PythonUtils.toSeq(of_profile)
        backend.killExecutors(converted, False, False, True)


def main() -> None:
    master, name, discovery = sys.argv[1:]
    conf = SparkConf().setMaster(master).setAppName(name).setAll(list(_FEW.items()))
    with SparkContext(conf=conf) as context:
        if master.startswith("k8s"):
            # A driver on Kubernetes reports that it lives, and executors need a template.
            kubernetes_application(context, Jvm(context))
        driver = Driver(context, discovery)
        print(context.applicationId, flush=True)
        for line in sys.stdin:
            command, *numbers = line.split()
            print(getattr(driver, command)(*map(int, numbers)) or "", flush=True)


if __name__ == "__main__":
    main()
