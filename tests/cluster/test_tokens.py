"""The submitter's HDFS tokens as the JVM gives them, on a cluster without Kerberos."""

from __future__ import annotations

from typing import Any

from pyspark.sql import SparkSession

from hopsgpu.backends.spark.jvm import Jvm
from hopsgpu.backends.spark.token_renewal import read_tokens
from hopsgpu.storage.hadoop_tokens import merge_tokens

SERVICE = "ha-hdfs:lake"


def credentials_of(hadoop: Any, tokens: dict[str, tuple[str, str, bytes]]) -> Any:
    """Java's Credentials with tokens by alias: kind, service and identifier."""
    text, found = hadoop.io.Text, hadoop.security.Credentials()
    for alias, (kind, service, identifier) in tokens.items():
        token = hadoop.security.token.Token(
            bytearray(identifier), bytearray(b"password"), text(kind), text(service)
        )
        found.addToken(text(alias), token)
    return found


def written(jvm: Any, credentials: Any) -> bytes:
    """As YARN writes a container's file."""
    stream = jvm.java.io.ByteArrayOutputStream()
    credentials.writeTokenStorageToStream(jvm.java.io.DataOutputStream(stream))
    return bytes(stream.toByteArray())


def read_back(jvm: Any, content: bytes) -> dict[str, tuple[str, str, bytes]]:
    found = jvm.org.apache.hadoop.security.Credentials()
    stream = jvm.java.io.ByteArrayInputStream(bytearray(content))
    found.readTokenStorageStream(jvm.java.io.DataInputStream(stream))
    held = found.getTokenMap()
    return {
        alias.toString(): (
            held.get(alias).getKind().toString(),
            held.get(alias).getService().toString(),
            bytes(held.get(alias).getIdentifier()),
        )
        for alias in held.keySet()
    }


def test_hdfs_tokens_leave_the_jvm_as_java_reads_them(spark: SparkSession) -> None:
    java: Any = spark.sparkContext._jvm
    jvm, hadoop = Jvm(spark.sparkContext), java.org.apache.hadoop
    hdfs = {
        "by hdfs": ("HDFS_DELEGATION_TOKEN", SERVICE, b"i" * 300),
        "by web": ("WEBHDFS delegation", "n1:9870", b"w"),
        "by tls": ("SWEBHDFS delegation", "n1:9871", b"s"),
    }
    others = {
        "rm": ("RM_DELEGATION_TOKEN", "n1:8032", b"r"),
        "am": ("YARN_AM_RM_TOKEN", "n1:8030", b"a"),
    }
    # Not the JVM's own user's, who could not be rid of them again.
    content = jvm._hdfs_part(credentials_of(hadoop, {**hdfs, **others}))
    assert read_back(java, content) == hdfs
    # What the agents make of it, Java reads as well.
    before = credentials_of(hadoop, {"old": ("HDFS_DELEGATION_TOKEN", SERVICE, b"o"), **others})
    assert read_back(java, merge_tokens(written(java, before), content)) == {**others, **hdfs}
    assert jvm._hdfs_part(credentials_of(hadoop, others)) == b""
    assert jvm.hdfs_tokens() == b"" and read_tokens(jvm) == b""
