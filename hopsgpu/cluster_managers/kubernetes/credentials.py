"""The API server of a cluster, and the caller's credentials: a kubeconfig's or a pod's.

Source: the Kubernetes documentation, "Organizing Cluster Access Using kubeconfig Files" and
"Accessing the Kubernetes API from a Pod".
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from hopsgpu.core.bounded_reads import read_file
from hopsgpu.errors import ConfigError

MASTER_PREFIX = "k8s://"
CONTEXT = "spark.kubernetes.context"
NAMESPACE = "spark.kubernetes.namespace"
# Spark sets the first one in a driver's pod, whose API server the second one names: `spark.master`
# is the address outside.
_IN_DRIVER_POD = "spark.kubernetes.submitInDriver"
_DRIVER_MASTER = "spark.kubernetes.driver.master"
DEFAULT_NAMESPACE = "default"
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_POD_ORIGIN = "the pod's service account"
# A pod reaches its API server by these names, on port 443.
_POD_SERVER_NAMES = (
    "kubernetes.default.svc",
    "kubernetes.default.svc.cluster.local",
    "kubernetes.default",
)
# Scheme and credentials of the header Authorization.
_HEADER = re.compile(r"[!-~]+ [!-~]+")
# Texts of the library that show a path or nothing of the file.
_PLAIN_TEXTS = ("File does not exist: ", "Service ", "Token file ", "Cert file ")
_ABSENT_KEY = re.compile(r"Expected key ([a-z-]+) in ")
_ABSENT_ENTRY = re.compile(r"Expected object with name .*/(contexts|clusters|users) list$")
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
        Clusters behind one authority share the name, such as those of a company whose authority
        signs several API servers. Their users set different `spark.hopsgpu.locks`.
        """
        try:
            authority = read_file(Path(self.configuration.ssl_ca_cert or ""))
        except OSError:  # no private authority
            authority = self.address.encode()
        return f"k8s-{hashlib.sha256(b''.join(authority.split())).hexdigest()[:16]}"

    def headers(self) -> dict[str, str]:
        """Return the headers with the credentials, which the library renews when they expire.

        Raises:
            ConfigError: they cannot be renewed, or a header cannot have them.
        """
        try:
            settings = self.configuration.auth_settings()
        except _library_errors() as error:
            problem = _problem_of(error)
            raise ConfigError(
                f"the credentials of {self.origin} cannot be renewed: {problem}"
            ) from None
        headers = {}
        for setting in settings.values():
            # Files with tokens end in a line break, which is no part of the token.
            scheme, _, token = str(setting["value"] or "").partition(" ")
            value = f"{scheme} {token.strip()}"
            if not _HEADER.fullmatch(value):
                raise ConfigError(
                    f"the token of {self.origin} is empty, or has characters that no token has:"
                    " check the file with the token"
                )
            headers[str(setting["key"])] = value
        return headers


def is_in_pod() -> bool:
    """Return whether this process runs in a pod with a service account."""
    return (_ACCOUNT / "token").is_file() and "KUBERNETES_SERVICE_HOST" in os.environ


def is_driver_pod(properties: Mapping[str, str]) -> bool:
    """Return whether an application's driver runs in a pod that spark-submit has created."""
    return properties.get(_IN_DRIVER_POD) == "true"


def api_server_of(properties: Mapping[str, str]) -> str:
    """Return the base URL of an application's API server.

    Raises:
        ConfigError: the properties name none.
    """
    if is_driver_pod(properties):
        return api_address(properties.get(_DRIVER_MASTER) or f"https://{_POD_SERVER_NAMES[0]}")
    return api_address(properties["spark.master"])


def api_address(master: str) -> str:
    """Return the base URL of the API server that a master names.

    Raises:
        ConfigError: it is no URL.
    """
    url = master.strip().removeprefix(MASTER_PREFIX)
    # As Spark: a master without a scheme is asked by HTTPS.
    url = url if "://" in url else f"https://{url}"
    if _server_of(url) is None:
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
        ConfigError: there are none, they are of another API server, or would be sent unencrypted.
    """
    try:
        from kubernetes.client import Configuration
    except ImportError as error:
        raise ConfigError(_INSTALL) from error
    address = api_server_of(properties)
    configuration = Configuration()
    # The library would take the proxy of the environment, which Spark's client does not.
    configuration.proxy = None
    file = environ.get("KUBECONFIG")
    if is_in_pod() and not file:
        access = _account_access(address, properties, configuration)
    else:
        file = file or str(Path.home() / ".kube" / "config")
        access = _kubeconfig_access(address, properties, configuration, file)
    if access.headers() and not _is_private(address):
        raise ConfigError(
            f"spark.master names {address}: hopsgpu does not send the token of {access.origin}"
            " unencrypted. Use https://, or an address of this machine as `kubectl proxy` has"
        )
    return access


def _account_access(address: str, properties: Mapping[str, str], configuration: Any) -> ApiAccess:
    from kubernetes import config

    try:
        config.load_incluster_config(client_configuration=configuration)
        namespace = _account_namespace()
    except _library_errors() as error:
        problem = _problem_of(error)
        raise ConfigError(
            f"no credentials for {address}: {_POD_ORIGIN} cannot be used: {problem}. KUBECONFIG"
            " may name a file with others"
        ) from None
    own_server = str(configuration.host)
    servers = (own_server, *(f"https://{name}" for name in _POD_SERVER_NAMES))
    if not any(_is_same_server(server, address) for server in servers):
        raise ConfigError(
            f"spark.master names {address}, but the API server of this pod is {own_server}:"
            f" hopsgpu does not send the token of {_POD_ORIGIN} to another server. Set"
            f" spark.master={MASTER_PREFIX}https://{_POD_SERVER_NAMES[0]}, or KUBECONFIG to a file"
            f" with credentials for {address}"
        )
    namespace = properties.get(NAMESPACE) or namespace
    return ApiAccess(address, namespace, configuration, _POD_ORIGIN)


def _kubeconfig_access(
    address: str, properties: Mapping[str, str], configuration: Any, file: str
) -> ApiAccess:
    from kubernetes import config

    context = properties.get(CONTEXT) or None
    try:
        config.load_kube_config(file, context, configuration, persist_config=False)
        namespace = _context_namespace(config.list_kube_config_contexts(file), context)
    except _library_errors() as error:
        where = f" (context {context})" if context else ""
        # Without the cause: its text may show a token.
        raise ConfigError(
            f"no credentials for {address}: {file}{where} cannot be used: {_problem_of(error)}."
            f" KUBECONFIG names the file, and {CONTEXT} the context; `kubectl config get-contexts`"
            " lists them"
        ) from None
    if not _is_same_server(configuration.host, address):
        raise ConfigError(
            f"spark.master names {address}, but the context {context or '(the current one)'} of"
            f" {file} is of {configuration.host}: hopsgpu does not send its credentials to another"
            f" server. Set spark.master={MASTER_PREFIX}{configuration.host}, or {CONTEXT}"
        )
    return ApiAccess(address, properties.get(NAMESPACE) or namespace, configuration, file)


def _library_errors() -> tuple[type[Exception], ...]:
    """Return what the library raises if a file has another form, or credentials are absent."""
    from kubernetes.config import ConfigException

    return (
        ConfigException,
        yaml.YAMLError,
        AttributeError,
        ImportError,
        LookupError,
        OSError,
        RecursionError,
        TypeError,
        ValueError,
    )


def _problem_of(error: Exception) -> str:
    """Return the kind of an error: the library's own text may show an entry with its token."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    if (mark := getattr(error, "problem_mark", None)) is not None:
        return f"line {mark.line + 1} is no YAML"
    text = str(error)
    if text.startswith(_PLAIN_TEXTS):
        return text
    if text.endswith("No configuration found."):
        return "there is no such file"
    if match := _ABSENT_KEY.search(text):
        return f"it lacks the key {match[1]}"
    if match := _ABSENT_ENTRY.search(text):
        return f"its {match[1]} have none of the name that is used"
    return f"it has another form ({type(error).__name__})"


def _account_namespace() -> str:
    file = _ACCOUNT / "namespace"
    return read_file(file).decode("ascii").strip() if file.is_file() else DEFAULT_NAMESPACE


def _context_namespace(contexts: Any, name: str | None) -> str:
    """Return the namespace of a context; Spark reads only its own property, as its default says."""
    listed, current = contexts
    chosen = next((c for c in listed if c["name"] == name), current)
    return str((chosen.get("context") or {}).get("namespace") or DEFAULT_NAMESPACE)


def _is_same_server(first: object, second: str) -> bool:
    server = _server_of(str(first))
    return server is not None and server == _server_of(second)


def _server_of(url: str) -> tuple[str, str, int] | None:
    """Return scheme, host and port of a URL; None if it does not name one server clearly."""
    # Libraries disagree about the host of a URL with a backslash or the name of a user.
    if not re.fullmatch(r"[!-~]+", url) or re.search(r"[\\@?#]", url):
        return None
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return None
    if parts.scheme not in ("https", "http") or not parts.hostname:
        return None
    return parts.scheme, parts.hostname, port or {"https": 443}.get(parts.scheme, 80)


def _is_private(address: str) -> bool:
    """Return whether nobody else can read what is sent: it is encrypted, or for this machine."""
    parts = urlsplit(address)
    host = parts.hostname or ""
    if parts.scheme == "https" or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
