"""The driver's configuration of HDFS, which a standalone master's executors get as an archive.

YARN's containers get it from Spark. Elsewhere, a node may have no configuration, or another one.
"""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from hopsgpu.agent.container_entry import HADOOP_CONF
from hopsgpu.control.peer import AUTHORITIES, BUNDLE
from hopsgpu.core.bounded_reads import read_file
from hopsgpu.storage.hadoop_conf import HadoopConf, is_configured

if TYPE_CHECKING:
    from pyspark import SparkContext

# Spark serves files to everybody who can connect to the driver.
_SECRET = re.compile(r"secret|password|token|key", re.IGNORECASE)


def ship_hadoop_conf(context: SparkContext, directory: str, environ: Mapping[str, str]) -> None:
    """Make executors get the driver's properties of HDFS; do nothing without a configuration.

    Args:
        directory: directory that lives as long as the application.

    Raises:
        ConfigError: a file of the Hadoop configuration cannot be read.
    """
    if not is_configured(environ):
        return
    archive = Path(directory) / f"{HADOOP_CONF}.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        _add(tar, "core-site.xml", _to_xml(HadoopConf.load_hdfs(environ).all_values()))
        bundle = environ.get(BUNDLE)
        if bundle and Path(bundle).is_file():
            _add(tar, AUTHORITIES, read_file(Path(bundle)))
    context.addArchive(f"{archive}#{HADOOP_CONF}")


def _to_xml(properties: Mapping[str, str]) -> bytes:
    root = ElementTree.Element("configuration")
    for name, value in sorted(properties.items()):
        if _SECRET.search(name) is None:
            entry = ElementTree.SubElement(root, "property")
            ElementTree.SubElement(entry, "name").text = name
            ElementTree.SubElement(entry, "value").text = value
    return bytes(ElementTree.tostring(root, encoding="utf-8"))


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.mode = 0o600
    member.size = len(content)
    member.uid, member.gid = os.getuid(), os.getgid()
    tar.addfile(member, BytesIO(content))
