"""The cluster of the screens, whose users are ann and bob, and where the screens are kept."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from playwright.sync_api import Page

from hopsgpu import devcluster
from tests.local_scripts import OF_CLUSTERS
from tests.screens.terminal import COLUMNS, Terminal

HERE = Path(__file__).parent
SEEN = HERE.parents[1] / "docs" / "seen"
# Pixels and bytes of a picture: larger ones would make the repository large.
MAX_HEIGHT = 1200
MAX_PICTURE_BYTES = 250_000

Environ = dict[str, str]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.soak)


class Screens:
    """Keeps what was seen: in docs/seen with `--record`, else in a temporary directory."""

    def __init__(self, directory: Path, home: Path) -> None:
        self._directory = directory
        self._home = home

    def keep(self, name: str, text: str) -> str:
        """Store a transcript as the terminal shows it, but with ann's home directory in /home."""
        text = text.replace(str(self._home), "/home/ann")
        lines = text.replace(sys.executable, "/usr/bin/python3").splitlines()
        wrapped = [
            line[n : n + COLUMNS] for line in lines for n in range(0, len(line) or 1, COLUMNS)
        ]
        (self._directory / f"{name}.txt").write_text("\n".join(wrapped) + "\n")
        return text

    def take(self, page: Page, name: str) -> Path:
        """Store a picture of the upper part of a page."""
        width, height = page.evaluate("[innerWidth, document.body.scrollHeight]")
        page.set_viewport_size({"width": width, "height": min(height, MAX_HEIGHT)})
        file = self._directory / f"{name}.png"
        page.screenshot(path=file)
        assert file.stat().st_size <= MAX_PICTURE_BYTES
        return file


@pytest.fixture(scope="session")
def home(own_tmpdir: Path) -> Path:
    """ann's home directory, with her scripts."""
    directory = own_tmpdir / "ann"
    shutil.copytree(HERE / "scripts", directory)
    cache = Path.home() / ".cache"
    cache.mkdir(exist_ok=True)
    # Hadoop's packages are downloaded once.
    (directory / ".cache").symlink_to(cache)
    return directory


@pytest.fixture(scope="session")
def screens(pytestconfig: pytest.Config, own_tmpdir: Path, home: Path) -> Screens:
    directory = SEEN if pytestconfig.getoption("record") else own_tmpdir / "seen"
    directory.mkdir(exist_ok=True)
    return Screens(directory, home)


def as_user(environ: Mapping[str, str], name: str) -> Environ:
    """Return the environment of a user of a cluster without Kerberos."""
    return {**environ, "USER": name, "LOGNAME": name, "HADOOP_USER_NAME": name}


@pytest.fixture(scope="session")
def machine(home: Path) -> Environ:
    """The environment of ann's shell, which knows no cluster yet."""
    environ = {name: value for name, value in os.environ.items() if name not in OF_CLUSTERS}
    path = os.pathsep.join((str(Path(sys.executable).parent), environ["PATH"]))
    source = {"PATH": path, "PYTHONPATH": str(HERE.parents[1])}
    return as_user({**environ, **source, "HOME": str(home)}, "ann")


@pytest.fixture(scope="session")
def cluster_starts(home: Path, machine: Environ) -> Iterator[tuple[str, str]]:
    """What `hopsgpu cluster up` prints when its time is over, and when it is started again."""
    try:
        with Terminal(home, machine) as shell:
            up = "hopsgpu cluster up --nodes 2 --gpus-per-node 2"
            starts = shell.run(f"{up} --timeout 3"), shell.run(up)
        yield starts
    finally:
        devcluster.down(home / ".hopsgpu" / "cluster")


@pytest.fixture(scope="session")
def ann(home: Path, machine: Environ, cluster_starts: tuple[str, str]) -> Environ:
    """The environment of ann's shell after `eval "$(hopsgpu cluster env)"`."""
    return machine | devcluster.environment(home / ".hopsgpu" / "cluster")


@pytest.fixture(scope="module")
def shell(home: Path, ann: Environ) -> Iterator[Terminal]:
    with Terminal(home, ann) as terminal:
        yield terminal


@pytest.fixture(scope="module")
def second_shell(home: Path, ann: Environ) -> Iterator[Terminal]:
    """A terminal beside the first one, in which another command runs."""
    directory = home / "second"
    directory.mkdir()
    with Terminal(directory, ann) as terminal:
        yield terminal


@pytest.fixture
def gpus_back(second_shell: Terminal) -> Iterator[None]:
    """End by checking that YARN has all GPUs back."""
    yield
    said = second_shell.run("until hopsgpu gpus | grep '^4 of 4 GPUs free'; do sleep 1; done")
    assert "4 of 4 GPUs free, 0 used" in said
