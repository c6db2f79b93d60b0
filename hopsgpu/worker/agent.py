"""The agent: the barrier task that supervises a container's ranks at the driver's word.

Between hello and the end of the connection it answers:

    reserve   holds a free port for rank 0's rendezvous     → reserved {port}
    run       starts ranks; payload: the call, the modules  → started, output …, ended, kept
              (memory: bytes that each rank may use, with its descendants; one over it is killed)
    stop      ends the ranks: SIGTERM, SIGKILL after 5 s    → (their ended)
    publish   uploads a rank's model directory              → published | publish-failed
    end       leaves

What belongs to a run bears its id, in both directions: on a gang that serves several launches a
late word of one is not taken for the next one's.

A lost connection is the same as stop and end.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import os
import re
import shutil
import socket
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import hopsgpu
from hopsgpu.errors import StoreError
from hopsgpu.stores.lake import Lake
from hopsgpu.stores.models import ModelStore
from hopsgpu.worker.channel import Channel, ChannelError, Message
from hopsgpu.worker.context import Context
from hopsgpu.worker.logs import follow
from hopsgpu.worker.peer import Driver, greet, lake_environment
from hopsgpu.worker.process import RankEnd, RankProcess

# Set by Spark or an earlier run in the executor's environment; a rank must not inherit them.
_NOT_INHERITED = re.compile(
    r"OMP_NUM_THREADS|PYTHONPATH|PYTHONHASHSEED|PYTHON_WORKER_FACTORY_.*|SPARK_AUTH_.*"
    r"|TF_CONFIG|TORCHELASTIC_.*|GROUP_.*|ROLE_.*"
)


def run_agent(driver: Driver) -> None:
    """Serves the driver until it says end or is gone. Must run in the main thread.

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
        self._ranks: dict[int, RankProcess] = {}
        self._port = contextlib.ExitStack()
        self._run_dir: Path | None = None

    async def serve(self) -> None:
        """Answers until the driver says end or hangs up; then no rank is left."""
        try:
            while (message := await self._channel.receive()) is not None:
                if message.kind == "end":
                    return
                await self._answer(message)
        finally:
            await asyncio.gather(*(rank.stop() for rank in self._ranks.values()))
            self._port.close()

    async def _answer(self, message: Message) -> None:
        match message.kind:
            case "reserve":
                self._port.close()
                port = self._port.enter_context(held_port())
                await self._channel.send("reserved", run_id=message["run_id"], port=port)
            case "run":
                self._clear()
                self._start(message)
            case "stop":
                for rank in self._ranks.values():
                    self._tasks.create_task(rank.stop())
            case "publish":
                self._tasks.create_task(self._publish(message))
            case other:
                raise ChannelError(f"the driver sent {other!r}, which this agent does not know")

    def _start(self, message: Message) -> None:
        split = int(message["call_bytes"])
        call, modules = message.payload[:split], message.payload[split:]
        directory = Path("hopsgpu", f"{message['run_id']}-{message['attempt']}").resolve()
        directory.mkdir(parents=True, mode=0o700)
        self._run_dir = directory
        roots = _unpack(modules, directory / "modules", int(message["roots"]))
        log_dir = Lake(message["run_url"]) / "logs"
        run_id, memory = message["run_id"], message.fields.get("memory")
        self._ranks = {}
        for described in message["ranks"]:
            home = directory / f"rank-{described['context']['rank']}"
            given = {**described["context"], "model_dir": home / "model"}
            environment = rank_environment(
                dict(os.environ), described["environment"], [*roots, _package_path()]
            )
            rank = RankProcess(home, Context(**given), environment, memory)
            self._ranks[rank.rank] = rank
            home.mkdir(mode=0o700)
            log = log_dir / f"rank-{rank.rank}.log"
            try:
                pid = rank.start(call)
            except OSError as error:
                self._tasks.create_task(self._not_started(rank, error, run_id))
            else:
                self._tasks.create_task(self._watch(rank, pid, log, run_id))

    async def _watch(self, rank: RankProcess, pid: int, log: Lake, run_id: str) -> None:
        send = functools.partial(self._channel.send, run_id=run_id)
        await send("started", rank=rank.rank, pid=pid)
        ended = asyncio.Event()

        async def output(chunk: bytes) -> None:
            await send("output", chunk, rank=rank.rank)

        streaming = asyncio.create_task(follow(rank.log, ended, output))
        end = await rank.wait()
        ended.set()
        try:
            await streaming
            await self._report(rank, end, run_id)
            problem = await asyncio.to_thread(_keep, rank.log, log)
            await send("kept", rank=rank.rank, problem=problem)
        except OSError:
            return  # the driver is gone: serve() sees it too and ends

    async def _not_started(self, rank: RankProcess, error: OSError, run_id: str) -> None:
        outcome = {"status": "not started", "error": str(error)}
        now = time.time()
        end = RankEnd(None, None, 0, outcome, b"", (), now, stopped=False)
        await self._channel.send("started", run_id=run_id, rank=rank.rank, pid=0)
        await self._report(rank, end, run_id)
        await self._channel.send("kept", run_id=run_id, rank=rank.rank, problem=None)

    async def _report(self, rank: RankProcess, end: RankEnd, run_id: str) -> None:
        await self._channel.send(
            "ended",
            end.value,
            run_id=run_id,
            rank=rank.rank,
            exit_code=end.exit_code,
            signal=end.signal,
            peak_memory=end.peak_memory,
            outcome=dict(end.outcome),
            log_tail=end.log_tail,
            time=end.time,
            stopped=end.stopped,
        )

    async def _publish(self, message: Message) -> None:
        source = self._ranks[int(message["rank"])].model_dir
        store = ModelStore(message["models_url"])
        send = functools.partial(self._channel.send, run_id=message["run_id"])
        try:
            if not any(path.is_file() for path in source.rglob("*")):
                await send("published", version=None)
                return
            version = await asyncio.to_thread(
                store.publish, source, message["name"], run_id=message["run_id"]
            )
        except Exception as error:  # noqa: BLE001 - told to the driver, whatever it is
            await send("publish-failed", reason=str(error))
            return
        await send("published", version=version.version, url=version.url)

    def _clear(self) -> None:
        if self._run_dir is not None:
            shutil.rmtree(self._run_dir)
            self._run_dir = None


def _keep(log: Path, target: Lake) -> str | None:
    """Copies a rank's log to the lake; what went wrong, or None."""
    try:
        target.upload(log)
    except StoreError as error:
        return str(error)
    return None


def _package_path() -> str:
    """What to put on a rank's path so that it finds the hopsgpu that this agent runs."""
    return str(Path(hopsgpu.__file__).absolute().parents[1])


def _unpack(modules: bytes, directory: Path, roots: int) -> list[str]:
    """Unpacks the user's modules; the directories to import them from."""
    with zipfile.ZipFile(io.BytesIO(modules)) as archive:
        archive.extractall(directory)
    return [str(directory / str(number)) for number in range(roots)]


def rank_environment(
    executor: dict[str, str], given: dict[str, str], python_path: list[str]
) -> dict[str, str]:
    """A rank's variables: the executor's, without leftovers, under those that are given."""
    kept = {k: v for k, v in executor.items() if not _NOT_INHERITED.fullmatch(k)}
    inherited = executor.get("PYTHONPATH", "").split(os.pathsep)
    path = dict.fromkeys(p for p in [*python_path, *inherited] if p)
    return {**kept, "PYTHONPATH": os.pathsep.join(path), **given}


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """A TCP port that nobody else is given while a rank may bind it.

    Bound with SO_REUSEADDR and not listening: another binder with SO_REUSEADDR (torch's and
    grpc's servers) takes the port, others and the kernel's own choice are kept out.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        yield int(holder.getsockname()[1])
