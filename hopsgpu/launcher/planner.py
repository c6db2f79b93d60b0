"""Plans from checked arguments: what a launch would request, and where its files go."""

from __future__ import annotations

import datetime
import logging
import math
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace

from hopsgpu.artifacts.checkpoints import Checkpoints, complete_shards
from hopsgpu.artifacts.kept_files import has_kept
from hopsgpu.artifacts.runs import RECORD, start_time
from hopsgpu.backends.gang_application import GangApplication
from hopsgpu.core.run_record import LARGEST_RECORD, OTHER_SCHEMA, parse
from hopsgpu.core.spec import GangSpec, LaunchPlan
from hopsgpu.data.argument import Datasets
from hopsgpu.errors import CapacityError, ConfigError, StoreError
from hopsgpu.launcher.arguments import Arguments, GangArguments
from hopsgpu.storage.error_messages import ABSENT, DAMAGED
from hopsgpu.storage.lake import LakePath
from hopsgpu.storage.root import join_url
from hopsgpu.tracebacks import inherited_variables

log = logging.getLogger(__name__)

_MAX_LISTED = 5
# The value of `resume` for the latest run of the same name.
LATEST_OF_NAME = "latest"
# By default, pyarrow's allocator keeps freed memory for some time: about 80 MB in a rank that reads
# data, which no limit includes. Returning the memory at once costs no measurable time.
_MEMORY_VARIABLES = {"MIMALLOC_PURGE_DELAY": "0"}


def plan_of(arguments: GangArguments, run_id: str, data: Datasets | None = None) -> LaunchPlan:
    """Return the plan of a launch.

    Raises:
        ConfigError: the application may not have so many executors, no node has GPUs of the
            requested type, or the run to resume from does not exist.
        CapacityError: the cluster can never grant the executors; nothing was requested.
        StoreError: the run to resume from cannot be read on the lake, or data that is to be read
            in place does not exist.
    """
    fitting = _fit(arguments.application, arguments.spec)
    paths = _paths(LakePath(arguments.application.root).url, arguments, run_id, data)
    return replace(
        fitting,
        spec=_with_resumed_run(fitting.spec, paths),
        environment=_environment(arguments.spec, fitting, arguments.environment),
        paths=paths,
        warnings=(*arguments.warnings, *fitting.warnings),
    )


def _fit(application: GangApplication, spec: GangSpec) -> LaunchPlan:
    """Return the plan of a gang's containers; for an elastic gang, of the largest that fits.

    Raises:
        ConfigError, CapacityError: as `GangApplication.fit`, for the smallest elastic size.
    """
    if not spec.is_elastic:
        return application.fit(spec)

    def with_workers(workers: int) -> GangSpec:
        return replace(spec, workers=workers, least_workers=None)

    # All worlds are made of containers of one shape.
    step = spec.gpus.sharing
    if spec.placement == "pack":
        step = math.gcd(spec.least, spec.workers)
    container = application.fit(with_workers(step))
    step = container.ranks_per_executor
    smallest = application.fit(with_workers(spec.least))
    try:
        largest, largest_plan = spec.workers, application.fit(with_workers(spec.workers))
    except (CapacityError, ConfigError) as error:
        largest = _largest(application, with_workers, spec.least, spec.workers, step)
        largest_plan = smallest
        log.info("the gang can have at most %d workers: %s", largest, error)
        warning = f"at most {largest} of the {spec.workers} ranks can run here: {error}"
        largest_plan = replace(largest_plan, warnings=(*largest_plan.warnings, warning))
    warnings = dict.fromkeys((*smallest.warnings, *largest_plan.warnings))
    return replace(
        container,
        spec=replace(container.spec, workers=largest, least_workers=spec.least),
        executors=largest // step,
        warnings=tuple(warnings),
    )


def _largest(
    application: GangApplication,
    with_workers: Callable[[int], GangSpec],
    least: int,
    most: int,
    step: int,
) -> int:
    """Return the largest world size in [least, most) that fits, where `least` does."""
    low, high = least // step, most // step
    while high - low > 1:
        middle = (low + high) // 2
        try:
            application.fit(with_workers(middle * step))
        except (CapacityError, ConfigError):
            high = middle
        else:
            low = middle
    return low * step


def plan_on(held: LaunchPlan, arguments: Arguments, run_id: str) -> LaunchPlan:
    """Return the plan of a launch on a held gang.

    Raises:
        ConfigError: the run to resume from does not exist.
        StoreError: the run to resume from cannot be read on the lake, or data does not exist.
    """
    # On a machine without GPUs, the gang's plan was reduced to 0 GPUs.
    spec = replace(arguments.spec, gpus=held.spec.gpus, gpu_type=held.spec.gpu_type)
    paths = _paths(held.paths["root"], arguments, run_id, arguments.data)
    return replace(
        held,
        spec=_with_resumed_run(spec, paths),
        environment=_environment(spec, held, arguments.environment),
        paths=paths,
        warnings=(*held.warnings, *arguments.warnings),
    )


def _environment(
    spec: GangSpec, containers: LaunchPlan, variables: Mapping[str, str]
) -> Mapping[str, str]:
    cores = containers.shape.cores // containers.ranks_per_executor
    # Without the variable, joblib (and thus scikit-learn's n_jobs=-1) uses all cores of the node.
    core_variables = dict.fromkeys(("OMP_NUM_THREADS", "LOKY_MAX_CPU_COUNT"), str(cores))
    defaults = {**core_variables, **_MEMORY_VARIABLES, **inherited_variables()}
    return {**defaults, **variables, **spec.env_vars}


def _paths(
    root: str, arguments: GangArguments, run_id: str, data: Datasets | None
) -> Mapping[str, str]:
    """Return where on the lake the run's directory, its inputs and its outputs are, by purpose.

    Raises:
        ConfigError: the run to resume from does not exist.
        StoreError: the run to resume from cannot be read on the lake, or data does not exist.
    """
    spec, runs = arguments.spec, join_url(root, "runs")
    paths = {"root": root, "run": f"{runs}/{run_id}"}
    if spec.model is not None:
        paths["model"] = join_url(root, f"models/{spec.model}")
    if spec.resume == LATEST_OF_NAME:
        if (latest := _latest_of_name(LakePath(runs), spec.name)) is not None:
            paths["resume"] = latest
    elif spec.resume is not None:
        paths["resume"] = _resume_source_url(LakePath(runs), spec.resume)
    if data is not None:
        places = data.places(paths["run"], arguments.application.default_fs)
        for name, _ in data.paths:
            _check_exists(data.label(name), LakePath(places[name]))
        paths |= {data.label(name): url for name, url in places.items()}
    return paths


def _check_exists(label: str, lake: LakePath) -> None:
    try:
        lake.stat()
    except StoreError as error:
        why = f"{lake.url} does not exist" if error.kind == ABSENT else str(error)
        raise StoreError(f"{label} cannot be read: {why}", error.kind) from error


def _resume_source_url(runs: LakePath, run_id: str) -> str:
    """Return the URL of the run whose checkpoints are resumed from.

    That is the named run. If it has no complete checkpoint, it is the run from which the named run
    itself was resumed, and so on; if none of these has one, it is the named run.

    Raises:
        ConfigError: there is no run with this id.
        StoreError: the lake cannot be read.
    """
    named = runs / run_id
    if not named.exists():
        raise _unknown_run_error(runs, run_id)
    run, seen = named, {run_id}
    while not _has_checkpoint(run):
        before = _resumed_from(run)
        if before is None or before in seen or not (runs / before).exists():
            return named.url
        seen.add(before)
        run = runs / before
    return run.url


def _with_resumed_run(spec: GangSpec, paths: Mapping[str, str]) -> GangSpec:
    """Return the spec with the run that "latest" stands for, which records and readers need."""
    if spec.resume != LATEST_OF_NAME:
        return spec
    return replace(spec, resume=paths["resume"].rpartition("/")[2] if "resume" in paths else None)


def _latest_of_name(runs: LakePath, name: str) -> str | None:
    """Return the URL of the latest run of a name that has a checkpoint; None if there is none."""
    if not runs.exists():
        return None
    named = re.compile(rf"{re.escape(name)}-\d{{8}}-\d{{6}}-[0-9a-f]+")
    entries = [e for e in runs.entries() if e.is_directory and named.fullmatch(e.name)]
    for entry in sorted(entries, key=start_time, reverse=True):
        if _has_checkpoint(runs / entry.name):
            log.info("resume=%r: continues %s", LATEST_OF_NAME, entry.name)
            return (runs / entry.name).url
    return None


def _has_checkpoint(run: LakePath) -> bool:
    checkpoints = Checkpoints(run / "checkpoints", rank=0)
    if complete_shards(checkpoints.shards(), checkpoints.announced_ranks()):
        return True
    return has_kept(run)


def _resumed_from(run: LakePath) -> str | None:
    """Return the id of the run from which a run was resumed; None without a readable record."""
    try:
        return parse((run / RECORD).read(LARGEST_RECORD)).spec.resume
    except StoreError as error:
        if error.kind in (ABSENT, DAMAGED, OTHER_SCHEMA):
            return None
        raise


def _unknown_run_error(runs: LakePath, run_id: str) -> ConfigError:
    entries = sorted(runs.entries(), key=start_time, reverse=True)
    run_ids = [entry.name for entry in entries if entry.is_directory]
    listed = ", ".join(run_ids[:_MAX_LISTED]) or "none"
    unlisted = len(run_ids) - _MAX_LISTED
    return ConfigError(
        f"resume={run_id!r}: there is no such run in {runs.url}; the latest runs:"
        f" {listed}{f' and {unlisted} more' if unlisted > 0 else ''}"
    )


def new_run_id(name: str) -> str:
    """Return a new run id: the run's name, the current time (UTC), and six random hex digits."""
    now = datetime.datetime.now(datetime.UTC)
    return f"{name}-{now:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
