"""What is written for readers who may stop reading."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from hopsgpu.core.run_values import RunStatus
from hopsgpu.display.nonblocking import NonblockingWriter
from hopsgpu.display.progress import RunLines, Shielded
from tests.bounds import HANG_SECONDS
from tests.conftest import until
from tests.unit.terminals import GO, STOP, terminal

STATUS = RunStatus("run-1", "running", 0, 2, 2, ("node1",), "", 1.5)
# Far more than a terminal or a pipe takes without a reader.
LINES = [f"line {number}" for number in range(10_000)]


def in_time(work: threading.Thread) -> bool:
    work.start()
    work.join(HANG_SECONDS)
    return not work.is_alive()


def writers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hopsgpu-outlet"]


def test_what_was_written_is_there_when_the_writer_goes_on() -> None:
    with terminal() as person:
        outlet = NonblockingWriter(HANG_SECONDS)
        outlet.write(person.stream, "one\ntwo\n")
        assert person.sees("two")
        reading, writing = os.pipe()
        with open(reading, "rb") as read, open(writing, "w") as stream:  # noqa: PTH123
            outlet.write(stream, "through a pipe\n")
            assert read.peek() == b"through a pipe\n"
    assert until(lambda: not writers())


def test_a_reader_that_does_not_read_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[bool] = []

    def wait(outlet: NonblockingWriter, seconds: float | None) -> bool:
        waits.append(waited(outlet, seconds))
        return waits[-1]

    waited = NonblockingWriter._wait_until_written
    monkeypatch.setattr(NonblockingWriter, "_wait_until_written", wait)
    with terminal() as person:
        shown = RunLines(out=person.stream, err=person.stream)

        def run() -> None:
            for _ in range(5):
                shown.line(0, "node1", *LINES)
            shown.status(STATUS)

        assert in_time(threading.Thread(target=run, daemon=True))
        assert waits == [False]  # one wait, not five
        # It is all there for who reads on.
        assert person.sees("run-1")
        assert person.seen.count("line 9999") == 5


def test_a_stopped_terminal_holds_up_nobody_and_shows_it_later() -> None:
    with terminal() as person:
        shown = RunLines(out=person.stream, err=person.stream)
        person.types(STOP)
        assert in_time(threading.Thread(target=shown.line, args=(0, "node1", "x"), daemon=True))
        assert in_time(threading.Thread(target=shown.status, args=(STATUS,), daemon=True))
        assert not person.sees("node1", seconds=0.0)
        person.types(GO)
        assert person.sees("running")
        assert "[rank 0 node1] x" in person.seen
        # Again at once, now that nothing is left.
        shown.line(0, "node1", "y")
        assert person.sees("[rank 0 node1] y")


def test_of_more_than_is_kept_the_number_is_told() -> None:
    with terminal() as person:
        outlet = NonblockingWriter(patience=0.1, most=100)
        person.types(STOP)
        outlet.write(person.stream, "a" * 99 + "\n")
        for _ in range(1200):
            outlet.write(person.stream, "lost\nlost\n")
        person.types(GO)
        assert person.sees("are missing here")
        assert "a" * 99 in person.seen and "lost" not in person.seen
        assert "hopsgpu: 2,400 lines are missing here, because nobody read them" in person.seen
        outlet.write(person.stream, "again\n")
        assert person.sees("again")


def test_a_reader_that_is_gone_is_told_of() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    shown = Shielded(RunLines(out=open(writing, "w")))  # noqa: PTH123, SIM115
    shown.line(0, "node1", "x")
    assert shown.problem is not None and "BrokenPipeError" in shown.problem


def test_a_terminal_that_is_gone_while_it_was_stopped_is_told_of() -> None:
    outlet = NonblockingWriter(patience=0.1)
    with terminal() as person:
        stream = os.fdopen(os.dup(person.stream.fileno()), "w")
        person.types(STOP)
        outlet.write(stream, "x\n")
    assert until(lambda: not writers())
    with pytest.raises(OSError):
        outlet.write(stream, "y\n")


def test_what_has_no_reader_is_written_at_once(tmp_path: Path) -> None:
    class Own:
        """A stream of the user's."""

        def __init__(self) -> None:
            self.threads: list[str] = []

        def write(self, text: str) -> None:
            self.threads.append(threading.current_thread().name)

        def flush(self) -> None:
            return

    own = Own()
    NonblockingWriter().write(own, "x\n")
    assert own.threads == [threading.current_thread().name]
    with (tmp_path / "log").open("w") as file:
        NonblockingWriter().write(file, "x\n")
        assert (tmp_path / "log").read_text() == "x\n"
    NonblockingWriter().write(io.StringIO(), "x\n")


SCRIPT = """
    import sys
    from hopsgpu.display.progress import RunLines
    from hopsgpu.core.run_values import RunStatus

    lines = RunLines()
    for state in ("running", sys.argv[1]):
        lines.line(0, "node1", *(["x" * 60] * 5_000))
        lines.status(RunStatus("run-1", state, 0, 1, 1, ("node1",), "", 1.0))
    print("ended", file=sys.stderr)
"""


@pytest.mark.parametrize(("state", "lines"), [("succeeded", 10_000), ("releasing", None)])
def test_a_script_that_ends_leaves_what_its_ended_run_wrote(state: str, lines: int | None) -> None:
    """A pager that is at its first page. Of a run that goes on, nothing may keep its GPUs."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), state],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    with process:
        said = iter(process.stderr.readline, "")
        assert any(line == "ended\n" for line in said)
        if lines is None:
            assert process.wait(HANG_SECONDS) == 0
        shown = process.stdout.read()
        assert process.wait(HANG_SECONDS) == 0
        assert "Fatal" not in process.stderr.read()
    if lines is not None:
        assert shown.count("\n") == lines
