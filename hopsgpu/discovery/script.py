#!/usr/bin/env python3
"""Tells Spark which GPUs an executor may use.

Spark runs this file in the container's directory, without arguments. How many GPUs to give
out is the number at the end of the name under which it was shipped (`gpus-2`). It needs
Python 3.9 and the NVIDIA driver's `nvidia-smi`, and nothing of hopsgpu.

YARN grants a count of GPUs and no device, and without container isolation every container
of a node sees all of them. So a GPU is given out under an flock on a file of its own, in a
directory that all users of the node share. A small keeper process inherits the lock and ends
with the executor; whatever ends the keeper, the kernel drops the lock.

Prints `{"name": "gpu", "addresses": [UUID, …]}`, and leaves the UUIDs in the container's
directory for the agent.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import subprocess
import sys
import time
from pathlib import Path

GIVEN_OUT = "hopsgpu-gpus.json"
LEASES = "/tmp/hopsgpu-gpu-leases"
# The ResourceManager can free a GPU before the process that had it is gone.
PATIENCE_SECONDS = 20.0
_POLL_SECONDS = 0.2
_SMI_SECONDS = 30


class Failure(Exception):
    """Why no GPU is given out; Spark logs it and gives up the executor."""


def amount_of(name: str) -> int:
    """GPUs to give out, by the name under which the script was shipped."""
    match = re.search(r"-([1-9][0-9]*)$", name)
    if match is None:
        raise Failure(f"{name} does not end in -AMOUNT, as gpus-2 does")
    return int(match.group(1))


def visible_gpus() -> list[str]:
    """UUIDs of the GPUs that this container sees."""
    command = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, timeout=_SMI_SECONDS, check=True)
    except FileNotFoundError:
        raise Failure("no nvidia-smi on this node: has it a GPU driver?") from None
    except subprocess.TimeoutExpired:
        raise Failure(f"nvidia-smi hung for {_SMI_SECONDS} s") from None
    except subprocess.CalledProcessError as error:
        said = (error.stdout + error.stderr).decode(errors="replace").strip()
        raise Failure(f"nvidia-smi failed ({said})") from None
    lines = [line.strip() for line in answer.stdout.decode(errors="replace").splitlines()]
    return [line for line in lines if re.match(r"(GPU|MIG)-[0-9A-Za-z-]+$", line)]


def lease_directory() -> Path:
    """The node's directory of locks, made for all users where it is not there yet."""
    # A fixed place: a TMPDIR of their own would have two applications share nothing.
    path = Path(os.environ.get("HOPSGPU_LEASE_DIR") or LEASES)
    try:
        path.mkdir()
    except FileExistsError:
        if path.is_symlink() or not path.is_dir():
            raise Failure(f"{path} is not a directory: remove it") from None
    else:
        path.chmod(0o1777)
    return path


def open_lock(path: Path) -> int:
    """A descriptor of a GPU's lock file, made for all users where it is not there yet."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        try:
            return os.open(path, flags)
        except FileNotFoundError:
            pass
        try:
            descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            continue  # another executor was quicker: open that one
        os.fchmod(descriptor, 0o666)
        return descriptor


def try_lease(directory: Path, uuid: str) -> int | None:
    """A descriptor that holds the GPU's lock, or None where another executor has it."""
    path = directory / uuid
    descriptor = open_lock(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), path.lstat()):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    # Another's, or a file that a cleaner of /tmp has just removed: asked for again if need be.
    os.close(descriptor)
    return None


def lease(amount: int, patience: float) -> dict[str, int]:
    """{UUID: descriptor} of GPUs that nobody else has, exactly the amount."""
    directory = lease_directory()
    visible = visible_gpus()
    held: dict[str, int] = {}
    until = time.monotonic() + patience
    while True:
        for uuid in visible:
            if len(held) < amount and uuid not in held:
                descriptor = try_lease(directory, uuid)
                if descriptor is not None:
                    held[uuid] = descriptor
        if len(held) == amount:
            return held
        if len(visible) < amount or time.monotonic() > until:
            raise Failure(
                f"{amount} GPUs were asked for; this node shows {len(visible)}"
                f" ({', '.join(visible) or 'none'}), and {len(held)} of them are not leased to"
                " other executors"
            )
        # Another executor's end is nothing that anybody tells us of.
        time.sleep(_POLL_SECONDS)


def keep(executor: int) -> None:
    """Leaves a process behind that holds the locks until the executor has ended."""
    descriptor = os.pidfd_open(executor)
    if os.fork() != 0:
        return
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    select.select([descriptor], [], [])
    os._exit(0)


def main() -> int:
    try:
        held = lease(amount_of(Path(sys.argv[0]).name), PATIENCE_SECONDS)
        # Spark's executor runs the script directly: our parent is the JVM.
        keep(os.getppid())
    except (Failure, OSError) as error:
        print(f"hopsgpu discovery: {error}", file=sys.stderr)
        return 1
    Path(GIVEN_OUT).write_text(json.dumps(sorted(held)))
    print(json.dumps({"name": "gpu", "addresses": sorted(held)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
