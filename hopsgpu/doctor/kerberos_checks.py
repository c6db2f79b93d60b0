"""Pure checks of Kerberos: the user's identity, its expiry, and the requirements of the daemons.

Sources: Hadoop's documentation, "Hadoop in Secure Mode" and "Data Confidentiality".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hopsgpu.doctor.report import Check, ok, unknown, wrong
from hopsgpu.storage.kerberos import KerberosTicket

_CIPHER = "dfs.encrypt.data.transfer.cipher.suites"
_SOON_SECONDS = 3600.0


@dataclass(frozen=True)
class Credentials:
    """This user's credentials, and which daemons require them.

    Attributes:
        problem: why Hadoop would accept no credentials of this user, or "".
        user: name of the user for Hadoop; "" if it is not known.
        keytab: the keytab that Spark's settings name, or "".
        spnego: address of each daemon → whether it requires Kerberos; None if it did not answer.
        has_client: whether the package that answers SPNEGO can be imported.
    """

    problem: str
    user: str
    ticket: KerberosTicket | None
    keytab: str
    spnego: Mapping[str, bool | None]
    has_client: bool


def check_identity(credentials: Credentials, now: float) -> Check:
    """Check whether there is a ticket or a keytab that lasts."""
    name = "kerberos"
    if credentials.problem:
        return wrong(name, credentials.problem, "get a ticket, or name a keytab that fits")
    if credentials.ticket is None:
        return unknown(name, "klist is not installed, so the ticket was not checked")
    ticket = credentials.ticket
    seen = f"{credentials.user} ({ticket.principal}), ticket until {_local(ticket.expires)}"
    if credentials.keytab:
        return ok(name, f"{seen}, then new ones from the keytab {credentials.keytab}")
    if ticket.renewable_until is None:
        seen += ", not renewable"
    else:
        seen += f", renewable until {_local(ticket.renewable_until)}"
    if ticket.expires - now < _SOON_SECONDS:
        return wrong(name, f"{seen}: it ends within the hour", "run kinit")
    details = ["runs that outlast their HDFS tokens (7 days by default) need a keytab"]
    return ok(name, seen, details)


def check_web(credentials: Credentials) -> Check:
    """Check whether this Python can ask daemons that require Kerberos on the web (SPNEGO)."""
    name = "spnego"
    spnego = credentials.spnego
    silent = [address for address, is_required in spnego.items() if is_required is None]
    details = [f"{address} did not answer" for address in silent]
    required = [address for address, is_required in spnego.items() if is_required]
    if len(silent) == len(spnego):
        return unknown(name, "no ResourceManager answers", details=details)
    if not required:
        return ok(name, "YARN's REST interface requires no Kerberos", details)
    seen = f"{', '.join(required)} requires Kerberos"
    if not credentials.has_client:
        fix = "pip install 'hopsgpu[kerberos]' (needs a compiler and libkrb5's headers)"
        return wrong(name, f"{seen}, and requests-gssapi cannot be imported", fix, details)
    return ok(name, f"{seen}: a driver in YARN (cluster mode) needs a keytab", details)


def check_protection(setting: Callable[[str], str | None]) -> Check:
    """Check how HDFS and Hadoop's RPC are protected, and whether encryption is a slow one."""
    data = setting("dfs.data.transfer.protection") or "none"
    rpc = setting("hadoop.rpc.protection") or "authentication"
    encrypted = setting("dfs.encrypt.data.transfer") == "true"
    seen = f"RPC: {rpc}, blocks: {'encrypted' if encrypted else data}"
    name, cipher = "protection", setting(_CIPHER)
    if (data == "privacy" or encrypted) and not cipher:
        fix = f"set {_CIPHER}=AES/CTR/NoPadding in hdfs-site.xml, for the DataNodes and clients"
        return unknown(name, f"{seen} without AES, which is about ten times slower", fix)
    return ok(name, seen + (f" ({cipher})" if cipher else ""))


def _local(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(moment))
