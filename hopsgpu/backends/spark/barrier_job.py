"""The two Spark jobs of a gang: placeholders, which acquire executors, and the agents' barrier."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from pyspark import RDD, InheritableThread, TaskContext
from pyspark.resource import ResourceProfile
from pyspark.serializers import CPickleSerializer

from hopsgpu.agent.warm_up import WarmUp
from hopsgpu.backends.spark.application import Application
from hopsgpu.backends.spark.settings import refuse_other_python
from hopsgpu.control.handshake import UnreachableError
from hopsgpu.control.peer import DriverEndpoint
from hopsgpu.errors import ConfigError

Task = Callable[[Iterable[Any]], Iterator[Any]]
# Poll interval: Spark has no notification for the reason of a task's failure.
_POLL_SECONDS = 0.1


def _enter_container() -> None:
    from hopsgpu.agent.container_entry import enter_container

    context = TaskContext.get()
    # Tasks request GPUs and nothing else, by a name that the cluster manager determines.
    resources = context.resources() if context is not None else {}
    enter_container([address for gpus in resources.values() for address in gpus.addresses])


def placeholder_task(driver: DriverEndpoint, warm: WarmUp) -> Task:
    def task(_: Iterable[Any]) -> Iterator[Any]:
        _enter_container()
        # The process daemon outlives this task; the agent that replaces the placeholder uses it.
        warm.start_daemon(driver)
        from hopsgpu.agent.placeholder import run_placeholder

        run_placeholder(driver, warm)
        return iter(())

    return task


def agent_task(driver: DriverEndpoint, warm: WarmUp) -> Task:
    def task(_: Iterable[Any]) -> Iterator[Any]:
        _enter_container()
        daemon_start = warm.start_daemon(driver)
        from hopsgpu.agent.agent import run_agent

        run_agent(driver, daemon_start=daemon_start)
        return iter(())

    return task


class GangJob:
    """A Spark job of N tasks with a resource profile, in its own thread.

    The thread is a daemon, because it must not keep a failed script alive. `hosts` has the
    preferred host of each task; if it is empty, YARN chooses.

    Attributes:
        tag: tag by which the job is cancelled.
    """

    def __init__(
        self,
        application: Application,
        *,
        tag: str,
        description: str,
        tasks: int,
        hosts: Sequence[str],
        profile: ResourceProfile,
        is_barrier: bool,
        task: Task,
    ) -> None:
        if len(hosts) not in (0, tasks):
            raise ValueError(f"{tasks} tasks and {len(hosts)} hosts")
        self.tag = tag
        self.tasks = tasks
        self.ended = threading.Event()
        self.error: Exception | None = None
        self._application = application
        self._description = description
        self._hosts = hosts
        self._profile = profile
        self._is_barrier = is_barrier
        self._task = task
        self._thread = InheritableThread(target=self._run, name=tag, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def reason(self, seconds: float) -> str:
        self.ended.wait(seconds)
        if self.error is None:
            return "it ended by itself"
        return self._application.jvm.ended_by(self.error) or reason_of(str(self.error))

    def loss(self, seconds: float) -> str:
        """Return why an executor of the job was lost; "" if that is not known in `seconds`.

        The loss ends a barrier job. Spark restarts the task of another job on another executor. Its
        later cancellation is not the reason of the loss.
        """
        deadline = time.monotonic() + seconds
        while True:
            has_ended = self.ended.is_set()
            if has_ended and not (self.error is not None and was_cancelled(str(self.error))):
                return self.reason(0.0)
            failures = () if self._is_barrier else self._application.jvm.task_failures(self.tag)
            if failures:
                return reason_of(failures[-1])
            if has_ended or time.monotonic() >= deadline:
                return ""
            self.ended.wait(_POLL_SECONDS)

    def _run(self) -> None:
        try:
            context = self._application.context
            context.setJobGroup(self.tag, self._description)
            context.addJobTag(self.tag)
            partitions = self._partitions().withResources(self._profile)
            rdd = partitions.barrier() if self._is_barrier else partitions
            rdd.mapPartitions(self._task).collect()
        except Exception as error:  # noqa: BLE001 - passed to the code that waits for the job
            self.error = error
        finally:
            self.ended.set()

    def _partitions(self) -> RDD[Any]:
        """Return one partition for each task.

        The partitions of `SparkContext.parallelize` would run an additional Python worker.
        """
        jvm = self._application.jvm
        if self._hosts:
            partitions = jvm.numbers([[host] for host in self._hosts])
        else:
            partitions = jvm.empty_partitions(self.tasks)
        return RDD(partitions, self._application.context, CPickleSerializer())


def reason_of(error: str) -> str:
    """Return the cause that Spark's error names.

    The cause is the reason why an executor was lost, the error of a task, or else the first line.
    """
    if lost := re.search(
        r"ExecutorLostFailure.*?Reason: (.*?)(?:\n\s+at |\n\s*\n|Driver stacktrace|$)", error, re.S
    ):
        return " ".join(lost[1].split())
    # Python prints the errors of a TaskGroup in a frame; py4j puts a colon before a Java exception.
    stripped = (line.strip(" |+-\t").removeprefix(": ") for line in error.splitlines())
    lines = [text for text in stripped if text]
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b.*: ", line)]
    python = [line for line in raised if not line.startswith(("org.", "java.", "py4j."))]
    return python[-1] if python else (raised or lines or ["no reason given"])[0]


def was_cancelled(error: str) -> bool:
    """Return whether Spark's error says that the job was cancelled by its tag."""
    return re.search(r"cancelled part of cancelled job (group|tag)", error) is not None


def refuse_hopeless(error: str) -> None:
    """Raise ConfigError if a retry by Spark cannot fix the error of a task or a job.

    The executor cannot reach the driver then, or has another Python version.
    """
    if UnreachableError.__name__ in error:
        raise ConfigError(reason_of(error))
    refuse_other_python(error)
