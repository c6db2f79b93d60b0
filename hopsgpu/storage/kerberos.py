"""Kerberos for Python's clients of Hadoop: tickets, keytabs, names of users, and errors in words.

The clients themselves (hdfs-native for HDFS, requests-gssapi for REST) use MIT's library, which
finds tickets by KRB5CCNAME and krb5.conf by KRB5_CONFIG. With KRB5_CLIENT_KTNAME it gets new
tickets from a keytab when those in the cache have expired.

Sources: the manuals of MIT Kerberos (klist, kinit, "Keytab file defaults"); Hadoop's documentation,
"Hadoop in Secure Mode" (auth_to_local).
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hopsgpu.core.cache_directory import cache_directory
from hopsgpu.errors import ConfigError
from hopsgpu.storage.hadoop_tokens import TOKEN_FILE_VARIABLE as TOKEN_FILE

if TYPE_CHECKING:
    from requests.auth import AuthBase

log = logging.getLogger(__name__)

CACHE, KEYTAB = "KRB5CCNAME", "KRB5_CLIENT_KTNAME"
_SECONDS = 30.0
_SOON_SECONDS = 1800.0
_INSTALL = "install MIT Kerberos' client (Debian and Ubuntu: apt install krb5-user)"
NO_TICKET = (
    "there is no Kerberos ticket: run kinit, or name a keytab with spark.kerberos.keytab and"
    " spark.kerberos.principal"
)
# What MIT's library says, in any of the texts of its clients → what it means, and the remedy.
_MEANINGS = (
    (r"cannot contact any kdc|unable to reach any kdc", "no KDC answers ({said}): check the network"
     " and the KDC's address in krb5.conf (KRB5_CONFIG)"),
    (r"clock skew too great", "this machine's clock differs from the KDC's by more than Kerberos"
     " accepts, 5 minutes by default: synchronise it (chronyc tracking, timedatectl)"),
    (r"credential has expired|ticket expired|gss_s_credentials_expired",
     "the Kerberos ticket has expired: run kinit"),
    (r"no kerberos credentials available|no credentials were supplied|gss_s_no_cred"
     r"|credentials cache file .* not found|no credentials cache found", NO_TICKET),
    (r"keytab contains no suitable keys|key table file .* not found|key table entry not found",
     "the keytab does not fit the principal ({said}): klist -kt KEYTAB lists those that it has"),
    (r"password incorrect|preauthentication failed|decrypt integrity check failed",
     "the keytab's key is no longer the principal's ({said}): get a new keytab"),
    (r"client .* not found in kerberos database", "the KDC does not know this principal ({said})"),
    (r"server .*not found in kerberos database", "the KDC has no principal for this address"
     " ({said}): use the host name that the administrator has registered, and check rdns and"
     " dns_canonicalize_hostname in krb5.conf"),
    (r"client .*locked out|clients credentials have been revoked",
     "the KDC has locked this principal: ask its administrator"),
)  # fmt: skip


def meaning(text: str) -> str | None:
    """Return what an error of a Kerberos client means, with the remedy; None if it is no such.

    Args:
        text: the client's message.
    """
    for pattern, words in _MEANINGS:
        if found := re.search(pattern, text, re.IGNORECASE):
            return words.format(said=_sentence(text, found.start()))
    return None


def _sentence(text: str, at: int) -> str:
    """Return the part of a message that has a position, without what clients write around it."""
    marks = [(text.rfind(mark, 0, at), mark) for mark in (": ", '"', "\n")]
    begin = max((place + len(mark) for place, mark in marks if place >= 0), default=0)
    part = re.split(r"\n|\"| while getting", text[begin:])[0]
    return part.strip()[:200]


@dataclass(frozen=True)
class KerberosTicket:
    """A ticket-granting ticket in a cache.

    Attributes:
        principal: whose it is, "alice@REALM".
        expires: when it ends, in seconds since the epoch.
        renewable_until: until when `kinit -R` renews it; None if it cannot be renewed.
    """

    principal: str
    expires: float
    renewable_until: float | None = None


def is_kerberized(setting: Callable[[str], str | None]) -> bool:
    """Return whether Hadoop requires Kerberos."""
    return (setting("hadoop.security.authentication") or "").lower() == "kerberos"


def read_ticket(environ: Mapping[str, str]) -> KerberosTicket | None:
    """Return the ticket of the default cache, also an expired one; None if it is not known.

    It is not known if another Kerberos' klist lists it, or if the cache is of another kind.

    Args:
        environ: environment that names the cache.

    Raises:
        ConfigError: `klist` is not installed, finds no cache, or fails otherwise.
    """
    ran = _run(["klist"], environ)
    if ran.returncode == 0:
        return parse_tickets(ran.stdout)
    said = ran.stderr.strip().removeprefix("klist: ")
    raise ConfigError(NO_TICKET if not said else f"{meaning(said) or said}".replace("\n", " "))


def parse_tickets(text: str) -> KerberosTicket | None:
    """Return the ticket-granting ticket that MIT's `klist` lists in the C locale."""
    owner = re.search(r"^Default principal: (\S+)$", text, re.MULTILINE)
    when = r"(\d\d/\d\d/\d\d(?:\d\d)? \d\d:\d\d:\d\d)"
    row = rf"^{when}  {when}  krbtgt/(\S+)$(?:\n\s+renew until {when})?"
    tickets = [
        KerberosTicket(owner[1], _time(expires), _time(renew) if renew else None)
        for _, expires, realm, renew in re.findall(row, text, re.MULTILINE)
        # Not those that lead to other realms.
        if owner is not None and realm.partition("@")[0] == realm.partition("@")[2]
    ]
    return max(tickets, key=lambda ticket: ticket.expires, default=None)


def sign_in(principal: str, keytab: str, environ: MutableMapping[str, str]) -> None:
    """Get a ticket from a keytab, and let this environment's clients use it and its successors.

    The cache is a file of this user's own, and not the default one, in which `kinit` may have put
    another principal's tickets.

    Args:
        principal: principal of the keytab, such as "alice@REALM".
        keytab: path of the keytab.
        environ: environment of this process.

    Raises:
        ConfigError: the keytab or the KDC gives no ticket; the message says why.
    """
    keytab = str(Path(keytab).absolute())
    name = hashlib.sha256(f"{principal}\n{keytab}".encode()).hexdigest()[:16]
    directory = cache_directory(environ) / "tickets"
    variables = {CACHE: f"FILE:{directory / name}", KEYTAB: f"FILE:{keytab}"}
    if all(environ.get(name) == value for name, value in variables.items()) and _lasts(environ):
        return
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"tickets cannot be stored in {directory}: {error.strerror}") from error
    # Replaced in one step, for other processes of this user use it.
    draft = directory / f"{name}.{secrets.token_hex(4)}"
    ran = _run(["kinit", "-k", "-t", keytab, "-c", f"FILE:{draft}", principal], environ)
    if ran.returncode:
        draft.unlink(missing_ok=True)
        said = ran.stderr.strip().removeprefix("kinit: ")
        raise ConfigError(
            f"no Kerberos ticket for {principal} from the keytab {keytab}: {meaning(said) or said}"
        )
    draft.replace(directory / name)
    log.info("Kerberos: signed in as %s with the keytab %s", principal, keytab)
    environ.update(variables)


def _lasts(environ: Mapping[str, str]) -> bool:
    """Return whether the ticket of this environment's cache has half an hour left."""
    try:
        ticket = read_ticket(environ)
    except ConfigError:
        return False
    return ticket is not None and ticket.expires - time.time() > _SOON_SECONDS


def forget_sign_in(environ: MutableMapping[str, str]) -> None:
    """Let this environment's clients use the default tickets again, if `sign_in` changed that."""
    ours = f"FILE:{cache_directory(environ) / 'tickets'}/"
    if environ.get(CACHE, "").startswith(ours):
        del environ[CACHE]
        environ.pop(KEYTAB, None)


def has_keytab(setting: Callable[[str], str | None]) -> bool:
    """Return whether Spark's properties name a keytab, usable here or not."""
    return bool(named_keytab(setting))


def named_keytab(setting: Callable[[str], str | None]) -> str | None:
    """Return the keytab as Spark's properties name it, by their present or their former names."""
    return setting("spark.kerberos.keytab") or setting("spark.yarn.keytab")


def keytab_of(setting: Callable[[str], str | None]) -> tuple[str, str] | None:
    """Return the principal and the keytab that Spark's properties name; None without a keytab.

    Raises:
        ConfigError: only one of them is set, or the keytab cannot be read.
    """
    principal = setting("spark.kerberos.principal") or setting("spark.yarn.principal")
    keytab = named_keytab(setting)
    if not principal and not keytab:
        return None
    if not principal or not keytab:
        missing, given = ("keytab", "principal") if principal else ("principal", "keytab")
        raise ConfigError(f"spark.kerberos.{given} is set without spark.kerberos.{missing}")
    keytab = re.sub("^(local|file):(//)?(?=/)", "", keytab)
    if not os.access(keytab, os.R_OK) or not Path(keytab).is_file():
        raise ConfigError(f"spark.kerberos.keytab={keytab}: this user cannot read such a file")
    return principal, keytab


def check_ticket(
    environ: Mapping[str, str], seconds: float | None = None, clock: Callable[[], float] = time.time
) -> KerberosTicket | None:
    """Check that there is a ticket that lasts, before anything uses it.

    Args:
        environ: environment that names the cache.
        seconds: how long it must last; None for a moment.
        clock: returns the time in seconds since the epoch.

    Returns:
        The ticket; None if `klist` is not installed, so that it is not known.

    Raises:
        ConfigError: there is none, it has expired, or it ends too early.
    """
    if shutil.which("klist", path=environ.get("PATH")) is None:
        log.info("Kerberos: the ticket is not checked, since klist is not installed")
        return None
    ticket = read_ticket(environ)
    if ticket is None:
        log.info("Kerberos: klist does not list a ticket in a form that is known")
        return None
    left = ticket.expires - clock()
    if left <= 0:
        # Not `kinit -R`, which renews no ticket that has expired.
        raise ConfigError(
            f"the Kerberos ticket of {ticket.principal} expired at {_local(ticket.expires)}:"
            " run kinit"
        )
    lasts = max(ticket.expires, ticket.renewable_until or 0) - clock()
    if seconds is not None and lasts < seconds:
        raise ConfigError(
            f"the Kerberos ticket of {ticket.principal} ends at {_local(ticket.expires)}, before"
            f" the wait for GPUs may end (acquire_timeout, {seconds:.0f} s): run kinit, or name a"
            " keytab with spark.kerberos.keytab and spark.kerberos.principal"
        )
    log.debug("Kerberos: ticket of %s until %s", ticket.principal, _local(ticket.expires))
    return ticket


def user_of(principal: str, rules: str | None, realm: str) -> str:
    """Return the user that Hadoop takes a principal for, by hadoop.security.auth_to_local.

    Args:
        principal: "alice@REALM" or "service/host@REALM".
        rules: the property's value, one rule after the other; None for DEFAULT.
        realm: the default realm.

    Raises:
        ConfigError: no rule applies, or one has another form.
    """
    name, _, own = principal.partition("@")
    parts = [own or realm, *name.split("/")]
    for rule in _split(rules or "DEFAULT"):
        if (user := _applied(rule, parts, realm)) is not None:
            return user
    raise ConfigError(
        f"no rule of hadoop.security.auth_to_local applies to the principal {principal}"
    )


_RULE = re.compile(
    r"(?P<default>DEFAULT)|RULE:\[(?P<count>\d+):(?P<form>[^\]]*)\](?:\((?P<match>.*?)\))?"
    r"(?:s/(?P<pattern>[^/]*)/(?P<replacement>[^/]*)/(?P<all>g?))?(?P<lower>/L)?"
)


def _split(rules: str) -> list[re.Match[str]]:
    """Return the rules in a text, which may follow each other without a space, as in Hadoop."""
    found, rest = [], rules.strip()
    while rest:
        rule = _RULE.match(rest)
        if rule is None:
            raise ConfigError(
                f"hadoop.security.auth_to_local has {rest[:60]!r}, which does not begin with a rule"
            )
        found.append(rule)
        rest = rest[rule.end() :].strip()
    return found


def _applied(found: re.Match[str], parts: list[str], realm: str) -> str | None:
    """Return the user by one rule; None if it does not apply.

    Args:
        found: the rule.
        parts: the principal's realm, then its components.
        realm: the default realm.
    """
    if found["default"]:
        return parts[1] if parts[0] == realm else None
    if int(found["count"]) != len(parts) - 1:
        return None
    name = re.sub(r"\$(\d)", lambda number: _part(parts, int(number[1])), found["form"])
    if found["match"] is not None and not re.fullmatch(found["match"], name):
        return None
    if found["pattern"] is not None:
        replacement = re.sub(r"\$(\d)", r"\\\1", found["replacement"])
        name = re.sub(found["pattern"], replacement, name, count=0 if found["all"] else 1)
    return name.lower() if found["lower"] else name


def _part(parts: list[str], number: int) -> str:
    return parts[number] if number < len(parts) else ""


def default_realm(environ: Mapping[str, str]) -> str | None:
    """Return the default realm of krb5.conf; None if it names none."""
    for file in environ.get("KRB5_CONFIG", "/etc/krb5.conf").split(":"):
        try:
            text = Path(file).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        if found := re.search(r"^\s*default_realm\s*=\s*(\S+)", text, re.MULTILINE):
            return found[1]
    return None


def spnego_auth(address: str) -> AuthBase:
    """Return what signs a request with this process's ticket (RFC 4559).

    A new one for each request: it has a state for each host, and threads ask at once.

    Args:
        address: address of the daemon, for the error.

    Raises:
        ConfigError: the package for it is not installed.
    """
    try:
        package = importlib.import_module("requests_gssapi")
    except ImportError as error:
        raise ConfigError(
            f"{address} requires Kerberos (SPNEGO), and requests-gssapi cannot be imported"
            f" ({error}): pip install 'hopsgpu[kerberos]', then run kinit"
        ) from None
    # The daemon has just asked for it, or is known to: the ticket is sent at once.
    auth: AuthBase = package.HTTPSPNEGOAuth(opportunistic_auth=True)
    return auth


def root_cause(error: BaseException) -> str:
    """Return the text of an error's first cause, which libraries wrap several times."""
    while (deeper := error.__cause__ or error.__context__) is not None:
        error = deeper
    return str(error)


def has_tokens(environ: Mapping[str, str]) -> bool:
    """Return whether YARN has given this process tokens, which serve instead of tickets."""
    return TOKEN_FILE in environ


def _run(argv: list[str], environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    program = shutil.which(argv[0], path=environ.get("PATH"))
    if program is None:
        raise ConfigError(f"{argv[0]} is not installed, and Hadoop requires Kerberos: {_INSTALL}")
    # The C locale determines the form of dates and messages.
    variables = {**environ, "LC_ALL": "C"}
    try:
        return subprocess.run(
            [program, *argv[1:]],
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"{argv[0]} had no answer in {_SECONDS:.0f} s: check the network and the KDC's address"
            " in krb5.conf (KRB5_CONFIG)"
        ) from error


def _time(text: str) -> float:
    form = "%m/%d/%y %H:%M:%S" if len(text.split()[0]) == len("01/02/03") else "%m/%d/%Y %H:%M:%S"
    return time.mktime(time.strptime(text, form))


def _local(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
