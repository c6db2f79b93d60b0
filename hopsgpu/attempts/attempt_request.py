"""The message `run`, which tells the agent of each container about an attempt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hopsgpu.attempts.rank_call import Call
from hopsgpu.attempts.rendezvous import Rendezvous
from hopsgpu.core.gang import WORKER, RankPlacement, World
from hopsgpu.frameworks import environment
from hopsgpu.frameworks.cuda import conflict_environment
from hopsgpu.frameworks.proxies import direct_hosts
from hopsgpu.frameworks.torch import Restarts
from hopsgpu.storage.root import join_url


@dataclass(frozen=True)
class RunMessage:
    """The message for one container.

    Attributes:
        payload: the call, the shards of each rank, and the list of a script's restored files,
            concatenated; their sizes are `call_bytes`, each rank's `data_bytes` and
            `restored_bytes`. The modules are sent before, in a `keep` message.
    """

    key: int
    payload: bytes
    fields: dict[str, Any]


def run_messages(call: Call, rendezvous: Rendezvous) -> Iterator[RunMessage]:
    """Yield the messages that start all ranks of an attempt."""
    world, spec, function = rendezvous.world, call.plan.spec, call.function
    restarts = Restarts(call.run_id, call.attempt, spec.retries)
    direct, script = direct_hosts(world), call.script_files
    restored = b"" if script is None else script.dump_restored()
    conflict = {} if spec.independent_ranks else conflict_environment(world, spec.env_vars)
    on_hosts = Counter(place.container.host for place in world.places)
    for key in dict.fromkeys(place.container.key for place in world.processes):
        places = world.of_container(key)
        parts = [_data_of(place, call) for place in places]
        ranks = [
            {
                "environment": conflict
                | environment(
                    world,
                    place,
                    rendezvous.endpoints,
                    restarts,
                    spec.visible,
                    call.memory_share,
                    is_independent=spec.independent_ranks,
                ),
                "context": _context(place, world, call, on_hosts[place.container.host]),
                "data_bytes": len(part),
            }
            for place, part in zip(places, parts, strict=True)
        ]
        fields = {
            "slot": call.slot(key),
            "run_url": call.directory.url,
            "attempt": call.attempt,
            "log_limit": call.log_limit,
            "memory": spec.memory_per_worker,
            "frameworks": function.foreseen.imports,
            "shared": dict(call.plan.environment),
            "direct": direct,
            "call_bytes": len(function.call),
            "modules": function.modules.digest,
            "roots": function.modules.roots,
            "ranks": ranks,
            "script": None if script is None else script.fields(len(restored)),
        }
        yield RunMessage(key, b"".join((function.call, *parts, restored)), fields)


def _data_of(place: RankPlacement, call: Call) -> bytes:
    # Parameter servers get no data.
    return call.data[place.rank] if call.data and place.role == WORKER else b""


def _context(place: RankPlacement, world: World, call: Call, sharers: int) -> dict[str, Any]:
    resumed = call.plan.paths.get("resume")
    return {
        "rank": place.rank,
        "local_rank": place.local_rank,
        "world_size": world.size,
        "host": place.container.host,
        "gpus": place.gpus,
        "role": place.role,
        "run_id": call.run_id,
        "attempt": call.attempt,
        "checkpoint_dir": (call.directory / "checkpoints").url,
        "resume_dir": resumed and join_url(resumed, "checkpoints"),
        "log_dir_url": (call.directory / "tensorboard").url,
        "disk_sharers": sharers or 1,
        "trial": None if call.trial is None else call.trial.as_fields(),
        "script": call.script,
        "independent_ranks": call.plan.spec.independent_ranks,
    }
