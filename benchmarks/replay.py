"""What the decisions about GPUs are worth on a large cluster: a trace of jobs, replayed.

The trace is Microsoft's Philly, or jobs generated like it; the decisions are hopsgpu's own, with a
simulated clock (`benchmarks.simulation`); what a start, a release and a resize cost is what was
measured on the development cluster. `python -m benchmarks.replay --help` lists what can be changed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.simulation.cluster import Cluster, nodes_like_philly
from benchmarks.simulation.elastic import ElasticGang
from benchmarks.simulation.gang_queue import FixedGang, SimulatedQueue, containers_for
from benchmarks.simulation.one_by_one import OneByOne
from benchmarks.simulation.trace import Job, compare, fitted, generate, read_trace
from benchmarks.simulation.world import Costs, Record, World
from hopsgpu.launcher.elastic_policy import ElasticTerms

_DAY = 24 * 3600.0
# The cluster has so many GPUs that the busiest weeks would use this share if no job waited.
_LOAD = 0.8
_BUSY_DAYS = 28
_SHORT_SECONDS = 300.0
_IDLE_TIMEOUT = 60.0
_SESSION_SECONDS = 1800.0
# What is compared with a wait for 1 GPU: below this, all waits are short.
_SIZE_FREE_LEAST = 60.0
_SIZE_FREE_MOST = 10
_STARVED_SECONDS = _DAY
# Gangs by size; a size and all up to the next one.
_SIZES = (1, 2, 4, 8, 16, 32, 64)
_TARGETS = {"long": 0.02, "short": 0.05}


@dataclass(frozen=True)
class Setting:
    """What is replayed, and where.

    Attributes:
        jobs: the jobs, in the order of their submission.
        node_gpus: GPUs of each node.
        costs: what things cost.
        queue_share: largest share of all GPUs that a queue may have.
        busy: begin and end of the busiest weeks.
        session_seconds: how long a session has its executors beside a training.
        seed: of the chance in back-off times.
        placement: of the gangs, "pack" or None.
    """

    jobs: Sequence[Job]
    node_gpus: Sequence[int]
    costs: Costs
    queue_share: float
    busy: tuple[float, float]
    session_seconds: float = _SESSION_SECONDS
    seed: int = 0
    placement: str | None = None


def measure(arguments: Sequence[str] = ()) -> Mapping[str, object]:
    """Replay a trace under each policy, and print and return what became of the jobs."""
    given = _parsed(arguments)
    generated = generate(fitted(), given.seed, given.share)
    jobs = generated if given.trace is None else read_trace(given.trace)
    costs = Costs(**{field.name: getattr(given, field.name) for field in dataclasses.fields(Costs)})
    setting = setting_for(
        jobs,
        costs,
        gpus=given.gpus,
        load=given.load,
        queue_share=given.queue_share,
        session_seconds=given.session,
        seed=given.seed,
    )
    if given.pack:
        setting = dataclasses.replace(setting, placement="pack")
    if given.trace is not None:
        print(compare(jobs, generated))
    _describe(setting, "generated" if given.trace is None else "of a trace")
    figures: dict[str, Mapping[str, float]] = {}
    for name in given.policy or POLICIES:
        began = time.monotonic()
        records = POLICIES[name](setting)
        figures[name] = summary(records, setting)
        print(f"\n{name} ({time.monotonic() - began:.0f} s)", flush=True)
        _show(records, setting, figures[name])
    _conclude(figures, setting)
    return figures


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    policies = "; ".join(f"{name}: {explained}" for name, explained in _EXPLAINED.items())
    parser = argparse.ArgumentParser("benchmarks.replay", description=__doc__, epilog=policies)
    parser.add_argument("--trace", help="the Philly trace as CSV; without it, jobs are generated")
    parser.add_argument("--seed", type=int, default=1, help="of generated jobs and back-off times")
    parser.add_argument("--share", type=float, default=1.0, help="of the number of jobs, generated")
    parser.add_argument("--gpus", type=int, help="GPUs of the cluster, instead of --load")
    parser.add_argument(
        "--load", type=float, default=_LOAD, help="of the busiest 4 weeks, if no job waited"
    )
    parser.add_argument("--queue-share", type=float, default=1.0, help="most GPUs of a queue")
    parser.add_argument("--pack", action="store_true", help="gangs with placement='pack'")
    parser.add_argument(
        "--session", type=float, default=_SESSION_SECONDS, help="of a session beside its training"
    )
    parser.add_argument("--policy", action="append", choices=POLICIES, help="only this; repeatable")
    for field in dataclasses.fields(Costs):
        parser.add_argument(f"--{field.name}", type=float, default=field.default, help="seconds")
    return parser.parse_args(arguments)


def setting_for(
    jobs: Sequence[Job],
    costs: Costs,
    *,
    gpus: int | None = None,
    load: float = _LOAD,
    queue_share: float = 1.0,
    session_seconds: float = _SESSION_SECONDS,
    seed: int = 0,
) -> Setting:
    """Return a setting whose cluster suits the jobs.

    Args:
        jobs: the jobs, in the order of their submission.
        costs: what things cost.
        gpus: GPUs of the cluster, or None for as many as `load` says.
        load: share of the GPUs that the busiest weeks would use if no job waited.
        queue_share: largest share of all GPUs that a queue may have.
        session_seconds: how long a session has its executors beside a training.
        seed: of the chance in back-off times.
    """
    demand = np.zeros(int(jobs[-1].submitted // _DAY) + 2)
    for job in jobs:
        end = job.submitted + job.seconds
        for day in range(int(job.submitted // _DAY), int(min(end // _DAY + 1, len(demand)))):
            overlap = min(end, (day + 1) * _DAY) - max(job.submitted, day * _DAY)
            demand[day] += job.gpus * overlap / _DAY
    days = min(_BUSY_DAYS, len(demand))
    means = np.convolve(demand, np.ones(days) / days, "valid")
    first = int(means.argmax())
    wanted = gpus or max(int(means[first] / load), max(job.gpus for job in jobs))
    busy = first * _DAY, (first + days) * _DAY
    return Setting(jobs, nodes_like_philly(wanted), costs, queue_share, busy, session_seconds, seed)


def _world(setting: Setting, tail: float = 0.0) -> World:
    costs = dataclasses.replace(setting.costs, tail=tail or setting.costs.tail)
    cluster = Cluster(setting.node_gpus, setting.queue_share)
    return World(cluster, costs, setting.seed, setting.busy)


def in_queue(
    setting: Setting, *, tail: float = 0.0, elastic: bool = False, check: bool = False
) -> list[Record]:
    """Replay the jobs as hopsgpu's gangs.

    Args:
        setting: what is replayed.
        tail: seconds for which executors are held after the return.
        elastic: whether gangs of 2 and more GPUs may have half of them.
        check: whether to check after each event that no GPU was lost.
    """
    world = _world(setting, tail)
    queue, empty = SimulatedQueue(world), world.cluster.empty()
    containers = functools.cache(
        functools.partial(containers_for, empty, placement=setting.placement)
    )
    records = [Record(job) for job in setting.jobs]

    def submit(number: int, record: Record) -> None:
        gpus = record.job.gpus
        if elastic and gpus > 1 and gpus % 2 == 0:
            container, ranks = containers(gpus, gpus // 2)
            terms = ElasticTerms(gpus // 2 // ranks, gpus // ranks)
            ElasticGang(world, queue, record, container, terms, number).submit()
        else:
            container, ranks = containers(gpus)
            FixedGang(world, queue, record, container, gpus // ranks).submit()

    for number, record in enumerate(records):
        world.clock.at(record.job.submitted, functools.partial(submit, number, record))
    _run(world, check)
    return records


def _run(world: World, check: bool) -> None:
    # Records of all jobs stay until the end: looking for garbage among them takes long.
    gc.freeze()
    try:
        world.clock.run(world.cluster.check if check else None)
    finally:
        gc.unfreeze()


def one_by_one(setting: Setting, *, check: bool = False) -> list[Record]:
    """Replay the jobs without a queue: 1-GPU executors that end by Spark's idle timeout."""
    world = _world(setting, _IDLE_TIMEOUT)
    waiting = OneByOne(world)
    container, _ = containers_for(world.cluster.empty(), 1)
    records = [Record(job) for job in setting.jobs]
    for record in records:
        world.clock.at(
            record.job.submitted,
            functools.partial(waiting.submit, record, container, record.job.gpus),
        )
    _run(world, check)
    waiting.finish()
    world.clock.run()
    return records


POLICIES: Mapping[str, Callable[[Setting], list[Record]]] = {
    "hopsgpu": in_queue,
    "elastic": lambda setting: in_queue(setting, elastic=True),
    "idle timeout": lambda setting: in_queue(setting, tail=_IDLE_TIMEOUT),
    "session": lambda setting: in_queue(setting, tail=setting.session_seconds),
    "no queue": one_by_one,
}
_EXPLAINED = {
    "hopsgpu": "launch(workers=n, acquire_timeout=None)",
    "elastic": "the same, and gangs of 2 and more may have half: workers=(n / 2, n)",
    "idle timeout": "hopsgpu's queue, but executors end by Spark's idle timeout of 60 s",
    "session": "hopsgpu's queue, but executors are held for the session",
    "no queue": "executors granted one by one, Spark's idle timeout of 60 s",
}


def _untrained(records: Sequence[Record]) -> float:
    held = sum(record.held for record in records)
    return 1 - sum(record.trained for record in records) / held if held else 0.0


def of_length(records: Sequence[Record], *, short: bool) -> list[Record]:
    """Return the records of jobs that train up to 5 minutes, or longer."""
    return [record for record in records if (record.job.seconds <= _SHORT_SECONDS) is short]


def size_free_ratio(record: Record) -> float:
    """Return how many times as long as a job of 1 GPU a gang waited; waits count as 1 min at least.

    A gang that was never granted has waited infinitely longer.
    """
    if record.waited is None:
        return float("inf")
    alone = record.waited if record.size_free is None else record.size_free
    return max(record.waited, _SIZE_FREE_LEAST) / max(alone, _SIZE_FREE_LEAST)


def is_hindered(record: Record) -> bool:
    """Return whether a gang waited over ten times because of what was granted after it came."""
    if record.unhindered is None:
        return True
    least = dataclasses.replace(record, granted=record.job.submitted + record.unhindered)
    return size_free_ratio(least) <= _SIZE_FREE_MOST


def summary(records: Sequence[Record], setting: Setting) -> Mapping[str, float]:
    """Return what became of the jobs, in figures."""
    gangs = [record for record in records if record.job.gpus > 1]
    large = [record for record in records if record.job.gpus >= 8]
    begin, end = setting.busy
    served = [record for record in gangs if record.granted is not None]
    ratios = [size_free_ratio(record) for record in served]
    over = [record for record in served if size_free_ratio(record) > _SIZE_FREE_MOST]
    waits = [record.waited for record in records if record.waited is not None]
    return {
        "untrained long": _untrained(of_length(records, short=False)),
        "untrained short": _untrained(of_length(records, short=True)),
        "untrained": _untrained(records),
        "wait 95 % of 8 and more": _quantile([r.waited for r in large], 0.95),
        "turnaround 95 % of 8 and more": _quantile(
            [None if r.ended is None else r.ended - r.job.submitted for r in large], 0.95
        ),
        "longest wait": max(waits, default=0.0),
        "never started": float(len(records) - len(waits)),
        "starved": float(sum(wait > _STARVED_SECONDS for wait in waits)),
        "over ten times": float(len(over)),
        "over ten times unhindered": float(len(over) - sum(map(is_hindered, over))),
        "largest ratio": max(ratios, default=1.0),
        "held in the busiest weeks": sum(r.in_window for r in records)
        / (sum(setting.node_gpus) * (end - begin)),
    }


def _quantile(values: Sequence[float | None], quantile: float) -> float:
    """Return a quantile; None is longer than all others."""
    known = [float("inf") if value is None else value for value in values]
    return float(np.quantile(known, quantile, method="inverted_cdf")) if known else 0.0


def _describe(setting: Setting, origin: str) -> None:
    jobs = setting.jobs
    large = sum(gpus == 8 for gpus in setting.node_gpus)
    begin, end = (time_ / _DAY for time_ in setting.busy)
    costs = dataclasses.asdict(setting.costs)
    print(
        f"\n{len(jobs)} jobs {origin}, {jobs[-1].submitted / _DAY:.0f} days,"
        f" {sum(job.gpus * job.seconds for job in jobs) / 3600:.0f} GPU hours\n"
        f"cluster: {sum(setting.node_gpus)} GPUs, {large} nodes of 8 and"
        f" {len(setting.node_gpus) - large} of 2; busiest weeks: days {begin:.0f} to {end:.0f}\n"
        f"seconds: {', '.join(f'{name} {value:g}' for name, value in costs.items())}",
        flush=True,
    )


def _show(records: Sequence[Record], setting: Setting, figures: Mapping[str, float]) -> None:
    print(
        f"  held without training: {figures['untrained long']:.2%} of the GPU time of jobs over"
        f" 5 min, {figures['untrained short']:.2%} of shorter ones, {figures['untrained']:.2%} in"
        f" all\n  busiest weeks: {figures['held in the busiest weeks']:.1%} of the GPUs held"
    )
    lost: dict[str, float] = defaultdict(float)
    for record in records:
        for why, seconds in record.lost.items():
            lost[why] += seconds
    if lost:
        reasons = (f"{why} {seconds / 3600:.0f}" for why, seconds in lost.items() if seconds)
        print(f"  GPU hours without training: {', '.join(reasons)}")
    print(f"  never started: {figures['never started']:.0f};", end=" ")
    print(f"waited over a day: {figures['starved']:.0f};", end=" ")
    if any(record.size_free is not None for record in records):
        print(
            f"over {_SIZE_FREE_MOST} times as long as 1 GPU: {figures['over ten times']:.0f} gangs"
            f" (at most {figures['largest ratio']:.1f} times),"
            f" {figures['over ten times unhindered']:.0f} of them even if nothing had been"
            " granted after they came"
        )
    else:
        print("waits of 1 GPU at the same time are not known")
    print(f"  {'wait by GPUs':20}{'jobs':>8}{'median':>10}{'95 %':>10}{'longest':>10}  seconds")
    for name, waits in _by_size(records):
        figures_of = (_quantile(waits, quantile) for quantile in (0.5, 0.95, 1.0))
        print(f"  {name:20}{len(waits):>8}" + "".join(f"{figure:>10.0f}" for figure in figures_of))


def _by_size(records: Sequence[Record]) -> Iterator[tuple[str, list[float | None]]]:
    for size, following in zip(_SIZES, (*_SIZES[1:], sys.maxsize), strict=True):
        waits = [r.waited for r in records if size <= r.job.gpus < following]
        if waits:
            is_one = following == size + 1
            last = "" if is_one else " or more" if following == sys.maxsize else f"–{following - 1}"
            yield f"{size}{last}", waits


def _conclude(figures: Mapping[str, Mapping[str, float]], setting: Setting) -> None:
    print()
    if (ours := figures.get("hopsgpu")) is not None:
        for length, most in _TARGETS.items():
            found = ours[f"untrained {length}"]
            print(f"{length} jobs: {found:.2%} held without training (target: under {most:.0%})")
        short = [job for job in setting.jobs if job.seconds <= _SHORT_SECONDS]
        if short:
            print(f"start and release together may take {allowed_seconds(short):.1f} s for that,")
            print(f"and take {setting.costs.start + setting.costs.release:.2f} s")
        print(
            f"gangs that waited over {_SIZE_FREE_MOST} times as long as 1 GPU:"
            f" {ours['over ten times']:.0f} (target: 0),"
            f" {ours['over ten times unhindered']:.0f} of them even if nothing had been granted"
            " after they came"
        )
        if (elastic := figures.get("elastic")) is not None:
            name = "wait 95 % of 8 and more"
            print(
                f"95 % of the gangs of 8 and more waited up to {ours[name]:.0f} s, elastic"
                f" {elastic[name]:.0f} s (target: half)"
            )


def allowed_seconds(short: Sequence[Job]) -> float:
    """Return how long GPUs may be held beside the training of short jobs, to meet the target."""
    share = _TARGETS["short"]
    trained = sum(job.gpus * job.seconds for job in short)
    return trained / sum(job.gpus for job in short) * share / (1 - share)


if __name__ == "__main__":
    measure(sys.argv[1:])
