"""The daemons' check of the Host header, compiled once for each Hadoop.

Hadoop has filters for its pages, but none that compares this header with the names of the cluster.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import os
import tempfile
from pathlib import Path

from hopsgpu.core.cache_directory import cache_directory
from hopsgpu.devcluster.daemons import run_logged
from hopsgpu.devcluster.hadoop_jars import DaemonJars
from hopsgpu.devcluster.java import ACCEPTED, Java

_CLASS = "hopsgpu.HostCheck"
# For `hadoop.http.filter.initializers` and `dfs.datanode.httpserver.filter.handlers`.
INITIALIZER, DATANODE_HANDLER = f"{_CLASS}$Initializer", f"{_CLASS}$DataNodeHandler"
_FILE = "HostCheck.java"
# The packages that Hadoop's minicluster jar has under other names.
_SHADED = ("io.netty.", "javax.servlet.")
_SHADED_PREFIX = "org.apache.hadoop.shaded."
# An accepted Java of any version runs the classes.
_RELEASE = str(min(ACCEPTED))


def compile_host_check(java: Java, jars: DaemonJars, log: Path) -> Path:
    """Return the directory of the compiled classes, for the daemons' class path.

    Raises:
        ClusterError: the compiler failed.
    """
    source = importlib.resources.files(__package__).joinpath(_FILE).read_text(encoding="utf-8")
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    directory = cache_directory(os.environ) / f"host-check-{digest}-{jars.directory.name}"
    if directory.is_dir():
        return directory
    if jars.is_minicluster:
        for package in _SHADED:
            source = source.replace(
                f"import {package}", f"import org.apache.hadoop.shaded.{package}"
            )
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix="compiling-") as scratch:
        file, classes = Path(scratch, _FILE), Path(scratch, "classes")
        file.write_text(source, encoding="utf-8")
        options = ["--release", _RELEASE, "-proc:none", "-d", str(classes)]
        run_logged(
            [str(java.compiler), *options, "-cp", jars.class_path, str(file)], os.environ, log
        )
        try:
            classes.rename(directory)
        except OSError:
            # Another `up` may have compiled the same classes first.
            if not directory.is_dir():
                raise
    return directory
