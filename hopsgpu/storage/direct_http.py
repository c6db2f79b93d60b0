"""HTTP to Hadoop's daemons without proxies, as Hadoop's Java clients use it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from requests import PreparedRequest, Session


def direct_session() -> Session:
    """Return a session of requests that uses none of the environment's proxies.

    `http_proxy` and similar variables are meant for connections to the outside. Whatever else
    requests reads from the environment applies: the certificates of a private authority
    (REQUESTS_CA_BUNDLE) and ~/.netrc.
    """
    import requests

    class Direct(requests.Session):
        def merge_environment_settings(
            self, url: Any, proxies: Any, stream: Any, verify: Any, cert: Any
        ) -> Any:
            # A sixth of a small request's time is a search for proxies in all of the environment;
            # for a host that needs none there is no search.
            direct = {"no_proxy": urlsplit(url).hostname or ""}
            settings = super().merge_environment_settings(url, direct, stream, verify, cert)
            return {**settings, "proxies": {}}

        def rebuild_proxies(
            self, prepared_request: PreparedRequest, proxies: Mapping[str, str] | None
        ) -> dict[str, str]:
            """Return no proxies for the address to which a daemon redirects."""
            return {}

    return Direct()
