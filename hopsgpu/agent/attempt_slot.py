"""A slot: what successive attempts use in an agent, beside the attempts of other slots."""

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
    """A slot of an agent. A launch uses slot 0; each of the trials that share its GPUs has one.

    Attributes:
        meeting: ports and store of the attempt.
        ports: ports of the meeting, which its ranks may bind.
        reserving: task that fills the slot.
        home: Python environment of the attempt's ranks.
        attempt: the last attempt.
        unwanted: event that cancels an upload of the attempt.
        unpacked: the user's modules. Not shared with other slots, whose ranks may change them.
        unpacking: task that unpacks them before the first attempt wants them.
    """

    meeting: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    ports: HeldPorts | None = None
    reserving: asyncio.Task[None] | None = None
    home: RankPython = field(default_factory=RankPython)
    attempt: RankGroup | None = None
    unwanted: threading.Event = field(default_factory=threading.Event)
    unpacked: UnpackedModules = field(default_factory=UnpackedModules)
    unpacking: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """End what runs, and release what is held."""
        self.unwanted.set()
        # A fork server that serves the store may still be importing.
        if self.reserving is not None:
            self.reserving.cancel()
        if self.attempt is not None:
            await self.attempt.end()
        self.meeting.close()
        if self.unpacking is not None:
            await asyncio.wait([self.unpacking])
        await asyncio.to_thread(self.unpacked.close)
