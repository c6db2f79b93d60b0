"""The hello message with which an executor introduces itself to the driver, and its checks."""

from __future__ import annotations

from collections.abc import Collection

from hopsgpu.backends.gang_request import Request
from hopsgpu.control.channel import Message
from hopsgpu.control.events import Event
from hopsgpu.core.gang import Device, GangExecutor
from hopsgpu.core.rank_requirements import LAKE
from hopsgpu.errors import ConfigError, DiscoveryError
from hopsgpu.packaging.python_env.missing_modules import missing_modules_error
from hopsgpu.units import count_of


def is_hello(message: Message, job: str) -> bool:
    """Return whether a message introduces a task of this job, and not of an earlier one."""
    return message.kind == "hello" and message["job"] == job


def register_container(event: Event, hello: Message, request: Request) -> GangExecutor:
    """Return the executor that a hello message introduces, if it can serve the request.

    Raises:
        ConfigError: the executor's Python lacks modules; the message names them.
        DiscoveryError: the executor does not report the requested number of GPUs, so hopsgpu's
            discovery script did not assign them.
    """
    gpus = request.plan.shape.gpus
    if len(hello["devices"]) != gpus:
        reported = count_of(len(hello["devices"]), "GPU")
        raise DiscoveryError(
            f"{hello['container']} on {hello['host']} reports {reported} instead of the requested"
            f" {gpus}: hopsgpu's discovery script must assign them (does"
            " spark.resources.discoveryPlugin name another one?)"
        )
    container = GangExecutor(
        key=event.peer,
        container_id=hello["container"],
        host=hello["host"],
        address=hello["address"],
        gpus=tuple(device["gpu"] for device in hello["devices"]),
        clock=clock_offset(hello["time"], event),
        devices=tuple(Device(**device) for device in hello["devices"]),
        missing_modules=tuple(hello["missing"]),
    )
    if missing := [name for name in LAKE if name in container.missing_modules]:
        raise ConfigError(
            f"Python {hello['python']} on {hello['host']} lacks {', '.join(missing)}, which ranks"
            " need to reach the lake: install them in the executors' Python"
            " (spark.pyspark.python)"
        )
    check_data(container, request.needs)
    if missing := [name for name in request.imports if name in container.missing_modules]:
        env = request.python_env
        where = f"the executors' Python on {container.host}"
        raise missing_modules_error(missing, where, None if env is None else env.name)
    return container


def clock_offset(sent: float, event: Event) -> float:
    """Return the seconds to add to a node's time to get the driver's time.

    The offset is 0 if the node's clock can be right: synchronized clocks are more accurate than
    this exchange. The message was sent after its connection was accepted, and may have travelled
    for that long on a busy machine.

    Args:
        sent: time at which the executor sent the message, by the node's clock.
    """
    opened = event.at if event.opened is None else event.opened
    return 0.0 if opened <= sent <= event.at else event.at - sent


def check_data(container: GangExecutor, needs: Collection[str]) -> None:
    """Raise ConfigError if the Python of an executor lacks modules that ranks with data need."""
    if missing := [name for name in needs if name in container.missing_modules]:
        raise ConfigError(
            f"the executors' Python on {container.host} lacks {', '.join(missing)}, which ranks"
            " need to read data=: install them there (spark.pyspark.python), or add them with"
            " python_env="
        )
