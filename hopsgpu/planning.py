"""From checked arguments to a plan: what a launch would ask of YARN, and whether it can be had."""

from __future__ import annotations

import datetime
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hopsgpu.arguments import Arguments
from hopsgpu.errors import CapacityError, ConfigError
from hopsgpu.gang import Avoid, has_type
from hopsgpu.spark.application import Application
from hopsgpu.spark.checks import check_gang
from hopsgpu.spark.request import demand_of
from hopsgpu.spec import ExecutorShape, GangSpec, LaunchPlan, shape_of
from hopsgpu.stores.lake import Lake
from hopsgpu.yarn.capacity import check_possible, cores_per_gpu
from hopsgpu.yarn.snapshot import Snapshot

_SHOWN = 8


def plan_of(
    spec: GangSpec, application: Application, run_id: str, warnings: tuple[str, ...]
) -> LaunchPlan:
    """The plan of a launch.

    Raises:
        ConfigError: the application may not have so many executors, or no node has GPUs of the
            wanted type.
        CapacityError: YARN can never grant them; nothing was asked for.
    """
    everywhere = application.snapshot(0.0)
    hosts = _hosts(spec.gpu_type, everywhere, application)
    snapshot = everywhere.only(hosts)
    ranks, shape = _containers(spec, snapshot)
    executors = spec.workers // ranks
    check_gang(application.setting, executors)
    check_possible(demand_of(shape, executors, spec.placement), snapshot)
    least = spec.gpus.sharing
    if spec.placement == "pack" and ranks == least < spec.workers:
        told = f"pack: not more than {least} of the {spec.workers} ranks fit into one container"
        warnings = (*warnings, told)
    return LaunchPlan(
        spec=spec,
        executors=executors,
        ranks_per_executor=ranks,
        shape=shape,
        queue=application.queue,
        environment=_environment(spec, shape.cores // ranks),
        paths=_paths(Lake(lake_root(application)).url, spec, run_id),
        warnings=warnings,
        hosts=hosts,
    )


def _hosts(
    gpu_type: str | None, snapshot: Snapshot, application: Application
) -> frozenset[str] | None:
    """Nodes that have GPUs of a type; None where any will do.

    Raises:
        ConfigError: no node has one.
    """
    if gpu_type is None:
        return None
    nodes = {node.id: node for node in snapshot.running if node.total.gpus}
    told = application.node_managers.devices(list(nodes.values()))
    models = {
        nodes[node].host: sorted({gpu.name for gpu in found.gpus})
        for node, found in told.devices.items()
    }
    return nodes_with(gpu_type, models, [nodes[node].host for node in told.problems])


def nodes_with(
    gpu_type: str, models: Mapping[str, Sequence[str]], silent: Sequence[str]
) -> frozenset[str]:
    """The nodes that have GPUs of a type.

    Args:
        gpu_type: part of a product name, in whatever case.
        models: product names of the GPUs of each node.
        silent: nodes that do not tell theirs.

    Raises:
        ConfigError: there is none; it lists the types that there are.
    """
    found = frozenset(h for h, names in models.items() if any(has_type(n, gpu_type) for n in names))
    if found:
        return found
    where: dict[str, list[str]] = {}
    for host, names in sorted(models.items()):
        for name in names:
            where.setdefault(name or "(a GPU without a name)", []).append(host)
    there = "; ".join(f"{name!r} on {_shown(hosts)}" for name, hosts in sorted(where.items()))
    unknown = f"; not told by {_shown(sorted(silent))}" if silent else ""
    raise ConfigError(
        f"gpu_type={gpu_type!r}: no node that this application can use has such a GPU. There are:"
        f" {there or 'none'}{unknown}"
    )


def _shown(hosts: Sequence[str]) -> str:
    more = f" and {len(hosts) - _SHOWN} more" if len(hosts) > _SHOWN else ""
    return ", ".join(hosts[:_SHOWN]) + more


def plan_on(held: LaunchPlan, given: Arguments, run_id: str) -> LaunchPlan:
    """The plan of a launch on a gang that is held already."""
    spec = given.spec
    cores = held.shape.cores // held.ranks_per_executor
    return replace(
        held,
        spec=spec,
        environment=_environment(spec, cores),
        paths=_paths(held.paths["root"], spec, run_id),
        warnings=(*held.warnings, *given.modules.warnings),
    )


def check_again(plan: LaunchPlan, application: Application, avoid: Avoid) -> None:
    """Whether the gang of a plan can be had without what is to be avoided.

    Raises:
        CapacityError: it can never be granted so.
        HopsGpuError: the ResourceManager does not tell.
    """
    demand = demand_of(plan.shape, plan.executors, plan.spec.placement)
    check_possible(demand, application.snapshot(0.0).only(plan.hosts).without(avoid))


def _containers(spec: GangSpec, snapshot: Snapshot) -> tuple[int, ExecutorShape]:
    """Ranks of each container, and what it asks for."""
    share, least = cores_per_gpu(snapshot.nodes), spec.gpus.sharing
    if spec.placement != "pack":
        return least, shape_of(spec, share, least)

    def fits(ranks: int) -> bool:
        demand = demand_of(shape_of(spec, share, ranks), spec.workers // ranks, "pack")
        try:
            check_possible(demand, snapshot)
        except CapacityError:
            return False
        return True

    divisors = (n for n in range(spec.workers, least, -1) if not (spec.workers % n or n % least))
    ranks = next(filter(fits, divisors), least)
    return ranks, shape_of(spec, share, ranks)


def _environment(spec: GangSpec, cores: int) -> Mapping[str, str]:
    return {"OMP_NUM_THREADS": str(cores), **spec.env_vars}


def _paths(root: str, spec: GangSpec, run_id: str) -> Mapping[str, str]:
    paths = {"root": root, "run": f"{root}/runs/{run_id}"}
    if spec.model is not None:
        paths["model"] = f"{root}/models/{spec.model}"
    return paths


def lake_root(application: Application) -> str:
    """Where runs and models go: spark.hopsgpu.root, HOPSGPU_ROOT, or the user's directory."""
    if named := application.option("root"):
        return named.rstrip("/")
    files = (application.jvm.hadoop("fs.defaultFS") or "file:///").rstrip("/")
    return f"{files}/user/{application.user}/hopsgpu"


def new_run_id(name: str) -> str:
    """A run's id: its name, when it began (UTC), and six digits by chance."""
    now = datetime.datetime.now(datetime.UTC)
    return f"{name}-{now:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
