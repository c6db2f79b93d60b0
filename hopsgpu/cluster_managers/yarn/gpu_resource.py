"""The name of the YARN resource that counts GPUs."""

from __future__ import annotations

from collections.abc import Mapping

from hopsgpu.cluster_managers.yarn.amounts import CORES, DEFAULT_GPU_RESOURCE, MEMORY
from hopsgpu.core.gpu_types import RESOURCE_NAME
from hopsgpu.errors import ConfigError
from hopsgpu.storage.spark_defaults import spark_defaults

SETTING = "spark.hopsgpu.gpu.resource"
VARIABLE = "HOPSGPU_GPU_RESOURCE"
# Spark requests its resource "gpu" from YARN under this name (Spark's documentation, "Running
# Spark on YARN"; since Spark 3.2.1).
SPARK_SETTING = "spark.yarn.resourceGpuDeviceName"


def choose_gpu_resource(properties: Mapping[str, str], environ: Mapping[str, str]) -> str:
    """Return the name of the resource that counts GPUs.

    hopsgpu's property counts, else its environment variable, else Spark's property, else
    `yarn.io/gpu`.

    Raises:
        ConfigError: the name is no name of a resource, or Spark's property has another one.
    """
    chosen, source = properties.get(SETTING, "").strip(), SETTING
    if not chosen:
        chosen, source = environ.get(VARIABLE, "").strip(), VARIABLE
    of_spark = properties.get(SPARK_SETTING, "").strip()
    if chosen and of_spark and chosen != of_spark:
        raise ConfigError(
            f"{source}={chosen}, but {SPARK_SETTING}={of_spark}: Spark would request other GPUs"
            f" than hopsgpu counts. Set {SETTING} alone, which hopsgpu.session() passes to Spark,"
            " or give both the same value"
        )
    if not chosen:
        chosen, source = of_spark or DEFAULT_GPU_RESOURCE, SPARK_SETTING
    if not RESOURCE_NAME.fullmatch(chosen) or chosen in (CORES, MEMORY):
        raise ConfigError(
            f"{source}={chosen!r}: must be the name of the YARN resource that counts GPUs, as in"
            f" yarn.resource-types: {DEFAULT_GPU_RESOURCE}, nvidia/miggpu or another one"
        )
    return chosen


def configured_gpu_resource(environ: Mapping[str, str]) -> str:
    """Return the name for commands without a session, from spark-defaults.conf.

    Raises:
        ConfigError: as `choose_gpu_resource`; or the file cannot be read.
    """
    return choose_gpu_resource(spark_defaults(environ), environ)
