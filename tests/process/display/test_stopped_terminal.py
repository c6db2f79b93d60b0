"""The live display at a terminal whose person has stopped it (Ctrl-S): no run waits for that."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from hopsgpu.core.run_values import RunStatus
from hopsgpu.display.live import Live
from hopsgpu.display.nonblocking import wait_for_room
from tests.bounds import HANG_SECONDS
from tests.conftest import until
from tests.unit.terminals import GO, STOP, Person, terminal

TRAINING = RunStatus("run-1", "running", 0, 2, 2, ("node1", "node2"), "", 1.5)
SUCCEEDED = replace(TRAINING, state="succeeded")


@pytest.fixture
def person() -> Iterator[Person]:
    with terminal() as person:
        yield person


@pytest.fixture
def at_terminal(monkeypatch: pytest.MonkeyPatch, person: Person) -> Callable[[], None]:
    """Makes stdout and stderr the terminal: in the test itself, for pytest has others before."""

    def enter() -> None:
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(sys, "stdout", person.stream)
        monkeypatch.setattr(sys, "stderr", person.stream)

    return enter


def done_by_others(work: Callable[[], None]) -> bool:
    """Whether it is done in time, by a thread as a held gang's keeper is one."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(HANG_SECONDS)
    return not thread.is_alive()


def displays() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hopsgpu-display"]


def test_a_run_ends_while_its_terminal_is_stopped(
    person: Person, at_terminal: Callable[[], None]
) -> None:
    at_terminal()
    live = Live()

    def run() -> None:
        live.status(TRAINING)
        live.line(0, "node1", "a line that was not seen yet")
        live.status(SUCCEEDED)

    person.types(STOP)
    assert done_by_others(run)
    # The next one on the same held gang, in plain lines, for the first has the terminal still.
    assert done_by_others(lambda: Live().status(replace(TRAINING, run_id="run-2")))
    assert not person.sees("run-", seconds=0.0)
    person.types(GO)
    assert person.sees("run-1: succeeded")
    assert person.sees("a line that was not seen yet") and person.sees("run-2")
    assert until(lambda: not displays() and sys.stdout is person.stream)
    assert person.sees("\x1b[?25h")  # the cursor


def test_a_terminal_that_is_stopped_while_it_is_drawn_on(
    person: Person, at_terminal: Callable[[], None]
) -> None:
    at_terminal()
    live = Live()
    live.status(TRAINING)
    assert person.sees("running")
    person.types(STOP)
    for step in range(200):
        live.line(0, "node1", f"line {step}")

    # Whoever prints there waits, as at any terminal; the run does not.
    printing = threading.Thread(
        target=sys.stdout.write, args=("a line of the script's\n",), daemon=True
    )
    printing.start()
    assert done_by_others(lambda: live.status(SUCCEEDED))
    assert not person.sees("succeeded", seconds=0.0)
    person.types(GO)
    assert person.sees("run-1: succeeded") and person.sees("a line of the script's")
    assert person.sees("line 199")
    printing.join(HANG_SECONDS)
    assert until(lambda: not displays())
    # What came meanwhile is drawn by the one that was under way, and by the last, twice.
    assert len(re.findall(r"line \d", person.seen)) <= 3 * 12


def test_a_reader_that_does_not_read_holds_up_no_run(
    person: Person, at_terminal: Callable[[], None]
) -> None:
    at_terminal()
    live = Live()
    live.status(TRAINING)
    # What the script itself prints fills the terminal, and waits.
    lines = ["x" * 70] * 2000
    printing = threading.Thread(
        target=sys.stdout.writelines, args=([f"{line}\n" for line in lines],), daemon=True
    )
    printing.start()
    assert until(lambda: not wait_for_room(person.stream.fileno(), 0.0))
    assert done_by_others(lambda: live.status(SUCCEEDED))
    assert person.sees("run-1: succeeded")
    assert until(lambda: person.sees("x" * 71, 0.1) or person.seen.count(lines[0]) == len(lines))
    printing.join(HANG_SECONDS)
    assert until(lambda: not displays())


SCRIPT = """
    import sys
    from hopsgpu.display.live import Live
    from hopsgpu.core.run_values import RunStatus

    live = Live()
    live.status(RunStatus("run-1", "running", 0, 1, 1, ("node1",), "", 1.0))
    sys.stdin.readline()
    live.line(0, "node1", "x" * 60)
"""


def test_a_script_ends_though_its_terminal_is_stopped(person: Person) -> None:
    """Its run goes on, so GPUs are held until Python has ended."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)],
        stdin=subprocess.PIPE,
        stdout=person.stream,
        stderr=person.stream,
        env={**os.environ, "TERM": "xterm"},
        text=True,
    )
    assert process.stdin is not None
    try:
        assert person.sees("running")
        person.types(STOP)
        process.stdin.close()
        assert process.wait(HANG_SECONDS) == 0
        person.types(GO)
        assert not person.sees("Fatal", seconds=0.1)
    finally:
        process.kill()
        process.wait()
