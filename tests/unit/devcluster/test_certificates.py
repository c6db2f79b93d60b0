"""The certificates of a cluster with HTTPS, made by the JDK's keytool, and who trusts them."""

from __future__ import annotations

import socket
import ssl
import threading
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.serialization import pkcs12

from hopsgpu.devcluster.certificates import Certificates, create_certificates
from hopsgpu.devcluster.java import find_java
from hopsgpu.devcluster.layout import ClusterLayout
from hopsgpu.errors import ClusterError


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> ClusterLayout:
    layout = ClusterLayout(tmp_path_factory.mktemp("cluster"))
    create_certificates(Certificates(layout.certificates), layout, find_java().home)
    return layout


def test_a_client_with_the_bundle_trusts_every_address(
    layout: ClusterLayout, tmp_path: Path
) -> None:
    made = Certificates(layout.certificates)
    conf = (made.daemon_conf / "ssl-server.xml").read_text()
    password = conf.partition("keystore.password</name><value>")[2].partition("<")[0]
    assert len(password) > 20
    key, own, others = pkcs12.load_key_and_certificates(
        made.key_store.read_bytes(), password.encode()
    )
    assert key is not None and own is not None
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    pem = serialization.Encoding.PEM
    file = tmp_path / "key.pem"
    chain = [one.public_bytes(pem) for one in (own, *others)]
    file.write_bytes(b"".join([key.private_bytes(pem, form, plain), *chain]))
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(file)
    trusting = ssl.create_default_context(cafile=str(made.bundle))
    for name in ("localhost", "127.0.0.1", "127.0.0.11", "node1", "127.0.0.42", "node32"):
        assert handshake(serving, trusting, name) is None
    told = handshake(serving, trusting, "other")
    assert told is not None and "mismatch" in told
    told = handshake(serving, ssl.create_default_context(), "localhost")
    assert told is not None and "self-signed" in told


def handshake(serving: ssl.SSLContext, trusting: ssl.SSLContext, name: str) -> str | None:
    """Connect to a host of that name; return why the client refuses, or None."""
    ours, theirs = socket.socketpair()

    def serve() -> None:
        try:
            serving.wrap_socket(theirs, server_side=True).close()
        except (OSError, ssl.SSLError):  # the client has hung up
            theirs.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        trusting.wrap_socket(ours, server_hostname=name).close()
    except ssl.SSLCertVerificationError as error:
        ours.close()
        return str(error)
    finally:
        thread.join()
    return None


def test_keys_are_for_their_owner_alone_and_made_once(layout: ClusterLayout) -> None:
    made = Certificates(layout.certificates)
    assert made.root.stat().st_mode & 0o777 == 0o700
    for file in (made.key_store, made.daemon_conf / "ssl-server.xml"):
        assert file.stat().st_mode & 0o777 == 0o600
    # Of the authority there is the certificate, and no key with which more could be signed.
    assert sorted(file.name for file in made.root.iterdir()) == [
        "authorities.pem",
        "authority.pem",
        "conf",
        "server.p12",
        "trust.p12",
    ]
    before = made.key_store.read_bytes()
    create_certificates(made, layout, Path("/no/java"))
    assert made.key_store.read_bytes() == before


@pytest.mark.parametrize(
    ("program", "why"),
    [("echo 'no entropy'; exit 1", "no entropy"), ("exec sleep 60", "within 2 s")],
)
def test_a_keytool_that_fails_or_hangs_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, why: str
) -> None:
    monkeypatch.setattr("hopsgpu.devcluster.daemons._PROGRAM_SECONDS", 2.0)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "keytool").write_text(f"#!/bin/sh\n{program}\n")
    (tmp_path / "bin" / "keytool").chmod(0o755)
    layout = ClusterLayout(tmp_path / "cluster")
    made = Certificates(layout.certificates)
    with pytest.raises(ClusterError, match=why):
        create_certificates(made, layout, tmp_path)
    assert not made.bundle.exists()
