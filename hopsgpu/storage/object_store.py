"""Object stores by fsspec: s3:// and s3a:// by s3fs, gs:// by gcsfs, abfss:// by adlfs.

An object store has objects under keys, and neither directories nor a rename. Here a directory is
the beginning of keys up to a slash: it is there as soon as a file is below it, and gone with the
last one. A file appears whole, at the end of its write, whether or not it replaces another one.
`write(replace=False)` is the store's own put-if-absent, so that of several writers one succeeds:
`If-None-Match: *` of S3 and of Azure, `ifGenerationMatch=0` of Google Cloud Storage.

Credentials are those that the store's own library finds. hopsgpu neither reads nor passes them on.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import io
import itertools
import logging
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any

from hopsgpu.errors import ConfigError
from hopsgpu.storage.error_messages import NO_CREDENTIALS, NO_STORE, STORE_DENIED, StoreRefusal
from hopsgpu.storage.filesystem import FileStatus

log = logging.getLogger(__name__)

# The module of the file system for each scheme, and the extra that installs it.
_MODULES = {
    "s3": ("s3fs", "s3"),
    "s3a": ("s3fs", "s3"),
    "gs": ("gcsfs", "gcs"),
    "abfss": ("adlfs", "azure"),
}
SCHEMES = tuple(_MODULES)
# A larger file is written in parts of this size, and read in ranges of it. S3 takes 10,000 parts.
_PART = 32 * 2**20
_READ = 8 * 2**20
_CONNECT_SECONDS = 10.0
_ANSWER_SECONDS = 60.0
_QUICK_SECONDS = 5.0
# For one request with all its repetitions, and for a part of a large file.
_CALL_SECONDS = 180.0
_REMOVED_AT_ONCE = 32
_MARK = "_$folder$"
_CONNECTIONS = 64
# What the libraries say if they find no credentials, by the names of their errors' classes.
_WITHOUT_CREDENTIALS = frozenset(
    {
        "NoCredentialsError",
        "PartialCredentialsError",
        "CredentialRetrievalError",
        "TokenRetrievalError",
        "UnauthorizedSSOTokenError",
        "DefaultCredentialsError",
        "RefreshError",
        "ClientAuthenticationError",
        "CredentialUnavailableError",
    }
)
# Codes of errors of S3 that have no number of HTTP in the library's answer.
_DENIED = frozenset({"AccessDenied", "AllAccessDisabled", "InvalidAccessKeyId"})
_DENIED |= {"SignatureDoesNotMatch", "ExpiredToken", "RequestTimeTooSkewed", "InvalidToken"}
_TAKEN = frozenset({"PreconditionFailed"})
_NO_SUCH_RANGE = "InvalidRange"
# The answer to a HEAD request has no body, in which the code of the error would be.
_NO_BODY = "Bad Request"
# Words of a refusal for which new credentials may help.
_EXPIRED = re.compile(r"expired|token|credential", re.IGNORECASE)
# The begin of botocore's message about an address without a scheme.
_INVALID_ADDRESS = "Invalid endpoint"
_BUSY = frozenset({"SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout"})
_BUSY |= {"OperationAborted", "ConditionalRequestConflict", "NoSuchUpload"}


def library_of(url: str) -> tuple[str, ...]:
    """Return the module that a lake with this URL needs; none if it is not on an object store."""
    known = _MODULES.get(url.partition("://")[0])
    return () if known is None else known[:1]


class ObjectStore:
    """A `FileSystem` on an object store.

    Nobody owns an object: the `owner` of a status is "". Directories have no time: it is 0.

    Args:
        url: URL of the bucket or container, without a path.
        should_fail_fast: whether to give up on the store after some seconds.

    Raises:
        ConfigError: the library for the scheme is not installed.
    """

    def __init__(self, url: str, *, should_fail_fast: bool) -> None:
        scheme, _, bucket = url.partition("://")
        # abfss://container@account.dfs.core.windows.net
        self._bucket, _, account = bucket.partition("@")
        self._files = _client(scheme, account, should_fail_fast=should_fail_fast)
        # Those of Azure's accounts with a hierarchical namespace stay without files.
        self._keeps_directories = scheme == "abfss"
        self._seconds = 2 * _QUICK_SECONDS if should_fail_fast else _CALL_SECONDS
        log.debug("%s client of %s, %s", scheme, bucket, "quick" if should_fail_fast else "patient")

    def make(self, path: str) -> None:
        """Do nothing: a directory is there with its first file."""

    def set_mode(self, path: str, mode: int) -> None:
        """Do nothing: the store's own policies say who may read and write."""

    def stat(self, path: str) -> FileStatus:
        """Return the status of a file or directory."""
        info = self._ask(self._files._info, self._key(path))
        # Some programs mark a directory by an empty object of its name, without a slash at the end.
        if info["type"] != "directory" and not info["size"] and self._has_files_below(path):
            info = {**info, "type": "directory"}
        return _status(path, info)

    def entries(self, path: str) -> tuple[FileStatus, ...]:
        """Return the status of all files and directories in a directory."""
        key = self._key(path)
        found = self._ask(self._files._ls, key, detail=True)
        # Consoles and other programs make empty objects that stand for a directory.
        real = [info for info in found if info["name"].rstrip("/") != key and not _is_mark(info)]
        is_file = any(info["name"] == key and info["type"] == "file" for info in found)
        if not real and is_file:
            raise NotADirectoryError(path)
        return tuple(_status(info["name"], info) for info in real)

    @contextlib.contextmanager
    def read(self, path: str) -> Iterator[io.RawIOBase]:
        """Yield a reader of a file's bytes."""
        with contextlib.closing(_Reader(self, path, self._size(path))) as reader:
            yield reader

    def blocks(self, path: str) -> Iterator[bytes]:
        """Yield a file's bytes in order."""
        size = self._size(path)
        if size <= _READ:
            yield self.range(path, 0, None)
            return
        for start in range(0, size, _READ):
            yield self.range(path, start, min(start + _READ, size))

    def range(self, path: str, start: int, end: int | None) -> bytes:
        """Return the bytes of a file from `start` to before `end`, or to its end if that is first.

        They are of one object, whoever replaces it meanwhile.
        """
        key = self._key(path)
        try:
            # Without bounds also for an empty object, which has no first byte.
            bounds = {} if (start, end) == (0, None) else {"start": start, "end": end}
            content: bytes = self._ask(self._files._cat_file, key, **bounds)
        except StoreRefusal as error:
            if error.java == _NO_SUCH_RANGE:
                return b""
            raise
        return content

    def write(self, path: str, blocks: Iterable[bytes], *, replace: bool) -> None:
        """Create a file from blocks; it appears with its last byte."""
        left = iter(blocks)
        first, size = [], 0
        for block in left:
            first.append(block)
            size += len(block)
            if size > _PART and replace:
                break
        else:
            mode = "overwrite" if replace else "create"
            self._ask(self._files._pipe_file, self._key(path), b"".join(first), mode=mode)
            return
        self._write_parts(path, itertools.chain(first, left))

    def append(self, path: str, content: bytes) -> None:
        """Refuse: an object is only replaced as a whole."""
        raise NotImplementedError("an object store does not append to files")

    def rename(self, source: str, target: str, *, replace: bool) -> None:
        """Refuse: a copy and a removal are no rename, because others see both halves."""
        raise NotImplementedError("an object store has no rename")

    def remove(self, path: str) -> None:
        """Remove a file, or all files below a directory, in no order."""
        key = self._key(path)
        below = self._ask(self._files._find, key)
        if not self._keeps_directories:
            # What is below a name does not include an object of that name.
            self._ask(self._remove_all, {*below, key} if below else ())
            return
        self._ask(self._remove_all, below)
        directories = {key, *self._ask(self._files._find, key, withdirs=True)}
        # One is removed only once nothing is below it.
        for one in sorted(directories, key=len, reverse=True):
            self._ask(self._remove_all, [one])

    async def _remove_all(self, keys: Iterable[str]) -> None:
        import asyncio

        places = asyncio.Semaphore(_REMOVED_AT_ONCE)

        async def remove(key: str) -> None:
            async with places:
                with contextlib.suppress(FileNotFoundError):
                    await self._files._rm_file(key)

        await asyncio.gather(*map(remove, keys))

    def _has_files_below(self, path: str) -> bool:
        try:
            return bool(self.entries(path))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _write_parts(self, path: str, blocks: Iterable[bytes]) -> None:
        with _errors():
            file = self._files.open(self._key(path), "wb", block_size=_PART)
        try:
            for block in blocks:
                with _errors():
                    file.write(block)
            with _errors():
                file.close()
        except BaseException:
            # To close it would put what there is under the file's name.
            file.closed = True
            with contextlib.suppress(Exception):  # the first problem is the one to report
                file.discard()
            raise

    def _size(self, path: str) -> int:
        status = self.stat(path)
        if status.is_directory:
            raise IsADirectoryError(f"{path} is a directory")
        return status.size

    def _key(self, path: str) -> str:
        return f"{self._bucket}/{path.strip('/')}".rstrip("/")

    def _ask(self, call: Callable[..., Awaitable[Any]], *given: Any, **named: Any) -> Any:
        """Return what a call of the library returns in time."""
        from fsspec.asyn import sync

        try:
            with _errors():
                return sync(self._files.loop, call, *given, timeout=self._seconds, **named)
        except StoreRefusal as error:
            if error.java == STORE_DENIED and _EXPIRED.search(error.reason):
                # Temporary credentials may have expired: the next client reads them again.
                self._files.clear_instance_cache()
            raise


class _Reader(io.RawIOBase):
    """A reader of a file's bytes, with one request for each read."""

    def __init__(self, store: ObjectStore, path: str, size: int) -> None:
        self._store = store
        self._path = path
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(start + offset, 0)
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        if self._at >= self._size or not len(view):
            return 0
        content = self._store.range(self._path, self._at, self._at + len(view))
        view[: len(content)] = content
        self._at += len(content)
        return len(content)

    def readall(self) -> bytes:
        if self._at >= self._size:
            return b""
        content = self._store.range(self._path, self._at, None)
        self._at += len(content)
        return content


def _client(scheme: str, account: str, *, should_fail_fast: bool) -> Any:
    """Return fsspec's client, which keeps no listings.

    fsspec keeps one for each thread and process, because to make one takes half a second.
    """
    name, extra = _MODULES[scheme]
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{scheme}:// needs the package {name}: pip install 'hopsgpu[{extra}]', on the driver"
            f" and on the nodes ({error})"
        ) from error
    connect = _QUICK_SECONDS if should_fail_fast else _CONNECT_SECONDS
    answer = _QUICK_SECONDS if should_fail_fast else _ANSWER_SECONDS
    common: Mapping[str, Any] = {"use_listings_cache": False}
    if name == "s3fs":
        # `retrying.RetryLimits` repeats calls, and s3fs itself does.
        config = {
            "connect_timeout": connect,
            "read_timeout": answer,
            "retries": {"total_max_attempts": 1},
            "max_pool_connections": _CONNECTIONS,
        }
        return module.S3FileSystem(config_kwargs=config, **common)
    if name == "gcsfs":
        return module.GCSFileSystem(requests_timeout=answer, **common)
    return module.AzureBlobFileSystem(
        account_name=account.partition(".")[0],
        account_host=account.replace(".dfs.", ".blob."),
        connection_timeout=int(connect),
        read_timeout=int(answer),
        **common,
    )


def _status(path: str, info: Mapping[str, Any]) -> FileStatus:
    directory = info["type"] == "directory"
    name = path.rstrip("/").rpartition("/")[2]
    size = 0 if directory else int(info["size"])
    return FileStatus(name, 0 if directory else _modified(info), "", 0o777, directory, size)


def _is_mark(info: Mapping[str, Any]) -> bool:
    """Return whether an object is the mark of a directory that Hadoop's and EMR's clients make."""
    return info["name"].endswith(_MARK) and info["type"] == "file" and not info["size"]


def _modified(info: Mapping[str, Any]) -> int:
    """Return the time of an object, in milliseconds since the epoch; S3's are whole seconds."""
    found = (info.get(name) for name in ("LastModified", "last_modified", "updated", "mtime"))
    time: datetime.datetime | str = next(filter(None, found))
    if isinstance(time, str):
        time = datetime.datetime.fromisoformat(time)
    return round(time.timestamp() * 1000)


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Turn the errors of the libraries into those that `error_messages.explain` knows."""
    try:
        yield
    except (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError):
        raise
    except NotImplementedError:
        raise
    except Exception as error:
        raise as_exception(error) from error


def as_exception(error: Exception) -> Exception:
    """Return the exception that an error of one of the libraries stands for."""
    chain = list(_chain(error))
    said = next((text for text in map(_first_line, chain) if text), type(error).__name__)
    names = {one.__name__ for each in chain for one in type(each).__mro__}
    codes = {code for each in chain for code in _codes(each)}
    if names & _WITHOUT_CREDENTIALS:
        return StoreRefusal(
            NO_CREDENTIALS, f"{said} (no credentials that the store's library accepts)"
        )
    if codes & {"401", "403", *_DENIED} or isinstance(error, PermissionError):
        return StoreRefusal(STORE_DENIED, said)
    if codes - {""} == {"400"} and said == _NO_BODY:
        return StoreRefusal(
            STORE_DENIED,
            f"{said}, without a reason, as S3 answers if temporary credentials have expired",
        )
    if codes & {"404", "NoSuchBucket", "NoSuchKey"}:
        return FileNotFoundError(said)
    if codes & {"412", *_TAKEN}:
        return FileExistsError(said)
    if codes & {"408", "409", "429", "500", "502", "503", "504", *_BUSY}:
        return StoreRefusal(NO_STORE, said)
    if isinstance(error, TimeoutError):
        return StoreRefusal(NO_STORE, "no answer in time")
    if codes & {"416", "InvalidRange"}:
        return StoreRefusal(_NO_SUCH_RANGE, said)
    if any(code.isdecimal() and code >= "400" for code in codes):
        return StoreRefusal("InvalidRequest", said)
    return _without_answer(said)


def _without_answer(said: str) -> StoreRefusal:
    """Return the refusal for what the library says where the store did not answer."""
    if said.startswith(_INVALID_ADDRESS):
        return StoreRefusal("InvalidRequest", f"{said} (it must begin with http:// or https://)")
    # A connection that broke, or a host without an address.
    return StoreRefusal(NO_STORE, said)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def _codes(error: BaseException) -> Iterator[str]:
    """Yield the codes that an error has: of botocore, gcsfs, azure.core."""
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):
        yield str(response.get("Error", {}).get("Code", ""))
        yield str(response.get("ResponseMetadata", {}).get("HTTPStatusCode", ""))
    for name in ("code", "status_code", "status"):
        if isinstance(code := getattr(error, name, None), int | str):
            yield str(code)
    if str(error).startswith("Forbidden"):  # gcsfs has no number then
        yield "403"


def _first_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = str(error).strip().splitlines()
    return lines[0] if lines else ""
