"""A slot of an agent, in which successive attempts run."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import dataclass, field

from hopsgpu.agent.addresses import HeldPorts
from hopsgpu.agent.module_unpacker import UnpackedModules
from hopsgpu.agent.rank_group import RankGroup
from hopsgpu.packaging.python_env.environment import RankPython


@dataclass
class AttemptSlot:
    """The resources of the attempts in a slot. A launch uses slot 0, and each running trial one.

    Attributes:
        rendezvous: closes the ports and the store of the attempt.
        ports: ports that the attempt's ranks may bind.
        reserving: task of the last `reserve` message.
        rank_group: ranks of the last attempt.
        upload_cancelled: cancels an upload of the attempt.
        unpacked: the user's modules. Not shared with other slots, whose ranks may change them.
        unpacking: task that unpacks the modules before the first attempt needs them.
    """

    rendezvous: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    ports: HeldPorts | None = None
    reserving: asyncio.Task[None] | None = None
    rank_python: RankPython = field(default_factory=RankPython)
    rank_group: RankGroup | None = None
    upload_cancelled: threading.Event = field(default_factory=threading.Event)
    unpacked: UnpackedModules = field(default_factory=UnpackedModules)
    unpacking: asyncio.Task[None] | None = None

    async def close(self) -> None:
        self.upload_cancelled.set()
        # The reservation may wait for a fork server that is still importing.
        if self.reserving is not None:
            self.reserving.cancel()
        if self.rank_group is not None:
            await self.rank_group.end()
        self.rendezvous.close()
        if self.unpacking is not None:
            await asyncio.wait([self.unpacking])
        await asyncio.to_thread(self.unpacked.close)
