"""All calls into Spark's JVM that PySpark does not offer.

No call may run in the main thread while a person can press Ctrl-C: py4j then closes the connections
of all threads, and their calls run twice.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import SparkContext, SparkStageInfo

from hopsgpu.backends.spark.log4j import CapturedLog, suppressed
from hopsgpu.backends.spark.release_messages import KilledExecutor, ReleaseMessages
from hopsgpu.errors import HopsGpuError

# Spark's scheduler logs this message every 15 s, until the application's first task runs.
_NO_RESOURCES = "Initial job has not accepted any resources"
_DYNAMIC = "spark.dynamicAllocation.enabled"
# Longest time for which dynamic allocation's flag is off, for a scheduler that hangs: the flag
# concerns all jobs of the application. Spark's scheduler handles one event at a time, so a user's
# job with 100,000 tasks delays a barrier job by seconds.
FLIP_SECONDS = 20.0
# The beginning of a warning with a stack trace, which Spark's scheduler logs if it refuses a stage.
_STAGE_REFUSED = "Creating new stage failed due to exception - job: "
_DAG_SCHEDULER = "org.apache.spark.scheduler.DAGScheduler"
# The message about an executor whose container ended, with the diagnostics of YARN.
_YARN_ENDPOINT = "org.apache.spark.scheduler.cluster.YarnSchedulerBackend$YarnSchedulerEndpoint"
_REMOVAL = "Requesting driver to remove executor "
_POLL_SECONDS = 0.01
_MAX_TASKS = 10_000
# Members of ExecutorAllocationManager. The field has the time of its next request, in nanoseconds
# of its clock. The method counts the executors that a profile's tasks need.
_NEXT_REQUEST = "addTime"
_NEEDED = "maxNumExecutorsNeededPerResourceProfile"
_LONG_AGO = -(2**62)
# The method that ExecutorAllocationManager calls every 100 ms.
_STEP = "org$apache$spark$ExecutorAllocationManager$$schedule"
# A method of CoarseGrainedSchedulerBackend, the reason of a loss, and the message that ends an
# executor.
_EXECUTORS = "org$apache$spark$scheduler$cluster$CoarseGrainedSchedulerBackend$$executorDataMap"
_KILLED = "org.apache.spark.scheduler.ExecutorKilled$"
_SHUTDOWN = "org.apache.spark.scheduler.cluster.CoarseGrainedClusterMessages$StopExecutor$"
# A JVM that a signal ends breaks its connections before it closes its port.
_ENDING_SECONDS = 2.0
# A method of HadoopDelegationTokenManager.
_SCHEDULE_RENEWAL = "scheduleRenewal"
_PROBE_SECONDS = 2.0
# Kinds of the tokens for hdfs, webhdfs and swebhdfs (Hadoop's DelegationTokenIdentifier and
# WebHdfsConstants).
_HDFS_TOKENS = ("HDFS_DELEGATION_TOKEN", "WEBHDFS delegation", "SWEBHDFS delegation")

log = logging.getLogger(__name__)


class Jvm:
    def __init__(self, context: SparkContext) -> None:
        self._context = context
        self._scala: Any = context._jsc.sc()
        self._flipping = threading.Lock()
        self._release_messages = ReleaseMessages()

    def error_text(self, error: BaseException) -> str:
        """Return the text that a record shows for an error that ended a run.

        For an error that is not hopsgpu's, the text names the type, and says if the JVM has ended.
        """
        if isinstance(error, HopsGpuError):
            return str(error)
        words = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        ended = self.ended_by(error)
        return f"{ended} ({words})" if ended else words

    def ended_by(self, error: BaseException) -> str:
        """Return that the JVM has ended, if that explains an error of a call into it; else ""."""
        # A Java exception proves that the JVM answered.
        is_connection_error = isinstance(error, OSError | Py4JError) and not isinstance(
            error, Py4JJavaError
        )
        if is_connection_error and wait_until(
            self._has_ended, threading.Event(), _ENDING_SECONDS, 0.1
        ):
            return "the driver's JVM has ended: a signal ended spark-submit, or it crashed"
        return ""

    def _has_ended(self) -> bool:
        gateway = self._context._gateway
        if gateway is None:
            return False
        address = gateway.gateway_parameters.address, gateway.gateway_parameters.port
        try:
            socket.create_connection(address, _PROBE_SECONDS).close()
        except ConnectionRefusedError:
            return True
        except OSError:  # the JVM may only be slow, or this process may have no descriptor left
            return False
        return False

    def setting(self, name: str) -> str | None:
        option = self._scala.conf().getOption(name)
        return str(option.get()) if option.isDefined() else None

    def set_live(self, name: str, value: str) -> None:
        """Change a property of the running application, for parts of Spark that read it again."""
        self._scala.conf().set(name, value)

    def settings(self) -> dict[str, str]:
        return dict(self._context._conf.getAll())

    def hadoop(self, name: str) -> str | None:
        """Return a property of the Hadoop configuration (core, hdfs and yarn), or None."""
        value = self._yarn_configuration().get(name)
        return None if value is None else str(value)

    def _yarn_configuration(self) -> Any:
        hadoop = self._context._jsc.hadoopConfiguration()
        return self._class("org.apache.hadoop.yarn.conf.YarnConfiguration")(hadoop)

    def _class(self, name: str) -> Any:
        java: Any = self._context._jvm
        for part in name.split("."):
            java = getattr(java, part)
        return java

    def has_resource(self, name: str) -> bool:
        """Return whether the YARN configuration here (resource-types.xml) defines a resource."""
        utils = self._class("org.apache.hadoop.yarn.util.resource.ResourceUtils")
        return bool(utils.getResourceTypes().containsKey(name))

    def user(self) -> str:
        """Return the submitter's short name, as HDFS and YARN know it."""
        return str(self._login().getCurrentUser().getShortUserName())

    def proxied_user(self) -> str | None:
        """Return the user for whom another one's credentials act; None if they are this user's."""
        user = self._login().getCurrentUser()
        return None if user.getRealUser() is None else str(user.getShortUserName())

    def removals(self) -> CapturedLog:
        """Return Spark's messages about executors whose containers end, from now on."""
        return CapturedLog(self._context._jvm, _YARN_ENDPOINT, _REMOVAL)

    def hadoop_version(self) -> str:
        return str(self._class("org.apache.hadoop.util.VersionInfo").getVersion())

    def is_kerberized(self) -> bool:
        return bool(self._login().isSecurityEnabled())

    def _login(self) -> Any:
        return self._class("org.apache.hadoop.security.UserGroupInformation")

    def hdfs_tokens(self) -> bytes:
        """Return the submitter's HDFS delegation tokens as a Hadoop token file; b"" without any."""
        return self._hdfs_part(self._login().getCurrentUser().getCredentials())

    def seconds_to_new_tokens(self) -> float | None:
        """Return in how many seconds Spark will get new HDFS tokens; None without a plan."""
        manager = self._token_manager()
        milliseconds = self._class("java.util.concurrent.TimeUnit").MILLISECONDS
        planned = () if manager is None else self._planned_tokens(manager)
        return min((float(task.getDelay(milliseconds)) / 1000 for task in planned), default=None)

    def plan_new_tokens(self) -> None:
        """Make Spark get new HDFS tokens in a second, in its own thread, instead of at its plan.

        Raises:
            LookupError: this Spark has no such method.
        """
        manager = self._token_manager()
        plans = (
            method
            for method in manager.getClass().getDeclaredMethods()
            # The compiler prefixes the class name if other classes call the method.
            if str(method.getName()).rpartition("$")[2] == _SCHEDULE_RENEWAL
        )
        if (plan := next(plans, None)) is None:
            raise LookupError(_SCHEDULE_RENEWAL)
        # Each renewal schedules the next one: two plans would continue in parallel.
        for task in self._planned_tokens(manager):
            task.cancel(False)
        plan.setAccessible(True)
        gateway: Any = self._context._gateway
        arguments = gateway.new_array(gateway.jvm.Object, 1)
        arguments[0] = gateway.jvm.Long.valueOf("1000")
        plan.invoke(manager, arguments)

    def _planned_tokens(self, manager: Any) -> list[Any]:
        executor = self._private(manager, "renewalExecutor")
        waiting = () if executor is None else executor.getQueue().toArray()
        # A periodic task renews the Kerberos ticket.
        return [task for task in waiting if not (task.isPeriodic() or task.isCancelled())]

    def _token_manager(self) -> Any:
        """Return Spark's HadoopDelegationTokenManager; None without Kerberos."""
        option = self._private(self._backend(), "delegationTokenManager")
        return option.get() if option is not None and option.isDefined() else None

    def _private(self, instance: Any, name: str) -> Any:
        return self._field(instance, name).get(instance)

    def _field(self, instance: Any, name: str) -> Any:
        """Return a private field of a Java object's class or of one of its superclasses."""
        declaring = instance.getClass()
        while declaring is not None:
            for field in declaring.getDeclaredFields():
                if str(field.getName()) == name:
                    field.setAccessible(True)
                    return field
            declaring = declaring.getSuperclass()
        raise LookupError(name)

    def _hdfs_part(self, credentials: Any) -> bytes:
        """Return the tokens for HDFS, without those of YARN and other services, as a token file."""
        tokens = credentials.getTokenMap()
        selected = self._class("org.apache.hadoop.security.Credentials")()
        for alias in tokens.keySet():
            token = tokens.get(alias)
            if token.getKind().toString() in _HDFS_TOKENS:
                selected.addToken(alias, token)
        if not selected.numberOfTokens():
            return b""
        content = self._class("java.io.ByteArrayOutputStream")()
        selected.writeTokenStorageToStream(self._class("java.io.DataOutputStream")(content))
        return bytes(content.toByteArray())

    def _backend(self) -> Any:
        return _check_running(self._scala.schedulerBackend())

    def _scheduler(self) -> Any:
        return _check_running(self._scala.taskScheduler())

    def registered_executors(self, profile: int) -> tuple[str, ...]:
        backend = self._backend()
        return tuple(
            str(executor)
            for executor in _elements(backend.getExecutorIds())
            if backend.getExecutorResourceProfileId(executor) == profile
        )

    def executors_on(self, profile: int, host: str) -> tuple[str, ...]:
        """Return the IDs of the executors of a resource profile on a host, the oldest first."""
        registered = (
            str(executor.id())
            for executor in _elements(self._scala.statusStore().executorList(True))
            if executor.resourceProfileId() == profile
            and str(executor.hostPort()).rpartition(":")[0] == host
        )
        return tuple(sorted(registered, key=int))

    def busy_executors(self, profile: int) -> tuple[str, ...]:
        """Return the IDs of a profile's executors that, by Spark's scheduler, run a task."""
        running = self._scheduler().runningTasksByExecutors()
        counts = (
            (executor, running.get(executor)) for executor in self.registered_executors(profile)
        )
        return tuple(e for e, tasks in counts if tasks.isDefined() and tasks.get())

    def empty_partitions(self, count: int) -> Any:
        return self._context._jsc.parallelize(self._class("java.util.ArrayList")(), count)

    def numbers(self, hosts: Sequence[Sequence[str]]) -> Any:
        """Return a Java RDD of the numbers from 0, one per partition, with its preferred hosts."""
        pair = self._class("scala.Tuple2")
        rows = [
            pair(bytearray(pickle.dumps(number)), self._seq(preferred))
            for number, preferred in enumerate(hosts)
        ]
        kind = self._class("scala.reflect.ClassTag").apply(
            self._class("java.lang.Class").forName("[B")
        )
        return self._scala.makeRDD(self._seq(rows), kind).toJavaRDD()

    def _seq(self, values: Iterable[Any]) -> Any:
        return self._class("org.apache.spark.api.python.PythonUtils").toSeq(list(values))

    def target(self, profile: int) -> int:
        """Return how many executors Spark's allocation manager wants for a profile now."""
        manager = self._scala.executorAllocationManager()
        if manager.isEmpty():
            return 0
        targets = manager.get().numExecutorsTargetPerResourceProfileId()
        count = targets.get(profile)
        return int(count.get()) if count.isDefined() else 0

    def request_executors_now(self, profile: int, executors: int) -> None:
        """Make Spark's allocation manager request this many executors of a profile in one step.

        By default, the manager waits for a second, and requests 1, 2, 4, … more, a second apart;
        meanwhile the first executors hold GPUs in vain. This call enlarges its next step. The step
        runs now if the manager knows of all tasks that need the executors. Otherwise the step runs
        at its own time. A step that finds fewer tasks would request fewer, and the next step would
        request again: YARN would grant too many, on hosts that no task prefers.

        Args:
            executors: number of executors that the tasks need, including the present ones.

        Raises:
            LookupError: this Spark has no such members.
        """
        option = self._scala.executorAllocationManager()
        if option.isEmpty():
            return
        manager = option.get()
        steps = manager.numExecutorsToAddPerResourceProfileId()
        # Spark adds profiles under a lock that py4j cannot take: do nothing if this profile is not
        # there yet.
        if not steps.contains(profile):
            return
        steps.update(profile, executors)
        try:
            needed = manager.maxNumExecutorsNeededPerResourceProfile(profile)
        except Py4JJavaError as error:
            # Another thread of Spark is changing the tables.
            why = str(error.java_exception).splitlines()[0]
            log.debug("Spark does not say how many executors are needed: %s", why)
            return
        except Py4JError as error:
            raise LookupError(_NEEDED) from error
        if needed >= executors:
            self._field(manager, _NEXT_REQUEST).setLong(manager, _LONG_AGO)
            self.run_allocation_step()

    def run_allocation_step(self) -> None:
        """Run the next step of Spark's allocation manager in this call, instead of within 100 ms.

        A step adapts the targets to the known tasks. If this Spark has no such method, the step
        runs at its own pace, and the log says so.
        """
        manager = self._scala.executorAllocationManager()
        if manager.isEmpty():
            return
        try:
            getattr(manager.get(), _STEP)()
        except Py4JError as error:
            why = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
            log.info("Spark adapts its targets at its own pace: %s", why)

    def kill(self, executors: Collection[str]) -> None:
        """Kill executors, busy or not, without changing the target.

        For some minutes, Spark does not log what follows from it.
        """
        ended = [KilledExecutor(executor, self._address(executor)) for executor in executors]
        self._release_messages.suppress(self._context._jvm, ended)
        self._backend().killExecutors(self._seq(executors), False, False, True)

    def _address(self, executor: str) -> str:
        """Return host and port of an executor's connection to the driver; "" if not known."""
        try:
            data = getattr(self._backend(), _EXECUTORS)().get(executor)
            return str(data.get().executorAddress().hostPort()) if data.isDefined() else ""
        except Py4JError as error:  # this Spark has no such members
            log.debug("the address of executor %s is not known: %s", executor, error)
            return ""

    def shut_down(self, executors: Iterable[str]) -> None:
        """Make Spark's driver forget executors, and send them StopExecutor.

        Raises:
            Py4JError: this Spark has no such members.
        """
        backend = self._backend()
        data_by_executor = getattr(backend, _EXECUTORS)()
        killed = getattr(self._class(_KILLED), "MODULE$")
        message = getattr(self._class(_SHUTDOWN), "MODULE$")
        for executor in executors:
            data = data_by_executor.get(executor)
            if data.isDefined():
                endpoint = data.get().executorEndpoint()
                # Remove first: the driver logs each message to an ending executor that fails.
                backend.removeExecutor(executor, killed)
                endpoint.send(message)

    def give_up(self, executors: Iterable[str]) -> None:
        """Make Spark's driver consider executors and their tasks lost; their containers stay."""
        lost = self._class("org.apache.spark.scheduler.ExecutorLossReason")
        for executor in executors:
            self._backend().removeExecutor(executor, lost("it cannot be reached"))

    def end_containers(self, executors: Iterable[str]) -> None:
        """Make the application master end the containers of executors given up by Spark."""
        self._backend().doKillExecutors(self._seq(executors))

    def cancel(self, tag: str) -> None:
        """Cancel the jobs with a tag, even while Spark retries its check for free slots.

        For some minutes, Spark does not log that their tasks are killed.
        """
        self._release_messages.suppress(self._context._jvm, [tag])
        self._context.cancelJobsWithTag(tag)

    def is_stage_active(self, group: str) -> bool:
        """Return whether the job of a group has a stage that Spark has submitted."""
        tracker = self._context.statusTracker()
        active = set(tracker.getActiveStageIds())
        return any(
            not active.isdisjoint(info.stageIds)
            for job in tracker.getJobIdsForGroup(group)
            if (info := tracker.getJobInfo(job)) is not None
        )

    def active_tasks(self, group: str) -> int:
        return sum(stage.numActiveTasks for stage in self._stages(group))

    def progress(self, group: str) -> tuple[int, int, int]:
        """Return how many tasks of a group's jobs are completed, active and planned."""
        stages = self._stages(group)
        return (
            sum(stage.numCompletedTasks for stage in stages),
            sum(stage.numActiveTasks for stage in stages),
            sum(stage.numTasks for stage in stages),
        )

    def task_failures(self, group: str) -> tuple[str, ...]:
        """Return the errors of a group's failed tasks, which Spark may retry."""
        failed = (stage for stage in self._stages(group) if stage.numFailedTasks)
        errors = (task.errorMessage() for stage in failed for task in self._tasks(stage))
        return tuple(str(error.get()) for error in errors if error.isDefined())

    def running_on(self, group: str) -> tuple[str, ...]:
        """Return the IDs of the executors that run tasks of a group, according to Spark."""
        tasks = (task for stage in self._stages(group) for task in self._tasks(stage))
        return tuple(str(task.executorId()) for task in tasks if task.status() == "RUNNING")

    def _tasks(self, stage: SparkStageInfo) -> Iterator[Any]:
        store = self._scala.statusStore()
        return _elements(store.taskList(stage.stageId, stage.currentAttemptId, _MAX_TASKS))

    def _stages(self, group: str) -> list[SparkStageInfo]:
        tracker = self._context.statusTracker()
        infos = [
            tracker.getStageInfo(stage)
            for job in tracker.getJobIdsForGroup(group)
            if (information := tracker.getJobInfo(job)) is not None
            for stage in information.stageIds
        ]
        return [info for info in infos if info is not None]

    def without_resource_warning(self) -> contextlib.AbstractContextManager[None]:
        """Suppress Spark's warning that no executor has arrived, while hopsgpu explains the wait.

        The warning refers to a cluster's page and workers. It is suppressed for other jobs, too.
        """
        scheduler = str(self._scheduler().getClass().getName())
        return suppressed(self._context._jvm, scheduler, _NO_RESOURCES)

    def without_stage_refusal(self) -> contextlib.AbstractContextManager[None]:
        """Suppress Spark's warning that it refuses a stage; the caller gets the error anyway."""
        return suppressed(self._context._jvm, _DAG_SCHEDULER, _STAGE_REFUSED)

    @contextlib.contextmanager
    def barriers_allowed(self) -> Iterator[None]:
        """Set dynamic allocation's flag to false for Spark's check of barrier stages, while inside.

        The allocation manager continues, because it read the flag when the context started.
        """
        conf = self._scala.conf()
        with self._flipping:
            before = conf.get(_DYNAMIC)
            conf.set(_DYNAMIC, "false")
            try:
                yield
            finally:
                conf.set(_DYNAMIC, before)


def _elements(seq: Any) -> Iterator[Any]:
    """Yield the elements of a Scala Seq."""
    return (seq.apply(index) for index in range(seq.size()))


def _check_running(part: Any) -> Any:
    """Return a part of a SparkContext; raise an error if the context was stopped."""
    if part is None:
        raise HopsGpuError(
            "this Spark application has ended: its SparkContext was stopped while a run used it"
        )
    return part


def wait_until(
    holds: Callable[[], bool], ended: threading.Event, seconds: float, step: float = _POLL_SECONDS
) -> bool:
    """Poll a state of Spark that has no notification until it holds.

    Return False if `ended` is set or the time is over first.
    """
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() >= deadline or ended.wait(step):
            return False
    return True
