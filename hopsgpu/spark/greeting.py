"""How a task of a gang introduces its container to the driver."""

from __future__ import annotations

from hopsgpu.errors import ConfigError, DiscoveryError
from hopsgpu.gang import Container, Device
from hopsgpu.units import counted
from hopsgpu.worker.channel import Message
from hopsgpu.worker.events import Event


def is_hello(message: Message, job: str) -> bool:
    """Whether a message introduces a task of this job; a late one of an earlier job does not."""
    return message.kind == "hello" and message["job"] == job


def greeted(event: Event, hello: Message, gpus: int) -> Container:
    """The container that has introduced itself, which was to have so many GPUs.

    Raises:
        ConfigError: it cannot serve; what it lacks is named.
        DiscoveryError: its GPUs were not given out by hopsgpu's discovery script.
    """
    if len(hello["devices"]) != gpus:
        told = counted(len(hello["devices"]), "GPU")
        raise DiscoveryError(
            f"{hello['container']} on {hello['host']} tells {told}, and not the {gpus} asked for:"
            " hopsgpu's discovery script must give them out (is another"
            " one in its place, by spark.resources.discoveryPlugin?)"
        )
    if hello["missing"]:
        raise ConfigError(
            f"Python {hello['python']} on {hello['host']} lacks"
            f" {', '.join(hello['missing'])}, which ranks need to reach the lake: install"
            " them into the executors' Python (spark.pyspark.python)"
        )
    return Container(
        key=event.peer,
        container_id=hello["container"],
        host=hello["host"],
        address=hello["address"],
        gpus=tuple(device["gpu"] for device in hello["devices"]),
        clock=event.at - hello["time"],
        devices=tuple(Device(**device) for device in hello["devices"]),
    )
