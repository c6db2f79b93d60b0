"""What the ranks and trials of the fault matrix run; imports neither pytest nor PySpark.

They talk with the tests by files of a directory: each writes a note of itself, all wait for the
file `go`, or that of their number (`go-1`), and the one that the file `order` names does what is in
it, and leaves `performed`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

import hopsgpu
from tests.bounds import HANG_SECONDS

GO = "go"
ORDER = "order"
PERFORMED = "performed"
_LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class Note:
    """What a rank, or the rank of a trial, has said of itself.

    Attributes:
        number: of the rank, or of the trial.
        world: number of the world, or of the attempt.
        pid: ID of the process, as its container counts its processes.
    """

    number: int
    world: int
    pid: int
    host: str
    container: str
    at: float


def notes_in(directory: Path) -> list[Note]:
    """Return the notes of all ranks so far, the earliest first."""
    found = [Note(**json.loads(file.read_text())) for file in directory.glob("*.note")]
    return sorted(found, key=lambda note: note.at)


def train(directory: str, number: int | None = None) -> int:
    """Wait for the tests' word; misbehave first, if that is the order."""
    context, place = hopsgpu.context(), Path(directory)
    number = context.rank if number is None else number
    is_first = not any(note.number == number for note in notes_in(place))
    _write_note(place, number)
    if context.trial is None:
        (context.model_dir / f"part-{number}").write_bytes(b"w" * 1000)
    step = -1
    while not any((place / name).exists() for name in (GO, f"{GO}-{number}")):
        if is_first and (what := _order_for(place, number)):
            is_first = False
            _perform(place, what)
        time.sleep(_LOOK_SECONDS)  # the tests' files tell
        step += 1
        if context.should_checkpoint(step) and context.rank == 0:
            state = Path("state")
            state.write_text(str(step))
            context.save_checkpoint(state, step)
    return context.world_size


def trial(x: float, directory: str) -> float:
    """Do the same as `train` in a trial of a search."""
    told = hopsgpu.context().trial
    assert told is not None, "search runs it"
    train(directory, told.number)
    return x


def _write_note(place: Path, number: int) -> None:
    context = hopsgpu.context()
    container = os.environ["CONTAINER_ID"]
    note = Note(number, context.generation, os.getpid(), context.host, container, time.time())
    # Two pods may count two processes by the same ID.
    file = place / f"{number}-{uuid.uuid4().hex}"
    file.write_text(json.dumps(asdict(note)))
    file.rename(file.with_suffix(".note"))


def _order_for(place: Path, number: int) -> str:
    """Return what the tests have ordered this rank to do, if anything."""
    try:
        whom, _, what = (place / ORDER).read_text().partition(" ")
    except FileNotFoundError:
        return ""
    return what if int(whom) == number else ""


def _perform(place: Path, what: str) -> None:
    (place / PERFORMED).touch()
    if what == "raises":
        raise ValueError("it has had enough")
    if what == "exits":
        sys.exit(9)
    if what == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "hangs":
        threading.Event().wait(HANG_SECONDS)
    if what == "floods":
        line = "x" * 1023 + "\n"
        for _ in range(64):
            sys.stdout.write(line * 1024)
        sys.stdout.flush()
    if what == "fills memory":
        kept = bytearray(b"x") * (600 * 2**20)
        threading.Event().wait(HANG_SECONDS)
        assert kept
    if what == "fills its disk":
        with Path("/dev/full").open("w") as full:
            full.write("one byte is too many")
    if what == "loses its GPU":
        raise RuntimeError("CUDA error: GPU is lost")
