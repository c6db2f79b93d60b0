"""The meaning and the remedies of file systems' errors. Pure functions."""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass

from hopsgpu.storage.viewfs import NO_MOUNT

ABSENT = "absent"
DAMAGED = "damaged"
EXISTS = "exists"
PERMISSION = "permission"
QUOTA = "quota"
SAFE_MODE = "safe mode"
UNREACHABLE = "unreachable"
UNSUPPORTED = "unsupported"
# hopsgpu's own names, instead of a Java class, for errors of Kerberos' library.
NO_CREDENTIALS, NO_KDC = "NoCredentials", "NoKdc"
# The same for an object store that does not answer, or that refuses the user.
NO_STORE, STORE_DENIED = "NoObjectStore", "ObjectStoreDenied"
# The errors of code that parses JSON, if the text is not JSON or has unexpected content.
JSON_ERRORS = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


class StoreRefusal(Exception):
    """A refusal by a file system.

    Attributes:
        java: the Java exception's class without its package, or the client's own name.
        reason: the first line of the message.
    """

    def __init__(self, java: str, reason: str) -> None:
        super().__init__(reason)
        self.java = java
        self.reason = reason


@dataclass(frozen=True)
class ErrorMeaning:
    """The meaning of an error.

    Attributes:
        kind: as `StoreError.kind`.
        reason: message of the file system.
        advice: remedy, or "".
        is_retryable: whether a retry may succeed in some seconds.
    """

    kind: str
    reason: str
    advice: str = ""
    is_retryable: bool = False

    def __str__(self) -> str:
        return f"{self.reason}; {self.advice}" if self.advice else self.reason


_ADVICE = {
    PERMISSION: "ask the owner for access, or set HOPSGPU_ROOT (spark.hopsgpu.root) to a directory"
    " that you own",
    QUOTA: "the quota is exhausted: remove files that you do not need, or ask the administrator to"
    " raise it (hdfs dfsadmin -setQuota, -setSpaceQuota)",
    SAFE_MODE: "HDFS is in safe mode: try again when enough of its DataNodes are up, or ask the"
    " administrator (hdfs dfsadmin -safemode get)",
    UNREACHABLE: "check that HDFS is running and that this is its address (HADOOP_CONF_DIR)",
    DAMAGED: "no replica is intact: restore the file (hdfs fsck lists other damaged files)",
}
_REFUSAL_ADVICE = {
    # The reason includes the remedy.
    NO_CREDENTIALS: "",
    NO_KDC: "",
    NO_STORE: "check the network, and the address of the object store if it is not its provider's"
    " (AWS_ENDPOINT_URL, STORAGE_EMULATOR_HOST, AZURE_STORAGE_CONNECTION_STRING)",
    STORE_DENIED: "check which credentials the store's library finds, and what the policy of the"
    " bucket allows them; or set HOPSGPU_ROOT (spark.hopsgpu.root) to another place",
}
_NO_DEFAULT = "No fs.defaultFS setting found"
_NAME_NODE = (
    "the URL names no NameNode and no fs.defaultFS is known; set HADOOP_CONF_DIR, or write"
    " hdfs://host:port/…"
)
_RETRYABLE_KINDS = frozenset({SAFE_MODE, UNREACHABLE})
# hdfs-native's message for a file in an encryption zone without a supported key provider.
_ENCRYPTED = re.compile(r"in an HDFS encryption zone but no KMS provider")
_UNMOUNTED = (
    "the mount table of viewfs has no mount point on HDFS for this path"
    " (fs.viewfs.mounttable.<name>.link.<path> in core-site.xml)"
)
_KEY_PROVIDER = (
    "only a KMS is supported as the key provider (hadoop.security.key.provider.path ="
    " kms://http@host:port/kms or kms://https@host:port/kms): set it in core-site.xml, or copy the"
    " file out of the encryption zone"
)
_NO_SPACE = "the disk is full, or your quota on it is exhausted"
_LOCAL_ADVICE: dict[int | None, str] = {
    errno.ENOSPC: _NO_SPACE,
    errno.EDQUOT: _NO_SPACE,
    errno.EIO: "the disk cannot be read or written",
}

# The name of the Java class without its package → the kind of error.
_KINDS_BY_CLASS = {
    "AccessControlException": PERMISSION,
    "AuthorizationException": PERMISSION,
    "InvalidToken": PERMISSION,
    "SecurityException": PERMISSION,
    "SaslException": PERMISSION,
    "SASLError": PERMISSION,
    "GSSAPIError": PERMISSION,
    "NoSASLMechanism": PERMISSION,
    NO_CREDENTIALS: PERMISSION,
    NO_KDC: UNREACHABLE,
    NO_STORE: UNREACHABLE,
    STORE_DENIED: PERMISSION,
    "NSQuotaExceededException": QUOTA,
    "DSQuotaExceededException": QUOTA,
    "QuotaByStorageTypeExceededException": QUOTA,
    "QuotaExceededException": QUOTA,
    "SafeModeException": SAFE_MODE,
    "FileNotFoundException": ABSENT,
    "FileAlreadyExistsException": EXISTS,
    "ParentNotDirectoryException": EXISTS,
    "PathIsNotDirectoryException": EXISTS,
    "StandbyException": UNREACHABLE,
    "ObserverRetryOnActiveException": UNREACHABLE,
    "RetriableException": UNREACHABLE,
    "ConnectException": UNREACHABLE,
    "NoRouteToHostException": UNREACHABLE,
    "SocketTimeoutException": UNREACHABLE,
    "EOFException": UNREACHABLE,
    "DataTransferError": UNREACHABLE,
    "BlocksNotFound": UNREACHABLE,
    "BlockMissingException": UNREACHABLE,
    "AlreadyBeingCreatedException": UNREACHABLE,
    "RecoveryInProgressException": UNREACHABLE,
    "UnsupportedOperationException": UNSUPPORTED,
    "UnsupportedFeature": UNSUPPORTED,
    "ChecksumError": DAMAGED,
    "ChecksumException": DAMAGED,
}
# The message → the kind, if the class is unspecific: an IOException, or an answer in HTML.
_KINDS_BY_MESSAGE = (
    (re.compile(r"safe ?mode is on|is in safe mode", re.IGNORECASE), SAFE_MODE),
    (re.compile(r"quota of .* is exceeded", re.IGNORECASE), QUOTA),
    (re.compile(r"permission denied", re.IGNORECASE), PERMISSION),
    (re.compile(r"could only be (written|replicated) to \d+"), UNREACHABLE),
    (
        re.compile(r"failed to find datanode|could not find any datanodes", re.IGNORECASE),
        UNREACHABLE,
    ),
    (re.compile(r"failed to complete file in time", re.IGNORECASE), UNREACHABLE),
    (re.compile(r"authentication (failure|required)", re.IGNORECASE), PERMISSION),
)
# HDFS raises FileNotFoundException with this message for a read of a directory.
_A_DIRECTORY = re.compile(r"^Path is not a file")
# The message for a strict rename of a file onto a directory, or of a directory onto a file.
_OTHER_SORT = re.compile(r"Source .* and destination .* must both be directories")
_KINDS_BY_ERRNO = {
    errno.EACCES: PERMISSION,
    errno.EPERM: PERMISSION,
    errno.EROFS: PERMISSION,
    errno.ENOSPC: QUOTA,
    errno.EDQUOT: QUOTA,
    errno.ENOENT: ABSENT,
    errno.EEXIST: EXISTS,
    errno.ENOTDIR: EXISTS,
    errno.EISDIR: EXISTS,
    errno.ENOTEMPTY: EXISTS,
    errno.EIO: DAMAGED,
}


def refusal(java: str, text: str) -> Exception:
    """Return the exception that a client raises for a Java exception's class and message."""
    name = re.split(r"[.$]", java)[-1]
    reason = (text.strip().splitlines() or [name])[0]
    if name == "FileNotFoundException":
        return FileNotFoundError(reason)
    if name == "FileAlreadyExistsException" or _OTHER_SORT.search(reason):
        return FileExistsError(reason)
    return StoreRefusal(name, reason)


def explain(error: BaseException) -> ErrorMeaning:
    reason = _first_line(error)
    if _NO_DEFAULT in reason:
        return ErrorMeaning("", _NO_DEFAULT, _NAME_NODE)
    if _ENCRYPTED.search(reason):
        return ErrorMeaning(UNSUPPORTED, reason, _KEY_PROVIDER)
    if NO_MOUNT in reason:
        return ErrorMeaning(ABSENT, _UNMOUNTED)
    kind = _kind(error, reason)
    advice = _ADVICE.get(kind, "")
    if isinstance(error, OSError):
        advice = _LOCAL_ADVICE.get(error.errno, advice)
    elif isinstance(error, StoreRefusal):
        advice = _REFUSAL_ADVICE.get(error.java, advice)
    return ErrorMeaning(kind, reason, advice, kind in _RETRYABLE_KINDS)


def _kind(error: BaseException, reason: str) -> str:
    if isinstance(error, StoreRefusal):
        kind = next((kind for pattern, kind in _KINDS_BY_MESSAGE if pattern.search(reason)), "")
        return kind if kind == SAFE_MODE else _KINDS_BY_CLASS.get(error.java, kind)
    if isinstance(error, FileNotFoundError):
        return EXISTS if _A_DIRECTORY.search(reason) else ABSENT
    if isinstance(error, (FileExistsError, IsADirectoryError, NotADirectoryError)):
        return EXISTS
    if isinstance(error, NotImplementedError):
        return UNSUPPORTED
    if isinstance(error, OSError) and error.errno is not None:
        return _KINDS_BY_ERRNO.get(error.errno, "")
    # Clients raise an OSError without a number if a connection breaks.
    return UNREACHABLE if isinstance(error, OSError) else ""


def _first_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno is not None and error.strerror:
        return error.strerror
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
