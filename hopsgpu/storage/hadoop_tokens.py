"""The file of Hadoop's tokens in a container: renewal, and the names of NameNodes.

YARN names the file in HADOOP_TOKEN_FILE_LOCATION, and HDFS clients read it. hopsgpu replaces the
file under the same name, so that running ranks also find the new tokens. Tokens of other services
stay.

Hadoop issues the token of a NameNode outside name services for its IP address and port, unless
hadoop.security.token.service.use_ip is false. But hdfs-native looks for the "host:port" of the URL.
So the file gets a copy of the token for each name.

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
from typing import NamedTuple
from urllib.parse import urlsplit

from hopsgpu.errors import ConfigError
from hopsgpu.storage.hadoop_conf import HadoopConf

log = logging.getLogger(__name__)

TOKEN_FILE_VARIABLE = "HADOOP_TOKEN_FILE_LOCATION"
# The name of hopsgpu's own file, if YARN's file is missing or cannot be replaced.
OWN_FILE = "tokens"
_HDFS = b"HDFS_DELEGATION_TOKEN"
# The NameNode's port if a URL has none.
_PORT = 8020
_COPY = b"hopsgpu "
_FILE_SYSTEMS = ("fs.defaultFS", "fs.default.name")
_SERVICE_ADDRESS = re.compile(r"dfs\.namenode\.(?:rpc|http|https)-address\.([^.]+)\.[^.]+")
_MAGIC = b"HDTS\0"
_KEY_PARTS = 2


def keep_tokens(renewed: bytes, environment: MutableMapping[str, str], directory: Path) -> None:
    """Replace the container's tokens by renewed tokens of the same services.

    Args:
        renewed: in Hadoop's format.
        environment: environment of this process, which ranks inherit; it names the file afterwards.
        directory: absolute path for hopsgpu's own file if YARN's cannot be written.

    Raises:
        OSError: neither file can be written.
        ValueError: the renewed tokens are in another format.
    """
    _update(environment, directory, lambda before: _renew_copies(merge_tokens(before, renewed)))


def name_tokens(
    addresses: Iterable[str],
    environment: MutableMapping[str, str],
    resolve: Callable[[str], set[str]] | None = None,
) -> None:
    """Copy the container's tokens for IP addresses to the names of their NameNodes.

    Without such tokens, as without Kerberos, nothing is resolved or written. If the file cannot be
    written, a warning is logged.

    Args:
        addresses: addresses of NameNodes in URLs, "host:port" or "host".
        environment: environment of this process, which ranks inherit; it names the file.
        resolve: returns the IP addresses of a host, by default from DNS.
    """
    file = environment.get(TOKEN_FILE_VARIABLE)
    if file is None:
        return
    service_by_name = _missing_names(_read(file), addresses, resolve or _addresses_of)
    if not service_by_name:
        return
    # Use the agent's directory, also in a rank.
    parent = Path(file).absolute().parent
    directory = parent if Path(file).name == OWN_FILE else parent / "hopsgpu"
    log.info("copies HDFS tokens for %s", ", ".join(sorted(service_by_name)))
    try:
        _update(environment, directory, lambda before: _with_copies(before, service_by_name))
    except OSError as error:
        log.warning(
            "the HDFS tokens in %s could not be copied for %s, so that HDFS may refuse this"
            " process: %s",
            file,
            ", ".join(sorted(service_by_name)),
            error,
        )


def name_configured_tokens(environment: MutableMapping[str, str]) -> None:
    """Call `name_tokens` for the NameNodes of the Hadoop configuration."""
    try:
        properties = HadoopConf.load_hdfs(environment).all_values()
    except ConfigError as error:
        log.warning("HDFS tokens are not copied for the configured NameNodes: %s", error)
        return
    name_tokens(_name_nodes(properties), environment)


def hdfs_services(environment: Mapping[str, str]) -> list[str]:
    return sorted({token.service_name for token in _tokens_of_container(environment)})


def _tokens_of_container(environment: Mapping[str, str]) -> list[_Token]:
    """Return the container's HDFS tokens; none without a file, or if its format is unknown."""
    try:
        return _Tokens.parse(_read(environment.get(TOKEN_FILE_VARIABLE))).of_hdfs()
    except ValueError:
        return []


def web_token(
    environment: Mapping[str, str],
    host: str,
    service_hosts: Mapping[str, Collection[str]],
    resolve: Callable[[str], set[str]] | None = None,
) -> str | None:
    """Return the container's token for a NameNode, or its name service, as in URLs of WebHDFS.

    Args:
        environment: environment that names the container's file.
        host: the NameNode.
        service_hosts: from `name_services`.
        resolve: returns the IP addresses of a host, by default from DNS.
    """
    tokens = _tokens_of_container(environment)
    by_host = {_host_and_port(token.service_name)[0]: token for token in tokens}
    token = by_host.get(host)
    if token is None and tokens:
        addresses = (resolve or _addresses_of)(host)
        token = next((by_host[address] for address in addresses if address in by_host), None)
    if token is None:
        token = next((t for t in tokens if host in service_hosts.get(_name_service(t), ())), None)
    if token is None:
        return None
    # The format of Hadoop's Token.encodeToUrlString.
    content = b"".join(_vint(len(part)) + part for part in token[1:])
    return base64.urlsafe_b64encode(content).decode().rstrip("=")


def token_owner(environment: Mapping[str, str]) -> str | None:
    """Return the principal or user who owns the container's HDFS tokens, or None."""
    for token in _tokens_of_container(environment):
        if token.identifier[:1] == b"\0":
            try:
                length, at = _read_vint(token.identifier, 1)
            except ValueError:
                return None
            return token.identifier[at : at + length].decode(errors="replace")
    return None


def name_services(properties: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the hosts of the NameNodes of each name service."""
    hosts: dict[str, set[str]] = {}
    for name, value in properties.items():
        if match := _SERVICE_ADDRESS.fullmatch(name):
            hosts.setdefault(match[1], set()).add(_host_and_port(value)[0])
    return hosts


def _name_service(token: _Token) -> str:
    service = token.service_name
    return service.removeprefix("ha-hdfs:") if service.startswith("ha-hdfs:") else ""


@dataclass(frozen=True)
class Lifetime:
    """The life of delegation tokens, in seconds since the epoch.

    Attributes:
        issued: earliest time of issue.
        ends: earliest end, which no renewal can move.
    """

    issued: float
    ends: float


def lifetime(content: bytes) -> Lifetime | None:
    """Return the life of a file's HDFS tokens; None without tokens, or in an unknown format."""
    try:
        times = [_issue_and_end(token.identifier) for token in _Tokens.parse(content).of_hdfs()]
    except ValueError:
        return None
    if not times:
        return None
    return Lifetime(min(issued for issued, _ in times), min(ends for _, ends in times))


def _issue_and_end(identifier: bytes) -> tuple[float, float]:
    """Return the times of an AbstractDelegationTokenIdentifier.

    The format is a version (0), owner, renewer, real user, the two times in milliseconds, and more.
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
    """Return the NameNodes in properties, as "host:port" or "host"."""
    rpc = "dfs.namenode.rpc-address"
    addresses = {urlsplit(properties.get(name, "")).netloc for name in _FILE_SYSTEMS}
    addresses |= {v for n, v in properties.items() if n == rpc or n.startswith(f"{rpc}.")}
    return addresses - {""}


def _update(
    environment: MutableMapping[str, str], directory: Path, change: Callable[[bytes], bytes]
) -> None:
    """Replace the container's file, or create hopsgpu's own, under a lock of agent and ranks."""
    file = environment.get(TOKEN_FILE_VARIABLE)
    with _locked(None if file is None else Path(file).parent):
        content = change(_read(file))
        if file is not None:
            try:
                _replace(Path(file), content)
                return
            except OSError:
                if Path(file) == directory / OWN_FILE:
                    raise
        directory.mkdir(parents=True, mode=0o700, exist_ok=True)
        _replace(directory / OWN_FILE, content)
        environment[TOKEN_FILE_VARIABLE] = str(directory / OWN_FILE)


@contextlib.contextmanager
def _locked(directory: Path | None) -> Iterator[None]:
    if directory is None or not directory.is_dir():
        yield
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        # Unlock explicitly: a process that was forked meanwhile has the descriptor, too.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _missing_names(
    content: bytes, addresses: Iterable[str], resolve: Callable[[str], set[str]]
) -> dict[str, str]:
    """Return the names, "host:port", without a token → the "address:port" that has a token."""
    try:
        services = {token.service_name for token in _Tokens.parse(content).of_hdfs()}
    except ValueError:
        return {}
    numeric = {service for service in services if _is_numeric(service)}
    service_by_name: dict[str, str] = {}
    for address in sorted(set(addresses)) if numeric else ():
        host, port = _host_and_port(address)
        name = f"{host}:{port}"
        if not host or name in services or _is_numeric(name):
            continue
        for ip in resolve(host):
            if f"{ip}:{port}" in numeric:
                service_by_name[name] = f"{ip}:{port}"
    return service_by_name


def _with_copies(content: bytes, service_by_name: Mapping[str, str]) -> bytes:
    """Return a file's content with copies of tokens for other names (name → service)."""
    parsed = _Tokens.parse(content)
    by_service = {token.service_name: token for token in parsed.of_hdfs()}
    copies = {}
    for name, service in service_by_name.items():
        if token := by_service.get(service):
            alias = _COPY + f"{service} {name}".encode()
            copies[alias] = token._replace(alias=alias, service=name.encode())
    return _Tokens({**parsed.tokens, **copies}, parsed.keys).content()


def _renew_copies(content: bytes) -> bytes:
    """Return a file's content with new copies of its present tokens."""
    service_by_name = {}
    for alias in _Tokens.parse(content).tokens:
        if alias.startswith(_COPY):
            service, _, name = alias.removeprefix(_COPY).decode().partition(" ")
            service_by_name[name] = service
    return _with_copies(content, service_by_name)


def _host_and_port(address: str) -> tuple[str, int]:
    parts = urlsplit(f"//{address}")
    try:
        return parts.hostname or "", parts.port or _PORT
    except ValueError:  # an invalid port
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


def merge_tokens(before: bytes, renewed: bytes) -> bytes:
    """Return a file's content in which renewed tokens replace tokens of the same services.

    If the format of the previous content is unknown, the content is dropped.

    Raises:
        ValueError: the renewed tokens are in another format.
    """
    new = _Tokens.parse(renewed)
    try:
        old = _Tokens.parse(before)
    except ValueError:
        return renewed
    renewed_services = {(token.kind, token.service) for token in new.tokens.values()}
    kept = {
        alias: token
        for alias, token in old.tokens.items()
        if alias not in new.tokens and (token.kind, token.service) not in renewed_services
    }
    return _Tokens({**kept, **new.tokens}, {**old.keys, **new.keys}).content()


class _Token(NamedTuple):
    alias: bytes
    identifier: bytes
    password: bytes
    kind: bytes
    service: bytes

    @property
    def service_name(self) -> str:
        return self.service.decode(errors="replace")


@dataclass(frozen=True)
class _Tokens:
    """A file's content: the tokens, and the parts of each secret key, by alias."""

    tokens: dict[bytes, _Token]
    keys: dict[bytes, tuple[bytes, ...]]

    @classmethod
    def parse(cls, content: bytes) -> _Tokens:
        if not content.startswith(_MAGIC):
            raise ValueError("not Hadoop tokens of format 0")
        tokens, at = _entries(content, len(_MAGIC), len(_Token._fields))
        keys, _ = _entries(content, at, _KEY_PARTS)
        return cls({alias: _Token(*parts) for alias, parts in tokens.items()}, keys)

    def of_hdfs(self) -> list[_Token]:
        return [token for token in self.tokens.values() if token.kind == _HDFS]

    def content(self) -> bytes:
        content = [_MAGIC]
        for entries in (self.tokens, self.keys):
            content.append(_vint(len(entries)))
            content += [_vint(len(part)) + part for parts in entries.values() for part in parts]
        return b"".join(content)


def _entries(content: bytes, at: int, parts: int) -> tuple[dict[bytes, tuple[bytes, ...]], int]:
    """Return entries with `parts` parts, by their first part, and the offset of their end."""
    number, at = _read_vint(content, at)
    entries = {}
    for _ in range(number):
        entry = []
        for _ in range(parts):
            length, at = _read_vint(content, at)
            if at + length > len(content):
                raise ValueError("the Hadoop tokens are truncated")
            entry.append(content[at : at + length])
            at += length
        entries[entry[0]] = tuple(entry)
    return entries, at


def _read_vint(content: bytes, at: int) -> tuple[int, int]:
    """Return a length in the format of Hadoop's WritableUtils, and the offset of its end."""
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
    if number <= 127:
        return bytes([number])
    size = (number.bit_length() + 7) // 8
    return struct.pack("b", -112 - size) + number.to_bytes(size)


def _read(path: str | None) -> bytes:
    try:
        return b"" if path is None else Path(path).read_bytes()
    except OSError:
        return b""


def _replace(path: Path, content: bytes) -> None:
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:  # noqa: PTH123 - not a path
            file.write(content)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
