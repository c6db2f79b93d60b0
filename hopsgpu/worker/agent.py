"""The agent: the barrier task that supervises a container's ranks at the driver's word.

Between hello and the end of the connection it answers:

    reserve   tries its GPUs, holds ports for its ranks, and a store where one is wanted
                                                            → reserved {ports, ...}
    run       starts ranks; payload: the call, the modules  → started, output, record, reports,
              warning …, ended
    stop      ends the ranks: SIGTERM, SIGKILL after 5 s    → (their ended)
    publish   uploads a rank's model directory              → published | publish-failed

What belongs to a run bears its id, in both directions: on a gang that serves several launches a
late word of one is not taken for the next one's.

A lost connection is the same as stop and end.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
from pathlib import Path

from hopsgpu.errors import ConfigError
from hopsgpu.stores.models import ModelStore
from hopsgpu.worker.addresses import held_ports, reach
from hopsgpu.worker.attempt import Attempt, spec_of
from hopsgpu.worker.channel import Channel, ChannelError, Message
from hopsgpu.worker.environment import ServerSpec
from hopsgpu.worker.keeping import Keeper, connected
from hopsgpu.worker.opening import unopened
from hopsgpu.worker.peer import Driver, given_out, greet, lake_environment
from hopsgpu.worker.unpacking import Unpacked


def run_agent(driver: Driver) -> None:
    """Serves the driver until it hangs up or is gone. Must run in the main thread.

    Raises:
        OSError: the driver cannot be reached.
        ChannelError: something else answered.
    """
    asyncio.run(_serve(driver))


async def _serve(driver: Driver) -> None:
    # HDFS clients in this process act for the submitter; the process is this task's own.
    os.environ.update(lake_environment(driver.user, {}))
    channel = await greet(driver)
    try:
        async with asyncio.TaskGroup() as tasks:
            await Agent(channel, tasks).serve()
    finally:
        await channel.close()


class Agent:
    """Ranks of one container and what the driver wants of them."""

    def __init__(self, channel: Channel, tasks: asyncio.TaskGroup) -> None:
        self._channel = channel
        self._tasks = tasks
        self._keeping = contextlib.AsyncExitStack()
        self._keeper: Keeper | None = None
        # Ports and store of the attempt.
        self._meeting = contextlib.ExitStack()
        self._reserving: asyncio.Task[None] | None = None
        self._attempt: Attempt | None = None
        self._unpacked = Unpacked()
        # Once for all launches on this container.
        gpus = [device["gpu"] for device in given_out()]
        self._opening = tasks.create_task(unopened(gpus))

    async def serve(self) -> None:
        """Answers until the driver hangs up; then no rank is left."""
        try:
            while (message := await self._channel.receive()) is not None:
                await self._answer(message)
        finally:
            # A fork server that serves the store may still be importing.
            if self._reserving is not None:
                self._reserving.cancel()
            self._opening.cancel()
            if self._attempt is not None:
                await self._attempt.end()
            self._meeting.close()
            await self._keeping.aclose()
            await asyncio.to_thread(self._unpacked.close)

    async def _answer(self, message: Message) -> None:
        match message.kind:
            case "reserve":
                self._reserving = self._tasks.create_task(self._reserve(message))
            case "run":
                await self._run(message)
            case "stop":
                if self._attempt is not None:
                    stopping = self._attempt.stop(dump_stacks=bool(message["dump_stacks"]))
                    self._tasks.create_task(stopping)
            case "publish":
                self._tasks.create_task(self._publish(message))
            case other:
                raise ChannelError(f"the driver sent {other!r}, which this agent does not know")

    async def _reserve(self, message: Message) -> None:
        self._meeting.close()
        tell = functools.partial(self._channel.tell, "reserved", run_id=message["run_id"])
        try:
            if closed := await asyncio.shield(self._opening):
                await tell(unopened=closed)
                return
            there = reach(self._channel.local_address, message["interface"], message["others"])
            ports = self._meeting.enter_context(held_ports(message["ports"], there.address)).ports
            store = await self._store(spec_of(message), int(message["store"]))
        except (ConfigError, OSError) as error:
            configured = isinstance(error, ConfigError)
            await tell(problem=str(error) or repr(error), configured=configured)
            return
        await tell(ports=ports, store=store, address=there.address, interface=there.interface)

    async def _store(self, spec: ServerSpec, world_size: int) -> int | None:
        """The port of a TCPStore for so many ranks, ended with the meeting; None without one."""
        if not world_size:
            return None
        keeper = await self._keeper_here()
        store = await keeper.store(spec, world_size)
        if store is None:
            return None
        self._meeting.callback(keeper.signal, store.pid, signal.SIGKILL, "tree")
        return store.port

    async def _run(self, message: Message) -> None:
        before, self._attempt = self._attempt, None
        if before is not None:
            await before.end()
        self._attempt = attempt = Attempt(self._channel, self._tasks, message)
        try:
            await attempt.start(await self._keeper_here(), self._unpacked)
        except OSError as error:
            await attempt.refuse(error)

    async def _keeper_here(self) -> Keeper:
        """This container's keeper; another one where it has been killed."""
        if self._keeper is None or self._keeper.lost:
            self._keeper = await self._keeping.enter_async_context(connected(Path("hopsgpu")))
        return self._keeper

    async def _publish(self, message: Message) -> None:
        tell = functools.partial(self._channel.tell, run_id=message["run_id"])
        store = ModelStore(message["models_url"])
        try:
            assert self._attempt is not None, "publish comes after run"
            source = self._attempt.model_dir(int(message["rank"]))
            if not any(path.is_file() for path in source.rglob("*")):
                await tell("published", version=None)
                return
            version = await asyncio.to_thread(
                store.publish, source, message["name"], run_id=message["run_id"]
            )
        except Exception as error:  # noqa: BLE001 - told to the driver, whatever it is
            await tell("publish-failed", reason=str(error))
            return
        await tell("published", version=version.version, url=version.url)
