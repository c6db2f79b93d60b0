"""Kerberos for Python's clients of Hadoop: tickets, keytabs, user names and error messages.

The clients (hdfs-native for HDFS, requests-gssapi for REST) use MIT's library, which finds tickets
by KRB5CCNAME and krb5.conf by KRB5_CONFIG. With KRB5_CLIENT_KTNAME the library gets new tickets
from a keytab when the tickets in the cache have expired.

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
_RUN_SECONDS = 30.0
_MIN_VALID_SECONDS = 1800.0
_INSTALL = "install MIT Kerberos' client (Debian and Ubuntu: apt install krb5-user)"
NO_TICKET = (
    "there is no Kerberos ticket: run kinit, or name a keytab with spark.kerberos.keytab and"
    " spark.kerberos.principal"
)
# Pattern in a client's message, from MIT's library → meaning and remedy.
_MEANINGS = (
    (r"cannot contact any kdc|unable to reach any kdc", "no KDC answers ({text}): check the network"
     " and the KDC's address in krb5.conf (KRB5_CONFIG)"),
    (r"clock skew too great", "this machine's clock differs from the KDC's by more than Kerberos"
     " accepts, 5 minutes by default: synchronise it (chronyc tracking, timedatectl)"),
    (r"credential has expired|ticket expired|gss_s_credentials_expired",
     "the Kerberos ticket has expired: run kinit"),
    (r"no kerberos credentials available|no credentials were supplied|gss_s_no_cred"
     r"|credentials cache file .* not found|no credentials cache found", NO_TICKET),
    (r"keytab contains no suitable keys|key table file .* not found|key table entry not found",
     "the keytab does not fit the principal ({text}): klist -kt KEYTAB lists those that it has"),
    (r"password incorrect|preauthentication failed|decrypt integrity check failed",
     "the keytab's key is no longer the principal's ({text}): get a new keytab"),
    (r"client .* not found in kerberos database", "the KDC does not know this principal ({text})"),
    (r"server .*not found in kerberos database", "the KDC has no principal for this address"
     " ({text}): use the host name that the administrator has registered, and check rdns and"
     " dns_canonicalize_hostname in krb5.conf"),
    (r"client .*locked out|clients credentials have been revoked",
     "the KDC has locked this principal: ask its administrator"),
)  # fmt: skip


def meaning(text: str) -> str | None:
    """Return the meaning of a client's message, with the remedy; None if both are unknown."""
    for pattern, words in _MEANINGS:
        if match := re.search(pattern, text, re.IGNORECASE):
            return words.format(text=_message_at(text, match.start()))
    return None


def _message_at(text: str, at: int) -> str:
    marks = [(text.rfind(mark, 0, at), mark) for mark in (": ", '"', "\n")]
    begin = max((offset + len(mark) for offset, mark in marks if offset >= 0), default=0)
    return re.split(r"\n|\"| while getting", text[begin:])[0].strip()[:200]


@dataclass(frozen=True)
class KerberosTicket:
    """A ticket-granting ticket in a cache.

    Attributes:
        principal: owner, as "alice@REALM".
        expires: end, in seconds since the epoch.
        renewable_until: end of renewals by `kinit -R`; None if the ticket cannot be renewed.
    """

    principal: str
    expires: float
    renewable_until: float | None = None


def is_kerberized(setting: Callable[[str], str | None]) -> bool:
    return (setting("hadoop.security.authentication") or "").lower() == "kerberos"


def read_ticket(environ: Mapping[str, str]) -> KerberosTicket | None:
    """Return the ticket of the cache that the environment names, even if it has expired.

    Returns:
        None if klist's output is unknown: klist is of another Kerberos, or the cache of a new kind.

    Raises:
        ConfigError: `klist` is not installed, finds no cache, or fails otherwise.
    """
    process = _run(["klist"], environ)
    if process.returncode == 0:
        return parse_tickets(process.stdout)
    problem = process.stderr.strip().removeprefix("klist: ")
    raise ConfigError((meaning(problem) or problem or NO_TICKET).replace("\n", " "))


def parse_tickets(text: str) -> KerberosTicket | None:
    """Return the ticket-granting ticket that MIT's `klist` lists in the C locale."""
    owner = re.search(r"^Default principal: (\S+)$", text, re.MULTILINE)
    when = r"(\d\d/\d\d/\d\d(?:\d\d)? \d\d:\d\d:\d\d)"
    row = rf"^{when}  {when}  krbtgt/(\S+)$(?:\n\s+renew until {when})?"
    tickets = [
        KerberosTicket(owner[1], _parse_time(expires), _parse_time(renew) if renew else None)
        for _, expires, realm, renew in re.findall(row, text, re.MULTILINE)
        # Leave out tickets for other realms.
        if owner is not None and realm.partition("@")[0] == realm.partition("@")[2]
    ]
    return max(tickets, key=lambda ticket: ticket.expires, default=None)


def sign_in(principal: str, keytab: str, environ: MutableMapping[str, str]) -> None:
    """Get a ticket from a keytab, and set the environment's variables for it and its successors.

    The cache is a file of this user, and not the default cache: `kinit` may have put another
    principal's tickets there.

    Raises:
        ConfigError: the keytab or the KDC gives no ticket; the message says why.
    """
    keytab = str(Path(keytab).absolute())
    name = hashlib.sha256(f"{principal}\n{keytab}".encode()).hexdigest()[:16]
    directory = cache_directory(environ) / "tickets"
    variables = {CACHE: f"FILE:{directory / name}", KEYTAB: f"FILE:{keytab}"}
    if all(environ.get(name) == value for name, value in variables.items()) and _is_valid(environ):
        return
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"tickets cannot be stored in {directory}: {error.strerror}") from error
    # Replace the cache atomically: other processes of this user use it.
    draft = directory / f"{name}.{secrets.token_hex(4)}"
    process = _run(["kinit", "-k", "-t", keytab, "-c", f"FILE:{draft}", principal], environ)
    if process.returncode:
        draft.unlink(missing_ok=True)
        problem = process.stderr.strip().removeprefix("kinit: ")
        raise ConfigError(
            f"no Kerberos ticket for {principal} from the keytab {keytab}:"
            f" {meaning(problem) or problem}"
        )
    draft.replace(directory / name)
    log.info("Kerberos: signed in as %s with the keytab %s", principal, keytab)
    environ.update(variables)


def _is_valid(environ: Mapping[str, str]) -> bool:
    """Return whether this environment has a ticket that is valid for half an hour."""
    try:
        ticket = read_ticket(environ)
    except ConfigError:
        return False
    return ticket is not None and ticket.expires - time.time() > _MIN_VALID_SECONDS


def forget_sign_in(environ: MutableMapping[str, str]) -> None:
    """Undo `sign_in`: clients use the default tickets again."""
    prefix = f"FILE:{cache_directory(environ) / 'tickets'}/"
    if environ.get(CACHE, "").startswith(prefix):
        del environ[CACHE]
        environ.pop(KEYTAB, None)


def has_keytab(setting: Callable[[str], str | None]) -> bool:
    """Return whether Spark's properties name a keytab, even an unreadable one."""
    return bool(named_keytab(setting))


def named_keytab(setting: Callable[[str], str | None]) -> str | None:
    """Return the keytab of Spark's property, under its present or former name."""
    return setting("spark.kerberos.keytab") or setting("spark.yarn.keytab")


def keytab_of(setting: Callable[[str], str | None]) -> tuple[str, str] | None:
    """Return the principal and the keytab of Spark's properties; None if neither is set.

    Raises:
        ConfigError: only one is set, or the keytab cannot be read.
    """
    principal = setting("spark.kerberos.principal") or setting("spark.yarn.principal")
    keytab = named_keytab(setting)
    if not principal and not keytab:
        return None
    if not principal or not keytab:
        missing, present = ("keytab", "principal") if principal else ("principal", "keytab")
        raise ConfigError(f"spark.kerberos.{present} is set without spark.kerberos.{missing}")
    keytab = re.sub("^(local|file):(//)?(?=/)", "", keytab)
    if not os.access(keytab, os.R_OK) or not Path(keytab).is_file():
        raise ConfigError(f"spark.kerberos.keytab={keytab}: this user cannot read such a file")
    return principal, keytab


def check_ticket(
    environ: Mapping[str, str], seconds: float | None = None, clock: Callable[[], float] = time.time
) -> KerberosTicket | None:
    """Check that there is a valid ticket, before a client uses it.

    Args:
        seconds: how long the ticket must be valid or renewable; None for no minimum.
        clock: returns seconds since the epoch.

    Returns:
        The ticket; None if it is unknown, for example because `klist` is not installed.

    Raises:
        ConfigError: there is no ticket, it has expired, or it ends too early.
    """
    if shutil.which("klist", path=environ.get("PATH")) is None:
        log.info("Kerberos: the ticket is not checked, since klist is not installed")
        return None
    ticket = read_ticket(environ)
    if ticket is None:
        log.info("Kerberos: klist does not list a ticket in a form that is known")
        return None
    if ticket.expires <= clock():
        # Not `kinit -R`, which cannot renew an expired ticket.
        raise ConfigError(
            f"the Kerberos ticket of {ticket.principal} expired at {_format_time(ticket.expires)}:"
            " run kinit"
        )
    valid_seconds = max(ticket.expires, ticket.renewable_until or 0) - clock()
    if seconds is not None and valid_seconds < seconds:
        raise ConfigError(
            f"the Kerberos ticket of {ticket.principal} ends at {_format_time(ticket.expires)},"
            f" before the wait for GPUs may end (acquire_timeout, {seconds:.0f} s): run kinit, or"
            " name a keytab with spark.kerberos.keytab and spark.kerberos.principal"
        )
    log.debug("Kerberos: ticket of %s until %s", ticket.principal, _format_time(ticket.expires))
    return ticket


def user_of(principal: str, rules: str | None, realm: str) -> str:
    """Return the user of a principal in Hadoop, by hadoop.security.auth_to_local.

    Args:
        principal: "alice@REALM" or "service/host@REALM".
        rules: the property's value; None for DEFAULT.
        realm: the default realm.

    Raises:
        ConfigError: no rule applies, or a rule is invalid.
    """
    name, _, principal_realm = principal.partition("@")
    parts = [principal_realm or realm, *name.split("/")]
    for rule in _split_rules(rules or "DEFAULT"):
        if (user := _apply_rule(rule, parts, realm)) is not None:
            return user
    raise ConfigError(
        f"no rule of hadoop.security.auth_to_local applies to the principal {principal}"
    )


_RULE = re.compile(
    r"(?P<default>DEFAULT)|RULE:\[(?P<count>\d+):(?P<form>[^\]]*)\](?:\((?P<match>.*?)\))?"
    r"(?:s/(?P<pattern>[^/]*)/(?P<replacement>[^/]*)/(?P<all>g?))?(?P<lower>/L)?"
)


def _split_rules(rules: str) -> list[re.Match[str]]:
    """Return the rules in a text; as in Hadoop, spaces between rules are optional."""
    matches, rest = [], rules.strip()
    while rest:
        rule = _RULE.match(rest)
        if rule is None:
            raise ConfigError(
                f"hadoop.security.auth_to_local has {rest[:60]!r}, which does not begin with a rule"
            )
        matches.append(rule)
        rest = rest[rule.end() :].strip()
    return matches


def _apply_rule(rule: re.Match[str], parts: list[str], realm: str) -> str | None:
    """Return the user by a rule, or None; `parts` are the realm, then the name's components."""
    if rule["default"]:
        return parts[1] if parts[0] == realm else None
    if int(rule["count"]) != len(parts) - 1:
        return None
    name = re.sub(r"\$(\d)", lambda number: _part(parts, int(number[1])), rule["form"])
    if rule["match"] is not None and not re.fullmatch(rule["match"], name):
        return None
    if rule["pattern"] is not None:
        replacement = re.sub(r"\$(\d)", r"\\\1", rule["replacement"])
        name = re.sub(rule["pattern"], replacement, name, count=0 if rule["all"] else 1)
    return name.lower() if rule["lower"] else name


def _part(parts: list[str], number: int) -> str:
    return parts[number] if number < len(parts) else ""


def default_realm(environ: Mapping[str, str]) -> str | None:
    for file in environ.get("KRB5_CONFIG", "/etc/krb5.conf").split(":"):
        try:
            text = Path(file).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        if match := re.search(r"^\s*default_realm\s*=\s*(\S+)", text, re.MULTILINE):
            return match[1]
    return None


def spnego_auth(address: str) -> AuthBase:
    """Return an object that signs one request with this process's ticket (RFC 4559).

    Each request needs a new object, which is not thread-safe.

    Raises:
        ConfigError: requests-gssapi is not installed.
    """
    try:
        package = importlib.import_module("requests_gssapi")
    except ImportError as error:
        raise ConfigError(
            f"{address} requires Kerberos (SPNEGO), and requests-gssapi cannot be imported"
            f" ({error}): pip install 'hopsgpu[kerberos]', then run kinit"
        ) from None
    # Send the ticket with the first request: the daemon is known to require it.
    auth: AuthBase = package.HTTPSPNEGOAuth(opportunistic_auth=True)
    return auth


def root_cause(error: BaseException) -> str:
    """Return the text of an error's first cause, which libraries wrap several times."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return str(error)


def has_tokens(environ: Mapping[str, str]) -> bool:
    """Return whether this process has tokens of YARN, which replace tickets."""
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
            timeout=_RUN_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"{argv[0]} had no answer in {_RUN_SECONDS:.0f} s: check the network and the KDC's"
            " address in krb5.conf (KRB5_CONFIG)"
        ) from error


def _parse_time(text: str) -> float:
    form = "%m/%d/%y %H:%M:%S" if len(text.split()[0]) == len("01/02/03") else "%m/%d/%Y %H:%M:%S"
    return time.mktime(time.strptime(text, form))


def _format_time(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
