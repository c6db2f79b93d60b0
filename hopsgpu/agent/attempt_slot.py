"""A slot of an agent: the resources of successive attempts, separate from other slots."""

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
        rendezvous: closes the ports and the store of the attempt.
        ports: ports that the attempt's ranks may bind.
        reserving: task that fills the slot.
        rank_python: Python environment of the attempt's ranks.
        attempt: the last attempt.
        upload_cancelled: event that cancels an upload of the attempt.
        unpacked: the user's modules. Not shared with other slots, whose ranks may change them.
        unpacking: task that unpacks the modules before the first attempt needs them.
    """

    rendezvous: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    ports: HeldPorts | None = None
    reserving: asyncio.Task[None] | None = None
    rank_python: RankPython = field(default_factory=RankPython)
    attempt: RankGroup | None = None
    upload_cancelled: threading.Event = field(default_factory=threading.Event)
    unpacked: UnpackedModules = field(default_factory=UnpackedModules)
    unpacking: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Stop the ranks and tasks, and release the ports and files."""
        self.upload_cancelled.set()
        # The reservation may wait for a fork server that is still importing.
        if self.reserving is not None:
            self.reserving.cancel()
        if self.attempt is not None:
            await self.attempt.end()
        self.rendezvous.close()
        if self.unpacking is not None:
            await asyncio.wait([self.unpacking])
        await asyncio.to_thread(self.unpacked.close)
