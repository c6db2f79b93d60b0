"""The placeholder: the task that keeps an executor until the gang is complete."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import platform
from pathlib import Path

from hopsgpu.agent.daemon_client import connected
from hopsgpu.agent.warm_up import WarmUp
from hopsgpu.control.peer import DriverEndpoint, connect_to_driver, lake_environment
from hopsgpu.core import own_log
from hopsgpu.errors import ConfigError
from hopsgpu.packaging.python_env.environment import RankPython

log = logging.getLogger(__name__)


def run_placeholder(driver: DriverEndpoint, warm: WarmUp) -> None:
    """Hold the task's slot until the driver closes the connection.

    Raises:
        UnreachableError, ChannelError: as `connect_to_driver`.
    """
    with own_log.log_to_file(own_log.directory(Path("hopsgpu")) / own_log.AGENT_FILE, driver.log):
        asyncio.run(_hold(driver, warm))


async def _hold(driver: DriverEndpoint, warm: WarmUp) -> None:
    channel = await connect_to_driver(driver)
    container = os.environ.get("CONTAINER_ID", "a container")
    log.info("holds %s on %s until the gang is complete", container, platform.node())
    warming = asyncio.create_task(_warm(warm, driver.user))
    try:
        while await channel.receive() is not None:
            pass
    finally:
        warming.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await warming
        await channel.close()
        log.info("stops holding the container: %s", channel.reason or "the placeholder ended")


async def _warm(warm: WarmUp, user: str | None) -> None:
    executor = lake_environment(user, os.environ)
    try:
        async with connected(Path("hopsgpu")) as daemon:
            python = RankPython()
            if warm.python_env is not None:
                python = await daemon.prepare(warm.python_env, executor)
            reason = await daemon.warm(warm.spec(executor, python))
    except (ConfigError, OSError) as error:
        reason = str(error)
    if reason is not None:
        # The launch reports the reason to its user.
        log.warning("ranks will start as fresh interpreters: %s", reason)
