"""Links that another Unix user plants on a file:// root or in a queue of gangs.

They lead to files of the victim, who is root here: what root creates, empties, renames, removes or
opens to all must stay where its path says.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from hopsgpu.backends.gang_queue import QueueMember, make_queue_dir, queued
from hopsgpu.core.queue_policy import Bound, queue_tag, turn_name
from hopsgpu.errors import StoreError
from hopsgpu.storage.error_messages import ABSENT, PERMISSION
from hopsgpu.storage.lake import LakePath
from tests.attacks.users import OTHER, as_other_user

TAG = queue_tag("root.default")
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def shared(shared_dir: Path) -> LakePath:
    return LakePath(f"file://{shared_dir}")


@pytest.fixture
def victims(tmp_path: Path) -> Path:
    """A private directory of the victim, with a file in it."""
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    (private / "precious").write_text("dear")
    return private


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def plant(place: LakePath, target: Path) -> None:
    as_other_user(lambda: Path(place.path).symlink_to(target))


def assert_untouched(private: Path) -> None:
    assert mode_of(private) == 0o700
    assert [path.name for path in private.iterdir()] == ["precious"]
    assert (private / "precious").read_text() == "dear"


CHANGES: dict[str, Callable[[LakePath], object]] = {
    "make": lambda place: (place / "below").make(),
    "create": lambda place: (place / "new").create(b"x"),
    "write": lambda place: (place / "precious").write(b"x"),
    "replace": lambda place: (place / "precious").replace(b"x"),
    "append": lambda place: (place / "precious").append(b"dearx", 0),
    "set_mode": lambda place: place.set_mode(0o1777),
    "rename here": lambda place: (place.parent / "mine").rename(place / "new"),
    "rename away": lambda place: (place / "precious").rename(place.parent / "away"),
    "remove below": lambda place: (place / "precious").remove(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_planted_link_to_a_directory_redirects_nothing(
    shared: LakePath, victims: Path, change: Callable[[LakePath], object]
) -> None:
    (shared / "mine").write(b"")
    plant(shared / "link", victims)
    with pytest.raises(StoreError, match="symbolic link of nobody") as raised:
        change(shared / "link")
    assert raised.value.kind == PERMISSION
    assert_untouched(victims)


@pytest.mark.parametrize("change", ["write", "append", "set_mode"])
def test_a_planted_link_to_a_file_redirects_nothing(
    shared: LakePath, victims: Path, change: str
) -> None:
    link = shared / "link"
    plant(link, victims / "precious")
    before = mode_of(victims / "precious")
    changes = {
        "write": lambda: link.write(b"x"),
        "append": lambda: link.append(b"dearx", 4),
        "set_mode": lambda: link.set_mode(0o1777),
    }
    with pytest.raises(StoreError, match="symbolic link of nobody"):
        changes[change]()
    assert_untouched(victims)
    assert mode_of(victims / "precious") == before


def test_a_planted_link_to_nothing_creates_nothing(shared: LakePath, victims: Path) -> None:
    plant(shared / "link", victims / "new")
    with pytest.raises(StoreError, match="symbolic link of nobody"):
        (shared / "link").write(b"x")
    assert not (shared / "link").create(b"x"), "the name is taken"
    assert_untouched(victims)


def test_a_planted_link_is_replaced_or_removed_itself(shared: LakePath, victims: Path) -> None:
    for name in ("one", "two"):
        plant(shared / name, victims / "precious")
    (shared / "one").replace(b"x")
    (shared / "two").remove()
    assert not Path((shared / "one").path).is_symlink()
    assert shared.names() == ("one",)
    assert_untouched(victims)


def test_a_link_below_another_users_directory_is_planted_too(
    shared: LakePath, victims: Path
) -> None:
    """Its directory is closed to others, but it was made where everybody may."""

    def plant_below() -> None:
        directory = Path(shared.path, "theirs")
        directory.mkdir(mode=0o755)
        (directory / "link").symlink_to(victims)

    as_other_user(plant_below)
    with pytest.raises(StoreError, match="symbolic link of nobody"):
        (shared / "theirs" / "link" / "new").create()
    assert_untouched(victims)


def test_a_hard_link_to_the_victims_file_is_not_emptied(shared: LakePath, tmp_path: Path) -> None:
    """As other users can make it where fs.protected_hardlinks is 0."""
    precious = Path(shared.path, "precious")
    precious.write_text("dear")
    Path(shared.path, "link").hardlink_to(precious)
    with pytest.raises(StoreError, match="several hard links"):
        (shared / "link").write(b"x")
    assert precious.read_text() == "dear"


def test_a_planted_pipe_blocks_nobody(shared: LakePath) -> None:
    as_other_user(lambda: os.mkfifo(Path(shared.path, "pipe"), 0o666))
    with pytest.raises(StoreError):
        (shared / "pipe").write(b"x")


def test_own_links_are_followed(shared: LakePath, tmp_path: Path) -> None:
    """Of the user, or of root: their roots may be elsewhere."""
    (tmp_path / "elsewhere").mkdir()
    Path(shared.path, "link").symlink_to(tmp_path / "elsewhere")
    Path(shared.path, "again").symlink_to("link/./../elsewhere")
    (shared / "link" / "a" / "b").make()
    (shared / "again" / "a" / "file").write(b"one")
    (shared / "link" / "a" / "file").append(b"onetwo", 0)
    assert (shared / "link" / "a" / "file").rename(shared / "again" / "renamed")
    Path(shared.path, "file").symlink_to("link/renamed")
    (shared / "file").write(b"x")
    (shared / "link").set_mode(0o711)
    assert (tmp_path / "elsewhere" / "renamed").read_text() == "x"
    assert mode_of(tmp_path / "elsewhere") == 0o711
    Path(shared.path, "loop").symlink_to("loop")
    with pytest.raises(StoreError, match="levels of symbolic links"):
        (shared / "loop").write(b"x")


def test_a_link_in_a_directory_of_one_user_is_followed(shared_dir: Path, tmp_path: Path) -> None:
    """An administrator named it in the path, as a root on another disk."""
    (tmp_path / "disk").mkdir()
    home = tmp_path / "home"
    home.mkdir(mode=0o755)
    (home / "root").symlink_to(tmp_path / "disk")
    os.chown(home / "root", OTHER.pw_uid, OTHER.pw_gid, follow_symlinks=False)
    LakePath(f"file://{home}/root/runs").make()
    assert (tmp_path / "disk" / "runs").is_dir()


# --- the queue of gangs ----------------------------------------------------------------------


@pytest.mark.parametrize("level", range(3))
def test_a_link_in_the_place_of_a_queues_directory_opens_no_other(
    shared: LakePath, victims: Path, level: int
) -> None:
    names = ("hopsgpu", "locks", "blue", "default")
    above = make_queue_dir(shared, *names[:level]) if level else shared
    plant(above / names[level], victims)
    with pytest.raises(StoreError, match="symbolic link of nobody"):
        make_queue_dir(shared, *names)
    assert_untouched(victims)


def test_the_mode_of_a_directory_that_exists_stays(shared: LakePath) -> None:
    """Whether it is an administrator's, who closed it, or another user's."""
    Path(shared.path, "blue").mkdir(mode=0o755)

    def make() -> None:
        Path(shared.path, "theirs").mkdir(mode=0o700)

    as_other_user(make)
    assert mode_of(Path(make_queue_dir(shared, "blue", "default").path)) == 0o1777
    make_queue_dir(shared, "theirs")
    assert mode_of(Path(shared.path, "blue")) == 0o755
    assert mode_of(Path(shared.path, "theirs")) == 0o700
    with pytest.raises(StoreError, match="belongs to nobody"):
        (shared / "theirs").set_mode(0o1777)


def test_planted_links_keep_no_gang_from_its_turn(shared: LakePath, victims: Path) -> None:
    """Of the names of the next turns, some lead nowhere, and some to files of the victim."""
    directory = make_queue_dir(shared, "blue", "default")
    plant(directory / turn_name(1), victims / "nothing")
    plant(directory / turn_name(3), victims / "precious")
    plant(directory / "asking-000000000005-application_1_0001", victims / "precious")
    member = QueueMember(directory, application="application_1_0001", executors=1, gpus=1)
    # The links are fresh turns of the other user, who thereby holds the turn until they expire.
    for name in (turn_name(1), turn_name(3)):
        os.utime(Path(directory.path, name), (1, 1), follow_symlinks=False)
    os.utime(victims / "precious", (1, 1))
    with queued(member):
        assert member.request_turn(Bound.NONE, TAG, (TAG,), [1], False).may_take
        assert turn_name(5) in directory.names()
    assert_untouched(victims)


def test_the_owner_of_a_link_is_who_planted_it(shared: LakePath, victims: Path) -> None:
    plant(shared / "link", victims / "precious")
    plant(shared / "nowhere", victims / "nothing")
    assert {entry.name: entry.owner for entry in shared.entries()} == {
        "link": "nobody",
        "nowhere": "nobody",
    }
    with pytest.raises(StoreError) as raised:
        (shared / "nowhere").read()
    assert raised.value.kind == ABSENT
