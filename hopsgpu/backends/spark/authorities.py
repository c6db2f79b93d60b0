"""The certificates of a private authority, shipped with an application.

A driver in YARN uses the ResourceManager by HTTPS, and ranks read swebhdfs://. Python finds a
private authority only by REQUESTS_CA_BUNDLE, which names a file of the submitting machine. In ranks
and agents, `hopsgpu.control.peer` sets the variable.

Source of the variable: the documentation of the library requests.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from hopsgpu.backends.spark.package_archive import with_entry
from hopsgpu.cluster_managers.yarn.rest_client import scheme_of
from hopsgpu.control.peer import AUTHORITIES, BUNDLE
from hopsgpu.storage.hadoop_conf import HadoopConf, is_configured

log = logging.getLogger(__name__)

FILES = "spark.yarn.dist.files"
_DRIVER_BUNDLE = f"spark.yarn.appMasterEnv.{BUNDLE}"


def shipped_bundle(properties: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the Spark properties that ship the certificates to an application's containers.

    Args:
        properties: the application's properties. If they name a bundle for the driver, that bundle
            is on the nodes, and nothing is shipped.

    Returns:
        No properties if HTTPS is not used, or REQUESTS_CA_BUNDLE does not name a file.

    Raises:
        ConfigError: a file of the Hadoop configuration is unreadable.
    """
    named = environ.get(BUNDLE)
    if not named or _DRIVER_BUNDLE in properties or not _uses_https(properties, environ):
        return {}
    bundle = Path(named).absolute()
    if not bundle.is_file():
        log.warning(
            "%s=%s is not a file on this machine, so ranks and a driver in YARN do not get"
            " the certificates",
            BUNDLE,
            named,
        )
        return {}
    return {
        FILES: with_entry(properties.get(FILES), f"{bundle.as_uri()}#{AUTHORITIES}"),
        # YARN replaces {{PWD}} by the container's directory.
        _DRIVER_BUNDLE: f"{{{{PWD}}}}/{AUTHORITIES}",
    }


def _uses_https(properties: Mapping[str, str], environ: Mapping[str, str]) -> bool:
    root = properties.get("spark.hopsgpu.root") or environ.get("HOPSGPU_ROOT") or ""
    if root.startswith("swebhdfs://"):
        return True
    return is_configured(environ) and scheme_of(HadoopConf.load(environ).get) == "https"
