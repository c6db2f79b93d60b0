"""A check that the frameworks of a rank train with all ranks of the gang."""

from __future__ import annotations

import json
import os

from hopsgpu.core.gang import WORKER
from hopsgpu.frameworks.cuda import NCCL_CONFLICT
from hopsgpu.frameworks.world_checks import WorldChecks
from hopsgpu.rank.context import VARIABLE, context
from hopsgpu.rank.import_hook import call_when_imported


def check_world() -> None:
    """Make frameworks refuse fewer ranks than all of the gang, and NCCL if it cannot connect them.

    Nothing is checked outside a gang, in a single or independent rank, and in a gang with parameter
    servers, where only the chief trains.
    """
    if VARIABLE not in os.environ:
        return
    gang = context()
    has_servers = "ps" in json.loads(os.environ.get("TF_CONFIG", "{}")).get("cluster", {})
    if gang.world_size == 1 or gang.role != WORKER or gang.independent_ranks or has_servers:
        return
    conflict = os.environ.get(NCCL_CONFLICT, "")
    call_when_imported(WorldChecks(gang.world_size, conflict).by_module())
