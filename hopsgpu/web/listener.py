"""The server of the pages: its socket, TLS, and its end."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hopsgpu.errors import ConfigError

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp

    from hopsgpu.web.page_sources import Sources

log = logging.getLogger(__name__)

_EXTRA = "`hopsgpu web` needs its packages: pip install 'hopsgpu[web]'"
# Requests in progress at Ctrl-C may take this long.
_LAST_SECONDS = 2
_MAX_CONNECTIONS = 256
_MAX_HEADER_BYTES = 16 * 1024


@dataclass(frozen=True)
class ServerOptions:
    """How the pages are served.

    Attributes:
        host: address or name to listen on.
        port: port; 0 for any free one.
        names: other names under which browsers reach the server, those of proxies.
        certfile: file of the certificate and those that signed it (PEM); or None.
        keyfile: file of its key (PEM); None if it is in `certfile`.
        plain_http: whether to do without TLS where others can reach the server.
    """

    host: str = "127.0.0.1"
    port: int = 0
    names: Sequence[str] = ()
    certfile: Path | None = None
    keyfile: Path | None = None
    plain_http: bool = False

    def check(self) -> None:
        """Check that what is asked for exposes nothing by mistake.

        Raises:
            ConfigError: it does, or a certificate is missing or cannot be used.
        """
        if self.keyfile is not None and self.certfile is None:
            raise ConfigError("--keyfile: name the certificate too, with --certfile")
        if self.certfile is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            try:
                context.load_cert_chain(self.certfile, self.keyfile)
            except OSError as error:  # an SSLError is one
                raise ConfigError(
                    f"--certfile {self.certfile}: {error}: must be the certificate as PEM, and"
                    " --keyfile its key, unless that is in the same file"
                ) from error
        elif not self.plain_http and not is_loopback(self.host):
            raise ConfigError(
                f"--host {self.host}: other machines could reach the pages without TLS. Whoever"
                " sees the network on the way could read the token, and with it everything that"
                " you may read of the cluster, logs included, and cancel your runs. Give"
                " --certfile and --keyfile; or leave --host out and use `ssh -L`; or accept it"
                " with --plain-http"
            )


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address.

    Raises:
        ConfigError: there is no such host.
    """
    return all(ipaddress.ip_address(address).is_loopback for _, address in _addresses(host, 0))


def _addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    try:
        addresses = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)  # noqa: S104
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host {host}: {error}") from error
    return [(family, str(address[0]).partition("%")[0]) for family, _, _, _, address in addresses]


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """Yield a socket that listens; close it at the end.

    Raises:
        ConfigError: the port is taken, or the address is not this machine's.
    """
    family, address = _addresses(host, port)[0]
    try:
        listener = socket.create_server((address, port), family=family, backlog=128)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another with"
            " --port (0 for any free one)"
        ) from error
    with listener:
        yield listener


def serve(sources: Sources, options: ServerOptions, on_ready: Callable[[str], None]) -> None:
    """Serve the pages until SIGINT or SIGTERM.

    Args:
        on_ready: called with the URL that opens the pages, once browsers can.

    Raises:
        ConfigError: an option cannot be used, or a package is missing.
    """
    try:
        import uvicorn

        from hopsgpu.web.access import Secrets, Server
        from hopsgpu.web.routes import application
    except ImportError as error:
        raise ConfigError(f"{_EXTRA} ({error})") from error
    options.check()
    with listening(options.host, options.port) as listener:
        port = int(listener.getsockname()[1])
        own_names = (options.host, socket.gethostname(), socket.getfqdn())
        secrets = Secrets.fresh()
        has_tls = options.certfile is not None
        server = Server(port, (*own_names, *options.names), options.names, has_tls)
        config = uvicorn_config(application(sources, secrets, server), options)
        on_ready(url_of(options.host, port, secrets.token, has_tls=has_tls))
        log.info("serves the pages on %s:%d", options.host, port)
        uvicorn.Server(config).run(sockets=[listener])


def uvicorn_config(app: ASGIApp, options: ServerOptions) -> uvicorn.Config:
    """Return how the server of the pages handles connections."""
    import uvicorn

    return uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        loop="asyncio",
        # A log of requests would contain the token.
        access_log=False,
        log_config=None,
        log_level="warning",
        server_header=False,
        # The address of a client is not used, so no proxy's header is trusted.
        proxy_headers=False,
        limit_concurrency=_MAX_CONNECTIONS,
        h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
        timeout_graceful_shutdown=_LAST_SECONDS,
        ssl_certfile=options.certfile,
        ssl_keyfile=options.keyfile,
    )


def url_of(host: str, port: int, token: str, *, has_tls: bool) -> str:
    name = socket.gethostname() if host in ("", "0.0.0.0", "::") else host  # noqa: S104
    shown = f"[{name}]" if ":" in name else name
    return f"{'https' if has_tls else 'http'}://{shown}:{port}/?token={token}"
