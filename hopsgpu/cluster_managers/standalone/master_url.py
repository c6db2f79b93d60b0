"""The URL of Spark standalone masters, and the addresses of their web interfaces. Pure.

Source: the Spark documentation, "Spark Standalone Mode".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from hopsgpu.errors import ConfigError

SCHEME = "spark://"
WEB_SETTING = "spark.hopsgpu.master.ui"
WEB_VARIABLE = "HOPSGPU_MASTER_UI"
_PORT_SETTING = "spark.master.ui.port"
_PORT_VARIABLE = "SPARK_MASTER_WEBUI_PORT"
_DEFAULT_PORT = "8080"
# Spark's name of the resource that counts GPUs.
GPU_RESOURCE = "gpu"
_MAX_MASTERS = 16
_MAX_HOST = 253
_HOST_AND_PORT = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5})")


def is_standalone(master: str | None) -> bool:
    """Return whether a value of `spark.master` names standalone masters."""
    return master is not None and master.strip().startswith(SCHEME)


def masters_of(url: str) -> tuple[tuple[str, int], ...]:
    """Return host and port of each master of a URL such as "spark://h1:7077,h2:7077".

    Raises:
        ConfigError: the URL has another form, or too many masters.
    """
    url = url.strip()
    parts = [part.strip() for part in url.removeprefix(SCHEME).split(",")]
    pairs = [_host_and_port(part) for part in parts]
    if not url.startswith(SCHEME) or None in pairs or len(pairs) > _MAX_MASTERS:
        raise ConfigError(
            f"spark.master={url[:_MAX_HOST]!r}: must be the URL of at most {_MAX_MASTERS}"
            " standalone masters: spark://HOST:PORT, or spark://HOST1:PORT1,HOST2:PORT2 for masters"
            " with ZooKeeper. The page of a master shows it"
        )
    return tuple(pair for pair in pairs if pair is not None)


def cluster_of(url: str) -> str:
    """Return a name for the cluster of a master URL, whatever the order of its masters is.

    Raises:
        ConfigError: as `masters_of`.
    """
    masters = sorted(f"{host}-{port}" for host, port in masters_of(url))
    return re.sub(r"[^\w.-]+", "-", "-".join(("spark", *masters)))


def master_web_addresses(
    master: str, properties: Mapping[str, str], environ: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the base URL of the web interface of each master.

    `spark.hopsgpu.master.ui` counts, else HOPSGPU_MASTER_UI. Without them, each master's host
    counts, with the port of `spark.master.ui.port`, else SPARK_MASTER_WEBUI_PORT, else 8080.

    Args:
        master: the value of `spark.master`.
        properties: Spark's properties.

    Raises:
        ConfigError: a URL or a port has another form, or there are too many masters.
    """
    for name, values in ((WEB_SETTING, properties), (WEB_VARIABLE, environ)):
        if value := values.get(name, "").strip():
            urls = [url.strip() for url in value.split(",")]
            if len(urls) > _MAX_MASTERS:
                raise ConfigError(f"{name} has {len(urls)} URLs: at most {_MAX_MASTERS} can be set")
            return tuple(dict.fromkeys(_check_web_url(name, url) for url in urls))
    source, port = _PORT_SETTING, properties.get(_PORT_SETTING, "").strip()
    if not port:
        source, port = _PORT_VARIABLE, environ.get(_PORT_VARIABLE, "").strip() or _DEFAULT_PORT
    if not (port.isascii() and port.isdigit() and _is_port(int(port))):
        raise ConfigError(
            f"{source}={port[:20]!r}: must be the port of the master's web interface, such as"
            f" {_DEFAULT_PORT}; or set {WEB_SETTING} ({WEB_VARIABLE}) to its URL"
        )
    return tuple(dict.fromkeys(f"http://{host}:{port}" for host, _ in masters_of(master)))


def _host_and_port(text: str) -> tuple[str, int] | None:
    match = _HOST_AND_PORT.fullmatch(text)
    if match is None or len(match[1]) > _MAX_HOST or not _is_port(int(match[2])):
        return None
    return match[1], int(match[2])


def _is_port(number: int) -> bool:
    return 0 < number < 65536


def _check_web_url(name: str, url: str) -> str:
    base = url.rstrip("/")
    try:
        parts = urlsplit(base)
        is_valid = (
            parts.scheme in ("http", "https")
            and _host_and_port(parts.netloc) is not None
            and not parts.query
            and not parts.fragment
            and re.fullmatch(r"(/[\w.~-]+)*", parts.path) is not None
        )
    except ValueError:
        is_valid = False
    if not is_valid:
        raise ConfigError(
            f"{name}={url[:_MAX_HOST]!r}: must be URLs of masters' web interfaces, such as"
            " http://HOST:8080, with commas between them: scheme http or https, host and port, and"
            " the path of a proxy if there is one"
        )
    return base
