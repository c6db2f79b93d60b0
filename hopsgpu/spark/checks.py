"""Settings under which an application can hold gangs and give them back: pure checks.

Each row of lease.md's rules is one finding that names the setting, what it is, and what
mends it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hopsgpu.discovery.shipping import ALIAS
from hopsgpu.errors import ConfigError

_DYNAMIC = "spark.dynamicAllocation."
_PLUGIN = "spark.resources.discoveryPlugin"
# Spark's default, which runs the script.
_OWN_PLUGIN = "org.apache.spark.resource.ResourceDiscoveryScriptPlugin"

# What our sessions set where the user has not; a user's own value is checked, not replaced.
SESSION_DEFAULTS: Mapping[str, str] = {
    _DYNAMIC + "enabled": "true",
    _DYNAMIC + "shuffleTracking.enabled": "true",
    _DYNAMIC + "shuffleTracking.timeout": "5min",
    _DYNAMIC + "minExecutors": "0",
    _DYNAMIC + "initialExecutors": "0",
    "spark.executor.instances": "0",
    # GPUs are seen gone within a heartbeat of the application master.
    "spark.yarn.scheduler.heartbeat.interval-ms": "500",
    "spark.python.task.killTimeout": "200ms",
    # YARN counts the memory of ranks, whose keeper outlives the task that starts it.
    "spark.python.daemon.module": "hopsgpu.spark.daemon",
    "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
    "spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures": "3",
    # A frozen driver lets its GPUs go after 20 × 10 s rather than 60 × 10 s.
    "spark.executor.heartbeat.maxFailures": "20",
    # Executors that ended long ago do not add up to the application's end.
    "spark.executor.failuresValidityInterval": "10min",
    "spark.scheduler.mode": "FIFO",
    "spark.yarn.maxAppAttempts": "1",
    # Its bars would be drawn over the lines of ranks and progress.
    "spark.ui.showConsoleProgress": "false",
}


def check_session(setting: Callable[[str], str | None]) -> None:
    """Whether an application with these settings can hold gangs.

    Args:
        setting: a property's value, or None where it is not set.

    Raises:
        ConfigError: naming every setting that is in the way, its value and what to set.
    """
    findings = [
        *_master(setting),
        *_dynamic_allocation(setting),
        *_scheduling(setting),
        *_shipping(setting),
    ]
    if findings:
        raise ConfigError(
            "this Spark application cannot hold gangs: "
            + "; ".join(findings)
            + ". hopsgpu.session() sets all of this for a new application"
        )


def check_gang(setting: Callable[[str], str | None], executors: int) -> None:
    """Whether the application may have as many executors as a gang needs.

    Raises:
        ConfigError: `spark.dynamicAllocation.maxExecutors` is below the gang.
    """
    most = setting(_DYNAMIC + "maxExecutors")
    # Spark's default is no bound (2^31 - 1).
    if most is not None and _number(most, executors) < executors:
        raise ConfigError(
            f"{_DYNAMIC}maxExecutors={most} is below the {executors} executors of this gang;"
            " raise it, or ask for fewer workers"
        )


def _master(setting: Callable[[str], str | None]) -> list[str]:
    master = setting("spark.master") or ""
    if master == "yarn":
        mode = setting("spark.submit.deployMode") or "client"
        return [] if mode == "client" else [f"spark.submit.deployMode={mode} is not available yet"]
    if master.startswith("k8s"):
        return [f"spark.master={master}: Kubernetes cannot hold gangs; yarn is accepted"]
    return [
        f"spark.master={master}: masters other than YARN are not available yet; yarn is accepted"
    ]


def _dynamic_allocation(setting: Callable[[str], str | None]) -> list[str]:
    findings = []
    if not _on(setting, _DYNAMIC + "enabled"):
        findings.append(f"{_DYNAMIC}enabled is off: set it to true, so that GPUs go back")
    if not _on(setting, _DYNAMIC + "shuffleTracking.enabled") and not _on(
        setting, "spark.shuffle.service.enabled"
    ):
        findings.append(f"set {_DYNAMIC}shuffleTracking.enabled=true")
    for name in (
        _DYNAMIC + "minExecutors",
        _DYNAMIC + "initialExecutors",
        "spark.executor.instances",
    ):
        given = setting(name)
        if given is not None and _number(given, 1) > 0:
            findings.append(
                f"{name}={given}: it counts for each profile and would keep or replace GPU"
                " executors; set it to 0"
            )
    ratio = setting(_DYNAMIC + "executorAllocationRatio")
    if ratio is not None and _number(ratio, 0) < 1:
        findings.append(
            f"{_DYNAMIC}executorAllocationRatio={ratio}: Spark would ask for fewer executors than"
            " the gang has; set it to 1"
        )
    return findings


def _scheduling(setting: Callable[[str], str | None]) -> list[str]:
    findings = []
    if _on(setting, "spark.decommission.enabled"):
        findings.append("spark.decommission.enabled=true: set it to false")
    if (setting("spark.scheduler.mode") or "FIFO").upper() != "FIFO":
        findings.append(
            f"spark.scheduler.mode={setting('spark.scheduler.mode')}: two gangs of one application"
            " would share out their executors and wait for ever; set it to FIFO"
        )
    for name in ("spark.excludeOnFailure.enabled", "spark.blacklist.enabled"):
        if _on(setting, name):
            findings.append(f"{name}=true: it can abort a gang's stage at once; set it to false")
    return findings


def _shipping(setting: Callable[[str], str | None]) -> list[str]:
    findings = []
    plugin = setting(_PLUGIN)
    if plugin is not None and plugin.strip() != _OWN_PLUGIN:
        findings.append(
            f"{_PLUGIN}={plugin}: hopsgpu's discovery script gives out the GPUs, and would not be"
            " run; leave it out"
        )
    archives = (setting("spark.yarn.dist.archives") or "").split(",")
    if any(entry.endswith(f"#{ALIAS}") for entry in archives):
        return findings
    return [
        *findings,
        f"the discovery script is not shipped (spark.yarn.dist.archives has no '#{ALIAS}'), and to"
        " an application that runs already it can no longer be: start it by hopsgpu.session()",
    ]


def _on(setting: Callable[[str], str | None], name: str) -> bool:
    return (setting(name) or "false").strip().lower() == "true"


def _number(text: str, otherwise: float) -> float:
    try:
        return float(text)
    except ValueError:
        return otherwise
