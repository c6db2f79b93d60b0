"""What an executor's task needs to find, authenticate and greet the driver."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hopsgpu.control.channel import Channel
from hopsgpu.control.handshake import connect
from hopsgpu.control.heartbeat import HEARTBEAT_SECONDS
from hopsgpu.core.own_log import INFO
from hopsgpu.core.rank_requirements import DATA, LAKE, missing_modules
from hopsgpu.gpu.container_gpus import read_container_gpus
from hopsgpu.gpu.node.health import BAD

# The variable by which Python's HTTP clients know private authorities, and the file in a container
# to which an application that ships one has given the name.
BUNDLE = "REQUESTS_CA_BUNDLE"
AUTHORITIES = "hopsgpu-authorities.pem"


@dataclass(frozen=True)
class DriverEndpoint:
    """Where the driver listens, and what authenticates it.

    Attributes:
        address: as the executors reach it.
        port: of the control channel.
        secret: the run's; never shown.
        user: who submitted, for the lake on clusters without Kerberos; None with it.
        job: names the job whose tasks they are; a late one of an earlier job is known by it.
        heartbeat: seconds without a heartbeat after which either end takes the other as lost.
        certificate: the driver's (DER), where the channel is encrypted.
        modules: top-level ones; the driver is told which of them a container's Python lacks.
        log: level at which the container's processes write their own log.
    """

    address: str
    port: int
    secret: bytes = field(repr=False)
    user: str | None
    job: str = ""
    heartbeat: float = HEARTBEAT_SECONDS
    certificate: bytes | None = field(default=None, repr=False)
    modules: tuple[str, ...] = ()
    log: str = INFO


async def connect_to_driver(driver: DriverEndpoint) -> Channel:
    """Connect to the driver and introduce this container.

    Raises:
        ChannelError, UnreachableError: as `connect`.
    """
    channel = await connect(
        driver.address,
        driver.port,
        driver.secret,
        certificate=driver.certificate,
        heartbeat=driver.heartbeat,
    )
    await channel.send("hello", job=driver.job, **_introduction(channel.local_address, driver))
    return channel


def _introduction(address: str, driver: DriverEndpoint) -> dict[str, Any]:
    """Return what the driver learns about this container.

    Args:
        address: address of this end of the connection to the driver: among the node's interfaces,
            the one that reaches the others.
        driver: the driver, which says what to report.
    """
    return {
        "container": os.environ.get("CONTAINER_ID", ""),
        "host": os.environ.get("NM_HOST") or platform.node(),
        "address": address,
        "devices": device_fields(),
        "python": platform.python_version(),
        "missing": missing_modules(dict.fromkeys((*LAKE, *DATA, *driver.modules))),
        # Last: the driver compares it with the time at which this arrives.
        "time": time.time(),
    }


def device_fields() -> list[dict[str, str]]:
    """Return the fields of a `gang.Device` for each GPU of this container.

    The discovery script left them in the container's directory; there are none if it did not run.
    """
    return [
        {
            "gpu": gpu.address,
            "model": gpu.name,
            "driver": gpu.driver,
            "bad": gpu.reason if gpu.state == BAD else "",
        }
        for gpu in read_container_gpus().gpus
    ]


def lake_environment(user: str | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables with which HDFS clients of this container act for the submitting user.

    Spark ships the submitter's Hadoop configuration into the container; the node's own, if it has
    one, may not know the submitter's name services. The certificates of a private authority are
    shipped too, for nodes that name none.
    """
    added = {}
    if user is not None:
        added["HADOOP_USER_NAME"] = user
    shipped = Path("__spark_conf__/__hadoop_conf__").resolve()
    if shipped.is_dir():
        added["HADOOP_CONF_DIR"] = str(shipped)
    bundle = Path(AUTHORITIES).resolve()
    if bundle.is_file() and BUNDLE not in os.environ:
        added[BUNDLE] = str(bundle)
    return {**environment, **added}
