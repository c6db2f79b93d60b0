"""The user of this process in Hadoop, and its credentials."""

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

# Hadoop's own variable, which hdfs-native reads too.
PROXY_USER = "HADOOP_PROXY_USER"
Setting = Callable[[str], str | None]


def user_name(number: int) -> str:
    """Return a user's name; the number if it has no name, as in some Linux containers."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def own_name() -> str:
    """Return the name of this process's user."""
    return user_name(os.getuid())


def hadoop_user(hadoop: Setting, environ: Mapping[str, str]) -> str:
    """Return the user of this process in Hadoop.

    HADOOP_PROXY_USER comes first: it names the user for whom a process, such as a gateway, acts.
    With Kerberos, the user is the short name of the principal of the ticket or of YARN's tokens,
    and HADOOP_USER_NAME is ignored. Without Kerberos, the user is HADOOP_USER_NAME, or else the
    user who runs this process.

    Raises:
        ConfigError: Hadoop requires Kerberos, and there is no ticket, or no user for its principal.
    """
    if proxy_user := environ.get(PROXY_USER):
        return proxy_user
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
    """Return the ticket of this process's clients; None if the ticket is unknown.

    Raises:
        ConfigError: there is no ticket, or it has expired.
    """
    if KEYTAB not in environ:
        return check_ticket(environ)
    try:
        return read_ticket(environ)
    except ConfigError as error:  # the library gets a ticket when a client needs it
        log.info("Kerberos: no ticket from the keytab yet: %s", error)
        return None


def ensure_credentials(
    hadoop: Setting,
    spark: Setting,
    environ: MutableMapping[str, str],
    seconds: float | None = None,
) -> None:
    """Check this process's Kerberos credentials before anything uses them.

    If Spark's properties name a keytab, get a ticket from it for Python's clients. Without
    Kerberos, or with YARN's tokens, do nothing.

    Args:
        hadoop: returns a property of Hadoop's configuration, or None.
        spark: returns a property of the application, or None.
        environ: environment of this process; with a keytab it names the tickets afterwards.
        seconds: how long a ticket without a keytab must last; None for no minimum.

    Raises:
        ConfigError: there is no ticket, it ends too early, the keytab gives no ticket, or both a
            keytab and HADOOP_PROXY_USER are set.
    """
    if not is_kerberized(hadoop) or has_tokens(environ):
        return
    principal_and_keytab = keytab_of(spark)
    if principal_and_keytab is not None and (proxy_user := environ.get(PROXY_USER)):
        raise ConfigError(
            f"{PROXY_USER}={proxy_user}: Spark takes no keytab ({principal_and_keytab[1]}) of one"
            " user to act for another: remove spark.kerberos.principal and spark.kerberos.keytab"
            f" and run kinit, or unset {PROXY_USER}"
        )
    if principal_and_keytab is not None:
        sign_in(*principal_and_keytab, environ)
        return
    forget_sign_in(environ)
    if KEYTAB not in environ:  # with a keytab, the clients get tickets by themselves
        check_ticket(environ, seconds)
