"""REST of Hadoop's daemons: answers with the lists of Hadoop 3.5, and the daemons' versions."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hopsgpu.cluster_managers.http_client import base_of, exchange, path_of
from hopsgpu.cluster_managers.yarn.answer_lists import FieldTrail, join_repeated, with_lists
from hopsgpu.errors import HopsGpuError

log = logging.getLogger(__name__)


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
        base = base_of(url)
        try:
            return str(get_json(base + self.info, seconds)[self.field]["hadoopVersion"])
        except (HopsGpuError, LookupError, TypeError) as error:
            log.debug("the %s at %s does not report its version: %s", self.name, base, error)
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
        at, reason = base_of(trail.url), trail.explain(error)
        log.info("the %s at %s (Hadoop %s): %s: %s", self.name, at, version, trail.url, reason)
        where = f" at {at}" if should_name_address else ""
        return (
            f"the {self.name}{where} (Hadoop {version}) answered"
            f" {path_of(trail.url)} in an unknown form: {reason}"
        )


RESOURCE_MANAGER = DaemonKind("ResourceManager", "/ws/v1/cluster/info", "clusterInfo")
NODE_MANAGER = DaemonKind("NodeManager", "/ws/v1/node/info", "nodeInfo")


def scheme_of(setting: Callable[[str], str | None]) -> str:
    """Return the scheme of YARN's web addresses; YARN takes the policy in any case."""
    policy = setting("yarn.http.policy") or ""
    return "https" if policy.upper() == "HTTPS_ONLY" else "http"


def get_json(url: str, seconds: tuple[float, float], trail: FieldTrail | None = None) -> Any:
    """Return a daemon's answer to a GET, with the lists of Hadoop 3.5 whatever its version is.

    Args:
        seconds: limits to connect, and to be answered.
        trail: notes the fields that are read.

    Raises:
        NoAnswer: nobody answers, or the answer is an error or no JSON.
        ConfigError: the daemon requires Kerberos, and the package for it is not installed.
        HopsGpuError: the daemon requires Kerberos, and the ticket is missing or refused.
    """
    if trail is not None:
        trail.url, trail.field = url, ""
    return with_lists(exchange("GET", url, seconds).parse_json(join_repeated), url, trail)


def get_text(url: str, seconds: tuple[float, float]) -> str:
    """Return a daemon's answer to a GET that is no JSON, such as a log.

    Raises:
        NoAnswer, ConfigError, HopsGpuError: as get_json().
    """
    return exchange("GET", url, seconds, accept="text/plain").text


def put_json(url: str, body: object, seconds: tuple[float, float]) -> None:
    """Send a JSON value to a daemon with a PUT; ignore its answer.

    Raises:
        NoAnswer, ConfigError, HopsGpuError: as get_json(); if the answer did not come in time, the
            daemon may have accepted the value all the same.
    """
    exchange("PUT", url, seconds, body=body)
