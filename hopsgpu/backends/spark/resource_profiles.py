"""Resource profiles, which define the executors of gangs, and their assignment to gangs.

Spark never discards a profile and never merges equal ones, so they are pooled. At most one gang
uses a profile at a time, so no gang takes another's executors.
"""

from __future__ import annotations

import threading
from collections import defaultdict

from pyspark.resource import (
    ExecutorResourceRequests,
    ResourceProfile,
    ResourceProfileBuilder,
    TaskResourceRequests,
)

from hopsgpu.core.spec import ExecutorShape
from hopsgpu.gpu.script_archive import marker_script, script_for


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


class ProfilePool:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[ExecutorShape, list[ResourceProfile]] = defaultdict(list)

    def check_out(self, shape: ExecutorShape) -> ResourceProfile:
        with self._lock:
            idle = self._idle[shape]
            return idle.pop() if idle else build_profile(shape)

    def check_in(self, shape: ExecutorShape, profile: ResourceProfile) -> None:
        """Put a profile back into the pool, once the ResourceManager has no container of it."""
        with self._lock:
            self._idle[shape].append(profile)
