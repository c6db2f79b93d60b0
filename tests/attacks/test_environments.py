"""Another user of a shared root plants a Python environment that somebody's ranks would run."""

from __future__ import annotations

import os
import pwd
import tempfile
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from hopsgpu.artifacts import python_environments
from hopsgpu.backends.spark.pyspark_archives import VARIABLE, with_bytecode
from hopsgpu.core.cache_directory import cache_directory
from hopsgpu.errors import ConfigError, StoreError
from hopsgpu.packaging.python_env.builder import ensure_built, put_on_lake, url_on_lake
from hopsgpu.packaging.python_env.kinds import recipe_for
from hopsgpu.storage.lake import LakePath
from tests.attacks.users import OTHER, as_other_user

NEVER = threading.Event()


@pytest.fixture
def modules(shared_dir: Path) -> Path:
    """What the user wants to send to ranks."""
    directory = shared_dir / "modules"
    directory.mkdir(mode=0o755)
    (directory / "mine.py").write_text("VALUE = 'honest'\n")
    return directory


@pytest.fixture
def root(shared_dir: Path) -> LakePath:
    """A root in which all users may create directories."""
    for name in ("lake", "lake/environments", "lake/environments/_staging"):
        (shared_dir / name).mkdir()
        (shared_dir / name).chmod(0o777)
    return LakePath(f"file://{shared_dir}/lake")


def plant(root: LakePath, key: str, directory: Path) -> python_environments.Description:
    """Put an archive of the caller's under a key."""
    archive = directory / "evil.tar.gz"
    archive.write_bytes(b"evil")
    described = {"bytes": 4, "digest": "0" * 64, "name": "evil"}
    return python_environments.upload(root, key, archive, described, NEVER)


def key_of(modules: Path, root: LakePath) -> str:
    return url_on_lake(str(modules), root, NEVER).rpartition("/")[2]


def test_an_environment_of_another_user_is_refused(
    root: LakePath, modules: Path, shared_dir: Path
) -> None:
    # Sources and user are known to all users of the machine.
    key = key_of(modules, root)
    as_other_user(lambda: plant(LakePath(root.url), key, shared_dir))
    for wanted in (str(modules), f"{root.url}/environments/{key}"):
        with pytest.raises(StoreError, match=f"belongs to {OTHER.pw_name}, and not to you") as told:
            ensure_built(recipe_for(wanted), root, NEVER)
        assert told.value.kind == "permission"
    # Also one that is planted during the build.
    with pytest.raises(StoreError, match=f"belongs to {OTHER.pw_name}, and not to you"):
        plant(root, key, shared_dir / "modules")


def test_files_of_another_user_in_an_own_environment_are_refused(
    root: LakePath, modules: Path
) -> None:
    env = ensure_built(recipe_for(str(modules)), root, NEVER)
    os.chown(LakePath(env.url).path, OTHER.pw_uid, OTHER.pw_gid)
    with pytest.raises(StoreError, match=f"belongs to {OTHER.pw_name}, and not to you"):
        ensure_built(recipe_for(str(modules)), root, NEVER)


@pytest.mark.parametrize("name", ["", "environment.json", "archive.tar.gz"])
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_an_environment_that_others_may_change_is_refused(
    root: LakePath, modules: Path, name: str, mode: int
) -> None:
    env = ensure_built(recipe_for(str(modules)), root, NEVER)
    place = Path(LakePath(env.url).path).parent / name
    place.chmod(place.stat().st_mode | mode)
    with pytest.raises(StoreError, match="other users may write there") as told:
        ensure_built(recipe_for(str(modules)), root, NEVER)
    assert told.value.kind == "permission"


def test_an_upload_lets_no_other_user_write(root: LakePath, modules: Path) -> None:
    before = os.umask(0)
    try:
        env = ensure_built(recipe_for(str(modules)), root, NEVER)
    finally:
        os.umask(before)
    place = Path(LakePath(env.url).path).parent
    assert {path.stat().st_mode & 0o022 for path in (place, *place.iterdir())} == {0}
    assert ensure_built(recipe_for(str(modules)), root, NEVER) == env


def test_an_environment_under_another_name_is_refused(
    root: LakePath, modules: Path, shared_dir: Path
) -> None:
    old = Path(LakePath(ensure_built(recipe_for(str(modules)), root, NEVER).url).path).parent
    (modules / "mine.py").write_text("VALUE = 'a fault is corrected'\n")
    new = old.with_name(key_of(modules, root))
    # The directory in which both are lets everybody rename them.
    as_other_user(lambda: old.rename(new))
    with pytest.raises(StoreError, match=f"is the environment '{old.name}', under another name"):
        ensure_built(recipe_for(str(modules)), root, NEVER)


def test_users_of_a_shared_root_have_environments_of_their_own(
    root: LakePath, modules: Path, shared_dir: Path
) -> None:
    """The root's owner may build one for all, which others name by its URL."""
    if os.geteuid():
        pytest.skip("only root can become another user")
    url = put_on_lake(str(modules), root, NEVER)
    told = shared_dir / "told"
    told.mkdir()
    told.chmod(0o777)

    def use() -> None:
        # In the child process alone: its own TMPDIR is closed to this user.
        tempfile.tempdir = str(told)
        at = LakePath(root.url)
        own = ensure_built(recipe_for(str(modules)), at, NEVER)
        assert own.url.rpartition("/")[0] != url
        assert ensure_built(recipe_for(str(modules)), at, NEVER) == own
        assert ensure_built(recipe_for(url), at, NEVER).url.rpartition("/")[0] == url
        (told / "done").touch()

    as_other_user(use)
    assert (told / "done").exists()


def test_odd_names_among_environments_disturb_nobody(
    root: LakePath, modules: Path, shared_dir: Path
) -> None:
    def plant_names() -> None:
        for name in ("a#b", "c?d", "\x01", "e;f"):
            (shared_dir / "lake" / "environments" / name).mkdir()

    as_other_user(plant_names)
    env = ensure_built(recipe_for(str(modules)), root, NEVER)
    assert ensure_built(recipe_for(str(modules)), root, NEVER) == env


@pytest.fixture
def hdfs_root(hdfs_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[LakePath]:
    """A root of alice's in which all users may create directories."""
    home = LakePath(f"{hdfs_url}/tmp/attack-{uuid.uuid4().hex}")
    monkeypatch.setenv("HADOOP_USER_NAME", "alice")
    home = LakePath(home.url)
    for place in (home, home / "environments", home / "environments" / "_staging"):
        place.make()
        place.set_mode(0o1777)
    yield home
    monkeypatch.setenv("HADOOP_USER_NAME", pwd.getpwuid(os.geteuid()).pw_name)
    LakePath(home.url).remove()


def test_an_environment_of_another_user_on_hdfs_is_refused(
    hdfs_root: LakePath, modules: Path, shared_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HADOOP_USER_NAME", "bob")
    root = LakePath(hdfs_root.url)
    key = key_of(modules, root)
    monkeypatch.setenv("HADOOP_USER_NAME", "mallory")
    # Mallory's own environment is none that others trust, but it is Mallory's.
    plant(LakePath(hdfs_root.url), key, shared_dir)
    monkeypatch.setenv("HADOOP_USER_NAME", "bob")
    with pytest.raises(StoreError, match="belongs to mallory, and not to you"):
        ensure_built(recipe_for(str(modules)), LakePath(hdfs_root.url), NEVER)
    # Alice owns the root, so that bob may use what she has built.
    monkeypatch.setenv("HADOOP_USER_NAME", "alice")
    url = put_on_lake(str(modules), LakePath(hdfs_root.url), NEVER)
    monkeypatch.setenv("HADOOP_USER_NAME", "bob")
    env = ensure_built(recipe_for(url), LakePath(hdfs_root.url), NEVER)
    assert env.url.rpartition("/")[0] == url
    # Bob's own, on the root of another user.
    (modules / "mine.py").write_text("VALUE = 2\n")
    own = ensure_built(recipe_for(str(modules)), LakePath(hdfs_root.url), NEVER)
    assert ensure_built(recipe_for(str(modules)), LakePath(hdfs_root.url), NEVER) == own


def test_a_cache_of_another_user_is_refused(shared_dir: Path) -> None:
    """It has code and checksums beside each other, such as PySpark with bytecode."""
    environ = {"XDG_CACHE_HOME": str(shared_dir), "PATH": os.environ["PATH"]}
    assert cache_directory(environ) == shared_dir / "hopsgpu"
    as_other_user(lambda: (shared_dir / "hopsgpu").mkdir())
    with pytest.raises(ConfigError, match="others could put code there that you would run"):
        cache_directory(environ)
    assert VARIABLE not in with_bytecode(environ)
    (shared_dir / "hopsgpu").rmdir()
    (shared_dir / "hopsgpu").mkdir()
    (shared_dir / "hopsgpu").chmod(0o777)
    with pytest.raises(ConfigError, match="has the mode 777"):
        cache_directory(environ)
