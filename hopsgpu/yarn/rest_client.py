"""HTTP to Hadoop's daemons: REST, with Kerberos (SPNEGO) if they require it.

Sources: RFC 4559 (Negotiate); the Hadoop documentation, "Authentication for Hadoop HTTP
web-consoles".
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from hopsgpu.errors import ConfigError, HopsGpuError
from hopsgpu.storage.direct_http import direct_session
from hopsgpu.yarn.answer_lists import join_repeated, with_lists

if TYPE_CHECKING:
    from typing import Any

    from requests import Response
    from requests.auth import AuthBase


_MOST_SAID = 200


class NoAnswer(HopsGpuError):
    """The error of a daemon that did not answer as asked; the message gives the reason briefly."""


def get_json(url: str, seconds: tuple[float, float]) -> Any:
    """Return a daemon's answer to a GET, with the lists of Hadoop 3.5 whatever its version is.

    No proxy is asked, whatever the environment says. The library requests reads the certificates of
    a private authority (REQUESTS_CA_BUNDLE) and ~/.netrc.

    Args:
        url: the complete URL.
        seconds: limits to connect, and to be answered.

    Raises:
        NoAnswer: nobody answers, or the answer is an error or no JSON.
        ConfigError: the daemon requires Kerberos, and the package for it is not installed.
        HopsGpuError: it requires Kerberos, and there is no ticket or it refuses the ticket.
    """
    import requests

    answer = _answer("GET", url, seconds)
    try:
        return with_lists(answer.json(object_pairs_hook=join_repeated))
    except requests.JSONDecodeError as error:
        raise NoAnswer("its answer is not JSON") from error


def get_text(url: str, seconds: tuple[float, float]) -> str:
    """Return a daemon's answer to a GET that is no JSON, such as a log.

    Raises:
        NoAnswer, ConfigError, HopsGpuError: as get_json().
    """
    return _answer("GET", url, seconds, accept="text/plain").text


def put_json(url: str, body: object, seconds: tuple[float, float]) -> None:
    """Send a JSON value to a daemon with a PUT; ignore its answer.

    Raises:
        NoAnswer, ConfigError, HopsGpuError: as get_json(); if the answer did not come in time, the
            daemon may have accepted the value all the same.
    """
    _answer("PUT", url, seconds, body=body)


def _answer(
    method: str,
    url: str,
    seconds: tuple[float, float],
    *,
    accept: str = "application/json",
    body: object = None,
) -> Response:
    import requests

    def ask(auth: AuthBase | None = None) -> Response:
        with direct_session() as session:
            return session.request(
                method, url, headers={"Accept": accept}, json=body, timeout=seconds, auth=auth
            )

    try:
        answer = ask()
        if _wants_kerberos(answer):
            # A new object for each request: it keeps a state for each host, and threads ask at
            # once.
            answer = ask(_kerberos(url))
            if _wants_kerberos(answer):
                raise HopsGpuError(
                    f"{_base(url)} requires Kerberos (SPNEGO) and refused this user: run kinit. Is"
                    " there a ticket (klist), and does this machine's clock agree with the KDC's?"
                )
        answer.raise_for_status()
    except requests.RequestException as error:
        raise NoAnswer(_reason(error)) from error
    return answer


def _wants_kerberos(answer: Response) -> bool:
    offered = answer.headers.get("WWW-Authenticate", "")
    return answer.status_code == 401 and "negotiate" in offered.lower()


def _kerberos(url: str) -> AuthBase:
    try:
        package = importlib.import_module("requests_gssapi")
    except ImportError as error:
        raise ConfigError(
            f"{_base(url)} requires Kerberos (SPNEGO), and requests-gssapi cannot be imported"
            f" ({error}): pip install 'hopsgpu[kerberos]', then run kinit"
        ) from None
    # The daemon has just asked for it, so the ticket is sent at once.
    auth: AuthBase = package.HTTPSPNEGOAuth(opportunistic_auth=True)
    return auth


def _base(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}"


def _status(answer: Response) -> str:
    """Return the HTTP status, and what Hadoop says beside it."""
    status = f"HTTP {answer.status_code} {answer.reason}".rstrip()
    try:
        message = " ".join(str(answer.json()["RemoteException"]["message"]).split())
    except (ValueError, LookupError, TypeError):
        return status
    return f"{status}: {message[:_MOST_SAID]}"


def _reason(error: BaseException) -> str:
    """Return the reason briefly: requests wraps the cause three times, with addresses in memory."""
    import requests

    if isinstance(error, requests.HTTPError) and error.response is not None:
        return _status(error.response)
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
