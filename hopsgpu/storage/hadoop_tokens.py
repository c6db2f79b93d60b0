"""The file of Hadoop's tokens in a container: renewed ones, and the names of NameNodes.

YARN names the file in HADOOP_TOKEN_FILE_LOCATION, and HDFS clients read it. It is replaced under
its name, so that running ranks also find the new tokens. The tokens of other services that YARN put
into it stay.

Hadoop writes the token of a NameNode that is not in a name service for its IP address and port
(unless hadoop.security.token.service.use_ip is false), and hdfs-native looks for the "host:port" of
the URL. A copy of the token for each name makes it found.

The format is that of Hadoop's `Credentials`, as Writables:

    "HDTS", 0
    vint      number of tokens; of each: alias, identifier, password, kind, service
    vint      number of secret keys; of each: alias, key

Each item is a vint, the length, followed by that many bytes.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import ipaddress
import logging
import os
import re
import socket
import struct
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from hopsgpu.errors import ConfigError
from hopsgpu.storage.hadoop_conf import HadoopConf

log = logging.getLogger(__name__)

TOKEN_FILE_VARIABLE = "HADOOP_TOKEN_FILE_LOCATION"
# The container's own, where YARN gave none or it cannot be replaced.
OWN = "tokens"
_HDFS = b"HDFS_DELEGATION_TOKEN"
# The NameNode's port where a URL has none.
_PORT = 8020
_COPY = b"hopsgpu "
_FILE_SYSTEMS = ("fs.defaultFS", "fs.default.name")
_OF_SERVICE = re.compile(r"dfs\.namenode\.(?:rpc|http|https)-address\.([^.]+)\.[^.]+")
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
    _update(environment, directory, lambda before: _renamed(merged(before, fresh)))


def name_tokens(
    addresses: Iterable[str],
    environment: MutableMapping[str, str],
    resolve: Callable[[str], set[str]] | None = None,
) -> None:
    """Make the container's tokens found by the names of their NameNodes.

    Without tokens for IP addresses, as without Kerberos, nothing is looked up or written. If the
    file cannot be written, that is logged: the NameNode may be found all the same.

    Args:
        addresses: NameNodes as URLs name them, "host:port" or "host".
        environment: environment of this process, which ranks inherit; it names the file.
        resolve: returns the IP addresses of a host; asks DNS by default.
    """
    file = environment.get(TOKEN_FILE_VARIABLE)
    if file is None:
        return
    added = _named(_present(file), addresses, resolve or _addresses_of)
    if not added:
        return
    # The agent's own directory, in a rank too.
    beside = Path(file).absolute().parent
    directory = beside if Path(file).name == OWN else beside / "hopsgpu"
    log.info("copies HDFS tokens for %s", ", ".join(sorted(added)))
    try:
        _update(environment, directory, lambda before: _with_copies(before, added))
    except OSError as error:
        log.warning(
            "the HDFS tokens in %s could not be copied for %s, so that HDFS may refuse this"
            " process: %s",
            file,
            ", ".join(sorted(added)),
            error,
        )


def name_configured_tokens(environment: MutableMapping[str, str]) -> None:
    """Do as `name_tokens` for the NameNodes that the Hadoop configuration names."""
    try:
        properties = HadoopConf.load_hdfs(environment).filled()
    except ConfigError as error:
        log.warning("HDFS tokens are not copied for the configured NameNodes: %s", error)
        return
    name_tokens(_name_nodes(properties), environment)


def hdfs_services(environment: Mapping[str, str]) -> list[str]:
    """Return the services that the container's HDFS tokens are for."""
    try:
        held = _Tokens.parse(_present(environment.get(TOKEN_FILE_VARIABLE))).tokens.values()
    except ValueError:
        return []
    return sorted({token[4].decode(errors="replace") for token in held if token[3] == _HDFS})


def web_token(
    environment: Mapping[str, str],
    host: str,
    service_hosts: Mapping[str, Collection[str]],
    resolve: Callable[[str], set[str]] | None = None,
) -> str | None:
    """Return the container's token for a NameNode's web address, as WebHDFS takes it in URLs.

    Args:
        environment: environment that names the container's file.
        host: the NameNode.
        service_hosts: the hosts of each name service, as `name_services` returns them.
        resolve: returns the IP addresses of a host; asks DNS by default.

    Returns:
        The token of that NameNode or of its name service; None if there is none.
    """
    try:
        tokens = [
            token
            for token in _Tokens.parse(
                _present(environment.get(TOKEN_FILE_VARIABLE))
            ).tokens.values()
            if token[3] == _HDFS
        ]
    except ValueError:
        return None
    by_host = {_host_and_port(token[4].decode(errors="replace"))[0]: token for token in tokens}
    found = by_host.get(host)
    if found is None and tokens:
        addresses = (resolve or _addresses_of)(host)
        found = next((by_host[address] for address in addresses if address in by_host), None)
    if found is None:
        found = next((t for t in tokens if host in service_hosts.get(_name_service(t), ())), None)
    if found is None:
        return None
    # Hadoop's Token.encodeToUrlString
    written = b"".join(_vint(len(part)) + part for part in found[1:5])
    return base64.urlsafe_b64encode(written).decode().rstrip("=")


def token_owner(environment: Mapping[str, str]) -> str | None:
    """Return the owner of the container's HDFS tokens, a principal or a user; None without any."""
    try:
        tokens = _Tokens.parse(_present(environment.get(TOKEN_FILE_VARIABLE))).tokens.values()
        for token in tokens:
            if token[3] == _HDFS and token[1][:1] == b"\0":
                length, at = _read_vint(token[1], 1)
                return token[1][at : at + length].decode(errors="replace")
    except ValueError:
        return None
    return None


def name_services(properties: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the hosts of the NameNodes of each name service in Hadoop's properties."""
    found: dict[str, set[str]] = {}
    for name, value in properties.items():
        if parts := _OF_SERVICE.fullmatch(name):
            found.setdefault(parts[1], set()).add(_host_and_port(value)[0])
    return found


def _name_service(token: tuple[bytes, ...]) -> str:
    """Return the name service of a token; "" if it is for an address."""
    service = token[4].decode(errors="replace")
    return service.removeprefix("ha-hdfs:") if service.startswith("ha-hdfs:") else ""


@dataclass(frozen=True)
class Lifetime:
    """The life of delegation tokens, in seconds since the epoch.

    Attributes:
        issued: when the first of them was issued.
        ends: when the first of them ends, whoever renews it.
    """

    issued: float
    ends: float


def lifetime(content: bytes) -> Lifetime | None:
    """Return the life of a file's HDFS tokens; None without any, or in an unknown format."""
    try:
        held = [t for t in _Tokens.parse(content).tokens.values() if t[3] == _HDFS]
        times = [_times(identifier) for _, identifier, *_ in held]
    except ValueError:
        return None
    if not times:
        return None
    return Lifetime(min(issued for issued, _ in times), min(ends for _, ends in times))


def _times(identifier: bytes) -> tuple[float, float]:
    """Return when a token was issued and ends, by Hadoop's AbstractDelegationTokenIdentifier.

    That is a version (0), owner, renewer and real user, the two times in milliseconds, and more.
    """
    if identifier[:1] != b"\0":
        raise ValueError("a token identifier of another version")
    at = 1
    for _ in range(3):
        length, at = _read_vint(identifier, at)
        at += length
    issued, at = _read_vint(identifier, at)
    ends, _ = _read_vint(identifier, at)
    return issued / 1000, ends / 1000


def _name_nodes(properties: Mapping[str, str]) -> set[str]:
    """Return the NameNodes that properties name, as "host:port" or "host"."""
    rpc = "dfs.namenode.rpc-address"
    found = {urlsplit(properties.get(name, "")).netloc for name in _FILE_SYSTEMS}
    found |= {v for n, v in properties.items() if n == rpc or n.startswith(f"{rpc}.")}
    return found - {""}


def _update(
    environment: MutableMapping[str, str], directory: Path, change: Callable[[bytes], bytes]
) -> None:
    """Replace the container's file, or create our own if YARN's cannot be replaced.

    The agent and the ranks take turns.
    """
    file = environment.get(TOKEN_FILE_VARIABLE)
    with _alone(None if file is None else Path(file).parent):
        content = change(_present(file))
        if file is not None:
            try:
                _replace(Path(file), content)
                return
            except OSError:
                if Path(file) == directory / OWN:
                    raise
        directory.mkdir(parents=True, mode=0o700, exist_ok=True)
        _replace(directory / OWN, content)
        environment[TOKEN_FILE_VARIABLE] = str(directory / OWN)


@contextlib.contextmanager
def _alone(directory: Path | None) -> Iterator[None]:
    """Keep others from replacing files of a directory in this way; a missing one needs no turn."""
    if directory is None or not directory.is_dir():
        yield
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        # A process that was forked meanwhile has the descriptor, and would keep the lock.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _named(
    content: bytes, addresses: Iterable[str], resolve: Callable[[str], set[str]]
) -> dict[str, str]:
    """Return the names, "host:port", that no token is for → the "address:port" that one is for."""
    try:
        services = {t[4].decode() for t in _Tokens.parse(content).tokens.values() if t[3] == _HDFS}
    except (ValueError, UnicodeDecodeError):
        return {}
    numeric = {service for service in services if _is_numeric(service)}
    found: dict[str, str] = {}
    for address in sorted(set(addresses)) if numeric else ():
        host, port = _host_and_port(address)
        name = f"{host}:{port}"
        if not host or name in services or _is_numeric(name):
            continue
        for ip in resolve(host):
            if f"{ip}:{port}" in numeric:
                found[name] = f"{ip}:{port}"
    return found


def _with_copies(content: bytes, names: Mapping[str, str]) -> bytes:
    """Return a file's content with the tokens of some services also under names.

    Args:
        names: name → service.
    """
    held = _Tokens.parse(content)
    by_service = {t[4].decode(errors="replace"): t for t in held.tokens.values() if t[3] == _HDFS}
    copies = {}
    for name, service in names.items():
        if token := by_service.get(service):
            alias = _COPY + f"{service} {name}".encode()
            copies[alias] = (alias, *token[1:4], name.encode())
    return _Tokens({**held.tokens, **copies}, held.keys).content()


def _renamed(content: bytes) -> bytes:
    """Return a file's content in which the copies are those of its present tokens."""
    names = {}
    for alias in _Tokens.parse(content).tokens:
        if alias.startswith(_COPY):
            service, _, name = alias.removeprefix(_COPY).decode().partition(" ")
            names[name] = service
    return _with_copies(content, names)


def _host_and_port(address: str) -> tuple[str, int]:
    parts = urlsplit(f"//{address}")
    try:
        return parts.hostname or "", parts.port or _PORT
    except ValueError:  # a port that is none
        return "", _PORT


def _is_numeric(service: str) -> bool:
    try:
        ipaddress.ip_address(_host_and_port(service)[0])
    except ValueError:
        return False
    return True


def _addresses_of(host: str) -> set[str]:
    try:
        return {str(row[4][0]) for row in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        log.info("the NameNode %s has no address: %s", host, error)
        return set()


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
