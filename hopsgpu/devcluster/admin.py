"""The files that an administrator installs; this cluster uses these files too.

`admin_files/` has links to kubernetes-objects/, spark-conf/, spark-scripts/ and yarn-scripts/ of
the checkout, which become copies in an installed package.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

from hopsgpu.errors import ConfigError
from hopsgpu.storage.spark_defaults import read_properties

HOME = Path(__file__).parent / "admin_files"
YARN = HOME / "yarn-scripts"
HEALTH_CHECK = YARN / "gpu-health-check"
MIG_AS_GPUS = YARN / "mig-nvidia-smi"
KUBERNETES = HOME / "kubernetes-objects"
WORKER_GPUS = HOME / "spark-scripts" / "worker-gpus"
_SPARK_DEFAULTS = HOME / "spark-conf" / "spark-defaults.conf"


def yarn_file(name: str) -> dict[str, str]:
    return site_properties(YARN / f"{name}.xml")


def site_properties(file: Path) -> dict[str, str]:
    """Return the properties of a site file, without substitutions; raise ConfigError if it is
    unreadable.
    """
    try:
        rows = ET.parse(file).getroot().iter("property")
    except (OSError, ET.ParseError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    return {row.findtext("name", "").strip(): row.findtext("value", "").strip() for row in rows}


def spark_defaults() -> dict[str, str]:
    return read_properties(_SPARK_DEFAULTS)
