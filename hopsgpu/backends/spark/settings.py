"""Checks of the settings with which an application can hold gangs and give them back. Pure.

Each finding names a setting, its value, and how to fix it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from hopsgpu.backends.spark.shell_safety import shell_findings
from hopsgpu.backends.spark.spark_versions import other_python
from hopsgpu.cluster_managers.manager_table import kind_of, master_forms
from hopsgpu.errors import ConfigError
from hopsgpu.units import count_of

_DYNAMIC = "spark.dynamicAllocation."
_ATTEMPTS = "spark.yarn.maxAppAttempts"
_EXCLUDE = "spark.excludeOnFailure.enabled"
# With this property, Spark starts a second copy of the only task of a stage if the task is slow.
_SPECULATION_THRESHOLD = "spark.speculation.task.duration.threshold"
_SPECULATION_UNITS = {"d": 86400, "h": 3600, "m": 60, "min": 60, "ms": 0.001, "us": 0.000001}
_PYSPARK_MEMORY = "spark.executor.pyspark.memory"
SUBMIT = "`hopsgpu submit --deploy-mode cluster`"
# Properties that spark-submit reads, or the application master before it starts the driver.
_AT_SUBMISSION = re.compile(
    r"spark\.(master|submit\..*|pyspark\..*|hopsgpu\.image(\..*)?"
    r"|driver\.(memory.*|minMemoryOverhead|cores|extra.*|defaultJavaOptions)"
    r"|yarn\.((am|appMasterEnv|dist)\..*|queue|tags|priority|jars|archive|maxAppAttempts|stagingDir"
    r"|scheduler\.heartbeat\.interval-ms))"
)

# Settings of sessions on every cluster manager, unless the user sets them: a user's value is
# checked, not replaced.
_COMMON_DEFAULTS: Mapping[str, str] = {
    _DYNAMIC + "enabled": "true",
    _DYNAMIC + "shuffleTracking.enabled": "true",
    _DYNAMIC + "shuffleTracking.timeout": "5min",
    _DYNAMIC + "minExecutors": "0",
    _DYNAMIC + "initialExecutors": "0",
    "spark.executor.instances": "0",
    "spark.python.task.killTimeout": "200ms",
    "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
    "spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures": "3",
    # The GPUs of a frozen driver are released after 20 × 10 s rather than 60 × 10 s.
    "spark.executor.heartbeat.maxFailures": "20",
    "spark.scheduler.mode": "FIFO",
    # A company's spark-defaults.conf may have other values of these for ETL.
    _DYNAMIC + "executorAllocationRatio": "1",
    "spark.decommission.enabled": "false",
    _EXCLUDE: "false",
    _SPECULATION_THRESHOLD: "365d",
    # Spark's progress bars would overwrite the lines of ranks and progress.
    "spark.ui.showConsoleProgress": "false",
}


def session_defaults(
    master: str | None, configured: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the settings of sessions with a master, unless the user sets them.

    Args:
        configured: properties of spark-defaults.conf, which precede a few of the settings.
    """
    kind = kind_of(master)
    if kind is None:
        return dict(_COMMON_DEFAULTS)
    fallback = {k: v for k, v in kind.fallback_settings.items() if k not in (configured or {})}
    return {**_COMMON_DEFAULTS, **kind.session_settings, **fallback}


def check_session(properties: Mapping[str, str]) -> None:
    """Check that an application with these settings can hold gangs.

    Raises:
        ConfigError: a setting prevents gangs; the message names every such setting, its value and
            what to set.
    """
    setting = properties.get
    findings = [
        *_master(setting),
        *_dynamic_allocation_problems(setting),
        *_scheduling(setting),
        *_manager_problems(setting),
    ]
    kind = kind_of(setting("spark.master"))
    has_shell = kind is not None and kind.has_shell
    unset = [*_memory(setting), *(shell_findings(properties) if has_shell else ())]
    unset += kind.find_refusals(setting) if kind is not None else []
    if findings:
        mend = "hopsgpu.session() sets all of this for a new application"
        if kind is not None and kind.has_shell and is_cluster_mode(setting):
            mend = f"{SUBMIT} has spark-submit set all of this"
        raise ConfigError(
            f"this Spark application cannot hold gangs: {'; '.join(findings + unset)}. {mend}"
        )
    if unset:
        raise ConfigError(f"this Spark application cannot hold gangs: {'; '.join(unset)}")


def is_cluster_mode(setting: Callable[[str], str | None]) -> bool:
    """Return whether the driver runs in the cluster, in a container or a pod."""
    return setting("spark.submit.deployMode") == "cluster"


def check_submitted(setting: Callable[[str], str | None], requested: Mapping[str, str]) -> None:
    """Check settings that a driver in YARN cannot change after the submission.

    Raises:
        ConfigError: a setting comes too late; the message names what spark-submit should have
            received.
    """
    wanted = {name: value for name, value in requested.items() if _AT_SUBMISSION.fullmatch(name)}
    if setting(_ATTEMPTS) is None:
        # If it is not set, YARN's own default of 2 applies.
        wanted.setdefault(_ATTEMPTS, session_defaults("yarn")[_ATTEMPTS])
    refuse_late(setting, wanted, "in YARN")


def refuse_late(
    setting: Callable[[str], str | None], wanted: Mapping[str, str], place: str
) -> None:
    """Raise ConfigError if a submitted application has other values of some settings.

    Args:
        place: where the driver runs.
    """
    late = {name: value for name, value in wanted.items() if setting(name) != value}
    if late:
        raise ConfigError(
            f"this driver runs {place} (cluster mode), where it is too late for these settings: "
            + ", ".join(f"{k}={v} (it has {setting(k)})" for k, v in late.items())
            + ". Pass them to spark-submit, each with --conf NAME=VALUE; "
            + f"{SUBMIT} passes all that a gang needs"
        )


def check_gang(setting: Callable[[str], str | None], executors: int) -> None:
    """Check that the application may have as many executors as a gang needs.

    Raises:
        ConfigError: `spark.dynamicAllocation.maxExecutors` is below the size of the gang.
    """
    most = setting(_DYNAMIC + "maxExecutors")
    # Spark's default (2^31 - 1) is no limit.
    if most is not None and _number(most, executors) < executors:
        raise ConfigError(
            f"{_DYNAMIC}maxExecutors={most} is below the {count_of(executors, 'executor')} of this"
            " gang; raise it, or request fewer workers"
        )


def check_python(executable: str, driver: str) -> None:
    """Check that the name of the executors' Python does not contradict the driver's minor version.

    Args:
        driver: minor version of the driver's Python, such as "3.11".

    Raises:
        ConfigError: the name of the executors' Python has another version.
    """
    named = re.fullmatch(r"python(\d+\.\d+)", executable.rpartition("/")[2])
    if named is not None and named[1] != driver:
        raise _other_python(named[1], driver, f" ({executable})")


def refuse_other_python(error: str) -> None:
    """Raise ConfigError if an error says that an executor's Python has another minor version."""
    if (versions := other_python(error)) is not None:
        raise _other_python(*versions, "")


def _other_python(executors: str, driver: str, which: str) -> ConfigError:
    return ConfigError(
        f"the executors' Python{which} is {executors}, but the driver's is {driver}, and functions"
        " and values are pickled between the two. Set PYSPARK_PYTHON (before the session starts;"
        " spark.pyspark.python for spark-submit) to a Python of the driver's minor version on the"
        " nodes, or run the driver in the nodes' version. python_env does not help: it is for the"
        " ranks, and Spark's own tasks run in the executors' Python"
    )


def _master(setting: Callable[[str], str | None]) -> list[str]:
    master = setting("spark.master") or ""
    if kind_of(master) is not None:
        return []
    return [f"spark.master={master} cannot hold gangs; {master_forms()}"]


def _manager_problems(setting: Callable[[str], str | None]) -> list[str]:
    kind = kind_of(setting("spark.master"))
    return [] if kind is None else kind.find_problems(setting)


def _dynamic_allocation_problems(setting: Callable[[str], str | None]) -> list[str]:
    findings = []
    if not _is_on(setting, _DYNAMIC + "enabled"):
        findings.append(f"{_DYNAMIC}enabled is off: set it to true, so that GPUs go back")
    if not _is_on(setting, _DYNAMIC + "shuffleTracking.enabled") and not _is_on(
        setting, "spark.shuffle.service.enabled"
    ):
        findings.append(f"set {_DYNAMIC}shuffleTracking.enabled=true")
    for name in (
        _DYNAMIC + "minExecutors",
        _DYNAMIC + "initialExecutors",
        "spark.executor.instances",
    ):
        value = setting(name)
        if value is not None and _number(value, 1) > 0:
            findings.append(
                f"{name}={value}: it applies to each profile and would keep or replace GPU"
                " executors; set it to 0"
            )
    ratio = setting(_DYNAMIC + "executorAllocationRatio")
    if ratio is not None and _number(ratio, 0) < 1:
        findings.append(
            f"{_DYNAMIC}executorAllocationRatio={ratio}: Spark would request fewer executors than"
            " the gang has; set it to 1"
        )
    return findings


def _scheduling(setting: Callable[[str], str | None]) -> list[str]:
    findings = []
    if _is_on(setting, "spark.decommission.enabled"):
        findings.append("spark.decommission.enabled=true: set it to false")
    if (setting("spark.scheduler.mode") or "FIFO").upper() != "FIFO":
        findings.append(
            f"spark.scheduler.mode={setting('spark.scheduler.mode')}: two gangs of one application"
            " would split the executors and wait forever; set it to FIFO"
        )
    # Spark reads the older name only if the newer name is not set.
    excluding = "spark.blacklist.enabled" if setting(_EXCLUDE) is None else _EXCLUDE
    if _is_on(setting, excluding):
        findings.append(
            f"{excluding}=true: it can abort a gang's stage immediately; set it to false"
        )
    threshold = setting(_SPECULATION_THRESHOLD)
    if _is_on(setting, "spark.speculation") and threshold is not None and _is_short(threshold):
        findings.append(
            f"{_SPECULATION_THRESHOLD}={threshold}: Spark would start a second copy of a task that"
            " supervises ranks; remove it, or set it to 365d"
        )
    return findings


def _is_short(duration: str) -> bool:
    match = re.fullmatch(r"(\d+)\s*([a-z]*)", duration.strip().lower())
    seconds = int(match[1]) * _SPECULATION_UNITS.get(match[2], 1) if match else 0
    return seconds < 30 * _SPECULATION_UNITS["d"]


def _memory(setting: Callable[[str], str | None]) -> list[str]:
    limit = setting(_PYSPARK_MEMORY)
    if limit is None or limit.strip().rstrip("bkmgtpBKMGTP") == "0":
        return []
    return [
        f"{_PYSPARK_MEMORY}={limit}: Spark limits the address space (RLIMIT_AS) of each Python"
        " process to this, ranks included, but frameworks and the GPU driver map far more than"
        " they use; remove it, or set it to 0: memory_per_worker= is the memory of a rank"
    ]


def _is_on(setting: Callable[[str], str | None], name: str) -> bool:
    return (setting(name) or "false").strip().lower() == "true"


def _number(text: str, otherwise: float) -> float:
    try:
        return float(text)
    except ValueError:
        return otherwise
