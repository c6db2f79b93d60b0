"""What ranks of the tests run, by reference: this module imports neither pytest nor PySpark.

A rank imports the module of its function; that of a test would take each of them a second or two.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import hopsgpu
from hopsgpu.core.rank_warnings import CONTEXT_VARIABLE
from tests.bounds import HANG_SECONDS


def who_am_i(greeting: str) -> dict[str, object]:
    context = hopsgpu.context()
    return {
        "greeting": greeting,
        "rank": context.rank,
        "world": context.world_size,
        "host": context.host,
        "gpus": context.gpus,
        "environment": dict(os.environ),
        "pid": os.getpid(),
    }


class Slow:
    """Takes its time to be unpickled in a rank, as a large module to be imported."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __reduce__(self) -> tuple[Callable[[Path], Path], tuple[Path]]:
        return imported, (self.directory,)


def imported(directory: Path) -> Path:
    # The driver's check that ranks can load the call does not wait.
    is_rank = CONTEXT_VARIABLE in os.environ
    while is_rank and not (directory / f"import-{hopsgpu.context().rank}").exists():
        time.sleep(0.02)
    return directory


def who_am_i_once_told(directory: Path, greeting: str) -> dict[str, object]:
    while not (directory / "return").exists():
        time.sleep(0.02)
    return who_am_i(greeting)


def gpus_in_use_seen_by(rank: int, other: Path) -> None:
    if hopsgpu.context().rank == rank:
        while not other.exists():
            time.sleep(0.05)  # nobody tells
        raise ValueError(f"rank {rank} has had enough")
    other.touch()
    time.sleep(600)


def where() -> str:
    return os.environ["CONTAINER_ID"]


def who_and_where() -> tuple[str, str, str, str, str]:
    get = os.environ.__getitem__
    return (
        hopsgpu.context().host,
        get("NODE_RANK"),
        get("LOCAL_RANK"),
        get("LOCAL_WORLD_SIZE"),
        get("CUDA_VISIBLE_DEVICES"),
    )


def own_gpu() -> tuple[str, ...]:
    return hopsgpu.context().gpus


def mark_of(container: str) -> bytes:
    """What the environment of an executor's processes has, of this container alone."""
    application, _, executor = container.partition("/")
    if not executor:
        return f"CONTAINER_ID={container}".encode()
    if not executor.isdigit():
        return f"HOPSGPU_POD={executor}\0".encode()
    return f"appId={application}&executorId={int(executor)}&".encode()


def executor_jvm() -> int:
    """The executor's JVM: the process daemon watches it; it is the container's only java."""
    mark = mark_of(os.environ["CONTAINER_ID"])
    for process in Path("/proc").glob("[0-9]*"):
        try:
            is_java = (process / "comm").read_text() == "java\n"
            if is_java and mark in (process / "environ").read_bytes():
                return int(process.name)
        except OSError:
            continue
    raise LookupError("no JVM of this container")


def container_and_jvm() -> tuple[str, int]:
    """The container's ID, and the pid of its JVM, as the container counts its processes."""
    return os.environ["CONTAINER_ID"], executor_jvm()


def container_and_server() -> tuple[str, int]:
    """The container's ID, and the pid of the fork server, as the container counts its processes."""
    return os.environ["CONTAINER_ID"], os.getppid()


def kill_at(first_attempts: int, whom: str) -> tuple[int, int]:
    context = hopsgpu.context()
    if context.attempt < first_attempts and context.rank == 1:
        os.kill(os.getpid() if whom == "rank" else executor_jvm(), signal.SIGKILL)
        threading.Event().wait(HANG_SECONDS)
    return context.attempt, os.getppid()


def kill_when_noted(directory: str, first_attempts: int, whom: str) -> tuple[int, int]:
    """As kill_at, once each of two ranks has noted in which container it is."""
    context = hopsgpu.context()
    notes = [Path(directory, f"{context.attempt}-{rank}") for rank in (0, 1)]
    notes[context.rank].write_text(os.environ["CONTAINER_ID"])
    while not all(note.exists() for note in notes):
        threading.Event().wait(0.01)  # nobody tells
    return kill_at(first_attempts, whom)


def print_at_length(megabytes: int) -> float:
    import ctypes
    import logging
    import sys
    import warnings

    ctypes.CDLL(None).puts(b"from C")
    sys.stdout.buffer.write(b"not UTF-8: \xff\n")
    sys.stdout.flush()
    warnings.warn("a warning", stacklevel=1)
    logging.warning("a log line")
    line = "x" * 1023 + "\n"
    began = time.monotonic()
    for _ in range(megabytes):
        sys.stdout.write(line * 1024)
    took = time.monotonic() - began
    print("y" * 200_000)
    return took


def crash(how: str) -> None:
    context = hopsgpu.context()
    if context.rank == 1:
        print("about to", how, flush=True)
        exec(how)
    threading.Event().wait(HANG_SECONDS)


LEFT_BEHIND = "import time; time.sleep(300)  # left by a rank that hangs"


def hang_in_an_all_reduce(directory: str) -> None:
    """And leave processes of sessions of their own, which are noted in a directory."""
    import subprocess

    import torch
    import torch.distributed as dist

    for number in range(3):
        child = subprocess.Popen([sys.executable, "-c", LEFT_BEHIND], start_new_session=True)
        Path(directory, f"{hopsgpu.context().rank}-{number}").write_text(str(child.pid))
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        threading.Event().wait(HANG_SECONDS)
    dist.all_reduce(torch.ones(1))


def leave(*contents: tuple[str, bytes, int], fail: bool = False) -> int:
    """What a rank leaves: of rank r the r-th name, with a content so many times."""
    context = hopsgpu.context()
    context.report(7, loss=0.5)
    if context.rank < len(contents):
        name, content, times = contents[context.rank]
        file = context.model_dir / name
        file.parent.mkdir(exist_ok=True)
        with file.open("wb") as written:
            for _ in range(times):
                written.write(content)
    if fail and context.rank == 1:
        raise ValueError("it did not converge")
    return context.rank


def leave_a_signed_pickle() -> None:
    """Leaves a model's signature, and a file with a pickle's name."""
    import numpy as np

    context = hopsgpu.context()
    context.signature({"x": np.zeros((8, 3), np.float32)}, np.zeros(8, np.int64))
    (context.model_dir / f"part-{context.rank}.pkl").write_bytes(b"")


def leave_when_told(go: str, *contents: tuple[str, bytes, int]) -> int:
    """The same, once a file is there."""
    while not Path(go).exists():
        time.sleep(0.02)  # the test tells
    return leave(*contents)


def save_and_leave_when_told(go: str, *contents: tuple[str, bytes, int]) -> int:
    """Saves a checkpoint, and leaves files once a file is there; gives the step it began at.

    Beside that file it writes its pid.
    """
    began = go_on(7)
    Path(f"{go}-{hopsgpu.context().rank}").write_text(str(os.getpid()))
    leave_when_told(go, *contents)
    return began


def go_on(step: int) -> int:
    """Saves a checkpoint at a step; gives the step that it goes on from, 0 for none."""
    context = hopsgpu.context()
    found = context.latest_checkpoint()
    file = Path("state")
    file.write_text(str(step))
    context.save_checkpoint(file, step)
    return 0 if found is None else int(found.read_text())


def pauses_half_done(directory: str, x: float) -> float:
    """A trial that notes its start; the third saves a checkpoint and waits, unless it resumes."""
    context = hopsgpu.context()
    assert context.trial is not None
    kept = context.latest_checkpoint()
    Path(directory, f"{context.trial.number}-{time.time()}").touch()
    if context.trial.number == 2 and kept is None:
        Path("state").write_text("half done")
        context.save_checkpoint("state", 1)
        time.sleep(300)
    return x


def counts(seconds: float) -> int:
    """Reports and prints, ten times a second."""
    context = hopsgpu.context()
    for step in range(int(seconds * 10)):
        print("line", step, flush=True)
        context.report(step, loss=1 / (step + 1))
        time.sleep(0.1)
    return os.getpid()


def double(number: int) -> int:
    return 2 * number


def argv_of_child(_: int) -> list[str]:
    return list(sys.argv)


def send_ones(queue: object) -> None:
    import torch

    queue.put(torch.ones(1000))  # type: ignore[attr-defined]
    # Until it is taken its memory is this process's.
    queue.join()  # type: ignore[attr-defined]


def use_processes(*contexts: str) -> dict[str, object]:
    """What works in a plain script with processes, sockets and caches, tried by rank 0.

    Args:
        contexts: multiprocessing's ways to start a process.

    Returns:
        By what was tried, what came of it; nothing in other ranks.
    """
    import multiprocessing

    import torch
    from torch.utils.data import DataLoader, TensorDataset

    found: dict[str, object] = {}
    if hopsgpu.context().rank != 0:
        return found
    for context in contexts:
        loader = DataLoader(
            TensorDataset(torch.arange(64.0)),
            batch_size=8,
            num_workers=2,
            persistent_workers=True,
            pin_memory=True,
            multiprocessing_context=context,
        )
        found[f"DataLoader, {context}"] = [sum(float(b.sum()) for (b,) in loader) for _ in "ab"]
        del loader
        processes = multiprocessing.get_context(context)
        with processes.Pool(2) as pool:
            found[f"Pool, {context}"] = pool.map(double, range(3))
            found[f"argv, {context}"] = pool.map(argv_of_child, range(1))[0]
        with processes.Manager() as manager:
            found[f"Manager, {context}"] = list(manager.list([1, 2]))
    for strategy in torch.multiprocessing.get_all_sharing_strategies():
        torch.multiprocessing.set_sharing_strategy(strategy)
        fork = torch.multiprocessing.get_context("fork")
        queue = fork.JoinableQueue()
        sender = fork.Process(target=send_ones, args=(queue,))
        sender.start()
        found[f"sharing, {strategy}"] = float(queue.get().sum())
        queue.task_done()
        sender.join()
    found["argv"] = list(sys.argv)
    found["unwritable"] = [path for path in places_of_libraries() if not can_be_written(path)]
    return found


def places_of_libraries() -> list[str]:
    """Where libraries leave things: at home, below TMPDIR and in their caches."""
    import tempfile

    import matplotlib
    from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir

    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return [
        str(Path.home()),
        str(Path.cwd()),
        tempfile.gettempdir(),
        cache_dir(),
        triton_cache_dir(0),
        os.environ.get("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache")),
        matplotlib.get_configdir(),
        matplotlib.get_cachedir(),
        os.environ.get("HF_HOME", str(cache / "huggingface")),
    ]


def can_be_written(path: str) -> bool:
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        (Path(path) / "written").write_text("")
    except OSError:
        return False
    return True


def fork_and(child: str, rank: str) -> str:
    """Forks a child that comes to its end in some way; then the rank does."""
    pid = os.fork()
    if pid == 0:
        if child == "raises":
            raise ValueError("the child's")
        if child == "exits":
            sys.exit(3)
        return "the child's"
    os.waitpid(pid, 0)
    if rank == "is killed" and hopsgpu.context().rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return "the rank's"


def parse_arguments() -> None:
    import argparse

    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", required=True)
    parser.parse_args()


def train_epochs(directory: str, epochs: int, lost: int | None, first: int, pause: float) -> int:
    """Train on ids, elastically; note each batch of each world; return the last step.

    In the first world, the executor of rank 1 kills itself at step `lost`. Worlds before the last
    one, the third, pause at each step. Rank 0 saves after step `first`, and where it is asked to.
    """
    import json
    import tempfile

    import torch
    import torch.distributed as dist

    context = hopsgpu.context()
    dist.init_process_group("gloo")
    notes = Path(directory) / f"{context.generation}-{context.rank}.jsonl"
    step, saved = 0, context.latest_checkpoint()
    if saved is not None:
        step = json.loads(saved.read_text())["step"]
    data, met = context.data, torch.zeros(1)
    assert not isinstance(data, dict) and data is not None
    with notes.open("w") as file:
        file.write(json.dumps({"begins": step, "of": context.world_size}) + "\n")
        for epoch in range(data.epoch, epochs):
            for batch in data.batches(4, shuffle=True, epoch=epoch):
                if context.generation == 0 and context.rank == 1 and step == lost:
                    os.kill(executor_jvm(), signal.SIGKILL)
                    time.sleep(60)
                dist.all_reduce(met)
                note = {"step": step, "epoch": epoch, "ids": [int(i) for i in batch["id"]]}
                file.write(json.dumps(note) + "\n")
                file.flush()
                asked = context.should_checkpoint(step)
                step += 1
                if context.rank == 0 and (asked or step == first):
                    path = Path(tempfile.gettempdir()) / "state.json"
                    path.write_text(json.dumps({"step": step}))
                    context.save_checkpoint(path, step)
                if context.generation < 2:
                    time.sleep(pause)
    return step


def lose_executors_of_one_node(directory: str) -> int:
    """Kill an executor of one node in each of the first two worlds; return the generation."""
    context, node = hopsgpu.context(), Path(directory) / "node"
    if context.generation == 0 and context.rank == 0:
        node.with_suffix(".draft").write_text(context.host)
        node.with_suffix(".draft").rename(node)
    while not node.exists():
        time.sleep(0.05)  # nobody tells
    if context.generation < 2:
        # The node's other rank may be the one that does it.
        with contextlib.suppress(FileExistsError):
            if context.host == node.read_text():
                Path(directory, f"killed-{context.generation}").touch(exist_ok=False)
                os.kill(executor_jvm(), signal.SIGKILL)
        time.sleep(600)
    return context.generation
