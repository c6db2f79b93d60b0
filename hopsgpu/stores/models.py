"""Published models: `<root>/<name>/<version>/`, a version is there whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from hopsgpu.errors import StoreError
from hopsgpu.spec import check_name
from hopsgpu.stores.lake import UNFIT, Lake

MANIFEST = "manifest.json"
_STAGING = "_staging"
_CHUNK = 4 * 2**20


@dataclass(frozen=True)
class ModelVersion:
    """A published version.

    Attributes:
        name: of the model.
        version: an integer, 1 and up.
        url: its directory on the lake.
    """

    name: str
    version: int
    url: str

    @property
    def manifest(self) -> dict[str, Any]:
        """The manifest, read from the lake: files with sizes and SHA-256, run, time."""
        content: dict[str, Any] = json.loads((Lake(self.url) / MANIFEST).read())
        return content

    def download(self, dst: str | Path) -> Path:
        """Copies the version's files to a local directory, which is made.

        Raises:
            StoreError: a file is missing, or its SHA-256 is not the manifest's.
        """
        target = Path(dst)
        for name, facts in self.manifest["files"].items():
            local = target / _inside(name)
            local.parent.mkdir(parents=True, exist_ok=True)
            (Lake(self.url) / name).download(local)
            if _digest(local) != facts["sha256"]:
                raise StoreError(f"{self.url}/{name} is damaged: its SHA-256 is not the manifest's")
        return target

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[BinaryIO]:
        """One file of the version, for reading bytes."""
        with (Lake(self.url) / str(_inside(path))).open() as file:
            yield file


class ModelStore:
    """The models below a URL on the lake."""

    def __init__(self, url: str) -> None:
        self._root = Lake(url)

    def publish(
        self, local_dir: str | Path, name: str, *, run_id: str | None = None
    ) -> ModelVersion:
        """Uploads a directory and makes it the model's next version.

        The files go to a staging directory first, which a strict rename turns into a version
        that never existed; of two publishers at once each gets a version of its own.

        Raises:
            StoreError: the lake refused, or there are no files; nothing is left behind.
        """
        source = Path(local_dir)
        home = self._root / check_name(name, "model")
        files = sorted(path for path in source.rglob("*") if path.is_file())
        if not files:
            raise StoreError(f"{source} holds no file to publish as {name!r}")
        unfit = [path.name for path in files if UNFIT.search(str(path.relative_to(source)))]
        if unfit:
            raise StoreError(
                f"{unfit[0]!r} cannot be published: names with '#', '?', ';' or control characters"
                " do not survive every client of the lake; rename the file"
            )
        staging = home / _STAGING / f"{int(time.time())}-{uuid.uuid4().hex}"
        try:
            manifest = self._upload(source, files, staging)
            manifest |= {"name": name, "run_id": run_id, "time": time.time()}
            (staging / MANIFEST).write(json.dumps(manifest, indent=1).encode())
            version = self._claim(home, staging)
        except BaseException:
            staging.remove()
            raise
        return ModelVersion(name, version, f"{home.url}/{version}")

    def _upload(self, source: Path, files: list[Path], staging: Lake) -> dict[str, Any]:
        listed = {}
        staging.make()
        for directory in sorted({path.relative_to(source).parent for path in files} - {Path()}):
            (staging / directory.as_posix()).make()
        for path in files:
            name = path.relative_to(source).as_posix()
            if name == MANIFEST:
                raise StoreError(f"{MANIFEST} is hopsgpu's own name; the model has such a file")
            (staging / name).upload(path)
            listed[name] = {"bytes": path.stat().st_size, "sha256": _digest(path)}
        return {"schema": 1, "files": listed}

    def _claim(self, home: Lake, staging: Lake) -> int:
        version = max((v.version for v in self.versions(home.url.rpartition("/")[2])), default=0)
        while True:
            version += 1
            if staging.rename(home / str(version)):
                return version

    def versions(self, name: str) -> tuple[ModelVersion, ...]:
        """All versions of a model, oldest first; none where there is no such model."""
        home = self._root / check_name(name, "model")
        numbers = sorted(int(entry) for entry in home.names() if entry.isdigit())
        return tuple(ModelVersion(name, n, f"{home.url}/{n}") for n in numbers)

    def get(self, name: str, version: int | str = "latest") -> ModelVersion:
        """One version of a model.

        Raises:
            StoreError: there is no such model or version.
        """
        versions = self.versions(name)
        found = [v for v in versions if version in ("latest", v.version)]
        if not found:
            there = ", ".join(str(v.version) for v in versions) or "none"
            raise StoreError(f"no version {version} of {name!r} in {self._root.url}: {there}")
        return found[-1]


def _inside(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise StoreError(f"{name!r} is not a path inside a model")
    return path


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
