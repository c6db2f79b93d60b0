"""What errors mean: texts as the clients and a real NameNode gave them."""

from __future__ import annotations

import errno
import os

import pytest

from hopsgpu.storage.error_messages import StoreRefusal, explain, refusal
from hopsgpu.storage.hdfs import as_exception

SAFE = (
    'RPCError("org.apache.hadoop.hdfs.server.namenode.SafeModeException", "Cannot create file/y.'
    " Name node is in safe mode.\\nThe reported blocks 0 has reached the threshold 0.9990 of total"
    ' blocks 0. The number of live datanodes 0 needs an additional 1 live datanodes")'
)
DENIED = (
    'RPCError("org.apache.hadoop.security.AccessControlException", "Permission denied: user=mallory'
    ', access=EXECUTE, inode=\\"/tmp/private\\":root:supergroup:drwx------")'
)
NAMES = (
    'RPCError("org.apache.hadoop.hdfs.protocol.NSQuotaExceededException", "The NameSpace quota'
    ' (directories and files) of directory /tmp/q is exceeded: quota=3 file count=4")'
)
SPACE = (
    'RPCError("org.apache.hadoop.hdfs.protocol.DSQuotaExceededException", "The DiskSpace quota of'
    ' /tmp/q is exceeded: quota = 1024 B = 1 KB but diskspace consumed = 134217728 B = 128 MB")'
)
NO_NODES = (
    'RPCError("java.io.IOException", "File /y could only be written to 0 of the 1 minReplication'
    ' nodes. There are 0 datanode(s) running and 0 node(s) are excluded in this operation.")'
)


@pytest.mark.parametrize(
    ("text", "kind", "retryable"),
    [
        (SAFE, "safe mode", True),
        (DENIED, "permission", False),
        (NAMES, "quota", False),
        (SPACE, "quota", False),
        (NO_NODES, "unreachable", True),
        ('FatalRPCError("org.apache.hadoop.ipc.StandbyException", "not")', "unreachable", True),
        ('RPCError("org.apache.hadoop.ipc.RetriableException", "busy")', "unreachable", True),
        ('DataTransferError("All nodes failed for write")', "unreachable", True),
        ('OperationFailed("Failed to complete file in time")', "unreachable", True),
        ('BlocksNotFound("/y")', "unreachable", True),
        ("NoSASLMechanism", "permission", False),
        ('SASLError("no valid token")', "permission", False),
        ("ChecksumError", "damaged", False),
        ('RPCError("java.io.FileNotFoundException", "no /y")', "absent", False),
        ('RPCError("org.apache.hadoop.fs.ParentNotDirectoryException", "/y")', "exists", False),
        ('RPCError("java.lang.NullPointerException", "")', "", False),
        ("what nobody has seen before", "", False),
    ],
)
def test_kinds_of_hdfs_native_errors(text: str, kind: str, retryable: bool) -> None:
    meaning = explain(as_exception(text))
    assert (meaning.kind, meaning.is_retryable) == (kind, retryable)


def test_first_line_of_an_error_is_kept() -> None:
    assert str(as_exception(DENIED)) == (
        'Permission denied: user=mallory, access=EXECUTE, inode="/tmp/private":root:supergroup'
        ":drwx------"
    )
    assert str(as_exception(SAFE)) == "Cannot create file/y. Name node is in safe mode."


def test_a_retriable_exception_in_safe_mode_is_safe_mode() -> None:
    """As a NameNode of a pair says it."""
    error = refusal("RetriableException", "org.apache…SafeModeException: Safe mode is ON.")
    assert explain(error).kind == "safe mode"


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.EACCES, "permission"),
        (errno.EROFS, "permission"),
        (errno.ENOSPC, "quota"),
        (errno.EDQUOT, "quota"),
        (errno.ENOENT, "absent"),
        (errno.EEXIST, "exists"),
        (errno.EMFILE, ""),
    ],
)
def test_kinds_of_local_errors(number: int, kind: str) -> None:
    meaning = explain(OSError(number, os.strerror(number), "/a/path"))
    assert (meaning.kind, meaning.reason) == (kind, os.strerror(number))
    assert not meaning.is_retryable


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileNotFoundError("Path is not a file: /tmp"), "exists"),
        (FileNotFoundError("File does not exist: /tmp/y"), "absent"),
        (OSError("Connection refused (os error 111)"), "unreachable"),
        (NotImplementedError("encryption zones"), "unsupported"),
        (
            StoreRefusal("", "Failed to find datanode, suggest to check cluster health."),
            "unreachable",
        ),
        (StoreRefusal("", "Authentication failure. Check your credentials."), "permission"),
        (ValueError("it has 3 bytes"), ""),
    ],
)
def test_what_is_left(error: Exception, kind: str) -> None:
    assert explain(error).kind == kind


def test_kinds_that_a_person_can_change_come_with_advice() -> None:
    for text, advice in (
        (DENIED, "HOPSGPU_ROOT"),
        (NAMES, "setQuota"),
        (SAFE, "dfsadmin -safemode"),
        ('DataTransferError("x")', "HADOOP_CONF_DIR"),
    ):
        assert advice in str(explain(as_exception(text)))


def test_url_without_a_name_node_is_explained() -> None:
    """As hdfs-native says it when a client is made."""
    meaning = explain(RuntimeError('InvalidArgument("No fs.defaultFS setting found")'))
    assert meaning.reason == "No fs.defaultFS setting found" and not meaning.is_retryable
    assert "NameNode" in meaning.advice and "HADOOP_CONF_DIR" in meaning.advice
