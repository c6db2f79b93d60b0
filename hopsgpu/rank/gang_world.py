"""Whether the frameworks of a rank must train with all ranks of the gang."""

from __future__ import annotations

import json
import os

from hopsgpu.core.gang import WORKER
from hopsgpu.frameworks.world_checks import WorldChecks
from hopsgpu.rank.context import VARIABLE, context
from hopsgpu.rank.import_hook import call_when_imported


def check_world() -> None:
    """Have frameworks refuse to train with other ranks than all of the gang.

    The call does nothing in a rank that is alone or independent, in a gang with parameter servers,
    of which only the chief trains, and outside a gang.
    """
    if VARIABLE not in os.environ:
        return
    gang = context()
    has_servers = "ps" in json.loads(os.environ.get("TF_CONFIG", "{}")).get("cluster", {})
    if gang.world_size == 1 or gang.role != WORKER or gang.independent_ranks or has_servers:
        return
    call_when_imported(WorldChecks(gang.world_size).by_module())
