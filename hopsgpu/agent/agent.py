"""The agent: supervises a container's ranks for the driver.

The agent is a task of Spark, or a process on a local master. It sends hello, and then answers:

    reserve   checks the GPUs, unpacks the ranks' Python environment, reserves ports, and starts a
              store if requested; the first `reserve` also starts the process daemon and a fork
              server                                        → preparing …, reserved {ports, ...}
    warm      starts a fork server and unpacks the modules for later ranks   → warmed
    keep      keeps the payload, the user's modules, for each `run` that names it
    run       starts ranks; payload: the call, shards       → started, entered, output, record,
              reports, saved …, warning …, failing, saving …, agent-log,
              ended
    steps     reports the last steps that ranks have asked about → steps {number, asked}
    propose   proposes to the ranks to save a checkpoint at a step
                                                            → accepted | rejected, of each rank
    commit, abort   decide on the proposal: all ranks save at the step, or none
                                                            → passed, of each rank after commit
    prune     asks the ranks of a trial to end early
    hand      passes a line to the ranks' inboxes
    stop      stops the ranks (SIGTERM, SIGKILL after 5 s) and uploads
                                                            → (their ended, publish-failed)
    tokens    stores the payload, renewed HDFS tokens, for the agent and the ranks
                                                            → kept-tokens {digest} | warning
    left      inspects ranks' model directories             → left
    publish   uploads the model directories                 → uploaded | publish-failed

Messages of a run carry its ID, so that a late message of one launch is not taken for a message of
the next. `reserve` and `run` also name a slot, and replace only the ranks in that slot: trials that
share a GPU have a slot each. A `run` of one rank without a `reserve` uses the earlier reservation.

If the connection is lost, the agent stops the ranks and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
import os
import platform
import shutil
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from hopsgpu.agent.addresses import find_agent_address, held_ports
from hopsgpu.agent.attempt_slot import AttemptSlot
from hopsgpu.agent.container_entry import SCRATCH
from hopsgpu.agent.daemon_client import DaemonClient, connected
from hopsgpu.agent.daemon_start import (
    DaemonStart,
    container_process,
    daemon_directory,
    is_listening,
)
from hopsgpu.agent.gpu_access import find_unopened
from hopsgpu.agent.lake_write_check import check_lake_writable
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
from hopsgpu.storage.digests import FileFacts
from hopsgpu.storage.hadoop_tokens import keep_tokens, name_configured_tokens

log = logging.getLogger(__name__)

# The driver gives up an agent that reports nothing for a few of these intervals.
_PREPARING_SECONDS = 5.0
# The slot that launches use; a search uses one for each trial on the GPUs.
_LAUNCH_SLOT = 0


def run_agent(
    driver: DriverEndpoint, watched_pid: int | None = None, daemon_start: DaemonStart | None = None
) -> None:
    """Serve the driver until the connection ends; call this in the main thread.

    Args:
        watched_pid: process with which the process daemon ends, as for `connected`.

    Raises:
        UnreachableError, ChannelError: as `connect_to_driver`.
    """
    with own_log.log_to_file(own_log.directory(Path("hopsgpu")) / own_log.AGENT_FILE, driver.log):
        try:
            asyncio.run(_serve(driver, watched_pid, daemon_start))
        finally:
            _remove_scratch(daemon_directory(Path("hopsgpu"), watched_pid or container_process()))


def _remove_scratch(directory: Path) -> None:
    """Remove the executor's directory on a standalone worker if its process daemon was killed.

    Otherwise the daemon removes it.

    Args:
        directory: directory of the daemon.
    """
    scratch = os.environ.get(SCRATCH)
    if not scratch or is_listening(directory):
        return
    try:
        shutil.rmtree(scratch)
    except OSError as error:
        # The worker removes it at the end of the application.
        log.warning("cannot remove %s: %s", scratch, error)


async def _serve(
    driver: DriverEndpoint, watched_pid: int | None, daemon_start: DaemonStart | None
) -> None:
    # HDFS clients in this process act for the submitter. No other task shares the process.
    os.environ.update(lake_environment(driver.user, {}))
    if driver.user is None:
        # Ranks may use another HDFS client, which reads the same token file.
        await asyncio.to_thread(name_configured_tokens, os.environ)
    channel = await connect_to_driver(driver)
    container, where = os.environ.get("CONTAINER_ID", "a container"), platform.node()
    address = f"{driver.address}:{driver.port}"
    log.info("agent of %s on %s serves the driver at %s", container, where, address)
    log_container_gpus(read_container_gpus())
    try:
        async with asyncio.TaskGroup() as tasks:
            await Agent(channel, tasks, watched_pid, daemon_start).serve()
    finally:
        await channel.close()
        log.info("agent ends: %s", channel.reason or "an error in the agent")


async def _await_daemon_start(daemon_start: DaemonStart | None) -> None:
    if daemon_start is not None:
        try:
            await daemon_start.wait()
        except OSError as error:
            # A request that needs the daemon starts another one, and reports if that fails too.
            log.warning("%s", error)


async def _verify_modules_after(group: RankGroup, unpacked: UnpackedModules, uses: int) -> None:
    """Check the modules once the ranks have exited, so that the next attempt need not wait."""
    await group.ended.wait()
    await asyncio.to_thread(unpacked.verify, uses)


async def _unpack(unpacked: UnpackedModules, archive: tuple[str, bytes]) -> None:
    try:
        await asyncio.to_thread(unpacked.prepare, *archive)
    except OSError as error:
        # The start of the ranks unpacks them again, and reports the error.
        log.warning("the modules could not be unpacked ahead: %s", error)


def _missing_modules(modules: Sequence[str], python: RankPython) -> list[str]:
    """Return top-level modules that ranks lack; [] if their Python is not this one."""
    if python.executable is not None:
        return []
    packages = list(python.packages)
    return [
        name for name in missing_modules(modules) if PathFinder.find_spec(name, packages) is None
    ]


class Agent:
    def __init__(
        self,
        channel: Channel,
        tasks: asyncio.TaskGroup,
        watched_pid: int | None = None,
        daemon_start: DaemonStart | None = None,
        upload: Callable[..., dict[int, dict[str, FileFacts]]] = upload_all,
    ) -> None:
        self._upload = upload
        self._channel = channel
        self._watched_pid = watched_pid
        self._tasks = tasks
        self._connections = contextlib.AsyncExitStack()
        self._daemon: DaemonClient | None = None
        # Slots that reserve at the same time must get the same daemon.
        self._connecting = asyncio.Lock()
        self._slots: defaultdict[int, AttemptSlot] = defaultdict(AttemptSlot)
        # The user's modules: name and archive of the last `keep`.
        self._archive: tuple[str, bytes] = ("", b"")
        # The GPUs are checked once for all launches on this container.
        gpus = [device["gpu"] for device in device_fields()]
        self._gpu_check = tasks.create_task(find_unopened(gpus))
        self._warming: asyncio.Task[None] | None = None
        self._daemon_start = tasks.create_task(_await_daemon_start(daemon_start))
        # Directory of runs → why this container cannot write there.
        self._lake_checks: dict[str, asyncio.Task[str]] = {}

    async def serve(self) -> None:
        """Handle messages until the driver closes the connection; then stop all ranks."""
        try:
            while (message := await self._channel.receive()) is not None:
                await self._handle_message(message)
        finally:
            self._gpu_check.cancel()
            await asyncio.gather(*(slot.close() for slot in self._slots.values()))
            preparing = [self._daemon_start, *([] if self._warming is None else [self._warming])]
            for task in preparing:
                task.cancel()
            await asyncio.wait(preparing)
            await self._connections.aclose()

    async def _handle_message(self, message: Message) -> None:
        match message.kind:
            case "reserve" | "keep" | "warm":
                self._prepare(message)
            case "run":
                await self._run(message, self._slots[message["slot"]])
            case "prune" | "hand" | "steps" | "propose" | "commit" | "abort":
                await self._forward(message)
            case "stop":
                log.info("%s: the driver stops the ranks", message["run_id"])
                for slot in self._slots_of(message):
                    assert slot.rank_group is not None
                    slot.upload_cancelled.set()
                    stopping = slot.rank_group.stop(
                        should_dump_stacks=bool(message["dump_stacks"]),
                        should_drop_saves=bool(message["drop_saves"]),
                    )
                    self._tasks.create_task(stopping)
            case "tokens":
                await self._keep_tokens(message)
            case "left":
                self._tasks.create_task(self._report_model_files(message))
            case "publish":
                cancelled = threading.Event()
                for slot in self._slots_of(message):
                    # Set the event now: a `stop` that follows must find it.
                    slot.upload_cancelled = cancelled
                self._tasks.create_task(self._publish(message, cancelled))
            case other:
                raise ChannelError(f"the driver sent {other!r}, which this agent does not know")

    def _prepare(self, message: Message) -> None:
        match message.kind:
            case "reserve":
                slot = self._slots[message["slot"]]
                slot.reserving = self._tasks.create_task(self._reserve(message, slot))
            case "keep":
                self._archive = archive = message["name"], message.payload
                for slot in self._slots.values():
                    # After the first attempt, files in the directory may be in use: do not unpack
                    # over them.
                    if slot.rank_group is None and slot.unpacking is None:
                        slot.unpacking = self._tasks.create_task(_unpack(slot.unpacked, archive))
            case "warm":
                # Start the check now, so that the reservation for a larger world finds its result.
                self._check_lake_writable(message["run_url"])
                self._warming = self._warming or self._tasks.create_task(self._warm_up(message))

    def _slots_of(self, message: Message) -> list[AttemptSlot]:
        """Return the slot with the ranks of a message's run; [] if other ranks replaced them."""
        run_id = message["run_id"]
        return [s for s in self._slots.values() if s.rank_group and s.rank_group.run_id == run_id]

    async def _forward(self, message: Message) -> None:
        for slot in self._slots_of(message):
            group = slot.rank_group
            assert group is not None
            match message.kind:
                case "prune":
                    log.info("%s: the driver ends the trial early", group.run_id)
                    await group.prune()
                case "hand":
                    await group.send_line(message["line"])
                case "steps":
                    await group.report_steps(message["number"])
                case "propose":
                    group.propose(message["step"])
                case decision:
                    group.decide(message["step"], is_committed=decision == "commit")

    async def _reserve(self, message: Message, slot: AttemptSlot) -> None:
        slot.rendezvous.close()
        run_id, began = message["run_id"], time.monotonic()
        notify = functools.partial(self._channel.notify, run_id=run_id)
        report = functools.partial(notify, "reserved")
        lake_check = self._check_lake_writable(message["run_url"])
        try:
            if closed := await asyncio.shield(self._gpu_check):
                log.info("%s: GPUs that cannot be opened: %s", run_id, ", ".join(closed))
                await send_log(notify, self._daemon_pid)
                await report(unopened=closed)
                return
            slot.rank_python = await self._prepare_python_env(message)
            agent_address = find_agent_address(
                self._channel.local_address, message["interface"], message["others"]
            )
            ports = held_ports(message["ports"], agent_address.address)
            slot.ports = slot.rendezvous.enter_context(ports)
            spec = spec_of(message, slot.rank_python)
            if self._warming is None:
                self._warming = self._tasks.create_task(self._start_fork_server(spec))
            store = await self._start_store(spec, int(message["store"]), slot.rendezvous)
            if problem := await asyncio.shield(lake_check):
                raise ConfigError(problem)
        except (ConfigError, OSError) as error:
            configured = isinstance(error, ConfigError)
            log.info("%s: nothing reserved: %s", run_id, type(error).__name__)
            await send_log(notify, self._daemon_pid)
            await report(problem=str(error) or repr(error), configured=configured)
            return
        what = f"{len(slot.ports.ports)} ports{'' if store is None else ' and a store'}"
        address, seconds = agent_address.address, time.monotonic() - began
        log.info("%s: reserved %s of %s after %.2f s", run_id, what, address, seconds)
        imports = message.fields.get("imports", ())
        await report(
            ports=slot.ports.ports,
            store=store,
            address=address,
            interface=agent_address.interface,
            lacks=await asyncio.to_thread(_missing_modules, imports, slot.rank_python),
        )

    def _check_lake_writable(self, run_url: str) -> asyncio.Task[str]:
        """Return the check of the directory of runs; repeat a check that found a problem."""
        root = run_url.rpartition("/")[0]
        check = self._lake_checks.get(root)
        if check is None or (check.done() and check.result()):
            check = self._lake_checks[root] = self._tasks.create_task(check_lake_writable(run_url))
        return check

    @property
    def _daemon_pid(self) -> int | None:
        return None if self._daemon is None else self._daemon.pid

    async def _prepare_python_env(self, message: Message) -> RankPython:
        """Unpack the ranks' Python environment, with reports to the driver while this takes long.

        Raises:
            ConfigError, OSError: as `DaemonClient.prepare`.
        """
        fields = message.fields.get("python_env")
        if fields is None:
            return RankPython()
        daemon = await self._connect_daemon()
        env = PythonEnv.from_fields(fields)
        preparing = asyncio.ensure_future(daemon.prepare(env, os.environ))
        try:
            while not (await asyncio.wait([preparing], timeout=_PREPARING_SECONDS))[0]:
                log.debug("%s: waits for its Python environment", message["run_id"])
                await self._channel.notify("preparing", run_id=message["run_id"])
            return preparing.result()
        finally:
            preparing.cancel()

    async def _start_store(
        self, spec: ServerSpec, world_size: int, rendezvous: contextlib.ExitStack
    ) -> int | None:
        """Start a TCPStore that ends with the rendezvous; return its port, or None without one."""
        if not world_size:
            return None
        daemon = await self._connect_daemon()
        store = await daemon.store(spec, world_size)
        if store is None:
            return None
        rendezvous.callback(daemon.signal, store.pid, signal.SIGKILL, "tree")
        return store.port

    async def _warm_up(self, message: Message) -> None:
        name, archive = self._named_archive(message["modules"])
        unpacked = self._slots[_LAUNCH_SLOT].unpacked
        try:
            await asyncio.gather(
                self._warm_environment(message), asyncio.to_thread(unpacked.prepare, name, archive)
            )
        except (ConfigError, OSError) as error:
            # The launch will meet the same error, and report it to its user.
            log.warning("ranks will start without a warm fork server or modules: %s", error)
        await self._channel.notify("warmed")

    async def _warm_environment(self, message: Message) -> None:
        python = RankPython()
        if (fields := message["python_env"]) is not None:
            daemon = await self._connect_daemon()
            python = await daemon.prepare(PythonEnv.from_fields(fields), os.environ)
        await self._start_fork_server(spec_of(message, python))

    async def _start_fork_server(self, spec: ServerSpec) -> None:
        # The requests that need the fork server report the error.
        with contextlib.suppress(OSError):
            await (await self._connect_daemon()).warm(spec)

    async def _run(self, message: Message, slot: AttemptSlot) -> None:
        previous, slot.rank_group = slot.rank_group, None
        group = RankGroup(self._channel, self._tasks, message)
        if previous is not None and previous.is_trial:
            await previous.end_in_background(group.started)
        elif previous is not None:
            # Files of the previous launch may be large, and the next launch needs the disk.
            await previous.end()
        slot.rank_group = group
        try:
            if previous is not None and previous.is_trial and slot.ports is not None:
                # A process that the previous rank left may listen on a port of the next rank.
                slot.ports.check()
            roots = await self._unpack_modules(message, slot.unpacked)
            self._tasks.create_task(_verify_modules_after(group, slot.unpacked, slot.unpacked.uses))
            await group.start(await self._connect_daemon(), roots, slot.rank_python)
        except OSError as error:
            log.info("%s: cannot start the ranks: %s", group.run_id, error)
            await group.refuse(error)

    async def _unpack_modules(self, message: Message, unpacked: UnpackedModules) -> list[str]:
        name, archive = self._named_archive(message["modules"])
        # Run in a thread: the event loop must keep sending heartbeats.
        return await asyncio.to_thread(unpacked.roots, name, archive, int(message["roots"]))

    def _named_archive(self, name: str) -> tuple[str, bytes]:
        if name != self._archive[0]:
            raise ChannelError("the driver named modules that it has not sent")
        return self._archive

    async def _connect_daemon(self) -> DaemonClient:
        """Return the client of the process daemon; start a new daemon if the last has ended."""
        async with self._connecting:
            if self._daemon is None or self._daemon.is_lost:
                daemon = connected(Path("hopsgpu"), self._watched_pid)
                self._daemon = await self._connections.enter_async_context(daemon)
                log.info("uses process daemon %d", self._daemon.pid)
            return self._daemon

    async def _keep_tokens(self, message: Message) -> None:
        directory = Path("hopsgpu").absolute()
        try:
            await asyncio.to_thread(keep_tokens, message.payload, os.environ, directory)
        except (OSError, ValueError) as error:
            container = os.environ.get("CONTAINER_ID", "a container")
            text = f"renewed HDFS tokens could not be stored in {container}: {error}"
            log.info("renewed HDFS tokens could not be stored: %s", type(error).__name__)
            await self._channel.notify("warning", run_id=message["run_id"], text=text)
            return
        log.info("stored renewed HDFS tokens")
        digest = hashlib.sha256(message.payload).hexdigest()
        await self._channel.notify("kept-tokens", run_id=message["run_id"], digest=digest)

    async def _report_model_files(self, message: Message) -> None:
        notify = functools.partial(self._channel.notify, run_id=message["run_id"])
        try:
            directories = self._model_dirs(message)
        except StoreError as error:
            await notify("publish-failed", reason=str(error), trouble=error.kind)
            return
        model_files = await asyncio.to_thread(read_model_dirs, directories)
        await notify("left", dump_model_files(model_files))

    async def _publish(self, message: Message, cancelled: threading.Event) -> None:
        run_id, began = message["run_id"], time.monotonic()
        notify = functools.partial(self._channel.notify, run_id=run_id)
        try:
            directories = self._model_dirs(message)
            parts = await asyncio.to_thread(
                self._upload, directories, message["staging_url"], cancelled
            )
        except Exception as error:  # noqa: BLE001 - any error is reported to the driver
            kind = error.kind if isinstance(error, StoreError) else ""
            log.info("%s: upload failed: %s", run_id, type(error).__name__)
            await notify("publish-failed", reason=str(error) or repr(error), trouble=kind)
            return
        finally:
            cancelled.set()
        log.info("%s: model files uploaded after %.1f s", run_id, time.monotonic() - began)
        await notify("uploaded", dump_parts(parts))

    def _model_dirs(self, message: Message) -> dict[int, Path]:
        """Return the model directories of ranks.

        Raises:
            StoreError: other ranks have replaced these ranks, and their directories are gone.
        """
        for slot in self._slots_of(message):
            assert slot.rank_group is not None
            return {rank: slot.rank_group.model_dir(rank) for rank in message["ranks"]}
        raise StoreError(
            f"the model files of {message['run_id']} are gone: its executor already runs other"
            " ranks"
        )
