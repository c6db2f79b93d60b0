"""Object stores by fsspec: s3:// and s3a:// by s3fs, gs:// by gcsfs, abfss:// by adlfs.

An object store has objects under keys, and neither directories nor a rename. Here a directory is a
prefix of keys up to a slash. It exists while a file is below it. Writes are atomic: a file appears
at the end of its write. `write(should_replace=False)` is the store's own put-if-absent, which lets
one of several writers succeed: `If-None-Match: *` of S3 and Azure, `ifGenerationMatch=0` of Google
Cloud Storage.

The store's own library finds the credentials. hopsgpu neither reads nor passes them on.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import io
import itertools
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any

from hopsgpu.errors import ConfigError
from hopsgpu.storage.error_messages import NO_CREDENTIALS, NO_STORE, STORE_DENIED, StoreRefusal
from hopsgpu.storage.filesystem import FileStatus, SizedReader

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
_PART_BYTES = 32 * 2**20
_READ_BYTES = 8 * 2**20
_CONNECT_SECONDS = 10.0
_ANSWER_SECONDS = 60.0
_FAIL_FAST_SECONDS = 5.0
# Limit of one request with all retries of the library, or of a part of a large file.
_CALL_SECONDS = 180.0
_CONCURRENT_REMOVALS = 32
_MARK_SUFFIX = "_$folder$"
_CONNECTIONS = 64
# The libraries' error classes for missing credentials.
_CREDENTIAL_ERRORS = frozenset(
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
# Error codes of S3 without an HTTP status in the library's answer.
_DENIED_CODES = frozenset({"AccessDenied", "AllAccessDisabled", "InvalidAccessKeyId"})
_DENIED_CODES |= {"SignatureDoesNotMatch", "ExpiredToken", "RequestTimeTooSkewed", "InvalidToken"}
_INVALID_RANGE = "InvalidRange"
# The message of an answer to a HEAD request, which has no body and so no error code.
_NO_BODY = "Bad Request"
# Words of a refusal for which new credentials may help.
_EXPIRED = re.compile(r"expired|token|credential", re.IGNORECASE)
# The start of botocore's message about an address without a scheme.
_INVALID_ADDRESS = "Invalid endpoint"
_BUSY_CODES = frozenset({"SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout"})
_BUSY_CODES |= {"OperationAborted", "ConditionalRequestConflict", "NoSuchUpload"}


def library_of(url: str) -> tuple[str, ...]:
    """Return the module that this URL requires; empty unless it is on an object store."""
    return _MODULES.get(url.partition("://")[0], ())[:1]


class ObjectStore:
    """A `FileSystem` on an object store.

    An object has no owner: the `owner` of a status is "". A directory has no time: `modified` is 0.

    Args:
        url: URL of the bucket or container, without a path.
        should_fail_fast: whether to give up on the store after seconds.

    Raises:
        ConfigError: the library for the scheme is not installed.
    """

    def __init__(self, url: str, *, should_fail_fast: bool) -> None:
        scheme, _, bucket = url.partition("://")
        # abfss://container@account.dfs.core.windows.net
        self._bucket, _, account = bucket.partition("@")
        self._client = _client(scheme, account, should_fail_fast=should_fail_fast)
        # Azure's accounts with a hierarchical namespace keep empty directories.
        self._has_directories = scheme == "abfss"
        self._seconds = 2 * _FAIL_FAST_SECONDS if should_fail_fast else _CALL_SECONDS
        log.debug("%s client of %s, %s", scheme, bucket, "quick" if should_fail_fast else "patient")

    def make(self, path: str) -> None:
        """Do nothing: a directory exists with its first file."""

    def set_mode(self, path: str, mode: int) -> None:
        """Do nothing: the store's own policies control access."""

    def stat(self, path: str) -> FileStatus:
        info = self._call(self._client._info, self._key(path))
        # Some programs mark a directory by an empty object with the name of the directory.
        if info["type"] != "directory" and not info["size"] and self._has_files_below(path):
            info = {**info, "type": "directory"}
        return _file_status(path, info)

    def entries(self, path: str) -> tuple[FileStatus, ...]:
        key = self._key(path)
        infos = self._call(self._client._ls, key, detail=True)
        # Consoles and other programs create empty objects that stand for a directory.
        real = [info for info in infos if info["name"].rstrip("/") != key and not _is_mark(info)]
        is_file = any(info["name"] == key and info["type"] == "file" for info in infos)
        if not real and is_file:
            raise NotADirectoryError(path)
        return tuple(_file_status(info["name"], info) for info in real)

    @contextlib.contextmanager
    def read(self, path: str) -> Iterator[io.RawIOBase]:
        with contextlib.closing(_Reader(self, path, self._size(path))) as reader:
            yield reader

    def blocks(self, path: str) -> Iterator[bytes]:
        size = self._size(path)
        if size <= _READ_BYTES:
            yield self.range(path, 0, None)
            return
        for start in range(0, size, _READ_BYTES):
            yield self.range(path, start, min(start + _READ_BYTES, size))

    def range(self, path: str, start: int, end: int | None) -> bytes:
        """Return the bytes from `start` to before `end`, or fewer at the end of the file.

        All bytes are of one object, even if another one replaces it meanwhile.
        """
        key = self._key(path)
        try:
            # Do not pass the bounds of a whole object: an empty object has no first byte.
            bounds = {} if (start, end) == (0, None) else {"start": start, "end": end}
            content: bytes = self._call(self._client._cat_file, key, **bounds)
        except StoreRefusal as error:
            if error.java == _INVALID_RANGE:
                return b""
            raise
        return content

    def write(self, path: str, blocks: Iterable[bytes], *, should_replace: bool) -> None:
        remaining = iter(blocks)
        first, size = [], 0
        for block in remaining:
            first.append(block)
            size += len(block)
            if size > _PART_BYTES and should_replace:
                break
        else:
            mode = "overwrite" if should_replace else "create"
            self._call(self._client._pipe_file, self._key(path), b"".join(first), mode=mode)
            return
        self._write_parts(path, itertools.chain(first, remaining))

    def append(self, path: str, content: bytes) -> None:
        raise NotImplementedError("an object store does not append to files")

    def rename(self, source: str, target: str, *, should_replace: bool) -> None:
        # A copy and a removal are not atomic.
        raise NotImplementedError("an object store has no rename")

    def remove(self, path: str) -> None:
        key = self._key(path)
        below = self._call(self._client._find, key)
        if not self._has_directories:
            # The objects below a name do not include the object with that name.
            self._call(self._remove_all, {*below, key} if below else ())
            return
        self._call(self._remove_all, below)
        directories = {key, *self._call(self._client._find, key, withdirs=True)}
        # Remove the deepest directories first: only an empty directory can be removed.
        for directory in sorted(directories, key=len, reverse=True):
            self._call(self._remove_all, [directory])

    async def _remove_all(self, keys: Iterable[str]) -> None:
        import asyncio

        places = asyncio.Semaphore(_CONCURRENT_REMOVALS)

        async def remove(key: str) -> None:
            async with places:
                with contextlib.suppress(FileNotFoundError):
                    await self._client._rm_file(key)

        await asyncio.gather(*map(remove, keys))

    def _has_files_below(self, path: str) -> bool:
        try:
            return bool(self.entries(path))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _write_parts(self, path: str, blocks: Iterable[bytes]) -> None:
        with _errors():
            file = self._client.open(self._key(path), "wb", block_size=_PART_BYTES)
        try:
            for block in blocks:
                with _errors():
                    file.write(block)
            with _errors():
                file.close()
        except BaseException:
            # `close` would create the file from the parts that were written.
            file.closed = True
            with contextlib.suppress(Exception):  # raise the first error
                file.discard()
            raise

    def _size(self, path: str) -> int:
        status = self.stat(path)
        if status.is_directory:
            raise IsADirectoryError(f"{path} is a directory")
        return status.size

    def _key(self, path: str) -> str:
        return f"{self._bucket}/{path.strip('/')}".rstrip("/")

    def _call(self, call: Callable[..., Awaitable[Any]], *args: Any, **options: Any) -> Any:
        from fsspec.asyn import sync

        try:
            with _errors():
                return sync(self._client.loop, call, *args, timeout=self._seconds, **options)
        except StoreRefusal as error:
            if error.java == STORE_DENIED and _EXPIRED.search(error.reason):
                # Temporary credentials may have expired. The next client reads them again.
                self._client.clear_instance_cache()
            raise


class _Reader(SizedReader):
    """A reader of a file's bytes, with one request for each read."""

    def __init__(self, store: ObjectStore, path: str, size: int) -> None:
        super().__init__(size)
        self._store = store
        self._path = path

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        if self._at >= self._size or not len(view):
            return 0
        content = self._store.range(self._path, self._at, self._at + len(view))
        view[: len(content)] = content
        self._at += len(content)
        if len(content) < len(view):
            # A shorter object has replaced the one whose size was read. A further request could
            # return the end of yet another one.
            self._size = self._at
        return len(content)

    def readall(self) -> bytes:
        if self._at >= self._size:
            return b""
        content = self._store.range(self._path, self._at, None)
        self._at += len(content)
        return content


def _client(scheme: str, account: str, *, should_fail_fast: bool) -> Any:
    """Return a client of fsspec without a cache of listings.

    fsspec caches a client for each thread and process, because creating one takes half a second.
    """
    name, extra = _MODULES[scheme]
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{scheme}:// needs the package {name}: pip install 'hopsgpu[{extra}]', on the driver"
            f" and on the nodes ({error})"
        ) from error
    connect = _FAIL_FAST_SECONDS if should_fail_fast else _CONNECT_SECONDS
    answer = _FAIL_FAST_SECONDS if should_fail_fast else _ANSWER_SECONDS
    common: Mapping[str, Any] = {"use_listings_cache": False}
    if name == "s3fs":
        # `retrying.RetryLimits` retries calls, and so does s3fs itself.
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


def _file_status(path: str, info: Mapping[str, Any]) -> FileStatus:
    is_directory = info["type"] == "directory"
    name = path.rstrip("/").rpartition("/")[2]
    size = 0 if is_directory else int(info["size"])
    return FileStatus(name, 0 if is_directory else _time_of(info), "", 0o777, is_directory, size)


def _is_mark(info: Mapping[str, Any]) -> bool:
    """Return whether an object stands for a directory, as Hadoop's and EMR's clients create it."""
    return info["name"].endswith(_MARK_SUFFIX) and info["type"] == "file" and not info["size"]


def _time_of(info: Mapping[str, Any]) -> int:
    """Return the time of an object, in milliseconds since the epoch; S3's are whole seconds."""
    times = (info.get(name) for name in ("LastModified", "last_modified", "updated", "mtime"))
    time: datetime.datetime | str = next(filter(None, times))
    if isinstance(time, str):
        time = datetime.datetime.fromisoformat(time)
    return round(time.timestamp() * 1000)


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError):
        raise
    except NotImplementedError:
        raise
    except Exception as error:
        raise as_exception(error) from error


def as_exception(error: Exception) -> Exception:
    chain = list(_chain(error))
    message = next((text for text in map(_first_line, chain) if text), type(error).__name__)
    names = {kind.__name__ for cause in chain for kind in type(cause).__mro__}
    codes = {code for cause in chain for code in _codes(cause)}
    if names & _CREDENTIAL_ERRORS:
        return StoreRefusal(
            NO_CREDENTIALS, f"{message} (no credentials that the store's library accepts)"
        )
    if codes & {"401", "403", *_DENIED_CODES} or isinstance(error, PermissionError):
        return StoreRefusal(STORE_DENIED, message)
    if codes - {""} == {"400"} and message == _NO_BODY:
        return StoreRefusal(
            STORE_DENIED,
            f"{message}, without a reason, as S3 answers if temporary credentials have expired",
        )
    if codes & {"404", "NoSuchBucket", "NoSuchKey"}:
        return FileNotFoundError(message)
    if codes & {"412", "PreconditionFailed"}:
        return FileExistsError(message)
    if codes & {"408", "409", "429", "500", "502", "503", "504", *_BUSY_CODES}:
        return StoreRefusal(NO_STORE, message)
    if isinstance(error, TimeoutError):
        return StoreRefusal(NO_STORE, "no answer in time")
    if codes & {"416", _INVALID_RANGE}:
        return StoreRefusal(_INVALID_RANGE, message)
    if any(code.isdecimal() and code >= "400" for code in codes):
        return StoreRefusal("InvalidRequest", message)
    return _without_answer(message)


def _without_answer(message: str) -> StoreRefusal:
    if message.startswith(_INVALID_ADDRESS):
        return StoreRefusal("InvalidRequest", f"{message} (it must begin with http:// or https://)")
    # For example, a connection broke, or a host has no address.
    return StoreRefusal(NO_STORE, message)


def _chain(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _codes(error: BaseException) -> Iterator[str]:
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):
        yield str(response.get("Error", {}).get("Code", ""))
        yield str(response.get("ResponseMetadata", {}).get("HTTPStatusCode", ""))
    for name in ("code", "status_code", "status"):
        if isinstance(code := getattr(error, name, None), int | str):
            yield str(code)
    if str(error).startswith("Forbidden"):  # gcsfs gives no number in this case
        yield "403"


def _first_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = str(error).strip().splitlines()
    return lines[0] if lines else ""
