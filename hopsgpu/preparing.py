"""What has to be there before GPUs are asked for."""

from __future__ import annotations

import threading
from collections.abc import Collection

from hopsgpu.gang import GangState
from hopsgpu.python_env.building import Wanted, ready
from hopsgpu.python_env.lacking import lacking_error
from hopsgpu.python_env.value import PythonEnv
from hopsgpu.spark.request import Watcher
from hopsgpu.spark.site import Site
from hopsgpu.stores.lake import Lake


def python_of(
    wanted: Wanted | None, root: str, board: Watcher, cancelled: threading.Event
) -> PythonEnv | None:
    """The Python environment that ranks run with, once it is on the lake.

    Raises:
        ConfigError, StoreError, Cancelled: as `python_env.building.ready`.
    """
    if wanted is None or isinstance(wanted, PythonEnv):
        return wanted
    why = f"the Python environment ({wanted.name}) is looked for on the lake, and made if need be"
    board.state(GangState.PREPARING, (), why)
    return ready(wanted, Lake(root), cancelled)


def asked_of_executors(
    needs: Collection[str], env: PythonEnv | None, application: Site | None
) -> tuple[str, ...]:
    """The top-level modules that the executors' Python must have for a call to be unpickled.

    Args:
        needs: those that the ranks' Python must have.
        env: that the ranks run with, or None.
        application: in which they run; None where nobody need be asked before the gang is.

    Raises:
        ConfigError: it is known that they are not there.
    """
    if env is not None and env.modules is None:
        return ()
    left = tuple(needs) if env is None else env.lacks(needs)
    name = None if env is None else env.name
    if env is not None and env.interpreter is not None:
        if left:
            raise lacking_error(left, f"python_env={name}", name)
        return ()
    lacks = () if application is None else application.lacking(left)
    if lacks:
        raise lacking_error(lacks, "the executors' Python", name)
    return left
