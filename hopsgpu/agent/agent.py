"""The agent: the barrier task that supervises a container's ranks for the driver.

Between hello and the end of the connection it answers:

    reserve   checks its GPUs, unpacks the ranks' Python environment, holds ports for its ranks, and
              starts a store if requested; the first one also starts the processes from which
              ranks are forked                              → preparing …, reserved {ports, ...}
    warm      starts a fork server, and unpacks the modules, for ranks to come → warmed
    keep      keeps the payload, the user's modules, for each `run` that names it, and unpacks it
              for the first one
    run       starts ranks; payload: the call, shards       → started, entered, output, record,
              reports, saved …, warning …, failing, saving …, agent-log,
              ended
    steps     asks for the last steps that ranks have asked about → steps {number, asked}
    propose   proposes to the ranks to save a checkpoint at a step
                                                            → accepted | rejected, of each rank
    commit, abort   decide on the proposal: all ranks save at the step, or none
                                                            → passed, of each rank after commit
    prune     has the ranks of a trial know that it is to end
    hand      hands a line to the ranks, which read it from their inbox
    stop      ends the ranks: SIGTERM, SIGKILL after 5 s; and an upload
                                                            → (their ended, publish-failed)
    tokens    keeps the payload, renewed HDFS tokens, for itself and its ranks
                                                            → kept-tokens {digest} | warning
    left      inspects ranks' model directories             → left
    publish   uploads them                                  → uploaded | publish-failed

Messages that belong to a run carry its ID, in both directions: on a gang that serves several
launches, a late message of one is not mistaken for one of the next. `reserve` and `run` also name a
slot, and replace only what is in that slot: trials that share a GPU run beside each other. A `run`
of one rank may follow another one without a `reserve`, and uses what was reserved before.

A lost connection means stop and end.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
import os
import platform
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from hopsgpu.agent.addresses import held_ports, reach
from hopsgpu.agent.attempt_slot import AttemptSlot
from hopsgpu.agent.daemon_client import DaemonClient, connected
from hopsgpu.agent.daemon_start import Starting
from hopsgpu.agent.gpu_access import find_unopened
from hopsgpu.agent.lake_write_check import try_to_write
from hopsgpu.agent.model_upload import dump_model_files, dump_parts, read_model_dirs, upload_all
from hopsgpu.agent.module_unpacker import UnpackedModules
from hopsgpu.agent.rank_environment import ServerSpec
from hopsgpu.agent.rank_group import RankGroup, spec_of
from hopsgpu.agent.sent_log import send_log
from hopsgpu.control.channel import Channel, ChannelError, Message
from hopsgpu.control.peer import DriverEndpoint, connect_to_driver, device_fields, lake_environment
from hopsgpu.core import own_log
from hopsgpu.core.rank_requirements import missing_modules
from hopsgpu.errors import ConfigError, StoreError
from hopsgpu.gpu.container_gpus import log_container_gpus, read_container_gpus
from hopsgpu.packaging.python_env.environment import PythonEnv, RankPython
from hopsgpu.storage.hadoop_tokens import keep_tokens, name_configured_tokens

log = logging.getLogger(__name__)

# The driver waits for an answer no longer than for some of these.
_SIGN_SECONDS = 5.0
# The slot of launches; trials have others too.
_OF_LAUNCHES = 0


def run_agent(
    driver: DriverEndpoint, watched: int | None = None, starting: Starting | None = None
) -> None:
    """Serve the driver until it closes the connection or is gone; call it in the main thread.

    Args:
        driver: where it listens.
        watched: pid of the process with which its daemon ends, as for `connected`.
        starting: start of its daemon that was begun, or None.

    Raises:
        OSError: the driver cannot be reached.
        ChannelError: something else answered.
    """
    with own_log.written(own_log.directory(Path("hopsgpu")) / own_log.AGENT, driver.log):
        asyncio.run(_serve(driver, watched, starting))


async def _serve(driver: DriverEndpoint, watched: int | None, starting: Starting | None) -> None:
    # HDFS clients in this process act for the submitter; the process is this task's own.
    os.environ.update(lake_environment(driver.user, {}))
    if driver.user is None:
        # Also for ranks that use another client than ours.
        await asyncio.to_thread(name_configured_tokens, os.environ)
    channel = await connect_to_driver(driver)
    container = os.environ.get("CONTAINER_ID", "a container")
    log.info(
        "agent of %s on %s serves the driver at %s:%d",
        container,
        platform.node(),
        driver.address,
        driver.port,
    )
    log_container_gpus(read_container_gpus())
    try:
        async with asyncio.TaskGroup() as tasks:
            await Agent(channel, tasks, watched, starting).serve()
    finally:
        await channel.close()
        log.info("agent ends: %s", channel.reason or "an error in the agent")


async def _begun(starting: Starting | None) -> None:
    """Wait for the start of the process daemon that was begun, and say how it went."""
    if starting is not None:
        try:
            await starting.done()
        except OSError as error:
            # A request that needs the daemon starts another one, and reports if that fails too.
            log.warning("%s", error)


async def _look_after(attempt: RankGroup, unpacked: UnpackedModules, attempts: int) -> None:
    """Check the modules once the ranks have ended, so that the next attempt need not wait."""
    await attempt.over.wait()
    await asyncio.to_thread(unpacked.look, attempts)


async def _unpack(unpacked: UnpackedModules, kept: tuple[str, bytes]) -> None:
    """Unpack the modules while the slot is being reserved."""
    try:
        await asyncio.to_thread(unpacked.prepare, *kept)
    except OSError as error:
        # Ranks that want them meet the same error, and report it.
        log.warning("the modules could not be unpacked ahead: %s", error)


def _lacking(modules: Sequence[str], home: RankPython) -> list[str]:
    """Return top-level modules that ranks lack; none if they use a Python that is not checked."""
    if home.executable is not None:
        return []
    brought = list(home.packages)
    return [
        name for name in missing_modules(modules) if PathFinder.find_spec(name, brought) is None
    ]


def _trouble(error: Exception) -> str:
    """Return the kind of a StoreError."""
    return error.kind if isinstance(error, StoreError) else ""


class Agent:
    """Controls the ranks of one container as the driver requests."""

    def __init__(
        self,
        channel: Channel,
        tasks: asyncio.TaskGroup,
        watched: int | None = None,
        starting: Starting | None = None,
    ) -> None:
        self._channel = channel
        self._watched = watched
        self._tasks = tasks
        self._keeping = contextlib.AsyncExitStack()
        self._daemon: DaemonClient | None = None
        # Slots that reserve at the same time are to have the same daemon.
        self._connecting = asyncio.Lock()
        self._slots: defaultdict[int, AttemptSlot] = defaultdict(AttemptSlot)
        self._kept: tuple[str, bytes] = ("", b"")
        # Once for all launches on this container.
        gpus = [device["gpu"] for device in device_fields()]
        self._opening = tasks.create_task(find_unopened(gpus))
        self._warming: asyncio.Task[None] | None = None
        self._beginning = tasks.create_task(_begun(starting))
        # Directory of runs → what keeps this container from writing there.
        self._lake_write_checks: dict[str, asyncio.Task[str]] = {}

    async def serve(self) -> None:
        """Answer requests until the driver closes the connection; then no rank is left."""
        try:
            while (message := await self._channel.receive()) is not None:
                await self._answer(message)
        finally:
            self._opening.cancel()
            await asyncio.gather(*(slot.close() for slot in self._slots.values()))
            preparing = [self._beginning, *([] if self._warming is None else [self._warming])]
            for task in preparing:
                task.cancel()
            await asyncio.wait(preparing)
            await self._keeping.aclose()

    async def _answer(self, message: Message) -> None:
        match message.kind:
            case "reserve" | "keep" | "warm":
                self._prepare(message)
            case "run":
                await self._run(message, self._slots[message["slot"]])
            case "prune" | "hand" | "steps" | "propose" | "commit" | "abort":
                await self._pass_on(message)
            case "stop":
                log.info("%s: the driver stops the ranks", message["run_id"])
                for slot in self._slots_of(message):
                    assert slot.attempt is not None
                    slot.unwanted.set()
                    stopping = slot.attempt.stop(
                        dump_stacks=bool(message["dump_stacks"]),
                        drop_saves=bool(message["drop_saves"]),
                    )
                    self._tasks.create_task(stopping)
            case "tokens":
                await self._keep_tokens(message)
            case "left":
                self._tasks.create_task(self._left(message))
            case "publish":
                (slot,) = self._slots_of(message)
                # Made here, for a `stop` right behind it.
                slot.unwanted = unwanted = threading.Event()
                self._tasks.create_task(self._publish(message, unwanted))
            case other:
                raise ChannelError(f"the driver sent {other!r}, which this agent does not know")

    def _prepare(self, message: Message) -> None:
        match message.kind:
            case "reserve":
                slot = self._slots[message["slot"]]
                slot.reserving = self._tasks.create_task(self._reserve(message, slot))
            case "keep":
                self._kept = message["name"], message.payload
                for slot in self._slots.values():
                    # Later, what ranks have left there may still be in use.
                    if slot.attempt is None and slot.unpacking is None:
                        slot.unpacking = self._tasks.create_task(_unpack(slot.unpacked, self._kept))
            case "warm":
                # The reservation finds its answer, and the larger world does not wait for it.
                self._check_lake_writable(message["run_url"])
                self._warming = self._warming or self._tasks.create_task(self._warm_up(message))

    def _slots_of(self, message: Message) -> list[AttemptSlot]:
        """Return the slot with the attempt of a message's run; none if it has been replaced."""
        run_id = message["run_id"]
        return [s for s in self._slots.values() if s.attempt and s.attempt.run_id == run_id]

    async def _pass_on(self, message: Message) -> None:
        """Pass a message on to the ranks of its run, which goes on."""
        for slot in self._slots_of(message):
            attempt = slot.attempt
            assert attempt is not None
            match message.kind:
                case "prune":
                    log.info("%s: the driver ends the trial early", attempt.run_id)
                    await attempt.prune()
                case "hand":
                    await attempt.hand(message["line"])
                case "steps":
                    await attempt.tell_steps(message["number"])
                case "propose":
                    attempt.propose(message["step"])
                case decision:
                    attempt.decide(message["step"], committed=decision == "commit")

    async def _reserve(self, message: Message, slot: AttemptSlot) -> None:
        slot.meeting.close()
        run_id, began = message["run_id"], time.monotonic()
        say = functools.partial(self._channel.tell, run_id=run_id)
        tell = functools.partial(say, "reserved")
        trying = self._check_lake_writable(message["run_url"])
        try:
            if closed := await asyncio.shield(self._opening):
                log.info("%s: GPUs that cannot be opened: %s", run_id, ", ".join(closed))
                await send_log(say, self._daemon_pid)
                await tell(unopened=closed)
                return
            slot.home = await self._prepared(message)
            there = reach(self._channel.local_address, message["interface"], message["others"])
            held = held_ports(message["ports"], there.address)
            slot.ports = slot.meeting.enter_context(held)
            spec = spec_of(message, slot.home)
            if self._warming is None:
                self._warming = self._tasks.create_task(self._warm(spec))
            store = await self._store(spec, int(message["store"]), slot.meeting)
            if problem := await asyncio.shield(trying):
                raise ConfigError(problem)
        except (ConfigError, OSError) as error:
            configured = isinstance(error, ConfigError)
            log.info("%s: nothing reserved: %s", run_id, type(error).__name__)
            await send_log(say, self._daemon_pid)
            await tell(problem=str(error) or repr(error), configured=configured)
            return
        log.info(
            "%s: reserved %d ports of %s%s after %.2f s",
            run_id,
            len(slot.ports.ports),
            there.address,
            "" if store is None else " and a store",
            time.monotonic() - began,
        )
        await tell(
            ports=slot.ports.ports,
            store=store,
            address=there.address,
            interface=there.interface,
            lacks=await asyncio.to_thread(_lacking, message.fields.get("imports", ()), slot.home),
        )

    def _check_lake_writable(self, run_url: str) -> asyncio.Task[str]:
        """Return the check of the lake; a check without a problem counts for all runs there."""
        root = run_url.rpartition("/")[0]
        before = self._lake_write_checks.get(root)
        if before is None or (before.done() and before.result()):
            before = self._lake_write_checks[root] = self._tasks.create_task(try_to_write(run_url))
        return before

    @property
    def _daemon_pid(self) -> int | None:
        """The pid of this container's process daemon, where there is one."""
        return None if self._daemon is None else self._daemon.pid

    async def _prepared(self, message: Message) -> RankPython:
        """Return the environment of the ranks once it is ready; tell the driver that it takes time.

        Raises:
            ConfigError: ranks cannot run with it here.
            OSError: it could not be fetched.
        """
        fields = message.fields.get("python_env")
        if fields is None:
            return RankPython()
        daemon = await self._connect_daemon()
        env = PythonEnv.from_fields(fields)
        preparing = asyncio.ensure_future(daemon.prepare(env, os.environ))
        try:
            while not (await asyncio.wait([preparing], timeout=_SIGN_SECONDS))[0]:
                log.debug("%s: waits for its Python environment", message["run_id"])
                await self._channel.tell("preparing", run_id=message["run_id"])
            return preparing.result()
        finally:
            preparing.cancel()

    async def _store(
        self, spec: ServerSpec, world_size: int, meeting: contextlib.ExitStack
    ) -> int | None:
        """Return the port of a TCPStore for so many ranks, ended with the meeting; None without
        one.
        """
        if not world_size:
            return None
        daemon = await self._connect_daemon()
        store = await daemon.store(spec, world_size)
        if store is None:
            return None
        meeting.callback(daemon.signal, store.pid, signal.SIGKILL, "tree")
        return store.port

    async def _warm_up(self, message: Message) -> None:
        """Prepare for ranks before any is known, and tell the driver when that is done."""
        name, archive = self._kept_as(message["modules"])
        unpacked = self._slots[_OF_LAUNCHES].unpacked
        try:
            await asyncio.gather(
                self._warm_as(message), asyncio.to_thread(unpacked.prepare, name, archive)
            )
        except (ConfigError, OSError) as error:
            # The launch will meet the same error, and tell its user.
            log.warning("ranks will start without what was to be prepared: %s", error)
        await self._channel.tell("warmed")

    async def _warm_as(self, message: Message) -> None:
        """Start a fork server with the Python environment of a message.

        Raises:
            ConfigError: ranks cannot run with that environment here.
            OSError: it could not be fetched.
        """
        python = RankPython()
        if (fields := message["python_env"]) is not None:
            daemon = await self._connect_daemon()
            python = await daemon.prepare(PythonEnv.from_fields(fields), os.environ)
        await self._warm(spec_of(message, python))

    async def _warm(self, spec: ServerSpec) -> None:
        """Start the process daemon and a fork server while the user's modules arrive."""
        with contextlib.suppress(OSError):  # what wants them is told, and tells
            await (await self._connect_daemon()).warm(spec)

    async def _run(self, message: Message, slot: AttemptSlot) -> None:
        before, slot.attempt = slot.attempt, None
        attempt = RankGroup(self._channel, self._tasks, message)
        if before is not None and before.is_trial:
            await before.give_way(attempt.begun)
        elif before is not None:
            # What a launch has left may be large, and the next one needs the disk.
            await before.end()
        slot.attempt = attempt
        try:
            if before is not None and before.is_trial and slot.ports is not None:
                # Its rank may have left a process that listens where this one is to.
                slot.ports.check()
            roots = await self._modules(message, slot.unpacked)
            self._tasks.create_task(_look_after(attempt, slot.unpacked, slot.unpacked.attempts))
            await attempt.start(await self._connect_daemon(), roots, slot.home)
        except OSError as error:
            log.info("%s: cannot start the ranks: %s", attempt.run_id, error)
            await attempt.refuse(error)

    async def _modules(self, message: Message, unpacked: UnpackedModules) -> list[str]:
        """Return the directories to import the user's modules from.

        Raises:
            ChannelError: other modules were announced.
            OSError: they cannot be written.
        """
        name, archive = self._kept_as(message["modules"])
        # In a thread, as all that may take long: a loop that does not run gives no sign of life.
        return await asyncio.to_thread(unpacked.roots, name, archive, int(message["roots"]))

    def _kept_as(self, name: str) -> tuple[str, bytes]:
        """Return the name and the archive of the user's modules.

        Raises:
            ChannelError: other modules were announced.
        """
        if name != self._kept[0]:
            raise ChannelError("the driver named modules that it has not sent")
        return self._kept

    async def _connect_daemon(self) -> DaemonClient:
        """Return this container's process daemon; a new one if it has been killed."""
        async with self._connecting:
            if self._daemon is None or self._daemon.lost:
                daemon = connected(Path("hopsgpu"), self._watched)
                self._daemon = await self._keeping.enter_async_context(daemon)
                log.info("uses process daemon %d", self._daemon.pid)
            return self._daemon

    async def _keep_tokens(self, message: Message) -> None:
        own = Path("hopsgpu").absolute()
        try:
            await asyncio.to_thread(keep_tokens, message.payload, os.environ, own)
        except (OSError, ValueError) as error:
            container = os.environ.get("CONTAINER_ID", "a container")
            text = f"renewed HDFS tokens could not be stored in {container}: {error}"
            log.info("renewed HDFS tokens could not be stored: %s", type(error).__name__)
            await self._channel.tell("warning", run_id=message["run_id"], text=text)
            return
        log.info("stored renewed HDFS tokens")
        digest = hashlib.sha256(message.payload).hexdigest()
        await self._channel.tell("kept-tokens", run_id=message["run_id"], digest=digest)

    async def _left(self, message: Message) -> None:
        """Report what the ranks have left in their model directories."""
        left = await asyncio.to_thread(read_model_dirs, self._model_dirs(message))
        await self._channel.tell("left", dump_model_files(left), run_id=message["run_id"])

    async def _publish(self, message: Message, unwanted: threading.Event) -> None:
        run_id, began = message["run_id"], time.monotonic()
        tell = functools.partial(self._channel.tell, run_id=run_id)
        try:
            directories = self._model_dirs(message)
            parts = await asyncio.to_thread(
                upload_all, directories, message["staging_url"], unwanted
            )
        except Exception as error:  # noqa: BLE001 - told to the driver, whatever it is
            reason = str(error) or repr(error)
            log.info("%s: upload failed: %s", run_id, type(error).__name__)
            await tell("publish-failed", reason=reason, trouble=_trouble(error))
            return
        finally:
            unwanted.set()
        log.info("%s: model files uploaded after %.1f s", run_id, time.monotonic() - began)
        await tell("uploaded", dump_parts(parts))

    def _model_dirs(self, message: Message) -> dict[int, Path]:
        (slot,) = self._slots_of(message)
        assert slot.attempt is not None
        return {rank: slot.attempt.model_dir(rank) for rank in message["ranks"]}
