"""The holder: the task that keeps an executor until the gang is whole."""

from __future__ import annotations

import asyncio

from hopsgpu.worker.peer import Driver, greet


def run_holder(driver: Driver) -> None:
    """Connects to the driver and holds the task's slot until the driver hangs up.

    Raises:
        OSError: the driver cannot be reached.
        ChannelError: something else answered.
    """
    asyncio.run(_hold(driver))


async def _hold(driver: Driver) -> None:
    channel = await greet(driver)
    while await channel.receive() is not None:
        pass
    await channel.close()
