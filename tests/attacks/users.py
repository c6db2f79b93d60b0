"""Plays another Unix user of the machine, for tests that run as root."""

from __future__ import annotations

import os
import pwd
import traceback
from collections.abc import Callable

import pytest

OTHER = pwd.getpwnam("nobody")


def as_other_user(act: Callable[[], object]) -> None:
    """Call `act` in a child process of the user `nobody`; skip the test without root's rights."""
    if os.geteuid():
        pytest.skip("only root can become another user")
    child = os.fork()
    if not child:
        status = 1
        try:
            os.setgroups([])
            os.setgid(OTHER.pw_gid)
            os.setuid(OTHER.pw_uid)
            act()
            status = 0
        except BaseException:  # noqa: BLE001 - the child must not return into the test
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, "the other user's part failed, see stderr"
