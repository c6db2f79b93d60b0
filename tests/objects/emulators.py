"""Servers on this machine that answer as object stores do, each with its client's variables.

That of S3 is moto's. Google's is fake-gcs-server and Azure's is Azurite: `make other-objects`
installs them.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import fsspec
import pytest

from tests.servers import accepts, free_port, running_server

REPOSITORY = Path(__file__).resolve().parents[2]
SECRET = "secret-of-the-tests"  # noqa: S105
# Azurite's own account, whose key is in its documentation.
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)


@dataclass(frozen=True)
class Emulator:
    """A server and what its clients know.

    Attributes:
        scheme: of its URLs.
        library: module of its client.
        variables: environment with its address, and with credentials where there are any.
        nobody: those with another address, at which nobody answers.
        stranger: those without credentials; empty if the server accepts anybody.
        address: name of the variable with the address.
        secret: what nothing of ours may contain; "" if there is none.
        host: what follows a bucket's name in a URL.
    """

    scheme: str
    library: str
    variables: Mapping[str, str]
    nobody: Mapping[str, str]
    address: str
    stranger: Mapping[str, str] = field(default_factory=dict)
    secret: str = ""
    host: str = ""

    def mark(self, path: str) -> None:
        """Make the empty object by which consoles show an empty directory."""
        if self.scheme != "abfss":
            fsspec.filesystem(self.scheme).pipe_file(f"{path}/", b"")
            return
        from azure.storage.blob import BlobServiceClient

        with BlobServiceClient.from_connection_string(self.variables[self.address]) as client:
            blob = client.get_blob_client(*path.split("/", 1))
            blob.upload_blob(b"", metadata={"hdi_isfolder": "true"})

    def url(self, bucket: str) -> str:
        """Return the URL of a bucket."""
        return f"{self.scheme}://{bucket}{self.host}"


@contextlib.contextmanager
def s3(directory: Path) -> Iterator[Emulator]:
    """Run moto's server."""
    with (
        (directory / "server.log").open("wb") as log,
        subprocess.Popen(
            [sys.executable, "-m", "tests.objects.s3_server"],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as server,
    ):
        assert server.stdin is not None and server.stdout is not None
        endpoint = server.stdout.readline().strip()
        assert endpoint, (directory / "server.log").read_text()
        variables = {
            "AWS_CONFIG_FILE": str(directory / "config"),
            "AWS_SHARED_CREDENTIALS_FILE": str(directory / "credentials"),
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "of-the-tests",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        yield Emulator(
            scheme="s3",
            library="s3fs",
            variables=variables,
            nobody={"AWS_ENDPOINT_URL": "http://127.0.0.1:1"},
            stranger={"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""},
            address="AWS_ENDPOINT_URL",
            secret=SECRET,
        )
        server.stdin.close()


@contextlib.contextmanager
def gs(directory: Path) -> Iterator[Emulator]:
    """Run fake-gcs-server, which wants no credentials."""
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    command = [_program("fake-gcs-server"), "-scheme", "http", "-host", "127.0.0.1"]
    command += ["-port", str(port), "-external-url", endpoint, "-public-host", f"127.0.0.1:{port}"]
    command += ["-backend", "memory", "-log-level", "warn"]
    with _running(command, port, directory):
        yield Emulator(
            scheme="gs",
            library="gcsfs",
            variables={
                "STORAGE_EMULATOR_HOST": endpoint,
                # Both would look for credentials, and for the metadata server of Google's machines.
                "NO_GCE_CHECK": "true",
                "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            },
            nobody={"STORAGE_EMULATOR_HOST": "http://127.0.0.1:1"},
            address="STORAGE_EMULATOR_HOST",
        )


@contextlib.contextmanager
def abfss(directory: Path) -> Iterator[Emulator]:
    """Run Azurite."""

    def connection(port: int, key: str) -> str:
        endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
        known = {"AccountName": ACCOUNT, "AccountKey": key, "BlobEndpoint": endpoint}
        fields = {"DefaultEndpointsProtocol": "http", **known}
        return ";".join(f"{name}={value}" for name, value in fields.items())

    port = free_port()
    command = [_program("azurite-blob"), "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    command += ["--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--silent"]
    name = "AZURE_STORAGE_CONNECTION_STRING"
    other_key = "bm90IHRoZSBrZXk="
    with _running(command, port, directory):
        yield Emulator(
            scheme="abfss",
            library="adlfs",
            variables={name: connection(port, ACCOUNT_KEY)},
            nobody={name: connection(1, ACCOUNT_KEY)},
            stranger={name: connection(port, other_key)},
            address=name,
            secret=ACCOUNT_KEY,
            host=f"@{ACCOUNT}.dfs.core.windows.net",
        )


EMULATORS: Mapping[str, Callable[[Path], contextlib.AbstractContextManager[Emulator]]] = {
    "s3": s3,
    "gs": gs,
    "abfss": abfss,
}


def _program(name: str) -> str:
    places = (REPOSITORY / ".emulators" / "bin", REPOSITORY / ".emulators/node_modules/.bin")
    for place in places:
        if found := shutil.which(name, path=place):
            return found
    pytest.fail(f"{name} is in none of {', '.join(map(str, places))}: run `make other-objects`")


@contextlib.contextmanager
def _running(command: list[str], port: int, directory: Path) -> Iterator[None]:
    with running_server(command, directory, directory / "server.log", lambda: accepts(port)):
        yield
