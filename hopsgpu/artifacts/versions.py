"""A published version, as readers see it, and the names in a model's directory."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import shutil
import tempfile
import time
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from hopsgpu.artifacts import manifest
from hopsgpu.artifacts.manifest import Manifest
from hopsgpu.core import html
from hopsgpu.core.boundary import public
from hopsgpu.errors import ConfigError, StoreError
from hopsgpu.serving import export, model_signature
from hopsgpu.serving.export_layout import ServedVersion
from hopsgpu.serving.model_formats import (
    ModelFormat,
    choose_format,
    read_model_class,
    recognise_formats,
)
from hopsgpu.serving.model_loading import check_loadable, check_trust, load_model
from hopsgpu.serving.torch_files import STATE_DICT
from hopsgpu.storage.digests import FileFacts
from hopsgpu.storage.error_messages import ABSENT, DAMAGED, EXISTS, PERMISSION, explain
from hopsgpu.storage.lake import LakePath
from hopsgpu.storage.local_tree import draft_name, drafts_in
from hopsgpu.storage.names import local_path
from hopsgpu.storage.transfer import check_files, download_files

log = logging.getLogger(__name__)

# Directories beside the versions; model servers ignore names that are not numbers.
STAGING = "_staging"
CLAIMS = "_claims"
TAGS = "_tags"
# Prefix of files that are written only to check that writing is permitted.
PROBE = "_probe-"
# As TensorFlow Serving and Triton read version numbers: no leading zero, and within an int64.
DIGITS = 18
# A download that is still running has written something within this time.
_DRAFT_SECONDS = 24 * 3600.0
_NUMBER = re.compile(rf"[1-9][0-9]{{0,{DIGITS - 1}}}")


def numbers(names: Iterable[str]) -> list[int]:
    """Return those names that are version numbers, as integers."""
    return [int(name) for name in names if _NUMBER.fullmatch(name)]


@dataclass(frozen=True)
class ModelVersion:
    """A published version.

    Attributes:
        name: name of the model.
        version: an integer, 1 and up.
        url: URL of its directory on the lake.
    """

    __module__ = "hopsgpu"

    name: str
    version: int
    url: str

    def _repr_html_(self) -> str:
        # Without the manifest, because reading the lake may take long.
        return html.box(html.title(self.name, f"version {self.version}", self.url))

    @property
    @public
    def manifest(self) -> dict[str, Any]:
        """Return the version's manifest; `hopsgpu.artifacts.manifest` describes the schema.

        The manifest says what was known of the version when it was published. The value is a copy,
        which may be changed.

        Raises:
            StoreError: the manifest cannot be read, or is damaged.
        """
        # Through JSON, whatever its depth: a copy made in Python would exceed the recursion limit.
        copied: dict[str, Any] = json.loads(json.dumps(self._manifest.content))
        return copied

    @property
    @public
    def files(self) -> dict[str, FileFacts]:
        """Return the sizes and digests of the version's files, by path."""
        return dict(self._manifest.files)

    @functools.cached_property
    def _manifest(self) -> Manifest:
        return self._read_manifest()

    @property
    @public
    def formats(self) -> tuple[ModelFormat, ...]:
        """Return the models among the version's files, recognised by names and content.

        Nothing is loaded or unpickled. Empty if hopsgpu recognises none.

        Raises:
            StoreError: the lake refused the operation, or `model_class.json` is damaged.
        """
        return self._formats

    @functools.cached_property
    def _formats(self) -> tuple[ModelFormat, ...]:
        with _deletion_told(LakePath(self.url)):
            return recognise_formats(self.files, self.open)

    @public
    def load(self, *, path: str | None = None, trust: bool | Iterable[str] = False) -> Any:
        """Download the version, and load its model into this process.

        Of a SavedModel the call returns what `tf.saved_model.load` does; of TorchScript a
        `torch.jit.ScriptModule` and of a state_dict the tensors by name, both on the CPU; of ONNX
        an `onnxruntime.InferenceSession`; of XGBoost an `xgboost.Booster`; of skops and of a pickle
        the estimator; of safetensors the tensors by name. Of a directory that `save_pretrained`
        wrote it returns a pair, `model` and `processor`: the transformers model, and its tokenizer
        or processor, which is None without one. docs/serving.md has the other formats. Each needs
        the library that wrote it.

        Unless `trust` allows it, nothing is unpickled, no code of the version is imported, and
        nothing comes from the network. A SavedModel, TorchScript and ONNX are programs too: run
        only those of publishers that you trust.

        Args:
            path: path of the model within the version, as in `formats`; needed if there are
                several.
            trust: True to run whatever code the files have: a pickle, a file of torch's that has
                more than tensors, and code that a configuration names (`auto_map`). For skops, the
                names of further types to accept.

        Raises:
            ConfigError: there is no model, or several; it needs `trust`; its library is not
                installed; or hopsgpu does not load its format, and the message says what does.
            StoreError: as `download`.
        """
        model = choose_format(self.formats, path, None, self.url)
        check_loadable(model)
        check_trust(model, trust)
        framework = self._manifest.content["framework"]
        with tempfile.TemporaryDirectory(prefix="hopsgpu-model-") as directory:
            return load_model(model, self.download(directory), trust, framework)

    @public
    def export(
        self,
        to: str,
        *,
        out: str | Path | None = None,
        path: str | None = None,
        trust: bool | Iterable[str] = False,
        max_batch_size: int | None = None,
        python: bool | None = None,
        namenode: str | None = None,
        principal: str | None = None,
        image: str | None = None,
    ) -> Path:
        """Write what a server needs to serve this version, and return the directory.

        Args:
            to: "kserve", "triton", "tf-serving" or "mlserver".
            out: a directory, created if missing; by default `NAME-SERVER` in the working directory.
                Other files in it stay.
            path: path of the model within the version, as in `formats`; needed if there are several
                that the server serves.
            trust: True if the server may unpickle the model; for skops, the names of further types
                that it may accept.
            max_batch_size: for Triton, the most rows that it may put together; by default none.
            python: for Triton, whether its Python backend is to call the model, where the format
                has a backend of its own, too.
            namenode: for KServe, the address of WebHDFS, `http://host:9870`.
            principal: for KServe, the Kerberos principal whose keytab it uses.
            image: for KServe, the image of the predictor, where it has no server for the format.

        Raises:
            ConfigError: the server does not serve the version's formats; there are several models;
                the manifest lacks the signature that the server needs; the model needs `trust`; or
                an argument is missing, or is another server's.
            StoreError: as `download`, or `out` cannot be written.
        """
        options = export.check_options(
            to,
            {
                "max_batch_size": max_batch_size,
                "python": python,
                "namenode": namenode,
                "principal": principal,
                "image": image,
            },
        )
        model = choose_format(self.formats, path, export.formats_of(to), self.url)
        check_trust(model, trust)
        target = Path(f"{self.name}-{to}") if out is None else local_path(out, "out")
        with tempfile.TemporaryDirectory(prefix="hopsgpu-model-") as directory:
            if export.needs_files(to, model):
                self.download(directory)
            known = ServedVersion(
                name=self.name,
                version=self.version,
                url=self.url,
                model=model,
                files=(model.path,),
                signature=model_signature.parse(self._manifest.content["signature"]),
                model_class=(
                    read_model_class(model.path, self.files, self.open)
                    if model.name == STATE_DICT
                    else None
                ),
            )
            version = export.add_file_facts(known, self.files, Path(directory), trust)
            try:
                export.write(to, version, Path(directory), target, options)
            except OSError as error:
                raise StoreError(
                    f"cannot export to {target}: {error}", explain(error).kind
                ) from error
        return target

    def _read_manifest(self) -> Manifest:
        file = LakePath(self.url) / manifest.FILE
        with _deletion_told(LakePath(self.url)):
            return manifest.parse(file.read(), file.url)

    @public
    def download(self, dst: str | Path) -> Path:
        """Copy the version's files into a local directory, and return the directory.

        The directory is created if missing. The files get their names once all of them have arrived
        and match the manifest. So a download that fails leaves no file, and replaces none that was
        there. A download that is killed leaves a draft, `.<id>.download`. A publish leaves the
        draft out, and a later download into the same directory removes it once nothing was written
        to it for a day.

        Args:
            dst: a directory; other files in it stay.

        Raises:
            ConfigError: `dst` is not a path, or is a file.
            StoreError: a file is missing or damaged, the version was deleted (kind "absent"), the
                lake refused the operation, `dst` cannot be written, or a directory is in the place
                of a file or the other way round.
        """
        target = local_path(dst, "dst")
        draft = target / draft_name()
        try:
            with _local_errors(target):
                if target.exists() and not target.is_dir():
                    raise ConfigError(
                        f"cannot download into {target}: it is a file; name a directory"
                    )
                files = self.files
                draft.mkdir(mode=0o700, parents=True)
                _remove_old_drafts(target)
                _refuse_ways_out(target, files)
                _refuse_in_the_way(target, files)
                with _deletion_told(LakePath(self.url)):
                    download_files(files, LakePath(self.url), draft)
                for directory in {PurePosixPath(path).parent for path in files}:
                    (target / directory).mkdir(parents=True, exist_ok=True)
                for path in files:
                    (draft / path).replace(target / path)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return target

    @public
    def verify(self) -> None:
        """Read all files and compare them with the manifest, which is read again.

        Raises:
            StoreError: a file is missing or damaged, and the message names it; or the version was
                deleted (kind "absent").
        """
        files = self._read_manifest().files
        with _deletion_told(LakePath(self.url)):
            check_files(files, LakePath(self.url))

    @public
    def open(self, path: str | PurePosixPath) -> BinaryIO:
        """Return one file of the version, opened to read bytes.

        The caller closes it, for example with a `with` statement.

        Args:
            path: path as in the manifest, in any Unicode normalisation form.

        Raises:
            StoreError: the version has no such file, or the lake refused the operation.
        """
        path = unicodedata.normalize("NFC", str(path))
        if path not in self._manifest.files:
            there = sorted(self._manifest.files)
            more = "" if len(there) <= 10 else f" and {len(there) - 10} more"
            raise StoreError(
                f"{self.url} has no file {path!r}: {', '.join(there[:10])}{more}", kind="absent"
            )
        return (LakePath(self.url) / path).reader()


def is_version(home: LakePath, number: int) -> bool:
    """Return whether a version exists: its manifest appears with it, in one step.

    Args:
        home: directory of the model.
        number: number of the version.
    """
    return has_manifest(home / str(number))


def has_manifest(version: LakePath) -> bool:
    """Return whether a version has a manifest; on an object store an empty one stands for none."""
    try:
        return bool((version / manifest.FILE).stat().size) or not version.is_object_store
    except StoreError as error:
        if error.kind in (ABSENT, EXISTS):  # a file may have the number as its name
            return False
        raise


def lacks_manifest(version: LakePath) -> bool:
    """Return whether a version has files but no manifest.

    On an object store that is an upload that is no version yet, or no more.
    """
    if version.is_object_store:
        return False
    try:
        # Use a single listing: a version may appear between two of them. On a local lake it appears
        # as an empty directory first.
        names = version.names() if version.stat().is_directory else ()
    except StoreError as error:
        if error.kind != ABSENT:
            raise
        return False
    return bool(names) and manifest.FILE not in names


def without_manifest(version: LakePath) -> StoreError:
    """Return the error for a version that has files but no manifest."""
    return StoreError(
        f"{version.url} is damaged: its manifest.json is missing; restore it, or delete the"
        " version",
        DAMAGED,
    )


@contextlib.contextmanager
def _deletion_told(version: LakePath) -> Iterator[None]:
    """Replace an error about a missing or damaged file if the version was deleted meanwhile.

    Missing files are no damage then. If the version has lost only its manifest, the error says
    that.
    """
    try:
        yield
    except StoreError as error:
        if error.kind not in (ABSENT, DAMAGED) or has_manifest(version):
            raise
        if lacks_manifest(version):
            raise without_manifest(version) from error
        raise StoreError(f"{version.url} was deleted", ABSENT) from error


def _remove_old_drafts(target: Path) -> None:
    """Remove what killed downloads left, by age, because several machines may share a directory.

    A draft that cannot be read or removed is skipped: it is another user's, or it is gone by now.
    """
    drafts: list[Path] = []
    with contextlib.suppress(OSError):
        drafts = drafts_in(target)
    for draft in drafts:
        with contextlib.suppress(OSError):
            newest = max(path.stat().st_mtime for path in (draft, *draft.rglob("*")))
            if time.time() - newest > _DRAFT_SECONDS:
                log.info("removes %s, the draft of a download that was killed", draft)
                shutil.rmtree(draft, ignore_errors=True)


def _refuse_ways_out(target: Path, files: Iterable[str]) -> None:
    """Raise StoreError if a link in the directory would make a file be written outside it."""
    root = target.resolve()
    for directory in {path.rpartition("/")[0] for path in files}:
        if not (root / directory).resolve().is_relative_to(root):
            raise StoreError(
                f"cannot download into {target}: {target}/{directory} is a link to a directory"
                " outside it; no file was written"
            )


def _refuse_in_the_way(target: Path, files: Iterable[str]) -> None:
    """Raise StoreError if one of the files cannot get its name, so that none gets its name."""
    places = [PurePosixPath(path) for path in files]
    for directory in sorted({above for place in places for above in place.parents}):
        there = target / directory
        if os.path.lexists(there) and not there.is_dir():
            problem = f"{there} is not a directory, but the version has a directory of this name"
            raise _in_the_way(target, problem, EXISTS)
    for place in places:
        above = (target / place).parent
        if (target / place).is_dir():
            problem = f"{target / place} is a directory, but the version has a file of this name"
            raise _in_the_way(target, problem, EXISTS)
        if above.is_dir() and not os.access(above, os.W_OK | os.X_OK):
            raise _in_the_way(target, f"you may not write to {above}", PERMISSION)


def _in_the_way(target: Path, problem: str, kind: str) -> StoreError:
    return StoreError(
        f"cannot download into {target}: {problem}; no file was written. Correct this, or download"
        " into another directory",
        kind,
    )


@contextlib.contextmanager
def _local_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot download into {target}: {error}", explain(error).kind) from error
