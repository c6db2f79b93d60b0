"""Worlds that shrink and grow, compared with torchrun's, Ray Train's and torchft's.

Four ranks of torch on gloo, of which one is killed with its member (agent, raylet, replica or
executor), then one is added; both several times in the same training. Two idle cores are what the
targets are for.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.elastic_ours import Elastic, on_cluster
from benchmarks.elastic_ranks import Event
from benchmarks.elastic_rivals import RayTrain, System, Torchft, Torchrun, World, wait_for
from benchmarks.table import heading, row

LEAST, MOST = 3, 4
ROUNDS = 3
STEPS_WORKERS = 2
STEPS_ROUNDS = 5
STEPS_SECONDS = 10.0
LONG_SECONDS = 600.0
LONG_CHANGES = 6
# Seconds that a world trains before it is changed again.
_SETTLED = 2.0
# Two notes of a rank's steps that are further apart than this are not of a training that goes on.
_GAP = 1.0
# What is wanted of hopsgpu.
TIMES_FASTER = 5.0
SHRINK_SECONDS, GROW_SECONDS = 5.0, 3.0
STEPS_RATIO = 0.99
TRAINING_SHARE = 0.95

DEFAULTS = (Torchrun("torchrun"), RayTrain("Ray Train"))
# The shortest timeouts that still count a member on busy cores as alive.
SHORT = (
    Torchrun(
        "torchrun, short timeouts",
        "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3",
    ),
    RayTrain(
        "Ray Train, short intervals",
        1.0,
        (
            ("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.1"),
            # Until Ray tells a node as dead, it waits for this node to start a rank.
            ("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "5"),
            ("RAY_health_check_failure_threshold", "3"),
            ("RAY_health_check_period_ms", "500"),
            ("RAY_health_check_timeout_ms", "3000"),
        ),
    ),
)
TORCHFT = Torchft("torchft")


@dataclass(frozen=True)
class Change:
    """Seconds of one loss and one gain of a member.

    Attributes:
        shrink: from the kill to the first step of the smaller world.
        noticed: of these, until the launcher knew of the loss; None if it does not tell.
        grow: from the new member's being ready to the first step of the larger world.
    """

    shrink: float
    noticed: float | None
    grow: float

    @property
    def beyond(self) -> float:
        """Seconds from the notice to the first step of the smaller world."""
        return self.shrink - (self.noticed or 0.0)


def measure() -> Mapping[str, object]:
    """Measure all launchers, print tables and targets; return the seconds of each."""
    ours = Elastic()
    with on_cluster():
        found = {ours.name: changes(ours)}
        show(found)
        share = long_run(ours)
        rates = steps_a_second([Elastic(saved=0), Torchrun(DEFAULTS[0].name, saved=0)])
    # Alone on the machine.
    for system in (*DEFAULTS, *SHORT, *_torchft()):
        try:
            found[system.name] = changes(system)
            show({system.name: found[system.name]})
        except (TimeoutError, RuntimeError) as error:
            # A rival that hangs or ends on busy cores is not to take the others' figures along.
            print(f"{system.name} is left out: {error}")
    print("\nall launchers")
    show(found)
    _compare(found[ours.name], found)
    _show_rates(rates, ours)
    return {
        "changes": {name: [vars(change) for change in each] for name, each in found.items()},
        "steps a second": rates,
        "training share": share,
    }


def _torchft() -> Sequence[System]:
    if importlib.util.find_spec("torchft") is None:
        print("torchft is left out: it is not installed (its wheels are for Linux on x86-64)")
        return ()
    return (TORCHFT,)


def changes(system: System, rounds: int = ROUNDS) -> list[Change]:
    """Kill and add a member several times in one training."""
    with system.world(LEAST, MOST) as world:
        first_step(world, MOST, 0.0)
        return [_change(world) for _ in range(rounds)]


def _change(world: World) -> Change:
    _settle(world, MOST)
    killed = world.remove()
    shrunk = first_step(world, LEAST, killed)
    noticed = world.noticed(killed)
    _settle(world, LEAST)
    ready = world.add()
    # A launcher that takes a member in before it says that it is ready is not to be negative.
    grown = first_step(world, MOST, shrunk)
    # Noticing is not what takes the time if the smaller world trains before it.
    seen = None if noticed is None else min(noticed, shrunk) - killed
    return Change(shrunk - killed, seen, max(grown - ready, 0.0))


def first_step(world: World, ranks: int, since: float) -> float:
    """Return when a world of so many ranks first ended a step after a time, in s since 1970."""

    def look() -> float | None:
        steps = (e for e in world.events if e.event == "step" and e.world == ranks)
        return min((e.time for e in steps if e.time > since), default=None)

    return wait_for(look, f"step of {ranks} ranks", world.told)


def _settle(world: World, ranks: int) -> None:
    """Wait until a world has trained for a while from now on."""
    now = world.events[-1].time
    first_step(world, ranks, now + _SETTLED)


def steps_a_second(systems: Sequence[System]) -> dict[str, list[float]]:
    """Return the steps a second of a world that does not change, of launchers in turn.

    Nothing is saved meanwhile: hopsgpu's checkpoints go to HDFS, torchrun's to a local file.
    """
    rates: dict[str, list[float]] = {system.name: [] for system in systems}
    for _ in range(STEPS_ROUNDS):
        for system in systems:
            with system.world(STEPS_WORKERS, STEPS_WORKERS) as world:
                began = first_step(world, STEPS_WORKERS, 0.0) + _SETTLED
                first_step(world, STEPS_WORKERS, began + STEPS_SECONDS)
                rates[system.name].append(rate(world.events, began, began + STEPS_SECONDS))
    return rates


def rate(events: Iterable[Event], since: float, until: float) -> float:
    """Return rank 0's steps a second between two times."""
    steps = [e for e in events if e.event == "step" and e.rank == 0 and since <= e.time <= until]
    return (steps[-1].step - steps[0].step) / (steps[-1].time - steps[0].time)


def long_run(
    ours: Elastic, seconds: float = LONG_SECONDS, changes: int = LONG_CHANGES
) -> dict[str, float]:
    """Return how much of the GPU time that a run with changes held was training, and print it.

    Args:
        ours: hopsgpu, which itself asks for an executor in the place of one that is lost.
        seconds: of the run, from the first step.
        changes: number of losses and gains, half of them losses.
    """
    losses = changes // 2
    with ours.world(LEAST, MOST) as world:
        began = first_step(world, MOST, 0.0)
        held = -world.held_seconds()
        for loss in range(1, losses + 1):
            first_step(world, MOST, began + loss * seconds / (losses + 1))
            first_step(world, LEAST, world.remove())
        ended = first_step(world, MOST, began + seconds)
        held += world.held_seconds()
        trained = training_seconds(world.events, began, ended)
        sizes = sizes_of(world.events)
    share = trained / held
    print(
        f"\n{ours.name}: {share:.1%} of {held:.0f} GPU seconds held were training, in a run of"
        f" {ended - began:.0f} s whose worlds had {sizes} ranks"
        f" (target: {TRAINING_SHARE:.0%}, {_met(share >= TRAINING_SHARE)})"
    )
    return {"held": held, "trained": trained, "share": share}


def sizes_of(events: Iterable[Event]) -> list[int]:
    """Return the sizes of the worlds in which steps were made, in order."""
    worlds = [event.world for event in events if event.event == "step"]
    return [world for world, before in pairwise([*worlds, 0]) if world != before]


def training_seconds(events: Iterable[Event], since: float, until: float) -> float:
    """Return the seconds that ranks spent on steps, summed over the ranks.

    A rank trains between two notes of steps, of the same process and world, that are not further
    apart than a second, with no other note of the process between them.
    """
    by_process: dict[int, list[Event]] = {}
    for event in events:
        if since <= event.time <= until:
            by_process.setdefault(event.pid, []).append(event)
    return sum(
        later.time - earlier.time
        for notes in by_process.values()
        for earlier, later in pairwise(notes)
        if _goes_on(earlier, later)
    )


def _goes_on(earlier: Event, later: Event) -> bool:
    return (
        earlier.event == later.event == "step"
        and earlier.world == later.world
        and later.time - earlier.time <= _GAP
    )


def show(found: Mapping[str, Sequence[Change]]) -> None:
    """Print the tables of the changes."""
    heading(f"from a killed member of {MOST} to the first step of {LEAST}, seconds")
    for name, each in found.items():
        row(name, [change.shrink for change in each])
        noticed = [change.noticed for change in each if change.noticed is not None]
        if noticed:
            row("  of it, until it was noticed", noticed)
            row("  beyond noticing", [change.beyond for change in each])
    heading(f"from a ready member to the first step of {MOST}, seconds")
    for name, each in found.items():
        row(name, [change.grow for change in each])


def _compare(ours: Sequence[Change], others: Mapping[str, Sequence[Change]]) -> None:
    """Print how our changes stand against the targets."""
    print()
    kinds: tuple[tuple[str, Callable[[Change], float]], ...] = (
        (f"{MOST} to {LEAST}, from the kill", lambda change: change.shrink),
        (f"{MOST} to {LEAST}, beyond noticing", lambda change: change.beyond),
        (f"{LEAST} to {MOST}, from ready", lambda change: change.grow),
    )
    for kind, seconds in kinds:
        for title, systems in (("as it comes", DEFAULTS), ("of all", (*DEFAULTS, *SHORT))):
            names = [s.name for s in systems if s.name in others]
            medians = {name: _median(others[name], seconds) for name in names}
            if not medians:
                print(f"{kind}: no rival to compare with")
                continue
            best = min(medians, key=lambda name: medians[name])
            ratio = medians[best] / _median(ours, seconds)
            print(
                f"{kind}: {ratio:.1f} times faster than the best {title}, {best}"
                f" (target: {TIMES_FASTER:g}, {_met(ratio >= TIMES_FASTER)})"
            )
    for kind, seconds, most in (
        (*kinds[1], SHRINK_SECONDS),
        (*kinds[2], GROW_SECONDS),
    ):
        took = _median(ours, seconds)
        print(f"{kind}: {took:.2f} s (target: at most {most:g}, {_met(took <= most)})")


def _median(each: Sequence[Change], seconds: Callable[[Change], float]) -> float:
    return statistics.median(seconds(change) for change in each)


def _show_rates(rates: Mapping[str, Sequence[float]], ours: System) -> None:
    heading(f"DDP on gloo, {STEPS_WORKERS} ranks, no checkpoints, steps a second")
    for name, each in rates.items():
        row(name, each)
    rival = statistics.median(rates[DEFAULTS[0].name])
    ratio = statistics.median(rates[ours.name]) / rival
    print(
        f"\n{ratio:.3f} of torchrun's steps a second"
        f" (target: {STEPS_RATIO}, {_met(ratio >= STEPS_RATIO)})"
    )


def _met(met: bool) -> str:
    return "met" if met else "MISSED"
