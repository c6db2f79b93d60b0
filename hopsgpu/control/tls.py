"""TLS for the control channel: each run has a certificate, which its agents pin."""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from hopsgpu.errors import ConfigError

# From Spark's security page. RPC does not inherit spark.ssl.enabled (SSLOptions.parse), and
# spark.io.encryption only covers files.
_ENCRYPTING = (
    "spark.network.crypto.enabled",
    "spark.authenticate.enableSaslEncryption",
    "spark.ssl.rpc.enabled",
)
# Long, so that executors with wrong clocks accept the certificate. The key ends with the run.
_VALID = timedelta(days=3650)


def is_network_encrypted(setting: Callable[[str], str | None]) -> bool:
    """Return whether Spark encrypts the traffic of its driver and executors.

    The run's secret and certificate then reach the executors encrypted, and the control channel is
    encrypted too.
    """
    return any((setting(name) or "").strip().lower() == "true" for name in _ENCRYPTING)


@dataclass(frozen=True)
class Identity:
    """The driver's certificate (DER), which agents pin, and its TLS context with the key."""

    certificate: bytes
    context: ssl.SSLContext = field(repr=False)


def new_identity() -> Identity:
    """Create a key and its self-signed certificate, without a file on disk.

    Raises:
        ConfigError: `cryptography` is not installed.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ImportError as error:
        raise ConfigError(
            "Spark's network encryption is on, so hopsgpu must encrypt its connections too, and"
            " the driver's Python lacks the package 'cryptography': pip install"
            " 'hopsgpu[encryption]'"
        ) from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "hopsgpu driver")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .issuer_name(name)
        .subject_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _VALID)
        .not_valid_after(now + _VALID)
        .sign(key, hashes.SHA256())
    )
    encoding = serialization.Encoding
    pem = certificate.public_bytes(encoding.PEM) + key.private_bytes(
        encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # An agent connects once, so it never resumes a session.
    context.num_tickets = 0
    with _in_memory(pem) as path:
        context.load_cert_chain(path)
    return Identity(certificate.public_bytes(encoding.DER), context)


def pinning_context(certificate: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    # PROTOCOL_TLS_CLIENT demands a certificate, and nothing else is trusted.
    context.load_verify_locations(cadata=certificate)
    return context


@contextlib.contextmanager
def _in_memory(content: bytes) -> Iterator[str]:
    """Provide `content` at a path of this process: Python's ssl reads a key only from a file."""
    descriptor = os.memfd_create("hopsgpu", os.MFD_CLOEXEC)
    with open(descriptor, "wb") as file:  # noqa: PTH123 - not a path
        file.write(content)
        file.flush()
        yield f"/proc/self/fd/{descriptor}"
