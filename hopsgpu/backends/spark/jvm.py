"""All calls into Spark's JVM that PySpark does not offer.

No call may run in the main thread while a person can press Ctrl-C, because py4j then closes the
connections of all threads, and their calls run twice.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import SparkContext, SparkStageInfo

from hopsgpu.backends.spark.log4j import suppressed
from hopsgpu.errors import HopsGpuError

# Spark's scheduler logs this every 15 s, until the application's first task runs.
_NO_RESOURCES = "Initial job has not accepted any resources"
_DYNAMIC = "spark.dynamicAllocation.enabled"
# The longest time for which dynamic allocation's flag is off. Spark's scheduler handles one event
# at a time, so that a job of the user's with 100,000 tasks delays a barrier job by seconds. This
# bound is for a scheduler that hangs: the flag concerns all jobs of the application.
FLIP_SECONDS = 20.0
# The beginning of a warning with a stack trace, which Spark's scheduler logs if it refuses a stage.
_STAGE_REFUSED = "Creating new stage failed due to exception - job: "
_DAG_SCHEDULER = "org.apache.spark.scheduler.DAGScheduler"
_LOOK_SECONDS = 0.01
_MOST_TASKS = 10_000
# Of ExecutorAllocationManager: the field with the time, in nanoseconds of its clock, when it asks
# for more; the method that counts the executors that a profile's tasks need.
_ASKS_AT = "addTime"
_NEEDED = "maxNumExecutorsNeededPerResourceProfile"
_LONG_AGO = -(2**62)
# The method that it calls each 100 ms.
_STEP = "org$apache$spark$ExecutorAllocationManager$$schedule"
# A method of CoarseGrainedSchedulerBackend, the reason of a loss, and the message that ends an
# executor.
_EXECUTORS = "org$apache$spark$scheduler$cluster$CoarseGrainedSchedulerBackend$$executorDataMap"
_KILLED = "org.apache.spark.scheduler.ExecutorKilled$"
_SHUTDOWN = "org.apache.spark.scheduler.cluster.CoarseGrainedClusterMessages$StopExecutor$"
# A JVM that a signal ends breaks its connections before it closes its port.
_ENDING_SECONDS = 2.0
# A method of HadoopDelegationTokenManager.
_PLANS_TOKENS = "scheduleRenewal"
_PROBE_SECONDS = 2.0
# Kinds of the tokens for hdfs, webhdfs and swebhdfs (Hadoop's DelegationTokenIdentifier and
# WebHdfsConstants).
_HDFS_TOKENS = ("HDFS_DELEGATION_TOKEN", "WEBHDFS delegation", "SWEBHDFS delegation")

log = logging.getLogger(__name__)


class Jvm:
    """The JVM of a SparkContext."""

    def __init__(self, context: SparkContext) -> None:
        self._context = context
        self._scala: Any = context._jsc.sc()
        self._flipping = threading.Lock()

    def error_text(self, error: BaseException) -> str:
        """Return the text that a record shows for an error that ended a run.

        For an error that is not hopsgpu's, the text names the type, and says if the JVM has ended.

        Args:
            error: the error that ended the run.
        """
        if isinstance(error, HopsGpuError):
            return str(error)
        words = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        ended = self.ended_by(error)
        return f"{ended} ({words})" if ended else words

    def ended_by(self, error: BaseException) -> str:
        """Return that the JVM has ended, if that explains an error of a call into it; else "".

        Args:
            error: error of the call. If the JVM has ended, it only mentions a connection.
        """
        # The JVM itself has reported what Java threw.
        lost = isinstance(error, OSError | Py4JError) and not isinstance(error, Py4JJavaError)
        if lost and wait_until(self._has_ended, threading.Event(), _ENDING_SECONDS, 0.1):
            return "the driver's JVM has ended: a signal ended spark-submit, or it crashed"
        return ""

    def _has_ended(self) -> bool:
        """Return whether nothing listens any more on the port of the JVM's gateway."""
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
        """Return a property of the live Spark conf, or None."""
        option = self._scala.conf().getOption(name)
        return str(option.get()) if option.isDefined() else None

    def settings(self) -> dict[str, str]:
        """Return all properties of the live Spark conf."""
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

    def knows_resource(self, name: str) -> bool:
        """Return whether the YARN configuration here (resource-types.xml) defines a resource."""
        utils = self._class("org.apache.hadoop.yarn.util.resource.ResourceUtils")
        return bool(utils.getResourceTypes().containsKey(name))

    def user(self) -> str:
        """Return the submitting user's short name, as HDFS and YARN know it."""
        information = self._class("org.apache.hadoop.security.UserGroupInformation")
        return str(information.getCurrentUser().getShortUserName())

    def proxied_user(self) -> str | None:
        """Return the user for whom another one's credentials act; None if they are this user's."""
        information = self._class("org.apache.hadoop.security.UserGroupInformation")
        user = information.getCurrentUser()
        return None if user.getRealUser() is None else str(user.getShortUserName())

    def hadoop_version(self) -> str:
        """Return the version of the Hadoop client in this JVM."""
        return str(self._class("org.apache.hadoop.util.VersionInfo").getVersion())

    def is_kerberized(self) -> bool:
        information = self._class("org.apache.hadoop.security.UserGroupInformation")
        return bool(information.isSecurityEnabled())

    def hdfs_tokens(self) -> bytes:
        """Return the submitter's HDFS delegation tokens as a Hadoop token file; b"" without any."""
        information = self._class("org.apache.hadoop.security.UserGroupInformation")
        return self._hdfs_part(information.getCurrentUser().getCredentials())

    def seconds_to_new_tokens(self) -> float | None:
        """Return in how many seconds Spark will get new HDFS tokens; None if it plans nothing."""
        manager = self._token_manager()
        milliseconds = self._class("java.util.concurrent.TimeUnit").MILLISECONDS
        planned = () if manager is None else self._planned_tokens(manager)
        return min((float(task.getDelay(milliseconds)) / 1000 for task in planned), default=None)

    def plan_new_tokens(self) -> None:
        """Have Spark get new HDFS tokens in its own thread, in a second, and not when it planned.

        Raises:
            LookupError: this Spark does it otherwise.
        """
        manager = self._token_manager()
        plans = (
            method
            for method in manager.getClass().getDeclaredMethods()
            # Spark's compiler puts the class before the name where other classes call it.
            if str(method.getName()).rpartition("$")[2] == _PLANS_TOKENS
        )
        if (plan := next(plans, None)) is None:
            raise LookupError(_PLANS_TOKENS)
        # Each plan makes the next one: two would go on side by side.
        for task in self._planned_tokens(manager):
            task.cancel(False)
        plan.setAccessible(True)
        gateway: Any = self._context._gateway
        arguments = gateway.new_array(gateway.jvm.Object, 1)
        arguments[0] = gateway.jvm.Long.valueOf("1000")
        plan.invoke(manager, arguments)

    def _planned_tokens(self, manager: Any) -> list[Any]:
        """Return the tasks with which Spark will get new tokens, which do not run yet."""
        executor = self._private(manager, "renewalExecutor")
        waiting = () if executor is None else executor.getQueue().toArray()
        # A periodic one renews the ticket.
        return [task for task in waiting if not (task.isPeriodic() or task.isCancelled())]

    def _token_manager(self) -> Any:
        """Return Spark's HadoopDelegationTokenManager; None without Kerberos."""
        option = self._private(self._backend(), "delegationTokenManager")
        return option.get() if option is not None and option.isDefined() else None

    def _private(self, instance: Any, name: str) -> Any:
        """Return the value of a private field of a Java object."""
        return self._field(instance, name).get(instance)

    def _field(self, instance: Any, name: str) -> Any:
        """Return a private field of a Java object's class, of whichever class of its it is."""
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
        held = credentials.getTokenMap()
        selected = self._class("org.apache.hadoop.security.Credentials")()
        for alias in held.keySet():
            token = held.get(alias)
            if token.getKind().toString() in _HDFS_TOKENS:
                selected.addToken(alias, token)
        if not selected.numberOfTokens():
            return b""
        content = self._class("java.io.ByteArrayOutputStream")()
        selected.writeTokenStorageToStream(self._class("java.io.DataOutputStream")(content))
        return bytes(content.toByteArray())

    def _backend(self) -> Any:
        return _of_running(self._scala.schedulerBackend())

    def _scheduler(self) -> Any:
        return _of_running(self._scala.taskScheduler())

    def executors(self, profile: int) -> tuple[str, ...]:
        """Return the IDs of the registered executors of a resource profile."""
        backend = self._backend()
        ids = backend.getExecutorIds()
        registered = []
        for index in range(ids.size()):
            executor = ids.apply(index)
            if backend.getExecutorResourceProfileId(executor) == profile:
                registered.append(str(executor))
        return tuple(registered)

    def executors_on(self, profile: int, host: str) -> tuple[str, ...]:
        """Return the IDs of the executors of a resource profile on a host, the oldest first."""
        listed = self._scala.statusStore().executorList(True)
        registered = []
        for index in range(listed.size()):
            executor = listed.apply(index)
            if (
                executor.resourceProfileId() == profile
                and str(executor.hostPort()).rpartition(":")[0] == host
            ):
                registered.append(str(executor.id()))
        return tuple(sorted(registered, key=int))

    def busy(self, profile: int) -> tuple[str, ...]:
        """Return the IDs of a profile's executors that, by Spark's scheduler, run a task."""
        running = self._scheduler().runningTasksByExecutors()
        counts = ((executor, running.get(executor)) for executor in self.executors(profile))
        return tuple(e for e, tasks in counts if tasks.isDefined() and tasks.get())

    def empty_partitions(self, count: int) -> Any:
        """Return a Java RDD of so many partitions without elements."""
        return self._context._jsc.parallelize(self._class("java.util.ArrayList")(), count)

    def numbers(self, hosts: Sequence[Sequence[str]]) -> Any:
        """Return a Java RDD of the numbers from 0, one per partition, with its preferred hosts."""
        to_seq = self._class("org.apache.spark.api.python.PythonUtils").toSeq
        pair = self._class("scala.Tuple2")
        rows = [
            pair(bytearray(pickle.dumps(number)), to_seq(list(preferred)))
            for number, preferred in enumerate(hosts)
        ]
        kind = self._class("scala.reflect.ClassTag").apply(
            self._class("java.lang.Class").forName("[B")
        )
        return self._scala.makeRDD(to_seq(rows), kind).toJavaRDD()

    def target(self, profile: int) -> int:
        """Return how many executors Spark's allocation manager wants for a profile now."""
        manager = self._scala.executorAllocationManager()
        if manager.isEmpty():
            return 0
        targets = manager.get().numExecutorsTargetPerResourceProfileId()
        count = targets.get(profile)
        return int(count.get()) if count.isDefined() else 0

    def request_executors_now(self, profile: int, executors: int) -> None:
        """Have Spark's allocation manager ask for so many more executors of a profile at once.

        By itself it waits for a second, and asks for 1, 2, 4, … more, a second apart; meanwhile the
        first ones hold GPUs in vain. Here its next step is that large. It takes it at once if it
        knows of the tasks that need them all; else in its own time, for a step that finds fewer
        tasks would ask for fewer, and the next one ask again: YARN grants too many then, on hosts
        that no task prefers.

        Args:
            profile: id of the resource profile.
            executors: number of executors that the tasks need, with those that are there.

        Raises:
            LookupError: this Spark does it otherwise.
        """
        option = self._scala.executorAllocationManager()
        if option.isEmpty():
            return
        manager = option.get()
        steps = manager.numExecutorsToAddPerResourceProfileId()
        # Its own threads hold a lock while they add a profile, which cannot be taken here.
        if not steps.contains(profile):
            return
        steps.update(profile, executors)
        try:
            needed = manager.maxNumExecutorsNeededPerResourceProfile(profile)
        except Py4JJavaError as error:
            # It changes its tables meanwhile, in another thread.
            why = str(error.java_exception).splitlines()[0]
            log.debug("Spark does not say how many executors are needed: %s", why)
            return
        except Py4JError as error:
            raise LookupError(_NEEDED) from error
        if needed >= executors:
            self._field(manager, _ASKS_AT).setLong(manager, _LONG_AGO)
            self.run_allocation_step()

    def run_allocation_step(self) -> None:
        """Have Spark's allocation manager take its next step in this call, not within 100 ms.

        By a step its targets follow from the tasks of which it knows. A Spark that does it
        otherwise takes the step at its own pace, and the log says so.
        """
        manager = self._scala.executorAllocationManager()
        if manager.isEmpty():
            return
        try:
            getattr(manager.get(), _STEP)()
        except Py4JError as error:
            why = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
            log.info("Spark adapts its targets at its own pace: %s", why)

    def kill(self, executors: Iterable[str]) -> None:
        """Kill executors, busy or not, without changing the target."""
        seq = self._class("org.apache.spark.api.python.PythonUtils").toSeq(list(executors))
        self._backend().killExecutors(seq, False, False, True)

    def shut_down(self, executors: Iterable[str]) -> None:
        """Have Spark's driver forget executors, and tell them to end by themselves.

        Raises:
            Py4JError: this Spark does it otherwise.
        """
        backend = self._backend()
        known = getattr(backend, _EXECUTORS)()
        killed = getattr(self._class(_KILLED), "MODULE$")
        message = getattr(self._class(_SHUTDOWN), "MODULE$")
        for executor in executors:
            data = known.get(executor)
            if data.isDefined():
                endpoint = data.get().executorEndpoint()
                # First: what the driver sends to one that is ending fails, and it logs that.
                backend.removeExecutor(executor, killed)
                endpoint.send(message)

    def give_up(self, executors: Iterable[str]) -> None:
        """Have Spark's driver take executors as lost, with their tasks; their containers stay."""
        lost = self._class("org.apache.spark.scheduler.ExecutorLossReason")
        for executor in executors:
            self._backend().removeExecutor(executor, lost("it cannot be reached"))

    def end_containers(self, executors: Iterable[str]) -> None:
        """Have the application master end the containers of executors that Spark has given up."""
        seq = self._class("org.apache.spark.api.python.PythonUtils").toSeq(list(executors))
        self._backend().doKillExecutors(seq)

    def cancel(self, tag: str) -> None:
        """Cancel the jobs with a tag, even while Spark retries its check for free slots."""
        self._context.cancelJobsWithTag(tag)

    def stage_is_active(self, group: str) -> bool:
        """Return whether the job of a group has a stage that Spark has submitted."""
        tracker = self._context.statusTracker()
        active = set(tracker.getActiveStageIds())
        return any(
            not active.isdisjoint(info.stageIds)
            for job in tracker.getJobIdsForGroup(group)
            if (info := tracker.getJobInfo(job)) is not None
        )

    def active_tasks(self, group: str) -> int:
        """Return how many tasks of a group's jobs run now."""
        return sum(stage.numActiveTasks for stage in self._stages(group))

    def progress(self, group: str) -> tuple[int, int, int]:
        """Return how many tasks of a group's jobs have ended, run, and are planned so far."""
        stages = self._stages(group)
        return (
            sum(stage.numCompletedTasks for stage in stages),
            sum(stage.numActiveTasks for stage in stages),
            sum(stage.numTasks for stage in stages),
        )

    def task_failures(self, group: str) -> tuple[str, ...]:
        """Return the errors of a group's failed tasks, which Spark may retry."""
        failures = []
        for stage in self._stages(group):
            if stage.numFailedTasks:
                store = self._scala.statusStore()
                tasks = store.taskList(stage.stageId, stage.currentAttemptId, _MOST_TASKS)
                errors = (tasks.apply(index).errorMessage() for index in range(tasks.size()))
                failures += [str(error.get()) for error in errors if error.isDefined()]
        return tuple(failures)

    def running_on(self, group: str) -> tuple[str, ...]:
        """Return the IDs of the executors that, as far as Spark knows, run tasks of a group."""
        found = []
        store = self._scala.statusStore()
        for stage in self._stages(group):
            tasks = store.taskList(stage.stageId, stage.currentAttemptId, _MOST_TASKS)
            each = [tasks.apply(index) for index in range(tasks.size())]
            found += [str(task.executorId()) for task in each if task.status() == "RUNNING"]
        return tuple(found)

    def _stages(self, group: str) -> list[SparkStageInfo]:
        """Return what Spark's tracker reports about the stages of a group's jobs."""
        tracker = self._context.statusTracker()
        infos = [
            tracker.getStageInfo(stage)
            for job in tracker.getJobIdsForGroup(group)
            if (information := tracker.getJobInfo(job)) is not None
            for stage in information.stageIds
        ]
        return [info for info in infos if info is not None]

    def without_resource_warning(self) -> contextlib.AbstractContextManager[None]:
        """Keep Spark from logging that no executor has arrived, while inside the context.

        It is for waits that hopsgpu itself explains: Spark's message refers to a cluster's page and
        workers. Meanwhile, Spark does not log the message for other waiting jobs either.
        """
        scheduler = str(self._scheduler().getClass().getName())
        return suppressed(self._context._jvm, scheduler, _NO_RESOURCES)

    def without_stage_refusal(self) -> contextlib.AbstractContextManager[None]:
        """Suppress Spark's warning that it refuses a stage, while inside the context.

        The caller of the refused job gets the error all the same.
        """
        return suppressed(self._context._jvm, _DAG_SCHEDULER, _STAGE_REFUSED)

    @contextlib.contextmanager
    def barriers_allowed(self) -> Iterator[None]:
        """Make Spark's check for barrier stages see dynamic allocation as off, while inside.

        The allocation manager continues, because it read the setting when the context started.
        """
        conf = self._scala.conf()
        with self._flipping:
            before = conf.get(_DYNAMIC)
            conf.set(_DYNAMIC, "false")
            try:
                yield
            finally:
                conf.set(_DYNAMIC, before)


def _of_running(part: Any) -> Any:
    """Return a part of a SparkContext, which has none any more once it is stopped."""
    if part is None:
        raise HopsGpuError(
            "this Spark application has ended: its SparkContext was stopped while a run used it"
        )
    return part


def wait_until(
    holds: Callable[[], bool], ended: threading.Event, seconds: float, step: float = _LOOK_SECONDS
) -> bool:
    """Poll until a condition holds; return False if `ended` is set or the time is over first.

    It is for states of Spark that have no notification.
    """
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() >= deadline or ended.wait(step):
            return False
    return True
