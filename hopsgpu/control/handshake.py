"""The start of a control connection: both ends prove that they know the run's secret.

    driver → agent   "hopsgpu1", nonce of the driver (32 bytes)
    agent → driver   "hopsgpu1", nonce of the agent (32 bytes), HMAC(secret, "agent", nonces)
    driver → agent   HMAC(secret, "driver", nonces)

The agent sends its proof first, so that a stranger learns only a random number. The key of each
direction is an HMAC of both nonces, so that frames of one connection are invalid in another.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import os
import platform
import secrets
import socket
import ssl
from collections.abc import Iterable

from hopsgpu.control.channel import DIGEST, Channel, ChannelError, mac
from hopsgpu.control.heartbeat import HEARTBEAT_SECONDS
from hopsgpu.control.streams import Inbox, open_streams
from hopsgpu.control.tls import pinning_context

HANDSHAKE_SECONDS = 10.0
# Pauses before a retry, if the driver refused the connection or closed it because of a flood.
_PAUSES = (0.25, 1.0)
_MAGIC = b"hopsgpu1"
_NONCE = 32
_TO_AGENT, _TO_DRIVER = b"to agent", b"to driver"


class UnreachableError(OSError):
    """An executor cannot connect to the driver; the message names the address and a remedy."""


async def accept(
    inbox: Inbox,
    writer: asyncio.StreamWriter,
    secret: bytes,
    heartbeat: float = HEARTBEAT_SECONDS,
) -> Channel:
    """Authenticate an agent at the driver's end; the caller must bound the time.

    Raises:
        ChannelError: the peer does not know the secret. At most 72 bytes were read, and none was
            interpreted.
        OSError, asyncio.IncompleteReadError: the peer disconnected.
    """
    ours = secrets.token_bytes(_NONCE)
    writer.write(_MAGIC + ours)
    answer = await inbox.readexactly(len(_MAGIC) + _NONCE + DIGEST)
    magic, theirs, proof = answer[:8], answer[8:40], answer[40:]
    if magic != _MAGIC or not hmac.compare_digest(proof, mac(secret, b"agent", ours, theirs)):
        raise ChannelError("the peer does not know the run's secret")
    writer.write(mac(secret, b"driver", ours, theirs))
    return Channel(
        inbox,
        writer,
        send_key=mac(secret, _TO_AGENT, ours, theirs),
        receive_key=mac(secret, _TO_DRIVER, ours, theirs),
        heartbeat=heartbeat,
    )


async def connect(
    host: str,
    port: int,
    secret: bytes,
    *,
    certificate: bytes | None = None,
    heartbeat: float = HEARTBEAT_SECONDS,
    seconds: float = HANDSHAKE_SECONDS,
    pauses: Iterable[float] = _PAUSES,
) -> Channel:
    """Connect to the driver from an agent, and authenticate both ends.

    Args:
        certificate: the only certificate (DER) to accept, if the driver speaks TLS.
        seconds: timeout of each try.
        pauses: seconds before each retry of a refused connection.

    Raises:
        ChannelError: the other end is not the run's driver.
        UnreachableError: the driver cannot be reached; the message is one line with its address.
    """
    tls = None if certificate is None else pinning_context(certificate)
    for pause in itertools.chain((0.0,), pauses):
        await asyncio.sleep(pause)
        try:
            async with asyncio.timeout(seconds):
                return await _connect(host, port, secret, tls, heartbeat)
        except (ConnectionError, socket.gaierror, asyncio.IncompleteReadError) as error:
            problem = error
        except ssl.SSLError as error:
            why = error.reason or str(error)
            raise ChannelError(f"{host}:{port} is not the driver of this run: {why}") from error
        except TimeoutError as error:
            silence = f"no answer within {seconds:g} s"
            raise UnreachableError(_unreachable_text(host, port, silence)) from error
        except OSError as error:
            raise UnreachableError(_unreachable_text(host, port, _why(error))) from error
    if isinstance(problem, (ConnectionRefusedError, socket.gaierror)):
        raise UnreachableError(_unreachable_text(host, port, _why(problem))) from problem
    raise ChannelError(f"{host}:{port} closed the connection during the handshake") from problem


async def _connect(
    host: str, port: int, secret: bytes, tls: ssl.SSLContext | None, heartbeat: float
) -> Channel:
    loop = asyncio.get_running_loop()
    inbox, writer = await open_streams(
        lambda protocol: loop.create_connection(protocol, host, port),
        tls,
        is_server=False,
    )
    try:
        hello = await inbox.readexactly(len(_MAGIC) + _NONCE)
        theirs, ours = hello[8:], secrets.token_bytes(_NONCE)
        if hello[:8] != _MAGIC:
            raise ChannelError(f"{host}:{port} does not speak hopsgpu's protocol")
        writer.write(_MAGIC + ours + mac(secret, b"agent", theirs, ours))
        proof = await inbox.readexactly(DIGEST)
        if not hmac.compare_digest(proof, mac(secret, b"driver", theirs, ours)):
            raise ChannelError(f"{host}:{port} is not the driver of this run")
    except BaseException:
        writer.transport.abort()
        raise
    return Channel(
        inbox,
        writer,
        send_key=mac(secret, _TO_DRIVER, theirs, ours),
        receive_key=mac(secret, _TO_AGENT, theirs, ours),
        heartbeat=heartbeat,
    )


def _why(error: OSError) -> str:
    # The strerror of asyncio repeats the address.
    if error.errno is None or isinstance(error, socket.gaierror):
        return " ".join(str(error).split())
    return os.strerror(error.errno)


def _unreachable_text(host: str, port: int, why: str) -> str:
    """Return one line: the driver shows only the last line of Spark's error."""
    return (
        f"the driver cannot be reached at {host}:{port} from {platform.node()} ({why}): executors"
        " must be able to connect to it. Set spark.hopsgpu.address (or spark.driver.host) to an"
        " address of the driver that they can reach, and open the ports of spark.hopsgpu.ports,"
        " such as 40000-40100, in its firewall"
    )
