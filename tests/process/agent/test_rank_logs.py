"""A rank's output from its file to the lines that are shown: real processes write it."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path

from hopsgpu.agent.rank_logs import LineSplitter, follow
from tests.bounds import HANG_SECONDS

MIB = 2**20
PREPARED = "from hopsgpu.rank.entry import prepare_output; prepare_output()\n"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def started(log: Path, code: str, *arguments: str) -> subprocess.Popen[bytes]:
    """A child that writes to a log as a rank does."""
    environment = {name: v for name, v in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-c", PREPARED + code, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )


async def follow_child(
    log: Path, child: subprocess.Popen[bytes], send: Callable[[bytes], Awaitable[None]]
) -> int:
    """Follows a child's log to its end; the exit code."""
    ended = asyncio.Event()
    following = asyncio.create_task(follow(log, ended, send))
    code = await asyncio.to_thread(child.wait)
    ended.set()
    await following
    return code


def followed(tmp_path: Path, code: str) -> tuple[int, bytes]:
    """The exit code of a child, and all that was sent of what it wrote."""
    log = tmp_path / "log"
    chunks: list[bytes] = []

    async def send(chunk: bytes) -> None:
        chunks.append(chunk)

    exit_code = asyncio.run(follow_child(log, started(log, code), send))
    assert max(map(len, chunks), default=0) <= 256 * 1024
    sent = b"".join(chunks)
    assert sent == log.read_bytes()
    return exit_code, sent


def test_output_of_c_and_python_is_in_order(tmp_path: Path) -> None:
    code = """
import ctypes, os, subprocess, sys
libc = ctypes.CDLL(None)
for i in range(50):
    print("print", i)
    libc.puts(f"puts {i}".encode())
    print("error", i, file=sys.stderr)
    os.write(1, f"write {i}\\n".encode())
    libc.dprintf(2, b"dprintf\\n")
subprocess.run(["echo", "child"])
print("last")
"""
    exit_code, sent = followed(tmp_path, code)
    each = (f"print {i}\nputs {i}\nerror {i}\nwrite {i}\ndprintf\n" for i in range(50))
    assert (exit_code, sent.decode()) == (0, "".join(each) + "child\nlast\n")


def test_a_kill_loses_no_whole_line(tmp_path: Path) -> None:
    code = """
import ctypes, os, signal
libc = ctypes.CDLL(None)
for i in range(1000):
    print("line", i)
    libc.puts(b"from C")
print("no end", end="")
os.kill(os.getpid(), signal.SIGKILL)
"""
    exit_code, sent = followed(tmp_path, code)
    assert exit_code == -9
    lines = sent.decode().splitlines()
    assert lines[:2000:2] == [f"line {i}" for i in range(1000)]
    assert lines[1:2000:2] == ["from C"] * 1000


def test_logging_warnings_and_tracebacks_come_as_they_would_locally(tmp_path: Path) -> None:
    code = """
import logging, warnings
logging.getLogger("mine").warning("low memory")
logging.getLogger("mine").info("not shown by default")
warnings.warn("old call", DeprecationWarning)
logging.basicConfig(level=logging.INFO, format="%(levelname)s|%(message)s")
logging.info("now shown")
raise LookupError("nothing here")
"""
    exit_code, sent = followed(tmp_path, code)
    lines = sent.decode().splitlines()
    assert exit_code == 1
    assert lines[0] == "low memory"
    assert lines[1].endswith("DeprecationWarning: old call")
    assert "INFO|now shown" in lines and "not shown by default" not in sent.decode()
    assert lines[-1] == "LookupError: nothing here"


def test_later_output_of_child_processes_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = """
import os, sys
if os.fork() == 0:
    sys.stdin = open(sys.argv[1])  # until the test lets it go on
    sys.stdin.read()
    print("from the child")
    os._exit(0)
print("from the rank")
os._exit(0)
"""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    sent: list[bytes] = []

    async def go() -> None:
        ended = asyncio.Event()
        seen = asyncio.Event()

        async def send(chunk: bytes) -> None:
            sent.append(chunk)
            seen.set()

        child = started(log, code, str(gate))
        following = asyncio.create_task(follow(log, ended, send))
        assert await asyncio.to_thread(child.wait) == 0
        await seen.wait()
        assert b"".join(sent) == b"from the rank\n"
        seen.clear()
        await asyncio.to_thread(gate.write_text, "go on")
        await seen.wait()
        ended.set()
        await following

    asyncio.run(go())
    assert b"".join(sent) == b"from the rank\nfrom the child\n"


def test_200_mb_neither_wait_for_a_slow_driver_nor_fill_memory(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = """
import os
block = b"".join(b"%063d\\n" % i for i in range(1 << 14))
for i in range(200):
    os.write(1, block)
"""
    child = started(log, code)
    digest = hashlib.sha256()
    sizes: list[int] = []

    async def send(chunk: bytes) -> None:
        # Takes nothing before the rank has ended: one that waited for us would never end.
        await asyncio.to_thread(child.wait)
        digest.update(chunk)
        sizes.append(len(chunk))

    tracemalloc.start()
    try:
        assert asyncio.run(follow_child(log, child, send)) == 0
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(sizes) == log.stat().st_size == 200 * MIB
    with log.open("rb") as file:
        assert digest.digest() == hashlib.file_digest(file, "sha256").digest()
    assert peak < 16 * MIB


def test_a_writer_that_never_ends_does_not_keep_the_following(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"first\n")
    sent: list[bytes] = []

    async def go() -> None:
        ended = asyncio.Event()
        ended.set()

        async def send(chunk: bytes) -> None:
            sent.append(chunk)
            with log.open("ab") as file:
                file.write(b"and on\n")

        await asyncio.wait_for(follow(log, ended, send), HANG_SECONDS)

    asyncio.run(go())
    assert sent == [b"first\n"]


def test_a_log_that_the_rank_empties_is_followed_on(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"a long first line\n")
    sent: list[bytes] = []

    async def go() -> None:
        ended = asyncio.Event()

        async def send(chunk: bytes) -> None:
            sent.append(chunk)
            if len(sent) == 1:
                log.write_bytes(b"anew\n")
            else:
                ended.set()

        await follow(log, ended, send)

    asyncio.run(go())
    assert sent == [b"a long first line\n", b"anew\n"]


def test_lines_are_whole_wherever_chunks_end() -> None:
    text = "one\ntwo\r\n\ngrün → 5 €\n".encode() + b"\xff\xfe \xe2\x82\n\x80" + b"last"
    wanted = ["one", "two", "", "grün → 5 €", "\\xff\\xfe \\xe2\\x82", "\\x80last"]
    for size in range(1, len(text) + 1):
        lines = LineSplitter(Clock())
        chunks = [text[start : start + size] for start in range(0, len(text), size)]
        shown = [line for chunk in chunks for line in lines.lines(chunk)] + lines.rest()
        assert shown == wanted, size
        assert lines.rest() == []


def test_a_line_of_any_length_is_shown_in_marked_pieces() -> None:
    line = "0123456789" * MIB
    for size in (1000, 65536, 256 * 1024, len(line) + 6):
        lines = LineSplitter()
        text = f"{line}\nnext\n".encode()
        shown = []
        for start in range(0, len(text), size):
            shown += lines.lines(text[start : start + size])
            assert len(lines._rest) <= 64 * 1024
        *pieces, after = shown
        assert after == "next" and lines.rest() == []
        assert "".join(piece.strip("…") for piece in pieces) == line
        assert max(map(len, pieces)) <= 64 * 1024 + 2
        assert [piece[0] == "…" for piece in pieces] == [False] + [True] * (len(pieces) - 1)
        assert [piece[-1] == "…" for piece in pieces] == [True] * (len(pieces) - 1) + [False]


def test_of_a_progress_bar_the_latest_state_is_shown_each_second() -> None:
    clock = Clock()
    lines = LineSplitter(clock)
    shown = []
    for percent in range(101):
        shown += lines.lines(f"\r{percent:3}%|{'#' * percent}".encode())
        clock.now += 1 / 16
    assert [state[:4] for state in shown] == [f"{p:3}%" for p in range(0, 101, 16)]
    end, after = lines.lines(b"\nepoch 1\n")
    assert end[:4] == "100%" and after == "epoch 1"


def test_a_bar_that_stands_still_is_shown_once_it_is_time() -> None:
    clock = Clock()
    lines = LineSplitter(clock)
    assert lines.lines(b"\r 1%") == [" 1%"]
    assert lines.lines(b"\r 2%") == []
    assert lines.due_state() == []
    clock.now += 1
    assert lines.due_state() == [" 2%"]
    clock.now += 1
    assert lines.due_state() == []
    assert lines.lines(b"\r 3%\r     \rdone\n") == ["done"]


def test_a_bar_without_end_is_not_kept_in_memory() -> None:
    lines = LineSplitter(Clock())
    for step in range(2000):
        lines.lines(f"\r{step} {'.' * 1000}".encode())
        assert len(lines._rest) < 1100
    assert lines.rest()[0].startswith("1999 ")


def test_bars_below_each_other_do_not_move_the_drivers_cursor() -> None:
    clock = Clock()
    lines = LineSplitter(clock)
    shown = []
    for step in range(100):
        shown += lines.lines(f"\r outer {step}\n\r inner {step}\x1b[A".encode())
        clock.now += 0.1
    assert not any("\x1b" in line for line in shown)
    assert 10 <= len(shown) <= 2 * 11
    assert lines.lines(b"\n\x1b[31mred\x1b[0m\x1b[2K\n")[-1] == "\x1b[31mred\x1b[0m"
