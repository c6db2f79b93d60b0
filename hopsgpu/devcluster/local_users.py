"""Finds the other users of this machine, who can reach a cluster on its loopback addresses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import PurePath
from pwd import struct_passwd

# Linux distributions number people from 1000 on.
_FIRST_PERSON, _NOBODY = 1000, 65534
# The names of the shells that end at once.
_NO_LOGIN = ("nologin", "false", "sync")
_MAX_NAMED = 3


def other_login_users(entries: Iterable[struct_passwd], uid: int) -> list[str]:
    """Return the names of the people with a login shell, except the user with this id.

    Args:
        entries: the user database, which also has the users of a directory service if that lists
            them.
    """
    return sorted(
        entry.pw_name
        for entry in entries
        if entry.pw_uid >= _FIRST_PERSON
        and entry.pw_uid not in (_NOBODY, uid)
        and PurePath(entry.pw_shell or "/bin/sh").name not in _NO_LOGIN
    )


def warn_of_users(people: Sequence[str], account: str) -> str:
    """Return the warning for a cluster without authentication.

    Args:
        people: at least one user.
        account: the user of the daemons.
    """
    named = ", ".join(people[:_MAX_NAMED])
    if len(people) > _MAX_NAMED:
        named += f" and {len(people) - _MAX_NAMED} more"
    return (
        f"warning: other users can log in to this machine ({named}). This cluster believes every"
        f" name, so each of them can run code as {account} and read and write all files of its"
        " HDFS: `hopsgpu cluster down`, then `up --kerberos` with another --dir"
    )
