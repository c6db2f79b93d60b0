"""Hadoop's configuration as administrators write it, read with a JVM and without one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hopsgpu.cluster_managers.yarn.resource_manager import web_addresses
from hopsgpu.storage.hadoop_conf import HadoopConf
from hopsgpu.storage.hdfs import Hdfs
from tests.bounds import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[3]
XI = 'xmlns:xi="http://www.w3.org/2001/XInclude"'
# With what Hadoop's own reader says of the properties whose names are arguments.
ASK_JVM = """
import json, sys
from pyspark import SparkContext
SparkContext._ensure_initialized()
conf = SparkContext._jvm.org.apache.hadoop.yarn.conf.YarnConfiguration()
print(json.dumps([conf.get(name) for name in sys.argv[1:]]))
"""
FILES = {
    "core-site.xml": f"""
<configuration {XI}>
  <property><name>site.domain</name><value>example.org</value></property>
  <property><name>fs.defaultFS</name><value>hdfs://nameservice1</value><final>true</final></property>
  <xi:include href="more/rack.xml"/>
</configuration>""",
    "more/rack.xml": """
<configuration>
  <property><name>rack</name><value>r1</value></property>
  <include xmlns="http://www.w3.org/2001/XInclude" href="shared.xml"/>
</configuration>""",
    "shared.xml": """
<configuration>
  <property name="shared" value="by the class path"/>
</configuration>""",
    "yarn-site.xml": f"""
<configuration {XI}>
  <property><name>fs.defaultFS</name><value>hdfs://ignored</value></property>
  <property><name>yarn.http.policy</name><value>HTTPS_ONLY</value></property>
  <property><name>yarn.resourcemanager.ha.enabled</name><value>true</value></property>
  <property><name>yarn.resourcemanager.ha.rm-ids</name><value>rm1,rm2</value></property>
  <xi:include href="file://DIRECTORY/more/managers.xml"/>
  <xi:include href="missing.xml">
    <xi:fallback>
      <property><name>fallback</name><value>${{env.SITE_OF_TEST:-none}}</value></property>
    </xi:fallback>
  </xi:include>
</configuration>""",
    "more/managers.xml": """
<configuration>
  <property><name>yarn.resourcemanager.hostname.rm1</name><value>one.${site.domain}</value></property>
  <property>
    <name>yarn.resourcemanager.webapp.https.address.rm1</name>
    <value>${yarn.resourcemanager.hostname.rm1}:8190</value>
  </property>
  <property><name>yarn.resourcemanager.hostname.rm2</name><value>two.${site.domain}</value></property>
</configuration>""",
}
NAMES = (
    "site.domain",
    "fs.defaultFS",
    "rack",
    "shared",
    "fallback",
    "yarn.http.policy",
    "yarn.resourcemanager.ha.rm-ids",
    "yarn.resourcemanager.hostname.rm1",
    "yarn.resourcemanager.webapp.https.address.rm1",
    "yarn.resourcemanager.hostname.rm2",
)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    for name, text in FILES.items():
        file = tmp_path / "conf" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.strip().replace("DIRECTORY", str(tmp_path / "conf")))
    gone = ("SPARK_HOME", "SPARK_CONF_DIR", "YARN_CONF_DIR")
    base = {name: value for name, value in os.environ.items() if name not in gone}
    return {**base, "HADOOP_CONF_DIR": str(tmp_path / "conf"), "SITE_OF_TEST": "north"}


def test_without_a_jvm_it_says_what_a_jvm_says(environ: dict[str, str]) -> None:
    asked = subprocess.run(
        [sys.executable, "-c", ASK_JVM, *NAMES],
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
        timeout=HANG_SECONDS,
        check=True,
    )
    conf = HadoopConf.load(environ)
    assert [conf.get(name) for name in NAMES] == json.loads(asked.stdout)
    assert conf.get("shared") == "by the class path"
    assert web_addresses(conf.get) == (
        "https://one.example.org:8190",
        "https://two.example.org:8090",
    )


def test_the_name_nodes_of_an_included_file_are_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as name_node:
        port = name_node.getsockname()[1]
        ha = {
            "dfs.nameservices": "nameservice1",
            "dfs.ha.namenodes.nameservice1": "${nn.ids}",
            "nn.ids": "nn1",
            "dfs.namenode.rpc-address.nameservice1.nn1": f"${{loopback}}:{port}",
        }
        properties = (f'<property name="{name}" value="{value}"/>' for name, value in ha.items())
        (tmp_path / "ha.xml").write_text(f"<configuration>{''.join(properties)}</configuration>")
        include = f'<configuration {XI}><xi:include href="ha.xml"/></configuration>'
        (tmp_path / "hdfs-site.xml").write_text(include)
        loopback = '<configuration><property name="loopback" value="127.0.0.1"/></configuration>'
        (tmp_path / "core-site.xml").write_text(loopback)
        monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
        name_node.settimeout(HANG_SECONDS)
        monkeypatch.setattr("hopsgpu.storage.hdfs._QUICK_ANSWER_SECONDS", 1.0)
        with pytest.raises(OSError):
            Hdfs("hdfs://nameservice1", should_fail_fast=True).stat("/")
        connection, _ = name_node.accept()
        connection.close()
