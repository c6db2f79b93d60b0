"""HTTP to the API server of Kubernetes: bounded answers, and errors in its own words.

Source: the Kubernetes documentation, "Kubernetes API Concepts" (lists, errors as Status objects).
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlencode, urlsplit

import urllib3

from hopsgpu.cluster_managers.http_client import MAX_ANSWER_BYTES, NoAccess, NoAnswer, NotUnderstood
from hopsgpu.cluster_managers.kubernetes.credentials import ApiAccess
from hopsgpu.errors import ConfigError
from hopsgpu.units import MIB

log = logging.getLogger(__name__)

Answer = Mapping[str, Any]
# Timeouts of connection and answer.
SECONDS = (3.0, 10.0)
_CHUNK_BYTES = 64 * 1024
# The limit of a read is for each one: a server that sends byte by byte needs another limit.
_TOTAL_PER_READ = 6
_PAGE, _MAX_PAGES = 500, 200
_MAX_TEXT = 400
_CONNECTIONS = 8
# An object of the API server has at most 1.5 MiB.
_MAX_LINE_BYTES = 2 * MIB


class ApiError(NoAnswer):
    """The error that an API server answered with.

    Attributes:
        reason: its machine-readable reason, such as "NotFound"; "" if it named none.
    """

    def __init__(self, message: str, status: int | None, reason: str = "") -> None:
        super().__init__(message, status)
        self.reason = reason


class Forbidden(ApiError, NoAccess):
    """The error of a caller who is not allowed to do this, or is not known."""


class ApiClient:
    """A client of an API server; threads may share it.

    All methods raise NoAnswer if the server does not answer, and ApiError if it answers with an
    error: Forbidden if the caller may not ask. They raise NotUnderstood if the answer has an
    unknown form.

    Args:
        seconds: limits to connect, and to be answered.
    """

    def __init__(self, access: ApiAccess, seconds: tuple[float, float] = SECONDS) -> None:
        self._access = access
        self._seconds = seconds
        configuration = access.configuration
        tls: dict[str, Any] = {}
        if urlsplit(access.address).scheme == "https":
            tls = {
                "cert_reqs": "CERT_REQUIRED" if configuration.verify_ssl else "CERT_NONE",
                "ca_certs": configuration.ssl_ca_cert,
                "cert_file": configuration.cert_file,
                "key_file": configuration.key_file,
            }
            if name := getattr(configuration, "tls_server_name", None):
                tls["server_hostname"] = tls["assert_hostname"] = name
        self._pool = urllib3.PoolManager(
            maxsize=_CONNECTIONS,
            retries=urllib3.Retry(0, redirect=0, raise_on_redirect=False),
            timeout=urllib3.Timeout(connect=seconds[0], read=seconds[1]),
            **tls,
        )

    @property
    def address(self) -> str:
        return self._access.address

    @property
    def cluster(self) -> str:
        """Return a name of the cluster, the same from inside and from outside of it."""
        return self._access.cluster

    @property
    def namespace(self) -> str:
        """Return the namespace of executors."""
        return self._access.namespace

    def get(self, path: str, **query: str) -> Answer:
        """Return an object."""
        return self._ask("GET", path, query)

    def get_content(self, path: str, **query: str) -> bytes:
        """Return an answer that is no object, such as a log."""
        with self._open("GET", path, query) as response:
            content = self._read(response)
        if response.status >= 300:
            raise self._error(response.status, _parse(content))
        return content

    def items(self, path: str, **query: str) -> Iterator[Answer]:
        """Yield the objects of a list, which is requested in pages."""
        following = ""
        for _ in range(_MAX_PAGES):
            page = {"limit": str(_PAGE), **({"continue": following} if following else {})}
            answer = self._ask("GET", path, {**query, **page})
            items = answer.get("items")
            if not isinstance(items, list):
                raise NotUnderstood(f"{self.address}{path}: the answer has no items")
            yield from (item for item in items if isinstance(item, dict))
            following = str((answer.get("metadata") or {}).get("continue") or "")
            if not following:
                return
        raise NoAnswer(f"{path} has more than the {_PAGE * _MAX_PAGES} objects that are accepted")

    def watch(self, path: str, seconds: float, **query: str) -> Iterator[tuple[str, Answer]]:
        """Yield the changes of a list's objects as they happen: what happened, and the object.

        The objects that exist come first, as "ADDED". The server ends the answer after some time.

        Args:
            seconds: the time after which it ends.
        """
        query = {**query, "watch": "true", "timeoutSeconds": str(int(seconds))}
        with self._open("GET", path, query, read_seconds=seconds + self._seconds[1]) as response:
            if response.status >= 300:
                raise self._error(response.status, _parse(self._read(response)))
            for line in _lines(response):
                event = _parse(line)
                if not isinstance(event, dict) or not isinstance(event.get("object"), dict):
                    raise NotUnderstood(f"{self.address}{path}: a line is no change of an object")
                if event.get("type") == "ERROR":
                    code = event["object"].get("code")
                    raise self._error(code if isinstance(code, int) else 500, event["object"])
                yield str(event.get("type")), event["object"]

    def create(self, path: str, body: Answer, **query: str) -> Answer:
        return self._ask("POST", path, query, body=body)

    def replace(self, path: str, body: Answer) -> Answer:
        return self._ask("PUT", path, body=body)

    def delete(self, path: str, body: Answer | None = None, **query: str) -> Answer:
        return self._ask("DELETE", path, query, body=body)

    def _ask(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Answer | None = None,
    ) -> Answer:
        with self._open(method, path, query or {}, body) as response:
            answer = _parse(self._read(response))
        if response.status >= 300:
            raise self._error(response.status, answer)
        if not isinstance(answer, dict):
            raise NotUnderstood(f"{self.address}{path}: the answer is not a JSON object")
        return answer

    @contextlib.contextmanager
    def _open(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Answer | None = None,
        read_seconds: float | None = None,
    ) -> Iterator[urllib3.BaseHTTPResponse]:
        """Send a request; provide the answer, whose content the caller reads.

        Args:
            read_seconds: the limit of each read; None for that of the client.
        """
        url = f"{self.address}{path}" + (f"?{urlencode(query)}" if query else "")
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            headers |= self._access.headers()
        except ConfigError as error:
            raise NoAccess(str(error)) from error
        began = time.monotonic()
        connect, read = self._seconds[0], read_seconds or self._seconds[1]
        try:
            response = self._pool.request(
                method,
                url,
                headers=headers,
                body=None if body is None else json.dumps(body),
                preload_content=False,
                timeout=urllib3.Timeout(connect=connect, read=read),
            )
            try:
                yield response
            except BaseException:
                # The rest of the answer would stand before the next one.
                response.close()
                raise
            finally:
                response.release_conn()
        except urllib3.exceptions.HTTPError as error:
            reason = _reason(error)
            log.debug("%s %s: %s after %.2f s", method, path, reason, time.monotonic() - began)
            raise NoAnswer(f"the API server at {self.address} does not answer: {reason}") from error
        log.debug("%s %s: HTTP %d", method, path, response.status)

    def _read(self, response: urllib3.BaseHTTPResponse) -> bytes:
        deadline = time.monotonic() + self._seconds[1] * _TOTAL_PER_READ
        answer = f"the answer of the API server at {self.address}"
        chunks, size = [], 0
        for chunk in _chunks(response):
            chunks.append(chunk)
            size += len(chunk)
            if size > MAX_ANSWER_BYTES:
                raise NoAnswer(f"{answer} has more than the {MAX_ANSWER_BYTES} accepted bytes")
            if time.monotonic() > deadline:
                raise NoAnswer(f"{answer} did not end in time")
        return b"".join(chunks)

    def _error(self, status: int, answer: object) -> ApiError:
        details = answer if isinstance(answer, dict) else {}
        reason = str(details.get("reason") or "")[:_MAX_TEXT]
        message = " ".join(str(details.get("message") or f"HTTP {status}").split())[:_MAX_TEXT]
        if status in (401, 403):
            who = f" (with the credentials of {self._access.origin})"
            return Forbidden(f"Kubernetes refuses: {message}{who}", status, reason)
        return ApiError(f"Kubernetes says: {message}", status, reason)


def _chunks(response: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
    """Yield the content as it arrives, so that the caller can give up a slow answer."""
    # `stream` waits until a chunk is full; urllib3 before 2.1 has nothing else.
    read_available = getattr(response, "read1", None)
    if read_available is None:
        yield from response.stream(1024)
        return
    while chunk := read_available(_CHUNK_BYTES, decode_content=True):
        yield chunk


def _lines(response: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
    """Yield the lines of an answer as they arrive.

    Raises:
        NoAnswer: a line is too long.
    """
    rest = b""
    for chunk in _chunks(response):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from filter(None, lines)
        if len(rest) > _MAX_LINE_BYTES:
            raise NoAnswer(f"a line of the answer has more than {_MAX_LINE_BYTES} bytes")


def _parse(content: bytes) -> object:
    """Return a JSON value; None if the content is none."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def _reason(error: BaseException) -> str:
    """Return the innermost cause, since urllib3 wraps it with memory addresses."""
    cause: BaseException = getattr(error, "reason", None) or error
    # A connection that is refused is a timeout to urllib3.
    is_refused = isinstance(cause, urllib3.exceptions.NewConnectionError)
    if isinstance(cause, urllib3.exceptions.TimeoutError) and not is_refused:
        return "timed out"
    while (deeper := cause.__cause__ or cause.__context__) is not None:
        cause = deeper
        if isinstance(cause, OSError) and cause.strerror:
            break
    return cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
