"""The name of the resource of Kubernetes that counts GPUs."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hopsgpu.errors import ConfigError

SETTING = "spark.hopsgpu.gpu.resource"
VARIABLE = "HOPSGPU_GPU_RESOURCE"
DEFAULT_GPU_RESOURCE = "nvidia.com/gpu"
# Spark requests its resource "gpu" as "VENDOR/gpu".
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?")


def kubernetes_gpu_resource(properties: Mapping[str, str], environ: Mapping[str, str]) -> str:
    """Return the name of the resource that counts GPUs: a setting's, or NVIDIA's.

    Raises:
        ConfigError: the name is not one of an extended resource.
    """
    chosen, source = properties.get(SETTING, "").strip(), SETTING
    if not chosen:
        chosen, source = environ.get(VARIABLE, "").strip(), VARIABLE
    if not chosen:
        return DEFAULT_GPU_RESOURCE
    if not _NAME.fullmatch(chosen):
        raise ConfigError(
            f"{source}={chosen!r}: must be the name of the resource that counts GPUs, as `kubectl"
            f" describe node` shows it: {DEFAULT_GPU_RESOURCE}, nvidia.com/mig-1g.10gb or another"
            " one"
        )
    return chosen
