"""HTTP to the daemons of cluster managers: bounded answers, Kerberos (SPNEGO), bearer tokens.

Sources: RFC 4559 (Negotiate), RFC 6750 (Bearer); the Hadoop documentation, "Authentication for
Hadoop HTTP web-consoles".
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hopsgpu.errors import ConfigError, HopsGpuError
from hopsgpu.storage.direct_http import direct_session
from hopsgpu.storage.kerberos import NO_TICKET, check_ticket, has_tokens, meaning, spnego_auth
from hopsgpu.units import MIB

if TYPE_CHECKING:
    from requests import PreparedRequest, Response
    from requests.auth import AuthBase

log = logging.getLogger(__name__)

# A ResourceManager's list of ten thousand applications has about a quarter of this.
MAX_ANSWER_BYTES = 128 * MIB
_MAX_ERROR_BYTES = 64 * 1024
_CHUNK_BYTES = 64 * 1024
# The limit of `requests` is for each read: a daemon that sends byte by byte needs another one.
_TOTAL_PER_READ = 6
_MAX_TEXT = 200


class NoAnswer(HopsGpuError):
    """The error of a daemon that did not answer; the message gives the reason briefly.

    Attributes:
        status: the HTTP status of an answer that is an error; None if there was no answer.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class NoAccess(NoAnswer):
    """The error of a daemon that requires credentials, and of this process's credentials."""


class NotUnderstood(HopsGpuError):
    """The error of an answer in an unknown form: it names field, address and version."""


@dataclass(frozen=True)
class HttpAnswer:
    """An answer without an error.

    Attributes:
        body: the content, at most `MAX_ANSWER_BYTES`.
    """

    status: int
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace")

    def parse_json(self, pairs_hook: Callable[[Any], Any] | None = None) -> Any:
        """Return the content as a JSON value.

        Raises:
            NoAnswer: it is not JSON.
        """
        try:
            return json.loads(self.body, object_pairs_hook=pairs_hook)
        except (ValueError, RecursionError) as error:
            raise NoAnswer("its answer is not JSON") from error


def exchange(
    method: str,
    url: str,
    seconds: tuple[float, float],
    *,
    accept: str = "application/json",
    body: object = None,
    token: str | None = None,
) -> HttpAnswer:
    """Send a request to a daemon, and return its answer.

    Proxies of the environment are ignored. The library requests reads the certificates of a private
    authority (REQUESTS_CA_BUNDLE) and ~/.netrc.

    Args:
        seconds: limits to connect, and for each read of the answer.
        body: a JSON value.
        token: a bearer token, which no other address gets by a redirect; None for no token.

    Raises:
        NoAnswer: nobody answers, or the answer is an error or has no bound.
        ConfigError: the daemon requires Kerberos, and the package for it is not installed.
        NoAccess: the daemon requires Kerberos, and the ticket is missing or refused.
    """
    import requests

    def ask(auth: AuthBase | None) -> tuple[Response, bytes]:
        with (
            direct_session() as session,
            session.request(
                method,
                url,
                headers={"Accept": accept},
                json=body,
                timeout=seconds,
                auth=auth,
                stream=True,
            ) as response,
        ):
            return response, _read(response, seconds[1] * _TOTAL_PER_READ)

    began = time.monotonic()
    try:
        response, content = ask(_bearer_auth(token) if token else None)
        if _is_kerberos_required(response):
            response, content = ask(spnego_auth(base_of(url)))
            if _is_kerberos_required(response):
                raise NoAccess(
                    f"{base_of(url)} requires Kerberos (SPNEGO) and refused this user:"
                    f" {_why_refused()}",
                    response.status_code,
                )
    except requests.RequestException as error:
        reason = _reason(error)
        if (explanation := meaning(reason)) is not None:
            why = _for_driver(explanation)
            raise NoAccess(f"{base_of(url)} requires Kerberos: {why}") from error
        log.debug("%s %s: %s after %.2f s", method, url, reason, time.monotonic() - began)
        raise NoAnswer(reason) from error
    log.debug("%s %s: HTTP %d", method, url, response.status_code)
    if response.status_code >= 400:
        raise NoAnswer(_status(response, content), response.status_code)
    if response.status_code >= 300:
        # A redirect that leads nowhere: a standby ResourceManager, while no other one is active.
        text = _first_line(content.decode(errors="replace")) or _status(response, content)
        raise NoAnswer(text, response.status_code)
    return HttpAnswer(response.status_code, content)


def is_kerberos_required(url: str, seconds: tuple[float, float]) -> bool:
    """Return whether a daemon answers only callers with a Kerberos ticket.

    Raises:
        NoAnswer: it does not answer.
    """
    import requests

    try:
        with (
            direct_session() as session,
            session.get(url, timeout=seconds, stream=True) as response,
        ):
            return _is_kerberos_required(response)
    except requests.RequestException as error:
        raise NoAnswer(_reason(error)) from error


def base_of(url: str) -> str:
    """Return scheme, host and port of a URL."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}"


def path_of(url: str) -> str:
    return url.removeprefix(base_of(url)).partition("?")[0]


def _read(response: Response, seconds: float) -> bytes:
    is_error = response.status_code >= 300
    limit, deadline = _MAX_ERROR_BYTES if is_error else MAX_ANSWER_BYTES, time.monotonic() + seconds
    chunks, size = [], 0
    for chunk in _chunks(response):
        chunks.append(chunk)
        size += len(chunk)
        if size > limit:
            if is_error:
                break
            raise NoAnswer(f"its answer has more than the {limit} bytes that are accepted")
        if time.monotonic() > deadline:
            raise NoAnswer(f"its answer did not end within {seconds:g} s")
    return b"".join(chunks)


def _chunks(response: Response) -> Iterator[bytes]:
    """Yield the content as it arrives, so that the caller can give up a slow answer."""
    import requests
    import urllib3

    # `iter_content` waits until a chunk is full; urllib3 before 2.1 has nothing else.
    read_available = getattr(response.raw, "read1", None)
    if read_available is None:
        yield from response.iter_content(1024)
        return
    try:
        while chunk := read_available(_CHUNK_BYTES, decode_content=True):
            yield chunk
    except urllib3.exceptions.HTTPError as error:
        raise requests.ConnectionError(error) from error


def _bearer_auth(token: str) -> AuthBase:
    """Return what adds a token to a request; requests removes it for another host or port."""
    from requests.auth import AuthBase

    # A header alone would be replaced by a password of ~/.netrc.
    class BearerAuth(AuthBase):
        def __call__(self, request: PreparedRequest) -> PreparedRequest:
            request.headers["Authorization"] = f"Bearer {token}"
            return request

    return BearerAuth()


def _why_refused() -> str:
    try:
        ticket = check_ticket(os.environ)
    except ConfigError as error:
        return _for_driver(str(error))
    if ticket is None:
        return "run kinit. Is there a ticket (klist), and does the clock agree with the KDC's?"
    return (
        f"there is a ticket of {ticket.principal}; does this machine's clock agree with the KDC's,"
        " and may this user ask (the daemon's log says why)?"
    )


def _for_driver(reason: str) -> str:
    """Return the error about credentials; for a driver in YARN, which has no ticket, the remedy."""
    if reason == NO_TICKET and has_tokens(os.environ):
        return (
            "a driver in YARN has no ticket without a keytab: submit with --principal and --keytab"
            " (spark.kerberos.principal, spark.kerberos.keytab), or use --deploy-mode client"
        )
    return reason


def _is_kerberos_required(response: Response) -> bool:
    offered = response.headers.get("WWW-Authenticate", "")
    return response.status_code == 401 and "negotiate" in offered.lower()


def _status(response: Response, content: bytes) -> str:
    status = f"HTTP {response.status_code} {response.reason}".rstrip()
    try:
        message = " ".join(str(json.loads(content)["RemoteException"]["message"]).split())
    except (ValueError, LookupError, TypeError, RecursionError):
        return status
    return f"{status}: {message[:_MAX_TEXT]}"


def _first_line(text: str) -> str:
    return next((line.strip()[:_MAX_TEXT] for line in text.splitlines() if line.strip()), "")


def _reason(error: BaseException) -> str:
    """Return the innermost cause: requests wraps it three times, with memory addresses."""
    import requests

    if isinstance(error, requests.Timeout):
        return "timed out"
    cause: BaseException = error
    while (deeper := cause.__cause__ or cause.__context__) is not None:
        cause = deeper
    message = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
    hint = isinstance(error, requests.exceptions.SSLError)
    return message + (
        " (if a private authority signed its certificate, set REQUESTS_CA_BUNDLE)" if hint else ""
    )
