"""The control channel over which a Spark application's executors reach the driver."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from hopsgpu.backends.spark.application import Application
from hopsgpu.control.channel import new_secret
from hopsgpu.control.peer import DriverEndpoint
from hopsgpu.control.server import ControlServer, serve
from hopsgpu.control.tls import is_network_encrypted
from hopsgpu.core.own_log import level
from hopsgpu.linux import allow_descriptors


@contextlib.contextmanager
def control_channel(
    application: Application, executors: int
) -> Iterator[tuple[ControlServer, DriverEndpoint]]:
    """Serve a control channel with its own secret; also yield what executors need to connect.

    Args:
        application: application of the executors.
        executors: largest number of executors.

    Raises:
        ConfigError: the driver cannot listen for the executors.
    """
    allow_descriptors(executors)
    secret, jvm = new_secret(), application.jvm
    address = application.driver_address
    bind = application.setting("spark.driver.bindAddress") or address
    user = None if jvm.is_kerberized() else jvm.user()
    heartbeat = application.heartbeat
    encrypted = is_network_encrypted(application.setting)
    with serve(secret, bind, application.ports, heartbeat=heartbeat, encrypted=encrypted) as server:
        certificate = server.certificate
        yield (
            server,
            DriverEndpoint(
                address,
                server.port,
                secret,
                user,
                heartbeat=heartbeat,
                certificate=certificate,
                log=level(),
            ),
        )
