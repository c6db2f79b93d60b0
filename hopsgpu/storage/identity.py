"""Who this process is for Hadoop, and the credentials that prove it."""

from __future__ import annotations

import logging
import os
import pwd
from collections.abc import Callable, Mapping, MutableMapping

from hopsgpu.errors import ConfigError
from hopsgpu.storage.hadoop_tokens import token_owner
from hopsgpu.storage.kerberos import (
    KEYTAB,
    KerberosTicket,
    check_ticket,
    default_realm,
    forget_sign_in,
    has_tokens,
    is_kerberized,
    keytab_of,
    read_ticket,
    sign_in,
    user_of,
)

log = logging.getLogger(__name__)

# Hadoop's own variable. hdfs-native reads it too.
PROXY_USER = "HADOOP_PROXY_USER"
Setting = Callable[[str], str | None]


def own_name() -> str:
    """Return the name of the user who runs this process, or the number of a user without a name.

    The user of a process in a Linux container may have no name.
    """
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def hadoop_user(hadoop: Setting, environ: Mapping[str, str]) -> str:
    """Return the user that Hadoop takes this process for.

    A process that acts for another user, as gateways do, names that user in HADOOP_PROXY_USER.
    With Kerberos that is the short name of the principal of the ticket, or of YARN's tokens, and
    HADOOP_USER_NAME is ignored. Without it that is HADOOP_USER_NAME, or else the user who runs
    this process.

    Args:
        hadoop: returns a property of Hadoop's configuration, or None.
        environ: environment of this process.

    Raises:
        ConfigError: Hadoop requires Kerberos, and there is no ticket, or no user for its principal.
    """
    if proxied := environ.get(PROXY_USER):
        return proxied
    if not is_kerberized(hadoop):
        return environ.get("HADOOP_USER_NAME") or own_name()
    if has_tokens(environ):
        principal = token_owner(environ)
    else:
        ticket = current_ticket(environ)
        principal = None if ticket is None else ticket.principal
    if principal is None:
        return own_name()
    realm = default_realm(environ) or principal.partition("@")[2]
    return user_of(principal, hadoop("hadoop.security.auth_to_local"), realm)


def current_ticket(environ: Mapping[str, str]) -> KerberosTicket | None:
    """Return the ticket with which this process's clients sign in; None if it is not known.

    Raises:
        ConfigError: there is none, or it has expired.
    """
    if KEYTAB not in environ:
        return check_ticket(environ)
    try:
        return read_ticket(environ)
    except ConfigError as error:  # the library gets one when a client needs it
        log.info("Kerberos: no ticket from the keytab yet: %s", error)
        return None


def ensure_credentials(
    hadoop: Setting,
    spark: Setting,
    environ: MutableMapping[str, str],
    seconds: float | None = None,
) -> None:
    """Check this process's Kerberos credentials before anything uses them.

    With the keytab that Spark's properties name, get a ticket for Python's clients from it. Without
    Kerberos, or with YARN's tokens, there is nothing to do.

    Args:
        hadoop: returns a property of Hadoop's configuration, or None.
        spark: returns a property of the application, or None.
        environ: environment of this process; with a keytab it then names the tickets.
        seconds: how long a ticket without a keytab must last; None for a moment.

    Raises:
        ConfigError: there is no ticket, it ends too early, the keytab gives none, or there is a
            keytab and HADOOP_PROXY_USER.
    """
    if not is_kerberized(hadoop) or has_tokens(environ):
        return
    named = keytab_of(spark)
    if named is not None and (proxied := environ.get(PROXY_USER)):
        raise ConfigError(
            f"{PROXY_USER}={proxied}: Spark takes no keytab ({named[1]}) of one user to act for"
            " another: remove spark.kerberos.principal and spark.kerberos.keytab and run kinit, or"
            f" unset {PROXY_USER}"
        )
    if named is not None:
        sign_in(*named, environ)
        return
    forget_sign_in(environ)
    if KEYTAB not in environ:  # with which the clients get tickets by themselves
        check_ticket(environ, seconds)
