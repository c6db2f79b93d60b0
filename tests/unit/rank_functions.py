"""What tests run in ranks: importable there without the tests' own needs."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

FOREVER = "import time; time.sleep(600)"


def spin() -> None:
    """Like a DataLoader's worker that is busy in __getitem__: looks at nobody."""
    while True:
        sum(range(1000))


def family(file: str) -> None:
    """A rank with a worker, a child and two processes that have left its session."""
    child = subprocess.Popen([sys.executable, "-c", FOREVER])
    daemon = subprocess.Popen([sys.executable, "-c", FOREVER], start_new_session=True)
    forked = os.fork()
    if forked == 0:
        os.setsid()
        time.sleep(600)
    worker = multiprocessing.get_context("fork").Process(target=spin, daemon=True)
    worker.start()
    pids = {
        "rank": os.getpid(),
        "server": os.getppid(),
        "worker": worker.pid,
        "child": child.pid,
        "daemon": daemon.pid,
        "forked": forked,
    }
    draft = Path(file + ".draft")
    draft.write_text(json.dumps(pids))
    draft.rename(file)
    worker.join()


def interpreter() -> dict[str, Any]:
    """What a function can see of the process that it runs in."""
    import logging

    handlers = {n.name: str(signal.getsignal(n)).split(" at ")[0] for n in signal.Signals}
    umask = os.umask(0o077)
    os.umask(umask)
    main = sys.modules["__main__"]
    return {
        "path": sys.path,
        "argv": sys.argv[:2],
        "main": (main.__name__, getattr(main, "__file__", None), main.__spec__),
        "flags": str(sys.flags),
        "signals": handlers,
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "umask": umask,
        "cwd": str(Path.cwd()),
        "files": sorted(p.name for p in Path("/proc/self/fd").iterdir() if p.exists()),
        "stdin": str(Path("/proc/self/fd/0").readlink()),
        "outputs": [str(Path(f"/proc/self/fd/{n}").readlink()) for n in (1, 2)],
        "encodings": [sys.stdout.encoding, sys.stderr.encoding, sys.getfilesystemencoding()],
        "buffering": [sys.stdout.line_buffering, sys.stderr.line_buffering],
        "session": os.getsid(0) == os.getpgid(0) == os.getpid(),
        "environment": dict(os.environ),
        "threads": [t.name for t in threading.enumerate()],
        "tasks": len([*Path("/proc/self/task").iterdir()]),
        "log handlers": len(logging.getLogger().handlers),
        "warnings": [str(f) for f in warnings.filters],
        "nice": os.nice(0),
        "excepthook": sys.excepthook is sys.__excepthook__,
        "authkey": len(multiprocessing.current_process().authkey),
    }


def traces() -> dict[str, Any]:
    """Leaves traces, and tells those that it found."""
    import user_module

    found = {
        "variable": os.environ.get("LEFT"),
        "cwd": Path.cwd().name,
        "path": [p for p in sys.path if "left" in p],
        "module": user_module.seen,
        "umask": os.umask(0),
        "server": os.getppid(),
        "drawn": random.random(),
        "key": bytes(multiprocessing.current_process().authkey),
    }
    os.environ["LEFT"] = "1"
    os.chdir("/")
    sys.path.insert(0, "/left")
    user_module.seen += 1
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return found


def ends_in_order() -> None:
    import atexit

    def late() -> None:
        time.sleep(0.2)
        print("thread")

    atexit.register(print, "exit function")
    threading.Thread(target=late).start()
    sys.stdout.reconfigure(line_buffering=False)  # type: ignore[union-attr]
    print("body")


def exits_with_a_message() -> None:
    sys.exit("what is wrong")


def crashes() -> None:
    print("before")
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs_until(file: str) -> str:
    """Waits in a function that a stack shows, until a file is there."""
    print("here", flush=True)
    while not Path(file).exists():
        time.sleep(0.01)
    return "went on"


def all_reduced() -> tuple[float, bool]:
    """The sum over all ranks, and whether rank 0 was a client of an agent's store."""
    import torch
    from torch import distributed

    distributed.init_process_group("gloo")
    total = torch.ones(1) * (distributed.get_rank() + 1)
    distributed.all_reduce(total)
    port = int(os.environ["MASTER_PORT"])
    listens = [line.split()[1].endswith(f":{port:04X}") for line in listening()]
    distributed.destroy_process_group()
    return total.item(), any(listens)


def listening() -> list[str]:
    """/proc/net/tcp's lines of this process's own listening sockets."""
    inodes = {str(p.readlink()) for p in Path("/proc/self/fd").iterdir() if p.is_symlink()}
    lines = [
        line
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]
    ]
    return [s for s in lines if f"socket:[{s.split()[9]}]" in inodes and s.split()[3] == "0A"]


class Squares:
    """A data set."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index * index, os.getpid()


class Busy(Squares):
    """A data set whose items never come; tells who waits for them."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __getitem__(self, index: int) -> tuple[int, int]:
        Path(f"{self.file}.{os.getpid()}").touch()
        spin()
        raise AssertionError


def loads(context: str) -> tuple[list[int], int]:
    """The squares by a DataLoader of two workers, and how many processes loaded them."""
    from torch.utils.data import DataLoader

    loader = DataLoader(Squares(), batch_size=2, num_workers=2, multiprocessing_context=context)
    items = [pair for batch in loader for pair in zip(*batch, strict=True)]
    return [int(square) for square, _ in items], len({int(pid) for _, pid in items})


def loads_for_ever(file: str) -> None:
    from torch.utils.data import DataLoader

    list(DataLoader(Busy(file), batch_size=2, num_workers=2))


def numbers() -> tuple[int, int, float, list[float], list[float]]:
    """torch's threads, the fork server, and what random generators give."""
    import numpy
    import torch

    drawn = random.random(), list(numpy.random.rand(3)), torch.rand(3).tolist()
    return torch.get_num_threads(), os.getppid(), *drawn


def loaded(module: str) -> bool:
    """Whether a module was there before this function began."""
    return module in sys.modules


def compiles() -> tuple[bool, float]:
    """Whether torch's compiler was there before, and what a function gives that it traced."""
    there = loaded("torch._dynamo")
    import torch

    traced = torch.compile(lambda x: (2 * x).sum(), backend="eager")
    return there, float(traced(torch.ones(3)))


def compilers_directories() -> tuple[str, str, str, str | None]:
    """Where torch's compiler puts what it debugs and keeps, TMPDIR, and the home of triton."""
    import torch._dynamo.config
    import torch._dynamo.package

    knobs = sys.modules.get("triton.knobs")
    return (
        torch._dynamo.config.debug_dir_root,
        torch._dynamo.package.DynamoCache.path_prefix(),
        os.environ["TMPDIR"],
        None if knobs is None else knobs.cache.home_dir,
    )


def gpus_counted() -> int:
    import torch

    return torch.cuda.device_count()


def first_line(asked: float) -> tuple[bool, float]:
    """Whether torch is there already, and seconds from the word to start until it is."""
    there = "torch" in sys.modules
    import torch

    assert torch.Tensor
    return there, time.time() - asked


def managed() -> list[int]:
    """What a manager's process keeps; it is reached by a socket in TMPDIR."""
    with multiprocessing.Manager() as manager:
        kept = manager.list([1])
        kept.append(2)
        return list(kept)


def temporary() -> dict[str, Any]:
    """TMPDIR as a rank has it."""
    import tempfile

    directory = os.environ["TMPDIR"]
    return {
        "TMPDIR": directory,
        "real": os.path.realpath(directory),
        "mode": os.lstat(directory).st_mode,
        "tempfile": tempfile.gettempdir(),
        "managed": managed(),
    }


def tells_tmpdir_and_waits(file: str) -> None:
    draft = Path(file + ".draft")
    draft.write_text(json.dumps(os.environ["TMPDIR"]))
    draft.rename(file)
    time.sleep(600)


def forks(what: str, file: str) -> str:
    """Forks a child that comes to its end in some way, and tells of it what waitpid does.

    Args:
        what: it does.
        file: what the child's exit function would make.
    """
    import atexit

    atexit.register(Path(file).touch)
    child = os.fork()
    if child == 0:
        Path(file).with_name("child").touch()
        if what == "returns":
            return "the child's"
        if what == "raises":
            raise ValueError("the child's")
        if what == "exits":
            sys.exit(7)
        if what == "is unpicklable":
            return threading.Lock()  # type: ignore[return-value]
        os._exit(9)
    _, status = os.waitpid(child, 0)
    ended = os.waitstatus_to_exitcode(status)
    assert not Path(file).exists()
    assert not (Path.cwd().parent / "outcome.json").exists()
    return f"{ended} {Path(file).with_name('child').exists()}"


def forks_and_is_killed(what: str) -> str:
    """Forks a child that comes to its end, and is killed."""
    child = os.fork()
    if child == 0:
        if what == "raises":
            raise ValueError("the child's")
        return "the child's"
    os.waitpid(child, 0)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def parses() -> float:
    import argparse

    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    return float(parser.parse_args().lr)
