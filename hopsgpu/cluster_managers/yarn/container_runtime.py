"""Whether NodeManagers start containers in images, from their own settings. Pure.

Source: Hadoop's documentation, "Launching Applications Using Docker Containers".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ALLOWED = "yarn.nodemanager.runtime.linux.allowed-runtimes"
EXECUTOR = "yarn.nodemanager.container-executor.class"
_NETWORK = "yarn.nodemanager.runtime.linux.{runtime}.default-container-network"
_LINUX_EXECUTOR = "LinuxContainerExecutor"
_HOST = "host"


@dataclass(frozen=True)
class RuntimeProblem:
    """A setting of a node that keeps a gang from running in an image there.

    Attributes:
        is_fatal: whether no container starts there; otherwise its ranks cannot be reached.
    """

    text: str
    is_fatal: bool


def settings_of_runtime(runtime: str) -> tuple[str, ...]:
    """Return the properties of a NodeManager that `runtime_problem` needs."""
    return (EXECUTOR, ALLOWED, _NETWORK.format(runtime=runtime))


def runtime_problem(
    runtime: str, settings: Mapping[str, str], network: str | None
) -> RuntimeProblem | None:
    """Return the problem of a NodeManager with these settings; None if there is none.

    Args:
        runtime: "docker" or "runc".
        settings: those of the properties that the NodeManager reports.
        network: the network that the application requests; None for the default.
    """
    executor = settings.get(EXECUTOR, _LINUX_EXECUTOR)
    if not executor.endswith(_LINUX_EXECUTOR):
        return RuntimeProblem(
            f"{EXECUTOR}={executor.rpartition('.')[2]}: it must be {_LINUX_EXECUTOR}",
            is_fatal=True,
        )
    allowed = settings.get(ALLOWED)
    if allowed is not None and runtime not in [word.strip() for word in allowed.split(",")]:
        return RuntimeProblem(f"{ALLOWED}={allowed}: it must include {runtime}", is_fatal=True)
    name = _NETWORK.format(runtime=runtime)
    used = network or settings.get(name)
    if used not in (None, _HOST):
        return RuntimeProblem(
            f"containers use the network {used!r} ({name}): ranks reach each other and the driver"
            f" only in the network {_HOST!r}",
            is_fatal=False,
        )
    return None
