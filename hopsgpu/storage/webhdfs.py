"""HDFS over HTTP by the package `hdfs`: webhdfs:// and swebhdfs://.

The NameNode's own WebHDFS supports all calls. HttpFS has the same protocol, but its renames are not
strict, so hopsgpu only reads from it. HttpFS redirects an upload to itself, by which hopsgpu
recognises it. (By its documentation and source; untried on a real HttpFS.)
"""

from __future__ import annotations

import contextlib
import getpass
import io
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qs, urlsplit

from hopsgpu.storage.direct_http import direct_session
from hopsgpu.storage.error_messages import NO_CREDENTIALS, StoreRefusal, refusal
from hopsgpu.storage.filesystem import FileStatus, SizedReader, read_blocks, read_range
from hopsgpu.storage.hadoop_conf import HadoopConf
from hopsgpu.storage.hadoop_tokens import name_services, web_token
from hopsgpu.storage.identity import PROXY_USER
from hopsgpu.storage.kerberos import is_kerberized, meaning, root_cause, spnego_auth
from hopsgpu.storage.umask import creation_mask

if TYPE_CHECKING:
    from requests import PreparedRequest

T = TypeVar("T")

log = logging.getLogger(__name__)

_PORTS = {"webhdfs": 9870, "swebhdfs": 9871}
_CONNECT_SECONDS = 10.0
# Longest wait for data: a DataNode that has lost another DataNode sends nothing for a minute.
_DATA_SECONDS = 180.0
_FAIL_FAST_SECONDS = 5.0


class WebHdfs:
    """A `FileSystem` on HDFS over HTTP; arguments as of `hdfs.Hdfs`.

    The user is HADOOP_PROXY_USER, HADOOP_USER_NAME or this process's user. With Kerberos, the user
    is the owner of the container's HDFS token, HADOOP_PROXY_USER, or the ticket's principal.
    """

    def __init__(self, url: str, *, should_fail_fast: bool) -> None:
        from hdfs.client import Client, InsecureClient

        scheme, _, address = url.partition("://")
        if not urlsplit(f"//{address}").port:
            address = f"{address}:{_PORTS[scheme]}"
        timeout = (
            (_FAIL_FAST_SECONDS, _FAIL_FAST_SECONDS)
            if should_fail_fast
            else (_CONNECT_SECONDS, _DATA_SECONDS)
        )
        log.debug(
            "WebHDFS client of the NameNode at %s, %s",
            address,
            "quick" if should_fail_fast else "patient",
        )
        base = f"{'https' if scheme == 'swebhdfs' else 'http'}://{address}"
        session = direct_session()
        hadoop = HadoopConf.load_hdfs(os.environ)
        if is_kerberized(hadoop.get):
            session.auth = _credentials(base, name_services(hadoop.all_values()))
            self._client = Client(base, timeout=timeout, session=session)
        else:
            user = os.environ.get(PROXY_USER) or os.environ.get("HADOOP_USER_NAME")
            user = user or getpass.getuser()
            self._client = InsecureClient(base, user=user, timeout=timeout, session=session)
        self._mask = creation_mask(os.environ)
        self._is_writable = False

    def make(self, path: str) -> None:
        self._check_writable(path)
        _call(lambda: self._client._mkdirs(path, permission=f"{0o777 & ~self._mask:o}"))

    def set_mode(self, path: str, mode: int) -> None:
        self._check_writable(path)
        _call(lambda: self._client._set_permission(path, permission=f"{mode:o}"))

    def stat(self, path: str) -> FileStatus:
        answer = _call(lambda: self._client._get_file_status(path).json())
        return _status(path.rpartition("/")[2], answer["FileStatus"])

    def entries(self, path: str) -> tuple[FileStatus, ...]:
        answer = _call(lambda: self._client._list_status(path).json())
        statuses = answer["FileStatuses"]["FileStatus"]
        return tuple(_status(s["pathSuffix"] or path.rpartition("/")[2], s) for s in statuses)

    @contextlib.contextmanager
    def read(self, path: str) -> Iterator[io.RawIOBase]:
        with contextlib.closing(_Reader(self._client, path, self.stat(path))) as reader:
            yield reader

    def blocks(self, path: str) -> Iterator[bytes]:
        with self.read(path) as reader:
            yield from read_blocks(reader)

    def range(self, path: str, start: int, end: int | None) -> bytes:
        with self.read(path) as reader:
            return read_range(reader, start, end)

    def write(self, path: str, blocks: Iterable[bytes], *, should_replace: bool) -> None:
        options = {
            "overwrite": str(should_replace).lower(),
            "permission": f"{0o666 & ~self._mask:o}",
            "createparent": "false",
        }
        self._send("PUT", lambda: self._client._create(path, **options), blocks)

    def append(self, path: str, content: bytes) -> None:
        self._send("POST", lambda: self._client._append(path), [content])

    def rename(self, source: str, target: str, *, should_replace: bool) -> None:
        self._check_writable(target)
        option = "OVERWRITE" if should_replace else "NONE"
        _call(lambda: self._client._rename(source, destination=target, renameoptions=option))

    def remove(self, path: str) -> None:
        self._check_writable(path)
        with contextlib.suppress(FileNotFoundError):
            _call(lambda: self._client._delete(path, recursive="true"))

    def _send(self, method: str, first: Callable[[], Any], blocks: Iterable[bytes]) -> None:
        """Send blocks to the address to which the NameNode redirects the first request."""
        address = _call(lambda: first().headers["location"])
        _check_redirect(address)
        # Log only the host: the query may contain a delegation token.
        log.debug("the NameNode redirects a %s to %s", method, urlsplit(address).netloc)
        content = (block for block in blocks if block)
        answer = _call(lambda: self._client._request(method=method, url=address, data=content))
        _check(answer)

    def _check_writable(self, path: str) -> None:
        """Raise a StoreRefusal if this is HttpFS: request once the address of an upload."""
        if self._is_writable:
            return
        try:
            address = _call(
                lambda: self._client._create(path, overwrite="true").headers["location"]
            )
        except StoreRefusal as error:
            if "find datanode" in error.reason:  # HttpFS does not look for a DataNode
                return
            raise
        _check_redirect(address)
        self._is_writable = True


def _credentials(
    base: str, services: Mapping[str, Collection[str]]
) -> Callable[[PreparedRequest], PreparedRequest]:
    """Return a function that adds credentials to requests to a NameNode.

    Each request reads the container's token again, because the token is renewed.
    """
    host = urlsplit(base).hostname or ""

    def sign(request: PreparedRequest) -> PreparedRequest:
        if "delegation" in parse_qs(urlsplit(str(request.url)).query):
            return request  # redirected to a DataNode
        if (token := web_token(os.environ, host, services)) is not None:
            request.prepare_url(request.url, {"delegation": token})
            return request
        if proxied := os.environ.get(PROXY_USER):
            request.prepare_url(request.url, {"doas": proxied})
        signed: PreparedRequest = spnego_auth(base)(request)
        return signed

    return sign


class _Reader(SizedReader):
    """A reader of a file's bytes, with one request for consecutive reads."""

    def __init__(self, client: Any, path: str, status: FileStatus) -> None:
        if status.is_directory:
            raise IsADirectoryError(path)
        super().__init__(status.size)
        self._client = client
        self._path = path
        self._answer: Any = None

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        before = self._at
        if super().seek(offset, whence) != before:
            self._disconnect()
        return self._at

    def readinto(self, buffer: Any) -> int:
        content = self.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def read(self, size: int | None = -1) -> bytes:
        if self._at == 0 and self._size and self._answer is None:
            # The same request has length and content: another file may have replaced this one.
            self._size = int(self._connect().headers.get("Content-Length", self._size))
        remaining = max(self._size - self._at, 0)
        wanted = remaining if size is None or size < 0 else min(size, remaining)
        if not wanted:
            return b""
        if self._answer is None:
            self._connect()
        content: bytes = _call(lambda: self._answer.raw.read(wanted))
        if not content:
            raise OSError(f"the connection ended at byte {self._at} of {self._size}")
        self._at += len(content)
        return content

    def close(self) -> None:
        self._disconnect()
        super().close()

    def _connect(self) -> Any:
        self._answer = _call(lambda: self._client._open(self._path, offset=self._at))
        return self._answer

    def _disconnect(self) -> None:
        if self._answer is not None:
            self._answer.close()
            self._answer = None


def _call(call: Callable[[], T]) -> T:
    """Return the result of a call of the package, or raise an exception that `explain` knows."""
    from hdfs.util import HdfsError
    from requests.exceptions import ConnectionError as NoConnection
    from requests.exceptions import RequestException
    from urllib3.exceptions import HTTPError

    # Not "from error": the libraries' errors contain URLs, which may contain a token.
    try:
        return call()
    except NoConnection as error:
        # The reason is "HTTPConnection(host='h', port=1): Failed to establish a new connection: …"
        reason = getattr(error.args[0], "reason", None) if error.args else None
        raise OSError(_redact(re.sub(r"^\w+\([^)]*\): ", "", str(reason or error)))) from None
    except HdfsError as error:
        raise refusal(str(error.exception or ""), _redact(str(error))) from None
    except RequestException as error:
        if (problem := meaning(root_cause(error))) is not None:
            raise StoreRefusal(NO_CREDENTIALS, problem) from None
        raise OSError(_redact(root_cause(error))) from None
    except HTTPError as error:
        raise OSError(_redact(str(error))) from None


def _redact(text: str) -> str:
    """Return a text without the delegation tokens in its URLs."""
    return re.sub(r"(delegation=)[^&\s'\")]+", r"\1…", text)


def _check(answer: Any) -> None:
    from hdfs.client import _to_error

    if not answer:
        error = _to_error(answer)
        raise refusal(str(error.exception or ""), str(error))


def _check_redirect(address: str) -> None:
    if "data" in parse_qs(urlsplit(address).query):
        raise StoreRefusal(
            "UnsupportedOperationException",
            "this is HttpFS, whose renames are not strict: hopsgpu only reads from it; to write,"
            " use the URL of the NameNode (hdfs:// or webhdfs://)",
        )


def _status(name: str, fields: Any) -> FileStatus:
    is_directory = fields["type"] == "DIRECTORY"
    return FileStatus(
        name,
        fields["modificationTime"],
        fields["owner"],
        int(fields["permission"], 8),
        is_directory,
        0 if is_directory else fields["length"],
    )
