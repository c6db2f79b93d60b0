"""The connection of an executor's task to the driver, and its hello."""

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

# Python's HTTP clients read private authorities from the file that this variable names.
BUNDLE = "REQUESTS_CA_BUNDLE"
# Name in the container of a file of authorities that the application ships.
AUTHORITIES = "hopsgpu-authorities.pem"


@dataclass(frozen=True)
class DriverEndpoint:
    """Where the driver listens, and what a task's process needs to serve it.

    Attributes:
        address: host name or IP under which executors reach the driver.
        user: the submitting user, for the lake on clusters without Kerberos; None with Kerberos.
        job: tag of the task's job, by which the driver recognises late tasks of an earlier job.
        heartbeat: seconds without data after which an end takes the other as lost.
        certificate: the driver's (DER), if the channel is encrypted.
        modules: top-level modules; the hello reports which of them the container's Python lacks.
        log: level of the log that hopsgpu's processes in the container write.
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
    """Connect to the driver and send the hello of this container.

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
    await channel.send("hello", job=driver.job, **_hello_fields(channel.local_address, driver))
    return channel


def _hello_fields(address: str, driver: DriverEndpoint) -> dict[str, Any]:
    return {
        "container": os.environ.get("CONTAINER_ID", ""),
        "host": os.environ.get("NM_HOST") or platform.node(),
        "address": address,
        "devices": device_fields(),
        "python": platform.python_version(),
        "missing": missing_modules(dict.fromkeys((*LAKE, *DATA, *driver.modules))),
        # The time is taken last: the driver compares it with the arrival of the hello.
        "time": time.time(),
    }


def device_fields() -> list[dict[str, str]]:
    """Return the fields of a `gang.Device` for each GPU that the discovery script found here."""
    return [
        {
            "gpu": gpu.address,
            "model": gpu.name,
            "driver": gpu.driver,
            "bad": gpu.reason if gpu.state == BAD else "",
            "parent": gpu.parent,
        }
        for gpu in read_container_gpus().gpus
    ]


def lake_environment(user: str | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables with which HDFS clients of this container act for the submitting user.

    The submitter's Hadoop configuration, which Spark ships into the container, replaces the node's,
    which may lack name services. Shipped authorities are used on nodes that configure none.
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
