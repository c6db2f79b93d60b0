"""The location of a cluster's own Spark, for a Python without PySpark."""

from __future__ import annotations

from pathlib import Path

from hopsgpu.errors import ConfigError

_REMEDY = "install pyspark, or set SPARK_HOME to the cluster's Spark"


def cluster_spark() -> str:
    """Return the directory of SPARK_HOME, else of the usual places such as /usr/lib/spark.

    Raises:
        ConfigError: there is none.
    """
    import findspark

    try:
        return str(findspark.find())
    except ValueError as error:
        raise ConfigError(f"no Spark was found ({error}): {_REMEDY}") from error


def find_spark() -> None:
    """Make pyspark importable: this environment's, else that of the cluster's own Spark.

    Raises:
        ConfigError: no Spark was found.
    """
    try:
        import pyspark  # noqa: F401
    except ImportError:
        import findspark

        home = cluster_spark()
        if not any(Path(home, "python", "lib").glob("py4j-*.zip")):
            raise ConfigError(
                f"no Spark was found: {home} has no python/lib/py4j-*.zip; {_REMEDY}"
            ) from None
        findspark.init(home)
