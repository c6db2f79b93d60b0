"""The API server of a cluster, and the caller's credentials: a kubeconfig's or a pod's.

Source: the Kubernetes documentation, "Organizing Cluster Access Using kubeconfig Files" and
"Accessing the Kubernetes API from a Pod".
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hopsgpu.core.bounded_reads import read_file
from hopsgpu.errors import ConfigError

MASTER_PREFIX = "k8s://"
CONTEXT = "spark.kubernetes.context"
NAMESPACE = "spark.kubernetes.namespace"
DEFAULT_NAMESPACE = "default"
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_INSTALL = "a master on Kubernetes needs the package kubernetes: pip install 'hopsgpu[kubernetes]'"


@dataclass(frozen=True)
class ApiAccess:
    """The address of an API server, and the credentials of a client.

    Attributes:
        address: base URL of the API server.
        namespace: the namespace of executors.
        configuration: the `kubernetes.client.Configuration` with the credentials.
        origin: where the credentials come from, for error messages.
    """

    address: str
    namespace: str
    configuration: Any = field(repr=False, compare=False)
    origin: str

    @property
    def cluster(self) -> str:
        """Return a name of the cluster, the same from inside and from outside of it.

        The address differs there; the authority that signed the server's certificate does not.
        """
        try:
            authority = read_file(Path(self.configuration.ssl_ca_cert or ""))
        except OSError:  # no private authority
            authority = self.address.encode()
        return f"k8s-{hashlib.sha256(b''.join(authority.split())).hexdigest()[:16]}"


def is_in_pod() -> bool:
    """Return whether this process runs in a pod with a service account."""
    return (_ACCOUNT / "token").is_file() and "KUBERNETES_SERVICE_HOST" in os.environ


def api_address(master: str) -> str:
    """Return the base URL of the API server that a master names.

    Raises:
        ConfigError: it is no URL.
    """
    url = master.strip().removeprefix(MASTER_PREFIX)
    # As Spark: a master without a scheme is asked by HTTPS.
    url = url if "://" in url else f"https://{url}"
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("https", "http") or not parts.hostname or port == -1:
        raise ConfigError(
            f"spark.master={master}: must be k8s://https://HOST:PORT, the API server's address that"
            " `kubectl cluster-info` shows"
        )
    return url.rstrip("/")


def load_access(properties: Mapping[str, str], environ: Mapping[str, str]) -> ApiAccess:
    """Return the credentials for the API server of `spark.master`.

    In a pod, they are those of its service account, unless KUBECONFIG is set. Elsewhere they are
    those of the context `spark.kubernetes.context`, by default the current one, of the kubeconfig.

    Raises:
        ConfigError: there are none, or the context is of another API server.
    """
    try:
        from kubernetes import config
        from kubernetes.client import Configuration
    except ImportError as error:
        raise ConfigError(_INSTALL) from error
    address = api_address(properties["spark.master"])
    configuration = Configuration()
    # The library would take the proxy of the environment, which Spark's client does not.
    configuration.proxy = None
    if is_in_pod() and "KUBECONFIG" not in environ:
        config.load_incluster_config(client_configuration=configuration)
        configuration.host = address
        return ApiAccess(
            address,
            properties.get(NAMESPACE) or _account_namespace(),
            configuration,
            "the pod's service account",
        )
    file = environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
    context = properties.get(CONTEXT) or None
    try:
        config.load_kube_config(file, context, configuration, persist_config=False)
        namespace = _context_namespace(config.list_kube_config_contexts(file), context)
    except (config.ConfigException, OSError, ValueError) as error:
        where = f" (context {context})" if context else ""
        raise ConfigError(
            f"no credentials for {address}: {file}{where} cannot be used: {error}. KUBECONFIG names"
            f" the file, and {CONTEXT} the context; `kubectl config get-contexts` lists them"
        ) from error
    if not _is_same_server(configuration.host, address):
        raise ConfigError(
            f"spark.master names {address}, but the context {context or '(the current one)'} of"
            f" {file} is of {configuration.host}: hopsgpu does not send its credentials to another"
            f" server. Set spark.master={MASTER_PREFIX}{configuration.host}, or {CONTEXT}"
        )
    return ApiAccess(address, properties.get(NAMESPACE) or namespace, configuration, file)


def _account_namespace() -> str:
    file = _ACCOUNT / "namespace"
    return file.read_text(encoding="ascii").strip() if file.is_file() else DEFAULT_NAMESPACE


def _context_namespace(contexts: Any, name: str | None) -> str:
    """Return the namespace of a context; Spark reads only its own property, as its default says."""
    listed, current = contexts
    chosen = next((c for c in listed if c["name"] == name), current)
    return str((chosen.get("context") or {}).get("namespace") or DEFAULT_NAMESPACE)


def _is_same_server(first: str, second: str) -> bool:
    def key(url: str) -> tuple[str, str | None, int | None]:
        parts = urlsplit(url)
        return parts.scheme, parts.hostname, parts.port or {"https": 443}.get(parts.scheme, 80)

    return key(first) == key(second)
