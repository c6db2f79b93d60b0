"""HTTP to Hadoop's daemons without proxies, as Hadoop's Java clients use it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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
            settings = super().merge_environment_settings(url, proxies, stream, verify, cert)
            return {**settings, "proxies": {}}

        def rebuild_proxies(
            self, prepared_request: PreparedRequest, proxies: Mapping[str, str] | None
        ) -> dict[str, str]:
            """Return no proxies for the address to which a daemon redirects."""
            return {}

    return Direct()
