"""The realm of a Kerberized cluster: KDC, principals, keytabs, and Hadoop's properties.

The KDC is MIT's, from the system's packages. Its database, port and configuration belong to the
cluster; the machine's own Kerberos is neither read nor changed.

Sources: MIT Kerberos' documentation (kdc.conf, krb5.conf, kadmin); Hadoop's, "Hadoop in Secure
Mode".
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hopsgpu.devcluster.config import ClusterSpec, Properties
from hopsgpu.devcluster.daemons import last_lines, run_logged
from hopsgpu.devcluster.host_check import INITIALIZER
from hopsgpu.devcluster.layout import MASTER, MAX_NODES, ClusterLayout, address_of, node_names
from hopsgpu.devcluster.state import write
from hopsgpu.errors import ClusterError

if TYPE_CHECKING:
    from requests.auth import AuthBase

REALM = "HOPSGPU.TEST"
# Hadoop takes a principal's middle part for a host name. The DataNode and the clients know this
# name without a hosts file.
HOST = "localhost"
# Users with a principal, a keytab and a home directory in HDFS.
USERS = ("alice", "bob")
# Users of the daemons' principals; the first is HDFS's superuser.
DAEMON_USERS = ("nn", "dn", "rm", "nm")
_WEB = "http"
_PROGRAMS = ("kdb5_util", "kadmin.local", "krb5kdc")
_INSTALL = "apt install krb5-kdc krb5-admin-server krb5-user (Debian and Ubuntu)"
_SYSTEM_PATH = "/usr/local/sbin:/usr/sbin:/sbin"
_SECONDS = 60.0


class SignInError(Exception):
    """The realm issues no ticket: its KDC does not answer, or a package is missing."""


@dataclass(frozen=True)
class Realm:
    root: Path

    @property
    def client_conf(self) -> Path:
        """krb5.conf of the daemons, the containers and the clients."""
        return self.root / "krb5.conf"

    @property
    def kdc_conf(self) -> Path:
        return self.root / "kdc" / "kdc.conf"

    @property
    def database(self) -> Path:
        return self.root / "kdc" / "principal"

    @property
    def creation_marker(self) -> Path:
        """A file that exists once the database and the keytabs are complete."""
        return self.root / "created"

    @property
    def signature_secret(self) -> Path:
        """The secret that signs the cookies of the web addresses."""
        return self.root / "keytabs" / "http.secret"

    def keytab(self, name: str) -> Path:
        """Return the keytab of a daemon's user, of a user, or of the web addresses ("http")."""
        return self.root / "keytabs" / f"{name}.keytab"

    def tickets(self, name: str) -> str:
        """Return the name of a ticket cache, as KRB5CCNAME has it."""
        return f"FILE:{self.root / 'tickets' / name}"

    @property
    def java_options(self) -> tuple[str, ...]:
        """The options with which a JVM uses the realm."""
        return (f"-Djava.security.krb5.conf={self.client_conf}",)


def realm_of(layout: ClusterLayout, spec: ClusterSpec) -> Realm | None:
    return Realm(layout.realm) if spec.kerberos else None


def container_variables(realm: Realm) -> dict[str, str]:
    """Return the variables of the daemons and containers.

    The ticket cache does not exist. All processes here have one Unix user, so a container would
    otherwise find the submitter's tickets, which no node of a real cluster has.
    """
    return {"KRB5_CONFIG": str(realm.client_conf), "KRB5CCNAME": realm.tickets("none")}


def client_variables(realm: Realm) -> dict[str, str]:
    """Return the variables with which a client, its Python and its JVMs, uses the realm."""
    options = " ".join(realm.java_options)
    return {
        "KRB5_CONFIG": str(realm.client_conf),
        "KRB5CCNAME": realm.tickets("client"),
        "HADOOP_OPTS": options,
        # The JVM of spark-submit in cluster mode does not read the driver's options.
        "SPARK_SUBMIT_OPTS": options,
    }


def kdc_command(realm: Realm) -> list[str]:
    """Return the command of the KDC, which stays in the foreground."""
    return [_program("krb5kdc"), "-n", "-r", REALM, "-P", str(realm.root / "kdc" / "pid")]


def kdc_variables(realm: Realm) -> dict[str, str]:
    return {"KRB5_CONFIG": str(realm.client_conf), "KRB5_KDC_PROFILE": str(realm.kdc_conf)}


def check_programs(spec: ClusterSpec) -> None:
    """Raise ClusterError if a program or package of a Kerberized cluster is missing."""
    for name in (*_PROGRAMS, "kinit"):
        _program(name)
    try:
        importlib.import_module("requests_gssapi")
    except ImportError as error:
        if not spec.simple_web:
            raise ClusterError(
                "the daemons' web addresses require SPNEGO, and requests-gssapi cannot be imported"
                f" ({error}): pip install 'hopsgpu[kerberos]' (needs a compiler and, on Debian and"
                " Ubuntu, libkrb5-dev), or use --simple-web"
            ) from None


def create_realm(realm: Realm, layout: ClusterLayout, port: int) -> None:
    """Write the configuration; create the database and the keytabs unless they exist.

    The port is that of the KDC, on loopback.

    Raises:
        ClusterError: a program of MIT Kerberos is missing or failed.
    """
    private = (realm.kdc_conf.parent, realm.keytab("any").parent, realm.root / "tickets")
    if not realm.creation_marker.exists():
        # Keytabs of an interrupted creation do not match a new database.
        for directory in private:
            shutil.rmtree(directory, ignore_errors=True)
    for directory in private:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    write(realm.client_conf, client_conf(port))
    write(realm.kdc_conf, kdc_conf(realm, port))
    if realm.creation_marker.exists():
        return
    log = layout.logs / "kerberos.log"
    # The master key's password is written to standard input: any user can read a command line.
    password = secrets.token_urlsafe(24)
    create = [_program("kdb5_util"), "create", "-r", REALM, "-s"]
    environ = {**os.environ, **kdc_variables(realm)}
    run_logged(create, environ, log, f"{password}\n{password}\n")
    administer = [_program("kadmin.local"), "-r", REALM]
    run_logged(administer, environ, log, "".join(f"{line}\n" for line in principals(realm)))
    realm.signature_secret.write_bytes(secrets.token_bytes(64))
    for file in realm.signature_secret.parent.iterdir():
        file.chmod(0o600)
    missing = [name for name in (*DAEMON_USERS, *USERS, _WEB) if not realm.keytab(name).exists()]
    if missing:
        raise ClusterError(
            f"kadmin.local created no keytab of {', '.join(missing)} ({log}):\n{last_lines(log)}"
        )
    realm.creation_marker.touch()


def principals(realm: Realm) -> list[str]:
    """Return the commands of kadmin that create all principals and their keytabs."""
    users = {name: f"{name}/{HOST}" for name in DAEMON_USERS} | {name: name for name in USERS}
    nodes = node_names(MAX_NODES)
    # Python's clients know a node only by its address, Hadoop's clients also by its name.
    hosts = [HOST, MASTER, *nodes, *map(address_of, nodes)]
    web = [f"HTTP/{host}" for host in hosts]
    return [
        *(f"addprinc -randkey {principal}" for principal in (*users.values(), *web)),
        *(f"ktadd -k {realm.keytab(name)} {principal}" for name, principal in users.items()),
        *(f"ktadd -k {realm.keytab(_WEB)} {principal}" for principal in web),
    ]


def client_conf(port: int) -> str:
    """Return krb5.conf, without lookups in DNS, which has no entries for a cluster on loopback."""
    return f"""[libdefaults]
  default_realm = {REALM}
  dns_lookup_kdc = false
  dns_lookup_realm = false
  dns_canonicalize_hostname = false
  rdns = false
  udp_preference_limit = 1
  ticket_lifetime = 10h
  renew_lifetime = 7d
  forwardable = true
[realms]
  {REALM} = {{
    kdc = {MASTER}:{port}
  }}
[domain_realm]
  localhost = {REALM}
"""


def kdc_conf(realm: Realm, port: int) -> str:
    directory = realm.kdc_conf.parent
    return f"""[kdcdefaults]
  kdc_listen = {MASTER}:{port}
  kdc_tcp_listen = {MASTER}:{port}
[realms]
  {REALM} = {{
    database_name = {realm.database}
    key_stash_file = {directory / "stash"}
    acl_file = {directory / "kadm5.acl"}
    max_life = 24h
    max_renewable_life = 7d
    default_principal_flags = +renewable, +forwardable
    supported_enctypes = aes256-cts-hmac-sha1-96:normal aes128-cts-hmac-sha1-96:normal
  }}
"""


def core_site(realm: Realm, spec: ClusterSpec) -> Properties:
    groups = "".join(f"{name}={name};" for name in (*DAEMON_USERS, *USERS))
    properties = {
        "hadoop.security.authentication": "kerberos",
        "hadoop.security.authorization": "true",
        "hadoop.rpc.protection": "privacy" if spec.privacy else "authentication",
        # Most of these are no users of this machine. HDFS's superuser administers YARN too.
        "hadoop.user.group.static.mapping.overrides": f"{groups}dr.who=;",
    }
    if not spec.simple_web:
        web = "hadoop.http.authentication"
        properties |= {
            f"{web}.type": "kerberos",
            f"{web}.kerberos.principal": "*",
            f"{web}.kerberos.keytab": str(realm.keytab(_WEB)),
            f"{web}.signature.secret.file": str(realm.signature_secret),
            "hadoop.http.filter.initializers": f"{INITIALIZER},org.apache.hadoop.security"
            ".AuthenticationFilterInitializer",
        }
    return properties


def hdfs_site(realm: Realm, spec: ClusterSpec) -> Properties:
    properties = {
        "dfs.block.access.token.enable": "true",
        "dfs.namenode.kerberos.principal": _principal("nn"),
        "dfs.namenode.keytab.file": str(realm.keytab("nn")),
        "dfs.datanode.kerberos.principal": _principal("dn"),
        "dfs.datanode.keytab.file": str(realm.keytab("dn")),
        "dfs.web.authentication.kerberos.principal": "*",
        "dfs.web.authentication.kerberos.keytab": str(realm.keytab(_WEB)),
        "dfs.data.transfer.protection": "privacy" if spec.privacy else "authentication",
        # The alternative, ports below 1024, needs DataNodes that start as root.
        "ignore.secure.ports.for.testing": "true",
    }
    if spec.privacy:
        # Without this suite, the DataNode encrypts ten times slower.
        properties["dfs.encrypt.data.transfer.cipher.suites"] = "AES/CTR/NoPadding"
    return properties | _token_lifetimes("dfs.namenode", spec)


def yarn_site(realm: Realm, spec: ClusterSpec, node: str | None) -> Properties:
    """Return additional properties of the yarn-site of a NodeManager, or of clients and masters."""
    # A NodeManager answers 403 if its principal has another host than its own address.
    web = f"HTTP/{address_of(node) if node else HOST}@{REALM}"
    properties: Properties = {}
    for daemon, user in (("resourcemanager", "rm"), ("nodemanager", "nm")):
        properties |= {
            f"yarn.{daemon}.principal": _principal(user),
            f"yarn.{daemon}.keytab": str(realm.keytab(user)),
            f"yarn.{daemon}.webapp.spnego-principal": web,
            f"yarn.{daemon}.webapp.spnego-keytab-file": str(realm.keytab(_WEB)),
        }
    return properties | _token_lifetimes("yarn.resourcemanager", spec)


def _token_lifetimes(daemon: str, spec: ClusterSpec) -> Properties:
    names = (f"{daemon}.delegation.token.{key}" for key in ("renew-interval", "max-lifetime"))
    lifetimes = [str(round(1000 * seconds)) for seconds in spec.token_lifetimes]
    return dict(zip(names, lifetimes, strict=False))  # no lifetimes: Hadoop's defaults


@contextlib.contextmanager
def signed_in_as_superuser(realm: Realm) -> Iterator[AuthBase]:
    """Yield an authenticator for requests of this process as HDFS's superuser, by SPNEGO.

    Inside, KRB5_CONFIG in the environment of the whole process names the realm: MIT's library has
    no other way.
    """
    try:
        import gssapi
        from requests_gssapi import HTTPSPNEGOAuth
    except ImportError as error:
        raise SignInError(str(error)) from error

    before = os.environ.get("KRB5_CONFIG")
    os.environ["KRB5_CONFIG"] = str(realm.client_conf)
    try:
        name = gssapi.Name(_principal("nn"), gssapi.NameType.kerberos_principal)
        store: dict[bytes | str, bytes | str] = {
            "client_keytab": str(realm.keytab("nn")),
            "ccache": realm.tickets("nn"),
        }
        try:
            credentials = gssapi.Credentials(name=name, usage="initiate", store=store)
        except gssapi.exceptions.GSSError as error:
            raise SignInError(str(error)) from error
        auth: AuthBase = HTTPSPNEGOAuth(creds=credentials, opportunistic_auth=True)
        yield auth
    finally:
        if before is None:
            del os.environ["KRB5_CONFIG"]
        else:
            os.environ["KRB5_CONFIG"] = before


def make_directories(
    realm: Realm, conf: Path, url: str, directories: Mapping[str, tuple[int, str]]
) -> str:
    """Create HDFS directories as the superuser; return "", or the error.

    A process of its own, with tickets of its own, uses RPC, because WebHDFS accepts no keytab if
    the web addresses are simple.

    Args:
        conf: HADOOP_CONF_DIR of the clients.
        directories: path → permission bits and owner; set on existing directories too.
    """
    variables = {
        **os.environ,
        "KRB5_CONFIG": str(realm.client_conf),
        "KRB5CCNAME": realm.tickets("nn-rpc"),
        "KRB5_CLIENT_KTNAME": f"FILE:{realm.keytab('nn')}",
        "HADOOP_CONF_DIR": str(conf),
    }
    # These variables could name tokens of another cluster's container, or another user.
    for name in ("HADOOP_TOKEN_FILE_LOCATION", "HADOOP_USER_NAME", "HADOOP_PROXY_USER"):
        variables.pop(name, None)
    argv = [sys.executable, "-P", "-c", _MAKE_DIRECTORIES, url, json.dumps(directories)]
    try:
        completed = subprocess.run(
            argv, env=variables, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {_SECONDS:.0f} s"
    if completed.returncode == 0:
        return ""
    return completed.stderr.strip()[-500:] or f"exit code {completed.returncode}"


_MAKE_DIRECTORIES = """
import json, sys
from hdfs_native import Client

client = Client(sys.argv[1], {"dfs.client.failover.max.attempts": "2"})
for path, (mode, owner) in json.loads(sys.argv[2]).items():
    client.mkdirs(path, mode, True)
    client.set_permission(path, mode)
    client.set_owner(path, owner)
"""


def _principal(user: str) -> str:
    return f"{user}/{HOST}@{REALM}"


def _program(name: str) -> str:
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), _SYSTEM_PATH])
    program = shutil.which(name, path=path)
    if program is None:
        raise ClusterError(
            f"a Kerberized cluster needs MIT Kerberos, and {name} is not installed: {_INSTALL}"
        )
    return program
