"""The contracts of every lake on the API of an object store, which a server here answers."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest

from hopsgpu.storage.lake import LakePath
from tests.conftest import CONTAINERS_ENV
from tests.objects.emulators import EMULATORS, Emulator

BUCKET = "lake"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--store", choices=sorted(EMULATORS), default="s3", help="the API to try")


@pytest.fixture(scope="session")
def emulator(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Emulator]:
    """The store, with a bucket; its variables are in the environment of this process."""
    start = EMULATORS[pytestconfig.getoption("store")]
    with start(tmp_path_factory.mktemp("store")) as known, pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3"):
            patch.delenv(name, raising=False)
        for name, value in known.variables.items():
            patch.setenv(name, value)
        fsspec.filesystem(known.scheme, skip_instance_cache=True).mkdir(BUCKET)
        yield known


@pytest.fixture(scope="session")
def site_conf(emulator: Emulator) -> Callable[[Path], dict[str, dict[str, object]]]:
    """Gives the nodes the variables too, as a role of the instances would."""
    variables = {f"{CONTAINERS_ENV}.{name}": value for name, value in emulator.variables.items()}
    return lambda directory: {"yarn-site": dict(variables)}


@pytest.fixture(scope="session")
def bucket(emulator: Emulator) -> str:
    """The bucket's URL."""
    return emulator.url(BUCKET)


@pytest.fixture
def lake(bucket: str) -> LakePath:
    """A directory of the bucket in which nothing is."""
    return LakePath(f"{bucket}/contract-{uuid.uuid4().hex}")
