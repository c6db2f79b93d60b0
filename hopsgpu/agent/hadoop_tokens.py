"""The file of Hadoop's tokens in a container, updated with those that the driver sends.

YARN names the file in HADOOP_TOKEN_FILE_LOCATION, and HDFS clients read it. It is replaced under
its name, so that running ranks also find the new tokens. The tokens of other services that YARN put
into it stay. The format is that of Hadoop's `Credentials`, as Writables:

    "HDTS", 0
    vint      number of tokens; of each: alias, identifier, password, kind, service
    vint      number of secret keys; of each: alias, key

Each item is a vint, the length, followed by that many bytes. Written according to Hadoop's source;
not tested with a real KDC.
"""

from __future__ import annotations

import os
import struct
import uuid
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "HADOOP_TOKEN_FILE_LOCATION"
# The container's own, where YARN gave none or it cannot be replaced.
OWN = "tokens"
_MAGIC = b"HDTS\0"
_TOKEN_PARTS = 5
_KEY_PARTS = 2


def keep_tokens(fresh: bytes, environment: MutableMapping[str, str], directory: Path) -> None:
    """Replace the container's tokens of the services for which there are renewed ones.

    Args:
        fresh: renewed tokens, in Hadoop's format.
        environment: environment of this process, which ranks inherit; it names the file afterwards.
        directory: directory for our own file if YARN's cannot be written; absolute.

    Raises:
        OSError: neither file can be written.
        ValueError: the renewed tokens are in another format.
    """
    file = environment.get(VARIABLE)
    content = merged(_present(file), fresh)
    if file is not None:
        try:
            _replace(Path(file), content)
            return
        except OSError:
            if Path(file) == directory / OWN:
                raise
    directory.mkdir(parents=True, mode=0o700, exist_ok=True)
    _replace(directory / OWN, content)
    environment[VARIABLE] = str(directory / OWN)


def merged(before: bytes, fresh: bytes) -> bytes:
    """Return a file's content with the renewed tokens in place of those of the same services.

    The previous content is dropped if its format is unknown.

    Raises:
        ValueError: the renewed tokens are in another format.
    """
    new = _Tokens.parse(fresh)
    try:
        old = _Tokens.parse(before)
    except ValueError:
        return fresh
    stale = {_whose(token) for token in new.tokens.values()}
    kept = {
        alias: token
        for alias, token in old.tokens.items()
        if alias not in new.tokens and _whose(token) not in stale
    }
    return _Tokens({**kept, **new.tokens}, {**old.keys, **new.keys}).content()


@dataclass(frozen=True)
class _Tokens:
    """A file's content: the parts of each token, and of each secret key, by its alias."""

    tokens: dict[bytes, tuple[bytes, ...]]
    keys: dict[bytes, tuple[bytes, ...]]

    @classmethod
    def parse(cls, content: bytes) -> _Tokens:
        if not content.startswith(_MAGIC):
            raise ValueError("not Hadoop tokens of format 0")
        tokens, at = _entries(content, len(_MAGIC), _TOKEN_PARTS)
        keys, _ = _entries(content, at, _KEY_PARTS)
        return cls(tokens, keys)

    def content(self) -> bytes:
        written = [_MAGIC]
        for entries in (self.tokens, self.keys):
            written.append(_vint(len(entries)))
            written += [_vint(len(part)) + part for parts in entries.values() for part in parts]
        return b"".join(written)


def _whose(token: tuple[bytes, ...]) -> tuple[bytes, bytes]:
    """Return a token's kind and service."""
    return token[3], token[4]


def _entries(content: bytes, at: int, parts: int) -> tuple[dict[bytes, tuple[bytes, ...]], int]:
    """Return entries of a number of parts each, by their first part, and where they end."""
    number, at = _read_vint(content, at)
    found = {}
    for _ in range(number):
        entry = []
        for _ in range(parts):
            length, at = _read_vint(content, at)
            if at + length > len(content):
                raise ValueError("the Hadoop tokens are truncated")
            entry.append(content[at : at + length])
            at += length
        found[entry[0]] = tuple(entry)
    return found, at


def _read_vint(content: bytes, at: int) -> tuple[int, int]:
    """Return a length, as Hadoop's WritableUtils writes it, and where it ends."""
    try:
        (first,) = struct.unpack_from("b", content, at)
    except struct.error as error:
        raise ValueError("the Hadoop tokens are truncated") from error
    if first >= 0:
        return first, at + 1
    if not -120 <= first < -112:
        raise ValueError("the Hadoop tokens contain a negative length")
    end = at + 1 - 112 - first
    return int.from_bytes(content[at + 1 : end]), end


def _vint(number: int) -> bytes:
    """Return a length as Hadoop's WritableUtils writes it."""
    if number <= 127:
        return bytes([number])
    size = (number.bit_length() + 7) // 8
    return struct.pack("b", -112 - size) + number.to_bytes(size)


def _present(path: str | None) -> bytes:
    try:
        return b"" if path is None else Path(path).read_bytes()
    except OSError:
        return b""


def _replace(path: Path, content: bytes) -> None:
    """Create or replace a file of secrets atomically."""
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:  # noqa: PTH123 - not a path
            file.write(content)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
