"""What a rank's end tells, whatever is in its texts and whatever its node's disk takes."""

from __future__ import annotations

import errno
import os
import pickle
import re
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.process.agent.test_agent import AGENT, Gang, serve_agent

DISK = 8 * 2**20

# The rank with this number has a disk that takes no file of reports: the agent is to follow it.
NO_REPORTS = f"""
from pathlib import Path
touch = Path.touch
def full(path, *args, **kwargs):
    if path.parent.name == "rank-1" and path.name == "metrics.jsonl":
        raise OSError({errno.ENOSPC}, "No space left on device", str(path))
    touch(path, *args, **kwargs)
Path.touch = full
"""


@pytest.fixture
def before() -> str:
    """What the agent's process runs first."""
    return ""


@pytest.fixture
def gang(tmp_path: Path, before: str) -> Iterator[Gang]:
    """An agent in a container with a disk of 8 MiB of its own, and its server."""
    (tmp_path / "container").mkdir()
    mount = f'mount -t tmpfs -o size={DISK} tmpfs container && cd container && exec "$0" -c "$1"'
    # The file system goes with the last process that sees it.
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount]
    command += [sys.executable, before + AGENT]
    with serve_agent(tmp_path / "lake", command, cwd=tmp_path) as gang:
        yield gang


def still_serves(gang: Gang) -> bool:
    gang.run(os.getpid)
    return int(pickle.loads(gang.wait_for("ended").payload)) > 0


def raises(text: str, times: int) -> None:
    raise ValueError(text * times)


def test_an_error_about_a_file_whose_name_is_not_utf8(gang: Gang) -> None:
    gang.run(raises, os.fsdecode(b"caf\xe9.jpg"), 1)
    outcome = gang.wait_for("ended")["outcome"]
    assert outcome["error"] == r"ValueError: caf\udce9.jpg"
    assert r"caf\udce9.jpg" in outcome["traceback"]
    for text in outcome.values():
        text.encode()  # it can be printed, and kept
    assert still_serves(gang)


@pytest.mark.parametrize(
    "text",
    [*(pytest.param(t, marks=pytest.mark.soak) for t in ("\0", "é", "\U0001f600")), "\udce9"],
    ids=ascii,
)
def test_the_longest_error_fits_whatever_it_is_made_of(gang: Gang, text: str) -> None:
    gang.run(raises, text, 100_000)
    outcome = gang.wait_for("ended")["outcome"]
    assert outcome["error"].startswith("ValueError: ")
    assert outcome["traceback"].startswith("Traceback (most recent call last):\n")
    assert "characters in all" in outcome["error"] and "characters in all" in outcome["traceback"]
    assert still_serves(gang)


def fill() -> None:
    """Writes until the disk is full."""
    with Path("much").open("wb", buffering=0) as much:
        for size in (2**16, 1):
            try:
                while much.write(bytes(size)):
                    pass
            except OSError as error:
                assert error.errno == errno.ENOSPC


def saves_on_a_full_disk() -> None:
    fill()
    Path("model").write_bytes(b"weights")


def test_a_rank_tells_that_its_disk_is_full(gang: Gang) -> None:
    gang.run(saves_on_a_full_disk)
    ended = gang.wait_for("ended")
    assert ended["outcome"]["status"] == "raised"
    assert ended["outcome"]["error"].startswith("OSError: [Errno 28] ")
    assert "in saves_on_a_full_disk" in ended["outcome"]["traceback"]
    assert still_serves(gang)


def returns_on_a_full_disk(size: int) -> bytes:
    fill()
    return b"v" * size


def test_value_that_does_not_fit_on_the_disk_is_reported(gang: Gang) -> None:
    gang.run(returns_on_a_full_disk, 100_000)
    outcome = gang.wait_for("ended")["outcome"]
    assert outcome["status"] == "value lost" and "No space left on device" in outcome["error"]
    assert still_serves(gang)


def test_a_rank_for_which_there_is_no_room_is_not_started(gang: Gang) -> None:
    gang.run(len, os.urandom(DISK))
    outcome = gang.wait_for("ended")["outcome"]
    assert outcome["status"] == "not started" and "No space left" in outcome["error"]
    assert still_serves(gang)


def ends_where_nothing_can_be_written(end: Callable[[], object]) -> object:
    # As a quota, or a disk that the kernel has made read-only.
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    return end()


@pytest.mark.parametrize("end", [os.getpid, lambda: raises("lost", 1), lambda: sys.exit(3)])
def test_an_end_that_cannot_be_written_is_not_taken_for_another(
    gang: Gang, end: Callable[[], object]
) -> None:
    gang.run(ends_where_nothing_can_be_written, end)
    ended = gang.wait_for("ended")
    assert ended["exit_code"] == os.EX_IOERR
    assert ended["outcome"]["status"] == "files lost"
    assert "could not write its outcome" in ended["outcome"]["error"]
    assert ended.payload == b""
    assert still_serves(gang)


def test_what_cannot_be_written_is_said_in_the_log_where_that_can_be(gang: Gang) -> None:
    def train() -> int:
        Path("../outcome.draft").unlink()
        Path("../outcome.draft").mkdir()
        return 1

    gang.run(train)
    ended = gang.wait_for("ended")
    assert "(returned): [Errno 21] " in ended["log_tail"][0]


def waits_as_rank_1() -> str:
    import hopsgpu

    if hopsgpu.context().rank == 1:
        threading.Event().wait()
    return "well"


@pytest.mark.parametrize("before", [NO_REPORTS])
def test_a_rank_that_cannot_be_followed_is_failed_and_no_other(gang: Gang) -> None:
    gang.run(waits_as_rank_1, ranks=2)
    ends = {end["rank"]: end for end in (gang.wait_for("ended"), gang.wait_for("ended"))}
    assert ends[0]["outcome"] == {"status": "returned"}
    assert ends[1]["outcome"]["status"] == "files lost"
    assert "[Errno 28] " in ends[1]["outcome"]["error"]
    assert (ends[1]["signal"], ends[1]["stopped"]) == ("SIGKILL", False)
    warnings = [m["text"] for m in gang.seen if m.kind == "warning"]
    assert len(warnings) == 1 and "rank 1 is incomplete: " in warnings[0]
    assert still_serves(gang)


def loses_its_log() -> None:
    Path("../log").unlink()


def loses_its_outcome() -> None:
    Path("../outcome.json").mkdir()
    threading.Event().wait()


@pytest.mark.parametrize("lose", [loses_its_log, loses_its_outcome])
def test_a_rank_whose_files_cannot_be_read_is_failed_and_no_other(
    gang: Gang, lose: Callable[[], None]
) -> None:
    def train() -> None:
        import hopsgpu

        if hopsgpu.context().rank == 1:
            lose()

    gang.run(train, ranks=2)
    ends = {end["rank"]: end for end in (gang.wait_for("ended"), gang.wait_for("ended"))}
    assert ends[0]["outcome"] == {"status": "returned"}
    assert ends[1]["outcome"]["status"] == "files lost"
    assert re.match(r"\[Errno \d+\] .*/rank-1/", ends[1]["outcome"]["error"])
    assert still_serves(gang)
