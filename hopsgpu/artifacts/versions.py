"""Reads published versions, and defines the names in a model's directory."""

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
    with_class,
)
from hopsgpu.serving.model_loading import check_loadable, check_trust, load_model
from hopsgpu.serving.torch_files import STATE_DICT
from hopsgpu.storage.digests import MAX_LIST_BYTES, FileFacts
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
# Prefix of files that only check the permission to write.
PROBE = "_probe-"
# TensorFlow Serving and Triton require version numbers without a leading zero, within an int64.
DIGITS = 18
# A running download writes more often than this.
_DRAFT_SECONDS = 24 * 3600.0
_NUMBER = re.compile(rf"[1-9][0-9]{{0,{DIGITS - 1}}}")


def numbers(names: Iterable[str]) -> list[int]:
    """Return the names that are version numbers, as integers; other names are ignored."""
    return [int(name) for name in names if _NUMBER.fullmatch(name)]


@dataclass(frozen=True)
class ModelVersion:
    """A published version.

    Attributes:
        name: name of the model.
        version: an integer, 1 and up.
        url: URL of the directory on the lake.
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

        The manifest describes the version at its publication. The value is a copy, which may be
        changed.

        Raises:
            StoreError: the manifest cannot be read, or is damaged.
        """
        # Copied as JSON: `copy.deepcopy` could exceed the recursion limit.
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

        Nothing is loaded or unpickled. The result is empty if hopsgpu recognises no model.

        Raises:
            StoreError: the lake refused the operation, or `model_class.json` is damaged.
        """
        return self._formats

    @functools.cached_property
    def _formats(self) -> tuple[ModelFormat, ...]:
        with _report_deletion(LakePath(self.url)):
            return recognise_formats(self.files, self.open)

    @public
    def load(self, *, path: str | None = None, trust: bool | Iterable[str] = False) -> Any:
        """Download the version, and load its model into this process.

        The result depends on the format:

        - SavedModel: the result of `tf.saved_model.load`
        - TorchScript: a `torch.jit.ScriptModule` on the CPU
        - state_dict: the tensors by name, on the CPU; safetensors: the tensors by name
        - ONNX: an `onnxruntime.InferenceSession`
        - XGBoost: an `xgboost.Booster`
        - skops and pickle: the estimator
        - a directory that `save_pretrained` wrote: a pair, `model` and `processor`: the
          transformers model, and its tokenizer or processor, or None

        docs/serving.md has the other formats. Each format needs the library that wrote it.

        Unless `trust` allows it, nothing is unpickled, and no code or program of the version runs.
        Only the version's files are read, and nothing is fetched from the network.

        Args:
            path: path of the model within the version, as in `formats`; needed if there are
                several models.
            trust: True to run all code of the files: a pickle, a torch file with more than tensors,
                a program (SavedModel, TorchScript), and code that a configuration names
                (`auto_map`). Or a list of names: for skops, of further types to accept; for a
                state_dict, the class in its `model_class.json`, as "module:Class".

        Raises:
            ConfigError: there is no model, or several; the model needs `trust`; its library is not
                installed; or hopsgpu does not load its format (the message names what does).
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
        """Write the files that a server needs to serve this version, and return the directory.

        Args:
            to: "kserve", "triton", "tf-serving" or "mlserver".
            out: a directory, created if missing; by default `NAME-SERVER` in the working directory.
                Other files in it stay.
            path: path of the model within the version, as in `formats`; needed if the server can
                serve several models.
            trust: True if the server may run the publisher's code, such as a pickle or a
                SavedModel. Or a list of names: for skops, of further types that it may accept; for
                a state_dict, the class that it may call, as "module:Class".
            max_batch_size: for Triton, the maximum number of rows of a batch; None for no batching.
            python: for Triton, whether its Python backend calls the model even if the format has a
                backend of its own.
            namenode: for KServe, the address of WebHDFS, `http://host:9870`.
            principal: for KServe, the Kerberos principal whose keytab it uses.
            image: for KServe, the image of the predictor if KServe has no server for the format.

        Raises:
            ConfigError: the server does not serve the version's formats; there are several models;
                the manifest lacks the signature that the server needs; the model needs `trust`, or
                refers to files that are not the version's; or an argument is missing, or belongs
                to another server.
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
        model_class = None
        if model.name == STATE_DICT:
            # The class that is checked is the one that is exported: the file may change meanwhile.
            model_class = read_model_class(model.path, self.files, self.open)
            model = with_class(model, model_class)
        check_trust(model, trust)
        target = Path(f"{self.name}-{to}") if out is None else local_path(out, "out")
        with tempfile.TemporaryDirectory(prefix="hopsgpu-model-") as directory:
            if export.needs_files(to, model):
                self.download(directory)
            served = ServedVersion(
                name=self.name,
                version=self.version,
                url=self.url,
                model=model,
                files=(model.path,),
                signature=model_signature.parse(self._manifest.content["signature"]),
                model_class=model_class,
            )
            version = export.add_file_facts(served, self.files, Path(directory), trust)
            try:
                export.write(to, version, self.files, Path(directory), target, options)
            except OSError as error:
                raise StoreError(
                    f"cannot export to {target}: {error}", explain(error).kind
                ) from error
        return target

    def _read_manifest(self) -> Manifest:
        file = LakePath(self.url) / manifest.FILE
        with _report_deletion(LakePath(self.url)):
            return manifest.parse(file.read(MAX_LIST_BYTES), file.url)

    @public
    def download(self, dst: str | Path) -> Path:
        """Copy the version's files into a local directory, and return the directory.

        The directory is created if missing. The files get their names once all files have arrived
        and match the manifest. A download that fails leaves no file, and replaces no file. A
        download that is killed leaves a draft, `.<id>.download`. A publish skips the draft. A later
        download into the same directory removes the draft once it is a day old.

        Args:
            dst: a directory; other files in it stay.

        Raises:
            ConfigError: `dst` is not a path, or is a file.
            StoreError: a file is missing or damaged, the version was deleted (kind "absent"), the
                lake refused the operation, `dst` cannot be written, or has a directory in the place
                of a file or the reverse.
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
                _refuse_links_outside(target, files)
                _refuse_obstacles(target, files)
                with _report_deletion(LakePath(self.url)):
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

        This finds damage, not tampering: whoever may change a file may change the manifest too.

        Raises:
            StoreError: a file is missing or damaged, and the message names it; or the version was
                deleted (kind "absent").
        """
        files = self._read_manifest().files
        with _report_deletion(LakePath(self.url)):
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
            names = sorted(self._manifest.files)
            more = "" if len(names) <= 10 else f" and {len(names) - 10} more"
            raise StoreError(
                f"{self.url} has no file {path!r}: {', '.join(names[:10])}{more}", kind="absent"
            )
        return (LakePath(self.url) / path).reader()


def is_version(home: LakePath, number: int) -> bool:
    """Return whether a version exists: it appears with its manifest, in one step."""
    return has_manifest(home / str(number))


def has_manifest(version: LakePath) -> bool:
    """Return whether a version has a manifest; an empty one does not count on an object store."""
    try:
        return bool((version / manifest.FILE).stat().size) or not version.is_object_store
    except StoreError as error:
        if error.kind in (ABSENT, EXISTS):  # EXISTS: a file has the number as its name
            return False
        raise


def lacks_manifest(version: LakePath) -> bool:
    """Return whether a version has files but no manifest.

    On an object store the result is False: such files are an unfinished upload or removal.
    """
    if version.is_object_store:
        return False
    try:
        # A single listing: a version may appear between two listings. On a local lake, a version
        # first appears as an empty directory.
        names = version.names() if version.stat().is_directory else ()
    except StoreError as error:
        if error.kind != ABSENT:
            raise
        return False
    return bool(names) and manifest.FILE not in names


def missing_manifest_error(version: LakePath) -> StoreError:
    return StoreError(
        f"{version.url} is damaged: its manifest.json is missing; restore it, or delete the"
        " version",
        DAMAGED,
    )


def is_listed(home: LakePath, number: int) -> bool:
    """Return whether a version exists, or a directory that may not be read."""
    try:
        return is_version(home, number)
    except StoreError as error:
        if error.kind != PERMISSION:
            raise
        return True


@contextlib.contextmanager
def _report_deletion(version: LakePath) -> Iterator[None]:
    """Replace an error about a missing or damaged file if the version was deleted meanwhile.

    If the version has lost only its manifest, the error says that.
    """
    try:
        yield
    except StoreError as error:
        if error.kind not in (ABSENT, DAMAGED) or has_manifest(version):
            raise
        if lacks_manifest(version):
            raise missing_manifest_error(version) from error
        raise StoreError(f"{version.url} was deleted", ABSENT) from error


def _remove_old_drafts(target: Path) -> None:
    """Remove old drafts of killed downloads; new ones may belong to other machines.

    A draft that cannot be read or removed is skipped: another user owns it, or it was removed.
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


def _refuse_links_outside(target: Path, files: Iterable[str]) -> None:
    root = target.resolve()
    for directory in {path.rpartition("/")[0] for path in files}:
        if not (root / directory).resolve().is_relative_to(root):
            raise StoreError(
                f"cannot download into {target}: {target}/{directory} is a link to a directory"
                " outside it; no file was written"
            )


def _refuse_obstacles(target: Path, files: Iterable[str]) -> None:
    """Raise StoreError if a file cannot get its name, before the first file gets its name."""
    places = [PurePosixPath(path) for path in files]
    for name in sorted({parent for place in places for parent in place.parents}):
        directory = target / name
        if os.path.lexists(directory) and not directory.is_dir():
            kind = "is not a directory, but the version has a directory of this name"
            raise _obstacle_error(target, f"{directory} {kind}", EXISTS)
    for place in places:
        parent = (target / place).parent
        if (target / place).is_dir():
            problem = f"{target / place} is a directory, but the version has a file of this name"
            raise _obstacle_error(target, problem, EXISTS)
        if parent.is_dir() and not os.access(parent, os.W_OK | os.X_OK):
            raise _obstacle_error(target, f"you may not write to {parent}", PERMISSION)


def _obstacle_error(target: Path, problem: str, kind: str) -> StoreError:
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
