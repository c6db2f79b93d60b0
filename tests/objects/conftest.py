"""The contracts of every lake on the API of S3, which moto's server answers."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import s3fs

from hopsgpu.storage.lake import Lake

BUCKET = "lake"


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the server; it and credentials are in the environment of this process."""
    directory = tmp_path_factory.mktemp("s3")
    with (
        (directory / "server.log").open("wb") as log,
        subprocess.Popen(
            [sys.executable, "-m", "tests.objects.s3_server"],
            cwd=Path(__file__).resolve().parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        assert server.stdin is not None and server.stdout is not None
        endpoint = server.stdout.readline().strip()
        assert endpoint, (directory / "server.log").read_text()
        for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3"):
            patch.delenv(name, raising=False)
        patch.setenv("AWS_CONFIG_FILE", str(directory / "config"))
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(directory / "credentials"))
        patch.setenv("AWS_ENDPOINT_URL", endpoint)
        patch.setenv("AWS_ACCESS_KEY_ID", "of-the-tests")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-the-tests")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        s3fs.S3FileSystem(skip_instance_cache=True).mkdir(BUCKET)
        yield endpoint
        server.stdin.close()


@pytest.fixture
def lake(s3_endpoint: str) -> Lake:
    """A directory of the bucket in which nothing is."""
    return Lake(f"s3://{BUCKET}/contract-{uuid.uuid4().hex}")
