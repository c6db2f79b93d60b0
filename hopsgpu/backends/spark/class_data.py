"""Load the classes that an application's JVMs load, so that they can be archived as class data.

hopsgpu/devcluster/class_archive.py starts `python -m hopsgpu.backends.spark.class_data URL` on the
development cluster.
"""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

# Classes that this program does not run: those of the application master, and of the executors'
# connection to the driver.
_LOADED = {
    "spark-yarn_": ("org/apache/spark/",),
    "spark-core_": (
        "org/apache/spark/executor/",
        "org/apache/spark/rpc/netty/",
        "org/apache/spark/scheduler/cluster/",
    ),
    "hadoop-client-api-": (
        "org/apache/hadoop/yarn/api/protocolrecords/impl/pb/",
        "org/apache/hadoop/yarn/api/records/impl/pb/",
        "org/apache/hadoop/yarn/client/api/",
    ),
}


def main(url: str) -> int:
    """Run typical work of applications on one core, with files at a URL; return the exit code."""
    from py4j.protocol import Py4JJavaError
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.master("local[1]").appName("classes").getOrCreate()
    context: Any = spark.sparkContext
    rows = spark.createDataFrame([(float(n), n % 10) for n in range(40)], "x double, y int")
    rows.write.mode("overwrite").parquet(url)
    spark.read.parquet(url).groupBy("y").count().collect()
    context.parallelize(range(8), 2).map(lambda x: x + 1).sum()
    jvm, hadoop = context._jvm, context._jsc.hadoopConfiguration()
    path = jvm.org.apache.hadoop.fs.Path(url)
    path.getFileSystem(hadoop).delete(path, True)
    client = jvm.org.apache.hadoop.yarn.client.api.YarnClient.createYarnClient()
    client.init(hadoop)
    client.start()
    client.getYarnClusterMetrics()
    client.stop()
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    for name in _names(Path(jvm.java.lang.System.getenv("SPARK_HOME"), "jars")):
        # A class that depends on a missing class is not used by applications.
        with suppress(Py4JJavaError):
            jvm.java.lang.Class.forName(name, False, loader)
    gateway = context._gateway
    spark.stop()
    # The JVM writes the archive when it ends, and it ends when its input is closed.
    gateway.proc.stdin.close()
    return int(gateway.proc.wait())


def _names(jars: Path) -> Iterator[str]:
    for begin, packages in _LOADED.items():
        for jar in jars.glob(f"{begin}*.jar"):
            for name in zipfile.ZipFile(jar).namelist():
                if name.startswith(packages) and name.endswith(".class"):
                    yield name.removesuffix(".class").replace("/", ".")


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
