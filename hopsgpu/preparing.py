"""What has to be on the lake before GPUs are asked for."""

from __future__ import annotations

import threading

from hopsgpu.gang import GangState
from hopsgpu.python_env.building import Wanted, ready
from hopsgpu.python_env.value import PythonEnv
from hopsgpu.spark.request import Watcher
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
