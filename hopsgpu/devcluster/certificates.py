"""The certificates of a cluster with HTTPS, signed by an authority of its own.

On-premises clusters have such authorities, which browsers and Python do not know: a client needs
the authority's certificate. The JDK's keytool makes the certificates.

Sources: the Hadoop documentation, "Encrypted Shuffle" (ssl-server.xml, ssl-client.xml), and the
policies in hdfs-default.xml and yarn-default.xml; the JDK's documentation of keytool.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hopsgpu.devcluster.config import Properties
from hopsgpu.devcluster.daemons import run_logged
from hopsgpu.devcluster.layout import MASTER, MAX_NODES, ClusterLayout, address_of, node_names
from hopsgpu.devcluster.site_files import xml_text
from hopsgpu.devcluster.state import write

_AUTHORITY, _SERVER = "authority", "server"
_DAYS = "3650"
# Not a secret: the store has only the authority's public certificate.
_TRUST_PASSWORD = "changeit"  # noqa: S105


@dataclass(frozen=True)
class Certificates:
    root: Path

    @property
    def bundle(self) -> Path:
        """The certificates of the authority and of public authorities, for Python's clients."""
        return self.root / "authorities.pem"

    @property
    def authority(self) -> Path:
        return self.root / "authority.pem"

    @property
    def trust_store(self) -> Path:
        """The authority's certificate, for JVMs."""
        return self.root / "trust.p12"

    @property
    def key_store(self) -> Path:
        """The daemons' key and certificate."""
        return self.root / "server.p12"

    @property
    def daemon_conf(self) -> Path:
        """The directory with ssl-server.xml, which is on the class path of the daemons only.

        The file has the password of the key, and Spark sends a client's configuration to every
        container.
        """
        return self.root / "conf"


def properties_of_https() -> dict[str, Properties]:
    return {
        "core-site": {"hadoop.ssl.require.client.cert": "false"},
        "hdfs-site": {"dfs.http.policy": "HTTPS_ONLY"},
        "yarn-site": {"yarn.http.policy": "HTTPS_ONLY"},
    }


def ssl_client_properties(certificates: Certificates) -> Properties:
    """Return the properties of ssl-client.xml, which makes a JVM trust the authority."""
    return {
        "ssl.client.truststore.location": str(certificates.trust_store),
        "ssl.client.truststore.password": _TRUST_PASSWORD,
        "ssl.client.truststore.type": "pkcs12",
    }


def create_certificates(certificates: Certificates, layout: ClusterLayout, java: Path) -> None:
    """Create the authority and the daemons' certificate with the JDK's keytool, unless they exist.

    The authority's key is not kept: the certificate names every node that a cluster can have.
    """
    if certificates.bundle.exists():
        return
    log = layout.logs / "certificates.log"
    shutil.rmtree(certificates.root, ignore_errors=True)
    certificates.root.mkdir(mode=0o700, parents=True)
    password = secrets.token_urlsafe(24)
    with tempfile.TemporaryDirectory(dir=certificates.root) as scratch:
        keytool = _Keytool(java, Path(scratch), log, password)
        keytool.sign(certificates)
    write(
        certificates.daemon_conf / "ssl-server.xml",
        xml_text(
            {
                "ssl.server.keystore.location": str(certificates.key_store),
                "ssl.server.keystore.password": password,
                "ssl.server.keystore.keypassword": password,
                "ssl.server.keystore.type": "pkcs12",
                "ssl.server.truststore.location": str(certificates.trust_store),
                "ssl.server.truststore.password": _TRUST_PASSWORD,
                "ssl.server.truststore.type": "pkcs12",
            }
        ),
        0o600,
    )
    # The bundle is written last: it shows that all files exist. It includes the public authorities,
    # because a client uses it for all hosts.
    import certifi

    public = Path(certifi.where()).read_text(encoding="utf-8")
    write(certificates.bundle, f"{certificates.authority.read_text()}\n{public}")


@dataclass(frozen=True)
class _Keytool:
    java: Path
    scratch: Path
    log: Path
    password: str

    def sign(self, certificates: Certificates) -> None:
        """Write the authority's certificate, the trust store and the signed key store."""
        authority, request = self.scratch / "authority.p12", self.scratch / "request"
        signed = self.scratch / "signed.pem"
        names = ["dns:localhost", *(f"dns:{node}" for node in node_names(MAX_NODES))]
        addresses = [MASTER, *map(address_of, node_names(MAX_NODES))]
        san = "san=" + ",".join([*names, *(f"ip:{address}" for address in addresses)])
        self._run(
            *("-genkeypair", "-alias", _AUTHORITY, "-dname", "CN=hopsgpu development authority"),
            *("-ext", "bc:critical=ca:true", "-ext", "ku:critical=keyCertSign,cRLSign"),
            *("-keyalg", "RSA", "-keysize", "2048", "-validity", _DAYS),
            store=authority,
        )
        export = ("-exportcert", "-rfc", "-alias", _AUTHORITY, "-file", str(certificates.authority))
        self._run(*export, store=authority)
        self._run(
            *("-genkeypair", "-alias", _SERVER, "-dname", "CN=localhost"),
            *("-keyalg", "RSA", "-keysize", "2048", "-validity", _DAYS),
            store=certificates.key_store,
        )
        ask = ("-certreq", "-alias", _SERVER, "-file", str(request))
        self._run(*ask, store=certificates.key_store)
        self._run(
            *("-gencert", "-rfc", "-alias", _AUTHORITY, "-validity", _DAYS, "-ext", san),
            *("-ext", "ku:critical=digitalSignature,keyEncipherment", "-ext", "eku=serverAuth"),
            *("-infile", str(request), "-outfile", str(signed)),
            store=authority,
        )
        trusting = ("-importcert", "-noprompt", "-alias", _AUTHORITY)
        authority_file = ("-file", str(certificates.authority))
        self._run(*trusting, *authority_file, store=certificates.key_store)
        self._run(
            *("-importcert", "-noprompt", "-alias", _SERVER, "-file", str(signed)),
            store=certificates.key_store,
        )
        trust = _Keytool(self.java, self.scratch, self.log, _TRUST_PASSWORD)
        trust._run(*trusting, *authority_file, store=certificates.trust_store)
        certificates.key_store.chmod(0o600)

    def _run(self, *arguments: str, store: Path) -> None:
        # The password is in the environment: any user can read a command line.
        argv = [
            str(self.java / "bin" / "keytool"),
            *arguments,
            *("-keystore", str(store), "-storetype", "PKCS12", "-storepass:env", "PASSWORD"),
        ]
        environ = {"PASSWORD": self.password, "HOME": str(self.scratch), "LC_ALL": "C.UTF-8"}
        run_logged(argv, environ, self.log)
