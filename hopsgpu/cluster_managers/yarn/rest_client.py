"""HTTP to Hadoop's daemons: REST, with Kerberos (SPNEGO) if they require it.

Sources: RFC 4559 (Negotiate); the Hadoop documentation, "Authentication for Hadoop HTTP
web-consoles".
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hopsgpu.cluster_managers.yarn.answer_lists import FieldTrail, join_repeated, with_lists
from hopsgpu.errors import ConfigError, HopsGpuError
from hopsgpu.storage.direct_http import direct_session
from hopsgpu.storage.kerberos import NO_TICKET, check_ticket, has_tokens, meaning, spnego_auth

if TYPE_CHECKING:
    from typing import Any

    from requests import Response
    from requests.auth import AuthBase

log = logging.getLogger(__name__)

_MAX_TEXT = 200
_TEMPORARY_REDIRECT = 307


class NoAnswer(HopsGpuError):
    """The error of a daemon that did not answer; the message gives the reason briefly."""


class NoAccess(NoAnswer):
    """The error of a daemon that requires Kerberos, and of this process's credentials."""


class NotUnderstood(HopsGpuError):
    """The error of an answer in an unknown form: it names field, address and Hadoop's version."""


@dataclass(frozen=True)
class DaemonKind:
    """A kind of YARN's daemons.

    Attributes:
        info: path at which it reports its version.
        field: the field of that answer that has the version in `hadoopVersion`.
    """

    name: str
    info: str
    field: str

    def version(self, url: str, seconds: tuple[float, float]) -> str:
        """Return the version of Hadoop that a daemon runs; "" if it does not report it."""
        try:
            return str(get_json(_base(url) + self.info, seconds)[self.field]["hadoopVersion"])
        except (HopsGpuError, LookupError, TypeError) as error:
            log.debug("the %s at %s does not report its version: %s", self.name, _base(url), error)
            return ""

    def misread(
        self,
        error: Exception,
        trail: FieldTrail,
        seconds: tuple[float, float],
        *,
        should_name_address: bool = True,
    ) -> str:
        """Return, in words, which field of an answer is not understood, and the Hadoop version.

        Args:
            should_name_address: whether to name the daemon's address; False if nodes with the same
                problem are listed together.
        """
        version = self.version(trail.url, seconds) or "of unknown version"
        at, reason = _base(trail.url), trail.explain(error)
        log.info("the %s at %s (Hadoop %s): %s: %s", self.name, at, version, trail.url, reason)
        where = f" at {at}" if should_name_address else ""
        return (
            f"the {self.name}{where} (Hadoop {version}) answered"
            f" {_path(trail.url)} in an unknown form: {reason}"
        )


RESOURCE_MANAGER = DaemonKind("ResourceManager", "/ws/v1/cluster/info", "clusterInfo")
NODE_MANAGER = DaemonKind("NodeManager", "/ws/v1/node/info", "nodeInfo")


def scheme_of(setting: Callable[[str], str | None]) -> str:
    """Return the scheme of YARN's web addresses; YARN takes the policy in any case."""
    policy = setting("yarn.http.policy") or ""
    return "https" if policy.upper() == "HTTPS_ONLY" else "http"


def get_json(url: str, seconds: tuple[float, float], trail: FieldTrail | None = None) -> Any:
    """Return a daemon's answer to a GET, with the lists of Hadoop 3.5 whatever its version is.

    Proxies of the environment are ignored. The library requests reads the certificates of a private
    authority (REQUESTS_CA_BUNDLE) and ~/.netrc.

    Args:
        seconds: limits to connect, and to be answered.
        trail: notes the fields that are read.

    Raises:
        NoAnswer: nobody answers, or the answer is an error or no JSON.
        ConfigError: the daemon requires Kerberos, and the package for it is not installed.
        HopsGpuError: the daemon requires Kerberos, and the ticket is missing or refused.
    """
    import requests

    if trail is not None:
        trail.url, trail.field = url, ""
    answer = _answer("GET", url, seconds)
    try:
        return with_lists(answer.json(object_pairs_hook=join_repeated), url, trail)
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

    began = time.monotonic()
    try:
        answer = ask()
        if _is_kerberos_required(answer):
            answer = ask(spnego_auth(_base(url)))
            if _is_kerberos_required(answer):
                raise NoAccess(
                    f"{_base(url)} requires Kerberos (SPNEGO) and refused this user:"
                    f" {_why_refused()}"
                )
        answer.raise_for_status()
        if answer.status_code == _TEMPORARY_REDIRECT:
            # A standby ResourceManager, while no other one is active.
            raise NoAnswer(_first_line(answer.text) or _status(answer))
    except requests.RequestException as error:
        reason = _reason(error)
        if (explanation := meaning(reason)) is not None:
            why = _for_driver(explanation)
            raise NoAccess(f"{_base(url)} requires Kerberos: {why}") from error
        log.debug("%s %s: %s after %.2f s", method, url, reason, time.monotonic() - began)
        raise NoAnswer(reason) from error
    log.debug("%s %s: HTTP %d", method, url, answer.status_code)
    return answer


def is_kerberos_required(url: str, seconds: tuple[float, float]) -> bool:
    """Return whether a daemon answers only callers with a Kerberos ticket.

    Raises:
        NoAnswer: it does not answer.
    """
    import requests

    try:
        with direct_session() as session:
            return _is_kerberos_required(session.get(url, timeout=seconds))
    except requests.RequestException as error:
        raise NoAnswer(_reason(error)) from error


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


def _is_kerberos_required(answer: Response) -> bool:
    offered = answer.headers.get("WWW-Authenticate", "")
    return answer.status_code == 401 and "negotiate" in offered.lower()


def _base(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}"


def _path(url: str) -> str:
    return url.removeprefix(_base(url)).partition("?")[0]


def _status(answer: Response) -> str:
    status = f"HTTP {answer.status_code} {answer.reason}".rstrip()
    try:
        message = " ".join(str(answer.json()["RemoteException"]["message"]).split())
    except (ValueError, LookupError, TypeError):
        return status
    return f"{status}: {message[:_MAX_TEXT]}"


def _first_line(text: str) -> str:
    return next((line.strip()[:_MAX_TEXT] for line in text.splitlines() if line.strip()), "")


def _reason(error: BaseException) -> str:
    """Return the innermost cause: requests wraps it three times, with memory addresses."""
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
