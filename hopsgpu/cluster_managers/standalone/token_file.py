"""The bearer token of a file, for masters whose pages need one (org.apache.spark.ui.JWSFilter)."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from hopsgpu.errors import ConfigError

TOKEN_SETTING = "spark.hopsgpu.master.token_file"
TOKEN_VARIABLE = "HOPSGPU_MASTER_TOKEN_FILE"
_MAX_BYTES = 64 * 1024
# RFC 6750, "b64token".
_TOKEN = re.compile(rb"[A-Za-z0-9._~+/-]+=*")
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def token_file_of(properties: Mapping[str, str], environ: Mapping[str, str]) -> Path | None:
    """Return the configured file; None if there is none."""
    name = properties.get(TOKEN_SETTING, "").strip() or environ.get(TOKEN_VARIABLE, "").strip()
    return Path(name).expanduser() if name else None


def read_token(file: Path) -> str:
    """Return the token of a file; errors and logs never have its content.

    Raises:
        ConfigError: the file cannot be read, other users may use it, or it has no token.
    """
    try:
        # O_NONBLOCK returns at once if the file is a named pipe without a writer.
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as stream:
            status = os.fstat(descriptor)
            content = stream.read(_MAX_BYTES + 1) if stat.S_ISREG(status.st_mode) else b""
    except OSError as error:
        raise _refusal(file, f"cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise _refusal(file, "is no regular file")
    if status.st_mode & _OTHERS:
        raise _refusal(file, "can be used by other users: run chmod 600 on it")
    if len(content) > _MAX_BYTES:
        raise _refusal(file, f"has more than {_MAX_BYTES} bytes")
    token = content.strip()
    if not _TOKEN.fullmatch(token):
        raise _refusal(file, "does not have one token and nothing else")
    return token.decode()


def _refusal(file: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"{TOKEN_SETTING} ({TOKEN_VARIABLE}) names {file}, which {reason}. It must be a file of at"
        f" most {_MAX_BYTES} bytes with a bearer token, which only its owner may read"
    )
