"""A rank prints without end: its log is bounded, and a stop does not wait for its output."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hopsgpu.agent.rank_logs import OutputCut, follow, follow_output
from hopsgpu.attempts.attempt_watcher import AttemptWatcher, Step, WatchBounds
from hopsgpu.attempts.outcome import RankEnds
from hopsgpu.attempts.rank_output import Outputs
from hopsgpu.control.channel import Message
from hopsgpu.core.gang import GangExecutor, World, assign_ranks
from hopsgpu.core.metrics import MetricsChunk
from hopsgpu.core.output_limits import END_BYTES, REST_SECONDS
from hopsgpu.display.base import NoDisplay
from hopsgpu.errors import StoreError
from hopsgpu.storage.error_messages import UNSUPPORTED
from hopsgpu.storage.lake import LakePath

MIB = 2**20
PRINTING = """
import os
line = 0
while True:
    os.write(1, b"".join(b"%063d\\n" % n for n in range(line, line + 2**12)))
    line += 2**12
"""


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def printed(log: Path, size: int) -> None:
    """Has a process print without end, and ends it once its log has a size."""
    with log.open("ab") as out, subprocess.Popen([sys.executable, "-c", PRINTING], stdout=out) as p:
        while log.stat().st_size < size:
            os.sched_yield()
        p.kill()


def world() -> World:
    return assign_ranks([GangExecutor(0, "container_0", "node", "10.0.0.1", ())], 1)


def test_after_a_stop_the_rest_of_the_output_is_sent_for_ten_seconds(tmp_path: Path) -> None:
    log, clock, sent = tmp_path / "log", Clock(), list[bytes]()
    printed(log, 64 * MIB)
    stopping, ended = asyncio.Event(), asyncio.Event()
    stopping.set()
    ended.set()

    async def send(chunk: bytes) -> None:
        # The driver needs a second for each chunk.
        clock.now += 1.0
        sent.append(chunk)

    missing = asyncio.run(follow_output(log, ended, send, OutputCut(2**30, stopping, clock)))
    content, received = log.read_bytes(), b"".join(sent)
    assert clock.now <= REST_SECONDS + 4
    begin, note, end = received.partition(b"hopsgpu: ")
    note, _, end = (note + end).partition(b"\n")
    assert f"{missing:,} bytes of the output are missing here".encode() in note
    assert b"not sent within 10 s after the rank was stopped" in note
    assert content.endswith(end) and len(end) > END_BYTES - 2**16
    # The note interrupts one line at most.
    assert content.startswith(begin.rstrip(b"\n")) and end.startswith(b"0")
    assert len(begin.rstrip(b"\n")) + missing + len(end) <= len(content) <= len(received) + missing


def test_messages_do_not_put_off_the_end_of_a_run_that_is_cancelled() -> None:
    bounds = WatchBounds()
    watcher = AttemptWatcher(RankEnds(world(), str), None, bounds)
    watcher.start_timeout(0.0)
    assert watcher.decide(is_cancelled=True, now=100.0) is Step.STOP
    now = 100.0
    for kind in ("output", "record", "reports", "warning") * 1000:
        now += 1.0
        watcher.record_message(Message(kind, {"rank": 0}), now)
        if watcher.decide(is_cancelled=True, now=now) is Step.GIVE_UP:
            break
    assert now <= 100.0 + bounds.stop + REST_SECONDS + 1.0


def test_output_that_is_not_sent_does_not_fill_the_nodes_disk(tmp_path: Path) -> None:
    log, limit = tmp_path / "log", 8 * MIB
    sent, ended = list[bytes](), asyncio.Event()

    async def send(chunk: bytes) -> None:
        # The rank prints 2 MiB while the driver takes one chunk.
        if log.stat().st_size < 64 * MIB:
            await asyncio.to_thread(printed, log, log.stat().st_size + 2 * MIB)
        else:
            ended.set()
        sent.append(chunk)

    printed(log, 2 * MIB)
    missing = asyncio.run(follow_output(log, ended, send, OutputCut(limit)))
    received = b"".join(sent)
    assert missing > 32 * MIB
    assert b"the rank wrote faster than they could be sent" in received
    assert log.read_bytes().endswith(received[-END_BYTES:])
    assert log.stat().st_blocks * 512 <= limit + 4 * MIB


def test_what_is_cut_of_reports_leaves_whole_lines(tmp_path: Path) -> None:
    log, sent, ended = tmp_path / "metrics", list[bytes](), asyncio.Event()
    log.write_bytes(b'{"time": 1, "step": 1, "metrics": {"loss": 0.5}}\n' * 200_000)
    ended.set()

    async def send(chunk: bytes) -> None:
        sent.append(chunk)

    assert asyncio.run(follow(log, ended, send, OutputCut(4 * MIB))) > 6 * MIB
    assert len(set(b"".join(sent).splitlines())) == 1


def test_a_line_of_reports_without_end_is_not_kept_in_memory() -> None:
    chunk = MetricsChunk()
    for _ in range(64):
        chunk.add(b"x" * MIB)
    assert len(chunk._rest) < 4 * MIB


def refuse_append(self: LakePath, content: bytes, at: int) -> int:
    raise StoreError("no append here", kind=UNSUPPORTED)


@pytest.mark.parametrize("can_append", [True, False])
@pytest.mark.parametrize("is_followed", [True, False])
def test_a_log_has_its_beginning_and_its_end_and_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_append: bool, is_followed: bool
) -> None:
    if not can_append:
        monkeypatch.setattr(LakePath, "append", refuse_append)
    lake, limit = LakePath(f"file://{tmp_path}/logs"), MIB
    content = b"".join(b"%063d\n" % n for n in range(2**16 + 5))
    with Outputs(world(), NoDisplay(), log_limit=limit) as outputs:
        for at in range(0, len(content), 10_007):
            outputs.add(0, content[at : at + 10_007])
            outputs.add_record(0, content[at : at + 10_007])
            if is_followed and at % 7 == 0:
                for _, append in outputs.pending_appends(lake):
                    append()
        for spool in (outputs._ranks[0].spool, outputs._records[0]):
            assert spool._file is not None
            assert os.fstat(spool._file.fileno()).st_size == limit
        sizes = outputs.sizes()
        assert "metrics-0.jsonl has only the first and the last" in " ".join(outputs.warnings(0))
        logs = outputs.take_over()
    for _, upload in logs.uploads(lake):
        upload()
    kept = (Path(lake.path) / "rank-0.log").read_bytes()
    missing = len(content) - limit
    note = f"\nhopsgpu: {missing:,} bytes of the output are missing here: spark.hopsgpu.log.limit"
    before, found, after = kept.partition(note.encode())
    assert found and before == content[: limit // 2]
    assert after.partition(b"\n")[2] == content[-limit // 2 :]
    # Who follows the log waits for so many bytes.
    assert sizes["rank-0.log"] <= len(kept)
    record = (Path(lake.path) / "metrics-0.jsonl").read_bytes()
    assert record == content[: limit // 2] + b"\n" + content[-limit // 2 :]
