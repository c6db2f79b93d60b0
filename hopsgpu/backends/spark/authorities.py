"""The certificates of a private authority go with an application.

Python knows the authority that signed the web addresses of a company's Hadoop only by
REQUESTS_CA_BUNDLE, and the file that it names is one of the submitting machine: a driver in YARN
asks the ResourceManager by HTTPS, and ranks read swebhdfs://. In ranks and agents
`hopsgpu.control.peer` sets the variable.

Source of the variable: the documentation of the library requests.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from hopsgpu.backends.spark.package_archive import with_entry
from hopsgpu.control.peer import AUTHORITIES, BUNDLE
from hopsgpu.storage.hadoop_conf import HadoopConf, is_configured
from hopsgpu.yarn.rest_client import scheme_of

log = logging.getLogger(__name__)

FILES = "spark.yarn.dist.files"
_OF_DRIVER = f"spark.yarn.appMasterEnv.{BUNDLE}"


def shipped_bundle(properties: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the Spark properties with which an application's containers have the certificates.

    Args:
        properties: the application's; a bundle that they name for the driver is on the nodes, and
            is used instead.
        environ: environment of the submitting process.

    Returns:
        No properties if nothing that needs certificates is used, or REQUESTS_CA_BUNDLE does not
        name a file.

    Raises:
        ConfigError: a file of the Hadoop configuration is unreadable.
    """
    named = environ.get(BUNDLE)
    if not named or _OF_DRIVER in properties or not _uses_https(properties, environ):
        return {}
    bundle = Path(named).absolute()
    if not bundle.is_file():
        log.warning(
            "%s=%s is not a file on this machine, so that ranks and a driver in YARN do not get"
            " the certificates",
            BUNDLE,
            named,
        )
        return {}
    return {
        FILES: with_entry(properties.get(FILES), f"{bundle.as_uri()}#{AUTHORITIES}"),
        # YARN puts the container's directory there.
        _OF_DRIVER: f"{{{{PWD}}}}/{AUTHORITIES}",
    }


def _uses_https(properties: Mapping[str, str], environ: Mapping[str, str]) -> bool:
    root = properties.get("spark.hopsgpu.root") or environ.get("HOPSGPU_ROOT") or ""
    if root.startswith("swebhdfs://"):
        return True
    return is_configured(environ) and scheme_of(HadoopConf.load(environ).get) == "https"
