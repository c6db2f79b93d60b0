"""The file of Hadoop's tokens in a container, kept fresh with those that the driver hands over.

YARN names it in HADOOP_TOKEN_FILE_LOCATION. HDFS clients read it; it is replaced under its name, so
that ranks which run already find the new tokens too. Of what YARN put into it the tokens of other
services stay. The format is that of Hadoop's `Credentials`, as Writables:

    "HDTS", 0
    vint      number of tokens; of each: alias, identifier, password, kind, service
    vint      number of secret keys; of each: alias, key

Everything in it is a vint, the length, and so many bytes. Built to Hadoop's source, and untried
with a real KDC.
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
    """Replace the container's tokens of the services for which there are fresh ones.

    Args:
        fresh: tokens, in Hadoop's format.
        environment: of this process, which ranks inherit; it names the file afterwards.
        directory: for a file of our own, where YARN's cannot be written; absolute.

    Raises:
        OSError: neither can be written.
        ValueError: what is fresh is in another format.
    """
    given = environment.get(VARIABLE)
    content = merged(_present(given), fresh)
    if given is not None:
        try:
            _replace(Path(given), content)
            return
        except OSError:
            if Path(given) == directory / OWN:
                raise
    directory.mkdir(parents=True, mode=0o700, exist_ok=True)
    _replace(directory / OWN, content)
    environment[VARIABLE] = str(directory / OWN)


def merged(before: bytes, fresh: bytes) -> bytes:
    """Return a file's content with the fresh tokens in place of those of the same services.

    What was before is left out where it is in no format that is known here.

    Raises:
        ValueError: what is fresh is in another format.
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
    """A file's content: parts of each token, and of each secret key, by its alias."""

    tokens: dict[bytes, tuple[bytes, ...]]
    keys: dict[bytes, tuple[bytes, ...]]

    @classmethod
    def parse(cls, content: bytes) -> _Tokens:
        if not content.startswith(_MAGIC):
            raise ValueError("these are no Hadoop tokens of format 0")
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
    """Entries of so many parts each, by the first of them, and where they end."""
    number, at = _read_vint(content, at)
    found = {}
    for _ in range(number):
        entry = []
        for _ in range(parts):
            length, at = _read_vint(content, at)
            if at + length > len(content):
                raise ValueError("these Hadoop tokens are cut short")
            entry.append(content[at : at + length])
            at += length
        found[entry[0]] = tuple(entry)
    return found, at


def _read_vint(content: bytes, at: int) -> tuple[int, int]:
    """Return a length, as Hadoop's WritableUtils writes it, and where it ends."""
    try:
        (first,) = struct.unpack_from("b", content, at)
    except struct.error as error:
        raise ValueError("these Hadoop tokens are cut short") from error
    if first >= 0:
        return first, at + 1
    if not -120 <= first < -112:
        raise ValueError("a length in these Hadoop tokens is negative")
    end = at + 1 - 112 - first
    return int.from_bytes(content[at + 1 : end]), end


def _vint(number: int) -> bytes:
    """Return a length, as Hadoop's WritableUtils writes it."""
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
    """Make or replaces a file of secrets; readers see the old content or the new, whole."""
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:  # noqa: PTH123 - not a path
            file.write(content)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
