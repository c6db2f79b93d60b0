"""Resource profiles, which define the executors of gangs, and their assignment to gangs.

Spark never discards a profile and never merges equal ones, so they are pooled. At most one gang
uses a profile at a time, so no gang takes another's executors.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable

from pyspark.resource import (
    ExecutorResourceRequests,
    ResourceProfile,
    ResourceProfileBuilder,
    TaskResourceRequests,
)

from hopsgpu.cluster_managers.kubernetes.pod_template import DISCOVERY_PATH, spark_resource
from hopsgpu.core.spec import ExecutorShape
from hopsgpu.gpu.script_archive import marker_script, script_for

# The ID of the profile of executors that no gang requested.
DEFAULT_PROFILE = 0


def build_profile(shape: ExecutorShape) -> ResourceProfile:
    """Return a profile whose executors run one task at a time, with all their GPUs."""
    executor = (
        ExecutorResourceRequests()
        .cores(shape.cores)
        .memory(f"{shape.heap_mib}m")
        .memoryOverhead(f"{shape.overhead_mib}m")
    )
    task = TaskResourceRequests().cpus(shape.cores)
    if shape.gpus:
        executor.resource("gpu", shape.gpus, discoveryScript=script_for(shape.gpus, shape.gpu_type))
        task.resource("gpu", shape.gpus)
    if shape.marker is not None:
        # Spark requires an address of the marker, as of a GPU.
        executor.resource(shape.marker, 1, discoveryScript=marker_script(shape.marker))
    return ResourceProfileBuilder().require(executor).require(task).build


def build_standalone_profile(shape: ExecutorShape) -> ResourceProfile:
    """Return the same for a standalone master, which assigns the GPUs of its workers itself.

    The master counts the heap and no overhead. Therefore all memory is requested as heap, which the
    executor's JVM does not fill: otherwise the ranks' memory would be promised to other executors.
    """
    memory = shape.heap_mib + shape.overhead_mib
    executor = ExecutorResourceRequests().cores(shape.cores).memory(f"{memory}m")
    executor.memoryOverhead("0m")
    task = TaskResourceRequests().cpus(shape.cores)
    if shape.gpus:
        executor.resource("gpu", shape.gpus)
        task.resource("gpu", shape.gpus)
    return ResourceProfileBuilder().require(executor).require(task).build


def build_kubernetes_profile(gpu_resource: str, shape: ExecutorShape) -> ResourceProfile:
    """Return the same for Kubernetes, whose kubelet chooses the GPUs of a pod."""
    executor = (
        ExecutorResourceRequests()
        .cores(shape.cores)
        .memory(f"{shape.heap_mib}m")
        .memoryOverhead(f"{shape.overhead_mib}m")
    )
    task = TaskResourceRequests().cpus(shape.cores)
    if shape.gpus:
        vendor, name = spark_resource(gpu_resource)
        executor.resource(name, shape.gpus, discoveryScript=DISCOVERY_PATH, vendor=vendor)
        task.resource(name, shape.gpus)
    return ResourceProfileBuilder().require(executor).require(task).build


class ProfilePool:
    """The profiles of one application.

    Attributes:
        build: creates the profile of executors of a shape.
    """

    def __init__(self, build: Callable[[ExecutorShape], ResourceProfile] = build_profile) -> None:
        self.build = build
        self._lock = threading.Lock()
        self._idle: dict[ExecutorShape, list[ResourceProfile]] = defaultdict(list)

    def check_out(self, shape: ExecutorShape) -> ResourceProfile:
        with self._lock:
            idle = self._idle[shape]
            return idle.pop() if idle else self.build(shape)

    def check_in(self, shape: ExecutorShape, profile: ResourceProfile) -> None:
        """Put a profile back into the pool, once the cluster manager has no executor of it."""
        with self._lock:
            self._idle[shape].append(profile)
