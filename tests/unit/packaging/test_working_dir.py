"""Which files of a script's working directory travel, and how they arrive."""

from __future__ import annotations

import os
import socket
import tarfile
import threading
from pathlib import Path

import pytest

from hopsgpu.errors import Cancelled, ConfigError
from hopsgpu.packaging import working_dir
from hopsgpu.packaging.python_env.archives import unpack
from hopsgpu.packaging.working_dir import WorkingDirectory, find_files

MIB = 2**20


@pytest.fixture
def work(tmp_path: Path) -> Path:
    directory = tmp_path / "work"
    directory.mkdir()
    return directory


def write(root: Path, name: str, text: str = "x") -> Path:
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def names_of(directory: WorkingDirectory) -> list[str]:
    """The files that travel, without the directories that have some."""
    return [name for name in directory.files if not has_children(name, directory.files)]


def has_children(name: str, names: tuple[str, ...]) -> bool:
    return any(other.startswith(f"{name}/") for other in names)


def digest_of(root: Path) -> str:
    return find_files(root).digest(threading.Event())


def arrived(directory: WorkingDirectory, home: Path) -> Path:
    """The directory as it is unpacked on a node."""
    home.mkdir(exist_ok=True)
    archive = home / "script.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        directory.add_to(tar, "work", threading.Event())
    unpack(archive, "work", home / "unpacked", ())
    return home / "unpacked"


def test_all_files_travel_with_their_size(work: Path) -> None:
    write(work, "train.py", "import helper\n")
    write(work, "conf/small.yaml", "a: 1\n")
    directory = find_files(work)
    assert directory.path == work.resolve()
    assert directory.files == ("conf", "conf/small.yaml", "train.py")
    assert directory.bytes == len("import helper\n") + len("a: 1\n")
    assert directory.warnings == ()


def test_what_gitignore_names_stays(work: Path) -> None:
    write(work, ".gitignore", "*.ckpt\n/runs/\n# a comment\n\ndata/**/big\n")
    for name in ("train.py", "last.ckpt", "deep/last.ckpt", "runs/1/log", "deep/runs/kept"):
        write(work, name)
    for name in ("data/a/b/big", "data/a/small"):
        write(work, name)
    assert names_of(find_files(work)) == [
        *(".gitignore", "data/a/b", "data/a/small", "deep/runs/kept", "train.py")
    ]


def test_an_inner_gitignore_comes_after_an_outer_one(work: Path) -> None:
    write(work, ".gitignore", "*.csv\n!keep.csv\n")
    write(work, "inner/.gitignore", "!*.csv\nkeep.csv\n/only-here\n")
    for name in ("a.csv", "keep.csv", "inner/a.csv", "inner/keep.csv"):
        write(work, name)
    for name in ("only-here", "inner/only-here", "inner/deep/only-here"):
        write(work, name)
    found = names_of(find_files(work))
    assert found == [
        *(".gitignore", "inner/.gitignore", "inner/a.csv", "inner/deep/only-here"),
        *("keep.csv", "only-here"),
    ]


def test_nothing_comes_back_of_an_ignored_directory(work: Path) -> None:
    write(work, ".gitignore", "build/\n!build/keep\nouter/*\n!outer/keep/\n")
    for name in ("build/keep", "outer/lost", "outer/keep/file"):
        write(work, name)
    assert names_of(find_files(work)) == [".gitignore", "outer/keep/file"]


def test_hopsgpuignore_has_the_last_word(work: Path) -> None:
    write(work, ".gitignore", "weights/\n")
    write(work, ".hopsgpuignore", "!weights/\nnotes.md\n")
    for name in ("weights/first.bin", "notes.md", "train.py"):
        write(work, name)
    assert names_of(find_files(work)) == [
        *(".gitignore", ".hopsgpuignore", "train.py", "weights/first.bin")
    ]


def test_gitignore_of_the_repository_above_counts(tmp_path: Path) -> None:
    write(tmp_path, ".gitignore", "*.bin\n")
    write(tmp_path, "repo/.git/HEAD")
    write(tmp_path, "repo/.gitignore", "*.log\n/top.txt\n/a/work/here.txt\n")
    write(tmp_path, "repo/a/.gitignore", "!kept.log\n")
    work = tmp_path / "repo" / "a" / "work"
    for name in ("a.log", "kept.log", "top.txt", "here.txt", "a.bin"):
        write(work, name)
    # The repository ends the search: what is above it says nothing about its files.
    assert names_of(find_files(work)) == ["a.bin", "kept.log", "top.txt"]


def test_without_a_repository_directories_above_do_not_count(tmp_path: Path, work: Path) -> None:
    write(tmp_path, ".gitignore", "*.log\n")
    write(work, "a.log")
    assert find_files(work).files == ("a.log",)


def test_a_repository_of_its_own_is_not_under_the_rules_above(tmp_path: Path) -> None:
    write(tmp_path, "outer/.git/HEAD")
    write(tmp_path, "outer/.gitignore", "*\n")
    write(tmp_path, "outer/inner/.git", "gitdir: elsewhere\n")
    write(tmp_path, "outer/inner/train.py")
    assert names_of(find_files(tmp_path / "outer" / "inner"))[-1] == "train.py"


@pytest.mark.parametrize(
    "name",
    ["__pycache__", ".git", ".hg", "node_modules", ".ipynb_checkpoints", ".ruff_cache", ".tox"],
)
def test_repositories_and_caches_stay(work: Path, name: str) -> None:
    write(work, f"{name}/file")
    write(work, f"pkg/{name}/file")
    write(work, "pkg/module.py")
    assert find_files(work).files == ("pkg", "pkg/module.py")


@pytest.mark.parametrize("mark", ["pyvenv.cfg", "conda-meta/history"])
def test_environments_stay_whatever_their_name(work: Path, mark: str) -> None:
    write(work, f"any-name/{mark}")
    write(work, "any-name/lib/python3.11/site-packages/a.py")
    write(work, "train.py")
    assert find_files(work).files == ("train.py",)


def test_the_working_directory_itself_may_have_any_name(tmp_path: Path) -> None:
    write(tmp_path, "node_modules/train.py")
    assert find_files(tmp_path / "node_modules").files == ("train.py",)


@pytest.mark.parametrize("script", ["train.py", "hidden/deep/train.py", "__pycache__/train.py"])
def test_an_ignored_script_travels(work: Path, tmp_path: Path, script: str) -> None:
    write(work, ".gitignore", "train.py\nhidden/\n")
    write(work, script, "print()\n")
    write(work, "hidden/other.py")
    directory = find_files(work, needed=[script])
    assert names_of(directory) == sorted([".gitignore", script])
    assert directory.bytes == len("train.py\nhidden/\n") + len("print()\n")
    assert (arrived(directory, tmp_path / "node") / script).read_text() == "print()\n"


@pytest.mark.parametrize("link", ["absolute", "relative"])
def test_a_script_that_is_a_link_out_of_the_directory_travels(
    work: Path, tmp_path: Path, link: str
) -> None:
    elsewhere = write(tmp_path, "elsewhere/train.py", "print()\n")
    (work / "train.py").symlink_to(
        elsewhere if link == "absolute" else Path("..", "elsewhere", "train.py")
    )
    directory = find_files(work, needed=["train.py"])
    assert directory.warnings == ()
    assert (arrived(directory, tmp_path / "node") / "train.py").read_text() == "print()\n"
    before = directory.digest(threading.Event())
    elsewhere.write_text("print(1)\n")
    assert find_files(work, needed=["train.py"]).digest(threading.Event()) != before


def test_directories_that_ranks_fill_travel_empty(work: Path) -> None:
    for name in ("out/1/a", "runs/logs/a", "deep/out/a", "outer/a"):
        write(work, name)
    directory = find_files(work, not_sent={"out", "runs/logs", "not-made"})
    assert names_of(directory) == ["deep/out/a", "out", "outer/a", "runs/logs"]


def test_a_script_in_a_directory_that_ranks_fill_travels(work: Path) -> None:
    write(work, "out/train.py")
    write(work, "out/old")
    directory = find_files(work, needed=["out/train.py"], not_sent={"out"})
    assert names_of(directory) == ["out/train.py"]


def test_empty_directories_travel(work: Path, tmp_path: Path) -> None:
    (work / "empty" / "deep").mkdir(parents=True)
    write(work, "cached/__pycache__/a.pyc")
    directory = find_files(work)
    assert directory.files == ("cached", "empty", "empty/deep")
    unpacked = arrived(directory, tmp_path / "node")
    assert (unpacked / "empty" / "deep").is_dir() and (unpacked / "cached").is_dir()
    assert list((unpacked / "cached").iterdir()) == []


def test_links_inside_stay_links(work: Path, tmp_path: Path) -> None:
    write(work, "versions/2/weights", "two")
    (work / "latest").symlink_to("versions/2")
    (work / "versions" / "back").symlink_to("../versions/2/weights")
    directory = find_files(work)
    assert directory.warnings == ()
    # What a linked directory has travels once.
    assert directory.bytes == len("two") and "latest/weights" not in directory.files
    unpacked = arrived(directory, tmp_path / "node")
    assert (unpacked / "latest").readlink() == Path("versions/2")
    assert (unpacked / "latest" / "weights").read_text() == "two"
    assert (unpacked / "versions" / "back").read_text() == "two"


def test_links_that_lead_out_or_to_nothing_stay_with_a_warning(work: Path, tmp_path: Path) -> None:
    write(tmp_path, "elsewhere/data")
    write(work, "deep/file")
    (work / "outside").symlink_to("../elsewhere/data")
    (work / "outside-dir").symlink_to(tmp_path / "elsewhere")
    (work / "broken").symlink_to("nothing")
    (work / "absolute").symlink_to(work / "deep" / "file")
    (work / "deep" / "circle").symlink_to("circle")
    directory = find_files(work)
    assert directory.files == ("deep", "deep/file")
    (warning,) = directory.warnings
    assert "these links lead out of the working directory or to nothing" in warning
    for name in ("outside", "outside-dir", "broken", "absolute", "deep/circle"):
        assert name in warning.partition(": ")[2].split(", ")


def test_only_the_first_links_are_listed(work: Path) -> None:
    for number in range(8):
        (work / f"link-{number}").symlink_to("nothing")
    (warning,) = find_files(work).warnings
    assert warning.count("link-") == 5


def test_a_directory_that_is_reached_by_a_link_is_as_any_other(work: Path, tmp_path: Path) -> None:
    write(work, "train.py")
    (work / "alias.py").symlink_to("train.py")
    (tmp_path / "link").symlink_to(work)
    directory = find_files(tmp_path / "link")
    assert directory.path == work.resolve() and directory.files == ("alias.py", "train.py")


def test_pipes_and_sockets_stay(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(work / "pipe")
    # The path of a socket has a bound of about a hundred bytes.
    monkeypatch.chdir(work)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        write(work, "train.py")
        assert find_files(work).files == ("train.py",)


def test_too_many_bytes_are_refused_with_the_largest_entries(work: Path) -> None:
    sizes = {"data/a/1": 3, "data/a/2": 4, "data/b": 6, "model.bin": 5, "notes/x": 2, "tiny": 1}
    for name, size in {**sizes, "least": 0}.items():
        write(work, name, "x" * size * MIB)
    with pytest.raises(ConfigError) as raised:
        find_files(work, max_bytes=20 * MIB)
    text = str(raised.value)
    assert "has 21.0 MiB of files" in text and "at most 20 MiB" in text
    listed = "data/a 7.0 MiB; data/b 6.0 MiB; model.bin 5.0 MiB; notes/x 2.0 MiB; tiny 1.0 MiB."
    assert listed in text and "least" not in text and ".hopsgpuignore" in text
    assert find_files(work, max_bytes=21 * MIB).bytes == 21 * MIB


def test_what_is_ignored_does_not_count(work: Path) -> None:
    write(work, ".hopsgpuignore", "data\n")
    write(work, "data", "x" * MIB)
    assert find_files(work, max_bytes=1024).bytes == len("data\n")


def test_a_needed_file_counts(work: Path) -> None:
    write(work, ".gitignore", "train.py\n")
    write(work, "train.py", "x" * MIB)
    with pytest.raises(ConfigError, match="train.py 1.0 MiB"):
        find_files(work, needed=["train.py"], max_bytes=1024)


def test_too_many_files_are_refused(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(working_dir, "_MAX_FILES", 3)
    for number in range(3):
        write(work, str(number))
    assert len(find_files(work).files) == 3
    write(work, "3")
    with pytest.raises(ConfigError, match="more than 3 files"):
        find_files(work)


@pytest.mark.parametrize("name", ["nothing", "file"])
def test_what_is_no_directory_is_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path, "file")
    with pytest.raises(ConfigError, match="working_dir=.*must be an existing directory"):
        find_files(tmp_path / name)


def test_the_digest_is_that_of_names_and_contents(tmp_path: Path) -> None:
    for root in ("a", "b"):
        write(tmp_path, f"{root}/deep/train.py", "print()\n")
        write(tmp_path, f"{root}/conf")
        (tmp_path / root / "link").symlink_to("conf")
    os.utime(tmp_path / "b" / "conf", (1, 1))
    write(tmp_path, "b/__pycache__/train.pyc")
    assert digest_of(tmp_path / "a") == digest_of(tmp_path / "b")


def test_each_change_changes_the_digest(work: Path) -> None:
    script = write(work, "train.py", "print()\n")
    write(work, "other.py")
    link = work / "link"
    link.symlink_to("train.py")
    digests = [digest_of(work)]

    def note() -> None:
        digests.append(digest_of(work))

    script.write_text("print(1\n")
    note()
    script.chmod(0o755)
    note()
    link.unlink()
    link.symlink_to("other.py")
    note()
    script.rename(work / "fit.py")
    note()
    (work / "empty").mkdir()
    note()
    (work / "empty").rmdir()
    write(work, "empty", "")
    note()
    assert len(set(digests)) == len(digests)


def test_only_the_owners_right_to_run_a_file_counts(work: Path) -> None:
    script = write(work, "train.py")
    script.chmod(0o644)
    before = digest_of(work)
    script.chmod(0o600)
    assert digest_of(work) == before


def test_files_arrive_with_their_content_and_right_to_run(work: Path, tmp_path: Path) -> None:
    write(work, "run.sh", "#!/bin/sh\n").chmod(0o4775)
    write(work, "deep/data").write_bytes(bytes(range(256)) * 999)
    write(work, "secret").chmod(0o600)
    write(work, "émile/\N{SNOWMAN}.txt", "é")
    unpacked = arrived(find_files(work), tmp_path / "node")
    assert (unpacked / "run.sh").stat().st_mode & 0o7777 == 0o755
    assert (unpacked / "secret").stat().st_mode & 0o7777 == 0o600
    assert (unpacked / "deep" / "data").read_bytes() == bytes(range(256)) * 999
    assert (unpacked / "émile" / "\N{SNOWMAN}.txt").read_text() == "é"
    assert find_files(unpacked).digest(threading.Event()) == digest_of(work)


def test_names_that_are_not_unicode_arrive(work: Path, tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.txt")
    write(work, name, "x")
    directory = find_files(work)
    assert directory.digest(threading.Event())
    assert (arrived(directory, tmp_path / "node") / name).read_text() == "x"


def test_hard_links_arrive_as_files(work: Path, tmp_path: Path) -> None:
    write(work, "a", "same")
    (work / "b").hardlink_to(work / "a")
    write(work, ".gitignore", "a\n")
    assert (arrived(find_files(work), tmp_path / "first") / "b").read_text() == "same"
    (work / ".gitignore").unlink()
    unpacked = arrived(find_files(work), tmp_path / "second")
    assert (unpacked / "a").read_text() == (unpacked / "b").read_text() == "same"
    assert not (unpacked / "a").samefile(unpacked / "b")


def test_archives_do_not_name_the_user(work: Path, tmp_path: Path) -> None:
    write(work, "train.py")
    archive = tmp_path / "script.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        find_files(work).add_to(tar, "work", threading.Event())
    with tarfile.open(archive) as tar:
        (member,) = tar.getmembers()
    assert (member.name, member.uid, member.gid) == ("work/train.py", 0, 0)
    assert member.uname == member.gname == ""


def test_a_file_that_is_gone_is_named(work: Path, tmp_path: Path) -> None:
    write(work, "train.py")
    directory = find_files(work)
    (work / "train.py").unlink()
    with pytest.raises(ConfigError, match="train.py cannot be read"):
        directory.digest(threading.Event())
    with pytest.raises(ConfigError, match="train.py cannot be read"):
        arrived(directory, tmp_path / "node")


def test_a_stop_ends_the_packing(work: Path, tmp_path: Path) -> None:
    write(work, "train.py")
    directory, stop = find_files(work), threading.Event()
    stop.set()
    with pytest.raises(Cancelled):
        directory.digest(stop)
    with tarfile.open(tmp_path / "a.tar", "w") as tar, pytest.raises(Cancelled):
        directory.add_to(tar, "work", stop)
