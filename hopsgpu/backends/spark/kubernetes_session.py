"""The start of a SparkSession on Kubernetes."""

from __future__ import annotations

import os
import platform
import re
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from hopsgpu.backends.spark.container_image import IMAGE
from hopsgpu.backends.spark.session_builder import (
    choose_python,
    resolve_settings,
    start_in_client_mode,
)
from hopsgpu.backends.spark.settings import check_session, refuse_late, session_defaults
from hopsgpu.cluster_managers.kubernetes.credentials import (
    NAMESPACE,
    api_address,
    is_driver_pod,
    is_in_pod,
)
from hopsgpu.cluster_managers.kubernetes.kind import IMAGE as SPARK_IMAGE
from hopsgpu.cluster_managers.kubernetes.kind import PYTHON_OF_IMAGE
from hopsgpu.cluster_managers.kubernetes.manager import KubernetesManager
from hopsgpu.cluster_managers.manager_table import required_kind
from hopsgpu.errors import ConfigError
from hopsgpu.storage.spark_defaults import spark_defaults

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    from hopsgpu.backends.spark.cluster_application import ClusterApplication
    from hopsgpu.backends.spark.jvm import Jvm

_PYTHON = "spark.pyspark.python"
_DRIVER_HOST = "spark.driver.host"
_BIND_ADDRESS = "spark.driver.bindAddress"
_DRIVER_POD = "spark.kubernetes.driver.pod.name"
# Properties that spark-submit reads before it creates a driver's pod.
_AT_SUBMISSION = re.compile(
    r"spark\.(master|submit\..*|driver\.(memory.*|cores|extra.*|defaultJavaOptions)"
    r"|kubernetes\.(namespace|context|driver\..*|file\.upload\.path|authenticate\..*))"
)


def check_kubernetes(requested: Mapping[str, str]) -> None:
    """Check settings that are known before a JVM is started.

    Raises:
        ConfigError: a setting prevents gangs.
    """
    configured = spark_defaults(os.environ)
    ours = session_defaults(requested["spark.master"], configured)
    settings = {**configured, **ours, **requested}
    check_session({**settings, **_image_properties(settings)})


def attach_to_kubernetes(context: SparkContext, jvm: Jvm) -> ClusterApplication:
    """Return the application of a running context; see `kubernetes_application`."""
    # A late import: a session finds Spark before anything imports pyspark.
    from hopsgpu.backends.spark.kubernetes_application import kubernetes_application

    return kubernetes_application(context, jvm)


def start_on_kubernetes(name: str, master: str, requested: Mapping[str, str]) -> SparkSession:
    """Return a session on Kubernetes, whose driver is this process.

    Raises:
        ConfigError: a setting prevents gangs, or comes too late for a driver in a pod that
            spark-submit has created; nothing was started.
        CapacityError: the caller may not create pods in the namespace.
        HopsGpuError: the API server does not answer.
    """
    environment, settings = resolve_settings(master, requested)
    if is_driver_pod(environment):
        late = {k: v for k, v in requested.items() if _AT_SUBMISSION.fullmatch(k)}
        refuse_late(environment.get, late, "in a pod")
        # Executors need neither the service that spark-submit creates nor a DNS for its name.
        if address := environment.get(_BIND_ADDRESS):
            settings[_DRIVER_HOST] = address
    settings |= _image_properties({**environment, **settings})
    check_kubernetes({**environment, **settings})
    manager = required_kind(master).connect({**environment, **settings}, os.environ)
    assert isinstance(manager, KubernetesManager)
    manager.check_submission()
    # Spark does not read the namespace of a context or of a pod.
    settings[NAMESPACE] = manager.namespace
    if is_in_pod() and _DRIVER_POD not in {**environment, **settings}:
        # Kubernetes then removes executors with the driver's pod. A pod's host name is its name.
        settings[_DRIVER_POD] = platform.node()
    if _DRIVER_HOST not in {**environment, **settings}:
        settings[_DRIVER_HOST] = _own_address(api_address(master))
    choose_python(settings.get(_PYTHON) or os.environ.get("PYSPARK_PYTHON") or PYTHON_OF_IMAGE)
    return start_in_client_mode(name, settings)


def _image_properties(settings: Mapping[str, str]) -> dict[str, str]:
    """Return Spark's property of the image that hopsgpu's property names.

    Raises:
        ConfigError: they name different images.
    """
    image, of_spark = settings.get(IMAGE), settings.get(SPARK_IMAGE)
    if not image:
        return {}
    if of_spark not in (None, image):
        raise ConfigError(
            f"{IMAGE}={image} (or image=), but {SPARK_IMAGE}={of_spark}: leave out one of them"
        )
    return {SPARK_IMAGE: image}


def _own_address(api_server: str) -> str:
    """Return the address of this machine, or pod, on the way to the API server.

    Pods usually reach a driver there: a pod by its own address, which needs no service and no name.
    """
    parts = urlsplit(api_server)
    host, port = parts.hostname or "", parts.port or 443
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as route:
            # A datagram socket sends nothing when it connects.
            route.connect(address)
            return str(route.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"this machine's address towards {api_server} is unknown ({error}): set {_DRIVER_HOST}"
            " to an address of this machine that pods reach"
        ) from error
