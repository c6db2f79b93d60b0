"""The executors that a launch requests, and the check whether they can ever be granted."""

from __future__ import annotations

from dataclasses import replace

from hopsgpu.backends.gang_request import demand_of
from hopsgpu.backends.spark.application import Application
from hopsgpu.backends.spark.settings import check_gang
from hopsgpu.backends.spark.spark_versions import slot_check_warning
from hopsgpu.cluster_managers.capacity import check_possible, cores_per_gpu
from hopsgpu.cluster_managers.snapshot import Snapshot
from hopsgpu.core.gang import Exclusions
from hopsgpu.core.gpu_names import may_have_type
from hopsgpu.core.gpu_types import hosts_of_whole_gpus, marker_of, nodes_with
from hopsgpu.core.spec import ExecutorShape, GangSpec, LaunchPlan, shape_of
from hopsgpu.errors import CapacityError, ConfigError


def fit_on_cluster(spec: GangSpec, application: Application) -> LaunchPlan:
    """Return the plan of a gang's executors, which can be granted; see `GangApplication.fit`.

    Raises:
        ConfigError: the application may not have so many executors; no node has GPUs of the
            requested type, or several GPUs for a rank; or no node starts containers in the
            application's image.
        CapacityError: they can never be granted; nothing was requested.
    """
    application.check_wait(spec.acquire_timeout)
    everywhere = application.snapshot(0.0)
    marker = _marker(spec.gpu_type, application)
    hosts = _hosts(spec, marker, everywhere, application)
    snapshot = everywhere.limited_to(hosts)
    ranks, shape = containers_of(spec, snapshot)
    shape = replace(shape, marker=marker)
    executors = spec.workers // ranks
    check_gang(application.setting, executors)
    check_possible(demand_of(shape, executors, spec.placement), snapshot)
    warnings = (*snapshot.problems, *application.setup_warnings)
    warning = slot_check_warning(application.versions["spark"], application.setting)
    if warning is not None:
        warnings += (warning,)
    least = spec.gpus.sharing
    if spec.placement == "pack" and ranks == least < spec.workers:
        warning = f"pack: at most {least} of the {spec.workers} ranks fit in one container"
        warnings += (warning,)
    queue = "" if snapshot.queues[0].is_setting else snapshot.queues[0].path
    return LaunchPlan(spec, executors, ranks, shape, queue, {}, {}, warnings, hosts)


def check_with_exclusions(
    plan: LaunchPlan, application: Application, exclusions: Exclusions
) -> None:
    demand = demand_of(plan.shape, plan.executors, plan.spec.placement)
    check_possible(demand, application.snapshot(0.0).limited_to(plan.hosts).excluding(exclusions))


def _marker(gpu_type: str | None, application: Application) -> str | None:
    """Return the resource that marks nodes with GPUs of a type, or None."""
    if gpu_type is None or (marker := marker_of(gpu_type, application.markers)) is None:
        return None
    application.check_marker(marker, gpu_type)
    return marker


def _hosts(
    spec: GangSpec, marker: str | None, snapshot: Snapshot, application: Application
) -> frozenset[str] | None:
    """Return the nodes whose GPUs suit the gang; None if any node is usable."""
    gpu_type, gpus_per_rank = spec.gpu_type, spec.gpus.per_worker
    if gpu_type is None and gpus_per_rank <= 1:
        return None
    nodes = {node.id: node for node in snapshot.running if node.total.gpus}
    if marker is not None:
        nodes = {id: node for id, node in nodes.items() if marker in node.other_resources}
        if not nodes:
            raise ConfigError(
                f"gpu_type={gpu_type!r}: no node that this application can use has {marker}, which"
                " spark.hopsgpu.markers names for it; the administrator adds it to nodes with"
                f" yarn.nodemanager.resource-type.{marker}"
            )
    answers = application.manager.devices(list(nodes.values()))
    models = {
        nodes[node].host: sorted({gpu.name for gpu in devices.gpus})
        for node, devices in answers.devices.items()
    }
    silent = [nodes[node].host for node in answers.problems]
    if gpu_type is None:
        return hosts_of_whole_gpus(models, silent, gpus_per_rank)
    # On YARN, only its own plugin describes GPUs. Each executor is checked at its arrival, too.
    undescribed = [host for host, names in models.items() if not names]
    if undescribed or (marker is not None and silent):
        return frozenset([*silent, *undescribed]).union(
            host for host, names in models.items() if any(may_have_type(n, gpu_type) for n in names)
        )
    return nodes_with(gpu_type, models, silent)


def containers_of(spec: GangSpec, snapshot: Snapshot) -> tuple[int, ExecutorShape]:
    """Return the number of ranks per container, and what each container requests."""
    share, least = cores_per_gpu(snapshot.running), spec.gpus.sharing
    if spec.placement != "pack":
        return least, shape_of(spec, share, least)

    def can_fit(ranks: int) -> bool:
        demand = demand_of(shape_of(spec, share, ranks), spec.workers // ranks, "pack")
        try:
            check_possible(demand, snapshot)
        except CapacityError:
            return False
        return True

    divisors = (n for n in range(spec.workers, least, -1) if not (spec.workers % n or n % least))
    ranks = next(filter(can_fit, divisors), least)
    return ranks, shape_of(spec, share, ranks)
