"""Access to the pages: token, cookie, the names of this server, and the origin of a request.

As with Jupyter, the URL that the command prints has a token. A browser that opens it gets a
cookie and a URL without the token. Every response forbids scripts, styles, frames and forms of
others.
"""

from __future__ import annotations

import hmac
import logging
import secrets
from collections.abc import Collection
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hopsgpu.core.host_header import host_of, is_host_of_server

log = logging.getLogger(__name__)

_READING = ("GET", "HEAD")
_MAX_FIELDS = 20
_SECRET_BYTES = 32
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    " connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # With "no-referrer", browsers would omit the Origin header of forms, which `Guard` checks.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
STATIC = "/static/"


@dataclass(frozen=True)
class Secrets:
    """The secrets that a browser must send; new at each start, and stored nowhere.

    Attributes:
        token: in the URL that is printed.
        session: in the cookie.
        form: in each form that does something.
    """

    token: str = field(repr=False)
    session: str = field(repr=False)
    form: str = field(repr=False)

    @classmethod
    def fresh(cls) -> Secrets:
        return cls(*(secrets.token_urlsafe(_SECRET_BYTES) for _ in range(3)))


@dataclass(frozen=True)
class Server:
    """How browsers reach this server.

    Attributes:
        names: host names under which browsers reach it, beside those of the loopback.
        proxied: those of `names` at which a proxy listens, whose pages have another origin than
            the server sees.
        has_tls: whether it speaks TLS.
    """

    port: int
    names: Collection[str] = ()
    proxied: Collection[str] = ()
    has_tls: bool = False

    @property
    def cookie(self) -> str:
        """Return the cookie's name; cookies are shared by all ports of a host."""
        return f"hopsgpu-web-{self.port}"

    def is_own(self, host: str) -> bool:
        """Return whether a Host header names this server."""
        return is_host_of_server(host, self.names)


def is_same(given: str, expected: str) -> bool:
    """Return whether two secrets are the same, in a time that does not depend on them."""
    return hmac.compare_digest(given.encode(errors="replace"), expected.encode())


class Guard:
    """The application's outermost layer, which lets only the caller's own browser in."""

    def __init__(self, app: ASGIApp, server: Server, secrets: Secrets) -> None:
        self._app = app
        self._server = server
        self._secrets = secrets

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        path = str(scope["path"])

        async def respond(message: Message) -> None:
            if message["type"] == "http.response.start":
                written = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    written[name] = value
                written["Cache-Control"] = (
                    "private, max-age=600" if path.startswith(STATIC) else "no-store"
                )
            await send(message)

        refusal = self._refusal(scope, headers)
        await (refusal or self._app)(scope, receive, respond)

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        """Return the answer to a request that does not get to the application."""
        host = headers.get("host", "")
        if not self._server.is_own(host):
            log.warning("refused a request for the host %r", host[:200])
            return PlainTextResponse(
                f"This server is not {host_of(host)[:200]!r}. If it is meant to be reached under"
                " that name, start it with --allow-host NAME.\n",
                403,
            )
        token = field_of(scope["query_string"], "token")
        if token and scope["path"] == "/":
            return self._with_cookie(token)
        cookies = cookie_parser(headers.get("cookie", ""))
        if not is_same(cookies.get(self._server.cookie, ""), self._secrets.session):
            return PlainTextResponse(
                "Open the URL that `hopsgpu web` printed when it was started: it has a token.\n",
                401,
            )
        if scope["method"] not in _READING and not self._is_ours(headers, host):
            log.warning("refused a request that comes from %r", headers.get("origin", "")[:200])
            return PlainTextResponse("The request does not come from a page of this server.\n", 403)
        return None

    def _with_cookie(self, token: str) -> Response:
        if not is_same(token, self._secrets.token):
            log.warning("refused a wrong token")
            return PlainTextResponse(
                "The token is wrong: it is new at each start of `hopsgpu web`.\n", 401
            )
        # A relative address: behind a proxy, the path may differ.
        response = Response(status_code=303, headers={"Location": "./"})
        secure = "; Secure" if self._server.has_tls else ""
        response.headers["Set-Cookie"] = (
            f"{self._server.cookie}={self._secrets.session}; HttpOnly; SameSite=Strict{secure}"
        )
        return response

    def _is_ours(self, headers: Headers, host: str) -> bool:
        """Return whether a request was sent by a page of this server, as the browser says."""
        if headers.get("sec-fetch-site", "same-origin") != "same-origin":
            return False
        try:
            origin = urlsplit(headers.get("origin", ""))
        except ValueError:
            return False
        if origin.scheme not in ("http", "https"):
            return False
        behind = {name.lower() for name in self._server.proxied}
        return origin.netloc.lower() == host.lower() or (origin.hostname or "") in behind


def field_of(form: bytes, name: str) -> str:
    """Return a field of a form or of a query, or "" if it is not there."""
    try:
        fields = parse_qs(form.decode("latin-1"), max_num_fields=_MAX_FIELDS)
    except ValueError:
        return ""
    return fields.get(name, [""])[0]
