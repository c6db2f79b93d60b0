"""The driver's side of ranks' output: what is shown, and what comes to the lake."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import io
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hopsgpu.agent.rank_logs import follow
from hopsgpu.attempts.rank_output import Logs, Outputs, OutputSpool, RankOutput
from hopsgpu.control.channel import new_secret
from hopsgpu.control.peer import DriverEndpoint, connect_to_driver
from hopsgpu.control.server import serve
from hopsgpu.core.gang import GangExecutor, World, assign_ranks
from hopsgpu.core.gpu_usage import GpuSample
from hopsgpu.core.metrics import MetricsChunk, report_line, sample_line
from hopsgpu.display.base import NoDisplay
from hopsgpu.display.progress import RunLines, Shielded
from hopsgpu.errors import StoreError
from hopsgpu.storage.lake import LakePath
from tests.bounds import HANG_SECONDS

MIB = 2**20


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def world(*hosts: str) -> World:
    containers = [
        GangExecutor(key, f"container_{key}", host, "10.0.0.1", (f"GPU-{key}",))
        for key, host in enumerate(hosts)
    ]
    return assign_ranks(containers, 1)


@pytest.fixture
def lake(tmp_path: Path) -> LakePath:
    return LakePath(f"file://{tmp_path}/runs/r/logs")


def kept(lake: LakePath) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(lake.path).iterdir()}


def open_spools() -> int:
    """Files that this process has open in its directory of temporary files."""
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            count += str(link.readlink()).startswith(tempfile.gettempdir())
    return count


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    yield
    assert open_spools() == 0
    assert list(directory.iterdir()) == []


def bring(logs: Logs, lake: LakePath) -> None:
    """Uploads all, and then raises the first problem."""
    problems = []
    for url, upload in logs.uploads(lake):
        assert url.startswith(lake.url)
        try:
            upload()
        except StoreError as error:
            problems.append(error)
    if problems:
        raise problems[0]


def test_each_line_is_shown_with_its_rank_and_host_and_all_is_kept(lake: LakePath) -> None:
    out = io.StringIO()
    with Outputs(world("node1", "node2"), RunLines(out=out)) as outputs:
        outputs.add(1, b"loss 0.5\nlo")
        outputs.add(0, "grün\n\xff".encode("latin-1"))
        outputs.add(1, b"ss 0.4\n")
        outputs.add(1, b"no end")
        outputs.record_end(0)
        outputs.record_end(1)
        assert open_spools() == 2
        logs = outputs.take_over()
    assert open_spools() == 2
    bring(logs, lake)
    assert open_spools() == 0
    assert out.getvalue().splitlines() == [
        "[rank 1 node2] loss 0.5",
        "[rank 0 node1] gr\\xfcn",
        "[rank 1 node2] loss 0.4",
        "[rank 0 node1] \\xff",
        "[rank 1 node2] no end",
    ]
    assert kept(lake) == {
        "rank-0.log": b"gr\xfcn\n\xff",
        "rank-1.log": b"loss 0.5\nloss 0.4\nno end",
    }


def test_a_rank_that_wrote_nothing_has_an_empty_log(lake: LakePath) -> None:
    with Outputs(world("node1"), NoDisplay()) as outputs:
        outputs.record_end(0)
        logs = outputs.take_over()
    assert open_spools() == 0
    bring(logs, lake)
    assert kept(lake) == {"rank-0.log": b""}


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, ZeroDivisionError])
def test_output_that_is_not_taken_over_is_removed(error: type[BaseException] | None) -> None:
    outputs = Outputs(world("node1"), NoDisplay())
    expected = contextlib.nullcontext() if error is None else pytest.raises(error)
    with expected, outputs:
        outputs.add(0, b"some\n")
        outputs.add_record(0, b"{}\n")
        assert open_spools() == 2
        if error is not None:
            raise error
    assert open_spools() == 0


def test_a_lost_executors_log_says_so_in_its_last_line(lake: LakePath) -> None:
    out = io.StringIO()
    with Outputs(world("node1", "node2"), RunLines(out=out)) as outputs:
        outputs.add(1, b"step 1\nstep 2, and th")
        outputs.record_loss(1, "no heartbeat for 30 s")
        outputs.record_loss(0, "")
        logs = outputs.take_over()
    bring(logs, lake)
    said = (
        "hopsgpu: the executor of rank 1 on node2 was lost (no heartbeat for 30 s);"
        " the end of its output may be missing"
    )
    assert kept(lake)["rank-1.log"].decode() == f"step 1\nstep 2, and th\n{said}\n"
    assert "(its connection ended)" in kept(lake)["rank-0.log"].decode()
    assert out.getvalue().splitlines()[:3] == [
        "[rank 1 node2] step 1",
        "[rank 1 node2] step 2, and th",
        f"[rank 1 node2] {said}",
    ]


def test_a_display_that_fails_harms_no_log(lake: LakePath) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError("closed")

    shown = Shielded(RunLines(out=Closed()))
    with Outputs(world("node1"), shown) as outputs:
        for number in range(100):
            outputs.add(0, b"line %d\n" % number)
        logs = outputs.take_over()
    bring(logs, lake)
    assert kept(lake)["rank-0.log"].count(b"\n") == 100
    assert shown.problem is not None and "closed" in shown.problem


class FullDisk:
    """A file on a disk that takes so many bytes more."""

    def __init__(self, file: Any, room: int) -> None:
        self._file = file
        self._room = room

    def write(self, data: Any) -> int:
        if self._room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self._file.write(data[: self._room])
        self._room -= written
        return int(written)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def test_full_disk_at_the_driver_is_an_error_of_the_log(
    lake: LakePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tempfile.TemporaryFile
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **options: FullDisk(real(**options), 10))
    out = io.StringIO()
    with Outputs(world("node1"), RunLines(out=out)) as outputs:
        for _ in range(3):
            outputs.add(0, b"1234567\n")
        logs = outputs.take_over()
    with pytest.raises(StoreError, match=r"rank-0\.log .* 14 bytes.*No space"):
        bring(logs, lake)
    assert kept(lake)["rank-0.log"] == b"1234567\n12"
    assert out.getvalue().count("1234567") == 3


def test_no_file_can_be_made_at_the_driver(lake: LakePath, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    spool = OutputSpool()
    spool.write(b"lost\n")
    lake.make()
    with pytest.raises(StoreError, match=" 5 bytes.*Too many open files"):
        spool.upload(lake / "rank-0.log")


def test_a_lake_that_refuses_one_log_gets_the_others(lake: LakePath) -> None:
    lake.make()
    (Path(lake.path) / "rank-0.log").mkdir()
    with Outputs(world("node1", "node2"), NoDisplay()) as outputs:
        outputs.add(0, b"zero\n")
        outputs.add(1, b"one\n")
        logs = outputs.take_over()
    with pytest.raises(StoreError, match=r"rank-0\.log"):
        bring(logs, lake)
    assert (Path(lake.path) / "rank-1.log").read_bytes() == b"one\n"


def test_a_bar_goes_on_while_nothing_comes() -> None:
    out = io.StringIO()
    clock = Clock()
    with Outputs(world("node1"), RunLines(out=out), clock) as outputs:
        outputs.add(0, b"\r 1%")
        outputs.add(0, b"\r 2%")
        outputs.refresh()
        clock.now += 1
        outputs.refresh()
        outputs.refresh()
    assert out.getvalue() == "[rank 0 node1]  1%\n[rank 0 node1]  2%\n"


def test_two_million_lines_are_shown_in_order() -> None:
    class Count(io.TextIOBase):
        encoding = "utf-8"
        lines = 0
        last = ""

        def write(self, text: str) -> int:
            self.lines += text.count("\n")
            self.last = text[-30:]
            return len(text)

    out = Count()
    output = RankOutput(0, "node1", RunLines(out=out))
    chunk = b"".join(b"%06d\n" % number for number in range(20_000))
    for _ in range(100):
        output.add(chunk)
    output.finish()
    output.spool.close()
    assert out.lines == 2_000_000
    assert out.last.endswith("019999\n")


PRINTS = """
import ctypes, sys
from hopsgpu.rank.entry import prepare_output
prepare_output()
libc = ctypes.CDLL(None)
for number in range(20_000):
    print("stdout", number)
    print("stderr", number, file=sys.stderr)
libc.puts(b"\\xff from C")
ctypes.string_at(0)
"""


def test_from_a_crashing_rank_over_the_channel_to_screen_and_lake(
    tmp_path: Path, lake: LakePath
) -> None:
    log = tmp_path / "log"

    async def agent(driver: DriverEndpoint) -> None:
        channel = await connect_to_driver(driver)
        ended = asyncio.Event()
        with log.open("ab") as file:
            command = [sys.executable, "-c", PRINTS]
            rank = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        send = functools.partial(channel.send, "output")
        following = asyncio.create_task(follow(log, ended, send))
        assert await asyncio.to_thread(rank.wait) == -signal.SIGSEGV
        ended.set()
        await following
        await channel.send("ended")
        await channel.close()

    out = io.StringIO()
    secret = new_secret()
    with (
        serve(secret, "127.0.0.1") as server,
        Outputs(world("node1"), RunLines(out=out)) as outputs,
    ):
        driver = DriverEndpoint("127.0.0.1", server.port, secret, None)
        talking = threading.Thread(target=lambda: asyncio.run(agent(driver)))
        talking.start()
        kind = ""
        while kind != "ended":
            event = server.next_event(HANG_SECONDS)
            assert event is not None and event.message is not None
            kind = event.message.kind
            if kind == "output":
                outputs.add(0, event.message.payload)
        outputs.record_end(0)
        talking.join()
        logs = outputs.take_over()
    bring(logs, lake)
    shown = [line.removeprefix("[rank 0 node1] ") for line in out.getvalue().splitlines()]
    pairs = (pair for n in range(20_000) for pair in (f"stdout {n}", f"stderr {n}"))
    assert shown[:40_001] == [*pairs, "\\xff from C"]
    assert shown[40_001] == "Fatal Python error: Segmentation fault"
    assert kept(lake)["rank-0.log"] == log.read_bytes()


def test_reports_and_samples_are_folded_and_recorded(lake: LakePath) -> None:
    told: list[str] = []
    with Outputs(world("node1", "node2"), NoDisplay()) as outputs:
        metrics_chunk = MetricsChunk()
        lines = [report_line(5, {"loss": 0.5}, 1.0)]
        lines += [sample_line(GpuSample(second, "GPU-1", 0.0)) for second in range(20)]
        for line in lines:
            outputs.add_record(1, line)
            metrics_chunk.add(line)
        outputs.add_reports(1, metrics_chunk.flush())
        assert outputs.metrics() == ({}, {"step": 5, "loss": 0.5, "gpu.0.utilisation": 0.0})
        assert (outputs.utilisation(0), outputs.utilisation(1)) == (None, 0.0)
        told = [*outputs.warnings(0), *outputs.warnings(1)]
        logs = outputs.take_over()
    bring(logs, lake)
    assert len(told) == 1 and "GPU-1 idled for 100% of 19 s" in told[0]
    assert set(kept(lake)) == {"rank-0.log", "rank-1.log", "metrics-1.jsonl"}
    assert kept(lake)["metrics-1.jsonl"] == b"".join(lines)


def follow_all(outputs: Outputs, lake: LakePath) -> list[str]:
    """Brings what has grown to the lake; the names of the files."""
    works = outputs.pending_appends(lake)
    for _, work in works:
        work()
    return [url.rpartition("/")[2] for url, _ in works]


def test_a_log_grows_on_the_lake_while_the_rank_writes(
    lake: LakePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[str, int]] = []
    upload, append = LakePath.upload, LakePath.append

    def note_upload(self: LakePath, source: Path) -> None:
        written.append(("upload", 0))
        upload(self, source)

    def note_append(self: LakePath, content: bytes, at: int) -> int:
        written.append(("append", len(content)))
        return append(self, content, at)

    monkeypatch.setattr(LakePath, "upload", note_upload)
    monkeypatch.setattr(LakePath, "append", note_append)
    with Outputs(world("node1", "node2"), NoDisplay()) as outputs:
        assert follow_all(outputs, lake) == []
        outputs.add(0, b"one\n")
        assert outputs.sizes() == {"rank-0.log": 4, "rank-1.log": 0}
        assert follow_all(outputs, lake) == ["rank-0.log"]
        assert kept(lake) == {"rank-0.log": b"one\n"}
        assert follow_all(outputs, lake) == []
        outputs.add(0, b"two")
        outputs.add_record(0, b"{}\n")
        assert follow_all(outputs, lake) == ["rank-0.log", "metrics-0.jsonl"]
        assert kept(lake)["rank-0.log"] == b"one\ntwo"
        outputs.add(0, b" three\n")
        outputs.add(1, b"only at the end\n")
        logs = outputs.take_over()
    assert written == [("append", 4), ("append", 3), ("append", 3)]
    bring(logs, lake)
    assert written[3:] == [("append", 7), ("upload", 0)]
    assert kept(lake) == {
        "rank-0.log": b"one\ntwo three\n",
        "rank-1.log": b"only at the end\n",
        "metrics-0.jsonl": b"{}\n",
    }


def test_a_large_output_comes_in_bounded_parts(
    lake: LakePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    append = LakePath.append

    def note(self: LakePath, content: bytes, at: int) -> int:
        sizes.append(len(content))
        return append(self, content, at)

    monkeypatch.setattr(LakePath, "append", note)
    with Outputs(world("node1"), NoDisplay()) as outputs:
        for number in range(10):
            outputs.add(0, bytes([number]) * MIB)
        follow_all(outputs, lake)
        assert sizes == [4 * MIB, 4 * MIB, 2 * MIB]
        bring(outputs.take_over(), lake)
    assert kept(lake)["rank-0.log"] == b"".join(bytes([n]) * MIB for n in range(10))


def test_a_lake_that_refuses_for_a_while_has_all_in_the_end(lake: LakePath) -> None:
    lake.make()
    place = Path(lake.path) / "rank-0.log"
    with Outputs(world("node1"), NoDisplay()) as outputs:
        outputs.add(0, b"one\n")
        place.mkdir()
        follow_all(outputs, lake)
        place.rmdir()
        outputs.add(0, b"two\n")
        follow_all(outputs, lake)
        assert kept(lake) == {"rank-0.log": b"one\ntwo\n"}
        # Somebody else's writing, or a file system that lost some: it is made anew.
        place.write_bytes(b"o")
        outputs.add(0, b"three\n")
        follow_all(outputs, lake)
        assert kept(lake) == {"rank-0.log": b"o"}
        logs = outputs.take_over()
    bring(logs, lake)
    assert kept(lake) == {"rank-0.log": b"one\ntwo\nthree\n"}


@pytest.mark.parametrize("kind", ["quota", "unreachable", "permission"])
@pytest.mark.parametrize("came", [b"on", b"one\n"])
def test_output_on_the_lake_stays_if_the_rest_is_refused(
    lake: LakePath, monkeypatch: pytest.MonkeyPatch, kind: str, came: bytes
) -> None:
    append = LakePath.append

    def refuse(self: LakePath, content: bytes, at: int) -> int:
        if at == 0:
            append(self, came, at)
            if content == came:
                return len(came)
        raise StoreError(f"cannot add to {self.url}: refused", kind)

    monkeypatch.setattr(LakePath, "append", refuse)
    with Outputs(world("node1"), NoDisplay()) as outputs:
        outputs.add(0, b"one\n")
        follow_all(outputs, lake)
        outputs.add(0, b"two\n")
        logs = outputs.take_over()
    with pytest.raises(StoreError, match=": refused") as told:
        bring(logs, lake)
    assert told.value.kind == kind
    assert kept(lake) == {"rank-0.log": came}


@pytest.mark.parametrize("kind", ["damaged", "unsupported"])
@pytest.mark.parametrize("is_full", [False, True])
def test_a_log_that_nothing_can_be_added_to_is_made_anew_beside_it(
    lake: LakePath, monkeypatch: pytest.MonkeyPatch, kind: str, is_full: bool
) -> None:
    def refuse(self: LakePath, content: bytes, at: int) -> int:
        raise StoreError(f"cannot add to {self.url}", kind)

    def no_room(self: LakePath, source: Path) -> None:
        self.write(b"half")
        raise StoreError(f"cannot write {self.url}: the quota is used up", "quota")

    with Outputs(world("node1"), NoDisplay()) as outputs:
        outputs.add(0, b"one\n")
        follow_all(outputs, lake)
        outputs.add(0, b"two\n")
        logs = outputs.take_over()
    monkeypatch.setattr(LakePath, "append", refuse)
    if is_full:
        monkeypatch.setattr(LakePath, "upload", no_room)
    with pytest.raises(StoreError, match="quota") if is_full else contextlib.nullcontext():
        bring(logs, lake)
    assert kept(lake) == {"rank-0.log": b"one\n" if is_full else b"one\ntwo\n"}


def test_following_what_was_let_go_of_does_nothing(lake: LakePath) -> None:
    with Outputs(world("node1"), NoDisplay()) as outputs:
        outputs.add(0, b"one\n")
        ((_, work),) = outputs.pending_appends(lake)
    work()
    assert "rank-0.log" not in kept(lake)
