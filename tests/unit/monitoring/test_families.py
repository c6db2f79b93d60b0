"""What an observation becomes as Prometheus' text."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from hopsgpu.cluster_managers.cluster_gpus import ClusterGpus, GpuNode, GpuQueue, GpuType, GpuUser
from hopsgpu.core.end_reason import EndReason
from hopsgpu.core.gpu_use import GpuUse
from hopsgpu.core.queue_policy import Bound, Ticket, queue_tag
from hopsgpu.monitoring.exposition import LookCollector
from hopsgpu.monitoring.families import METRICS, families
from hopsgpu.monitoring.observation import Look, SourceState, WaitingGang, WaitingGangs
from hopsgpu.monitoring.run_digest import GpuReading, RunDigest, ScoreProgress
from hopsgpu.monitoring.run_totals import RunTotals
from hopsgpu.monitoring.runs_reader import LiveRun, RunsView

NOW = 1_795_300_000.0
A100 = GpuType("NVIDIA A100", 81559, 4)
SLICED = GpuType("NVIDIA A100 MIG 1g.10gb", 9728, 14, parents=2)
CLUSTER = ClusterGpus(
    time=NOW,
    user="hopsgpu",
    nodes=(
        GpuNode("node1", "RUNNING", "", (A100,), "550", 4, 3, 1, 0, ""),
        GpuNode("node2", "UNHEALTHY", "", (), "", 2, 1, 0, 1, "ERROR"),
        GpuNode("node3", "DECOMMISSIONING", "slow", (), "", 2, 0, 0, 0, ""),
    ),
    nodes_without=3,
    users=(
        GpuUser("application_1", "x", "bob", "root.a", 2, None, 1.0, {"node1": 2}),
        GpuUser("application_2", "y", "bob", "root.b", 1, None, 1.0, {"node2": 1}),
        GpuUser("application_3", "z", "eve\n", "root.a", 1, None, 1.0, {}),
    ),
    queues=(
        GpuQueue("root", "", "RUNNING", False, 8, 8, 4, 3, None, "", ""),
        GpuQueue("root.a", "", "RUNNING", True, 4, 6, 3, 3, 1, "user", "root.a"),
        GpuQueue("root.b", "slow", "STOPPED", True, 2, 2, 1, None, 0, "state", ""),
    ),
    unexplained=0,
    acls=True,
    executor="1 GPU",
    problems=(),
)
RUN = RunDigest("fit-1", "alice", "a", "running", None, NOW, 2, GpuUse(), trains_since=NOW - 600)
READING = GpuReading(0, "node1", "GPU-a", 0.5, 2.0**30, 2.0**34, 250.0)
UP = {"runs": SourceState(True, 0.25), "queue": SourceState(False, 8.0, "no answer in time")}

_ids = itertools.count()


def ticket(
    queue: str, seconds: float, bound: Bound = Bound.CLUSTER, is_growth: bool = False, gpus: int = 2
) -> WaitingGang:
    filed = int((NOW - seconds) * 1000)
    one = Ticket(filed, f"{next(_ids):08x}", is_growth, 3, gpus, queue_tag(queue), bound, 0, "app")
    return WaitingGang(one, seconds)


def live(digest: RunDigest, state: str = "", saved: float | None = None) -> LiveRun:
    return LiveRun(digest, f"root.{digest.queue}", state or digest.state, saved)


def nonzero(series: Mapping[tuple[str, ...], float]) -> dict[tuple[str, ...], float]:
    return {labels: value for labels, value in series.items() if value}


class Given:
    """Gives a look that a test made."""

    def __init__(self, look: Look) -> None:
        self.given = look
        self.asked = 0

    def look(self) -> Look:
        self.asked += 1
        return self.given


def samples(look: Look) -> dict[str, dict[tuple[str, ...], float]]:
    """Value by labels, by the name of the sample, as Prometheus' own parser reads the text."""
    registry = CollectorRegistry()
    registry.register(LookCollector(Given(look)))
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            labels = tuple(value for _, value in sorted(sample.labels.items()))
            series = found.setdefault(sample.name, {})
            assert labels not in series, f"{sample.name}{sample.labels} is there twice"
            series[labels] = sample.value
    return found


def look_at(*runs: LiveRun, totals: RunTotals | None = None, **more: int) -> Look:
    view = RunsView(runs, (totals or RunTotals()).snapshot(), **more)
    return Look(NOW, UP, runs=view)


def test_types_have_their_memory_and_mig_devices_the_number_of_their_gpus() -> None:
    assert samples(Look(NOW, UP, gpus=CLUSTER))["hopsgpu_gpu_memory_bytes"] == {
        ("node1", "NVIDIA A100"): 81559.0 * 2**20
    }
    unknown = GpuType("other", None, 1)
    node = dataclasses.replace(CLUSTER.nodes[0], types=(SLICED, unknown))
    families = samples(Look(NOW, UP, gpus=dataclasses.replace(CLUSTER, nodes=(node,))))
    assert families["hopsgpu_mig_parent_gpus"] == {("node1", "NVIDIA A100 MIG 1g.10gb"): 2.0}
    assert families["hopsgpu_gpu_memory_bytes"] == {
        ("node1", "NVIDIA A100 MIG 1g.10gb"): 9728.0 * 2**20
    }


def test_each_gpu_of_a_node_is_in_one_state() -> None:
    found = samples(Look(NOW, UP, gpus=CLUSTER))["hopsgpu_gpus"]
    # Labels in the order of their names: label, node, queue, state, type.
    assert {labels: value for labels, value in found.items() if value} == {
        ("", "node1", "root.a", "used", "NVIDIA A100"): 2.0,
        ("", "node1", "", "used", "NVIDIA A100"): 1.0,
        ("", "node1", "", "free", "NVIDIA A100"): 1.0,
        ("", "node2", "root.b", "used", ""): 1.0,
        ("", "node2", "", "unhealthy", ""): 1.0,
        ("slow", "node3", "", "unavailable", ""): 2.0,
    }
    assert sum(found.values()) == CLUSTER.total


@pytest.mark.parametrize("count", [0, 1, 3, 100])
def test_gpus_that_are_held_aside_are_not_used_too(count: int) -> None:
    aside = dataclasses.replace(RUN, state="waiting", trains_since=None, aside={"node1": count})
    look = dataclasses.replace(look_at(live(aside)), gpus=CLUSTER)
    by_state: Counter[str] = Counter()
    for labels, value in samples(look)["hopsgpu_gpus"].items():
        if labels[1] == "node1":
            by_state[labels[3]] += int(value)
    held = min(count, 3)
    assert by_state == Counter(held_aside=held, used=3 - held, free=1, unhealthy=0, unavailable=0)


def test_what_users_and_leaf_queues_have() -> None:
    found = samples(Look(NOW, UP, gpus=CLUSTER, answering={"node1": True, "node2": False}))
    assert found["hopsgpu_user_gpus"] == {
        ("root.a", "bob"): 2.0,
        ("root.b", "bob"): 1.0,
        ("root.a", "eve?"): 1.0,
    }
    assert found["hopsgpu_queue_gpus_used"] == {("", "root.a"): 3.0, ("slow", "root.b"): 1.0}
    assert found["hopsgpu_queue_gpus_pending"] == {("", "root.a"): 3.0}
    assert found["hopsgpu_queue_gpus_guaranteed"]["", "root.a"] == 4.0
    assert found["hopsgpu_queue_gpus_maximum"]["", "root.a"] == 6.0
    assert found["hopsgpu_node_manager_up"] == {("node1",): 1.0, ("node2",): 0.0}


def test_gangs_that_wait() -> None:
    waiting = (
        ticket("root.a", 30.0),
        ticket("root.a", 90.0),
        ticket("root.a", 10.0, Bound.QUEUE, is_growth=True, gpus=1),
        ticket("root.removed", 5.0, Bound.USER),
    )
    found = samples(Look(NOW, UP, gpus=CLUSTER, queue=WaitingGangs(waiting, 0)))
    # Labels in the order of their names: bound, kind, queue, state.
    assert nonzero(found["hopsgpu_waiting_gangs"]) == {
        ("cluster", "start", "root.a", "queued"): 2.0,
        ("queue", "growth", "root.a", "queued"): 1.0,
        ("user", "start", "unknown", "queued"): 1.0,
    }
    first = ("cluster", "start", "root.a", "queued")
    assert found["hopsgpu_waiting_gang_gpus"][first] == 12.0
    assert found["hopsgpu_waiting_gang_oldest_seconds"][first] == 90.0


WAITING_METRICS = (
    "hopsgpu_waiting_gangs",
    "hopsgpu_waiting_gang_gpus",
    "hopsgpu_waiting_gang_oldest_seconds",
)


def waiting_run(application: str, seconds: float, queue: str = "a") -> LiveRun:
    return live(
        dataclasses.replace(
            RUN,
            queue=queue,
            state="waiting",
            trains_since=None,
            waits_since=NOW - seconds,
            application=application,
        )
    )


@pytest.mark.parametrize(
    ("runs", "tickets", "acquiring"),
    [
        ((), 0, {}),
        ([waiting_run("app", 40.0)], 0, {"root.a": (1.0, 2.0, 40.0)}),
        ([waiting_run("app", 40.0)], 1, {}),
        # The ticket is that of a run of another application.
        ([waiting_run("other", 40.0)], 1, {"root.a": (1.0, 2.0, 40.0)}),
        # One of two asks YARN.
        ([waiting_run("app", 40.0), waiting_run("app", 7.0)], 1, {"root.a": (1.0, 2.0, 40.0)}),
        ([waiting_run("app", 5.0, "gone")], 0, {"unknown": (1.0, 2.0, 5.0)}),
        ([live(RUN)], 0, {}),
        ([live(waiting_run("app", 40.0).digest, "lost")], 0, {}),
        # On a local master.
        ([dataclasses.replace(waiting_run("local-1", 40.0), queue="")], 0, {}),
    ],
)
def test_waiting_runs_without_a_ticket_are_acquiring(
    runs: Sequence[LiveRun], tickets: int, acquiring: dict[str, tuple[float, ...]]
) -> None:
    waiting = tuple(ticket("root.a", 30.0) for _ in range(tickets))
    look = dataclasses.replace(look_at(*runs), gpus=CLUSTER, queue=WaitingGangs(waiting, 0))
    found = samples(look)
    numbers = {
        labels[2]: tuple(found[name][labels] for name in WAITING_METRICS)
        for labels, value in nonzero(found["hopsgpu_waiting_gangs"]).items()
        if labels[3] == "acquiring"
    }
    assert numbers == acquiring


def test_growth_in_the_queue_does_not_hide_a_run_that_acquires() -> None:
    growth = ticket("root.a", 10.0, is_growth=True)
    run = waiting_run("app", 40.0)
    look = dataclasses.replace(look_at(run), gpus=CLUSTER, queue=WaitingGangs((growth,), 0))
    assert nonzero(samples(look)["hopsgpu_waiting_gangs"]) == {
        ("cluster", "growth", "root.a", "queued"): 1.0,
        ("none", "start", "root.a", "acquiring"): 1.0,
    }


def test_gauges_of_queues_have_samples_when_nothing_waits_or_runs() -> None:
    idle = samples(dataclasses.replace(look_at(), gpus=CLUSTER, queue=WaitingGangs((), 0)))
    busy = samples(
        dataclasses.replace(
            look_at(live(RUN), waiting_run("app", 40.0)),
            gpus=CLUSTER,
            queue=WaitingGangs((ticket("root.b", 30.0, Bound.USER),), 0),
        )
    )
    for name in (*WAITING_METRICS, "hopsgpu_runs"):
        assert set(idle[name].values()) == {0.0}
        assert idle[name].keys() == busy[name].keys()
        assert nonzero(busy[name])
    assert {labels[2] for labels in idle["hopsgpu_waiting_gangs"]} == {"root.a", "root.b"}


def test_files_that_do_not_count_are_counted() -> None:
    found = samples(dataclasses.replace(look_at(), queue=WaitingGangs((), 3)))
    assert found["hopsgpu_ignored_queue_files"] == {(): 3.0}


def test_runs_that_go_on_have_series_of_their_own() -> None:
    waits = dataclasses.replace(
        RUN, run_id="fit-2", state="waiting", trains_since=None, waits_since=NOW - 45.0
    )
    trains = dataclasses.replace(RUN, readings=(READING,))
    saved = dataclasses.replace(RUN, run_id="fit-3")
    gone = dataclasses.replace(waits, run_id="fit-4", readings=(READING,))
    found = samples(
        look_at(live(trains), live(waits), live(saved, saved=NOW - 100.0), live(gone, "lost"))
    )
    assert found["hopsgpu_runs"] == {
        ("root.a", "running"): 2.0,
        ("root.a", "waiting"): 1.0,
        ("root.a", "lost"): 1.0,
    }
    assert found["hopsgpu_run_waiting_seconds"] == {("root.a", "fit-2", "alice"): 45.0}
    assert found["hopsgpu_run_unsaved_seconds"] == {
        ("root.a", "fit-1", "alice"): 600.0,
        ("root.a", "fit-3", "alice"): 100.0,
    }
    labels = ("GPU-a", "node1", "0", "fit-1")
    assert found["hopsgpu_gpu_utilisation_ratio"] == {labels: 0.5}
    assert found["hopsgpu_gpu_memory_used_bytes"] == {labels: 2.0**30}
    assert found["hopsgpu_gpu_memory_size_bytes"] == {labels: 2.0**34}
    assert found["hopsgpu_gpu_power_watts"] == {labels: 250.0}


def test_a_score_that_goes_on_has_its_rows() -> None:
    score = dataclasses.replace(RUN, trains_since=None, score=ScoreProgress(300, 600, 1))
    gone = dataclasses.replace(score, run_id="fit-2")
    found = samples(look_at(live(score), live(gone, "lost")))
    assert found["hopsgpu_score_rows"] == {
        ("root.a", "fit-1", "scored", "alice"): 300.0,
        ("root.a", "fit-1", "left", "alice"): 600.0,
    }
    assert found["hopsgpu_score_failed_parts"] == {("root.a", "fit-1", "alice"): 1.0}
    assert "hopsgpu_run_unsaved_seconds" not in found


def test_a_run_on_cpus_is_not_asked_for_checkpoints() -> None:
    found = samples(look_at(live(dataclasses.replace(RUN, gpus=0))))
    assert "hopsgpu_run_unsaved_seconds" not in found


def ended_run(totals: RunTotals) -> None:
    run = dataclasses.replace(
        RUN,
        state="failed",
        reason=EndReason.USER_ERROR,
        use=GpuUse(held=30, training=20, publishing=0, waited=8),
        waited=4.0,
        started=700.0,
        released=0.3,
    )
    totals.take("a", run, "root.a", is_old=False)


def test_counters_and_histograms() -> None:
    totals = RunTotals()
    ended_run(totals)
    found = samples(look_at(totals=totals, unreadable_records=3, unreadable_roots=2))
    # Labels in the order of their names: kind, queue, (state,) user.
    assert found["hopsgpu_gpu_seconds_total"] == {
        ("training", "root.a", "alice"): 20.0,
        ("publishing", "root.a", "alice"): 0.0,
        ("idle", "root.a", "alice"): 10.0,
    }
    assert found["hopsgpu_ended_gpu_seconds_total"]["training", "root.a", "failed", "alice"] == 20.0
    assert found["hopsgpu_waited_gpu_seconds_total"] == {("root.a", "alice"): 8.0}
    assert found["hopsgpu_run_ends_total"]["root.a", "user_error"] == 1.0
    assert set(found["hopsgpu_run_ends_total"]) == {("root.a", one.value) for one in EndReason}
    buckets = found["hopsgpu_waiting_seconds_bucket"]
    assert (buckets["1.0", "root.a"], buckets["5.0", "root.a"]) == (0.0, 1.0)
    assert found["hopsgpu_waiting_seconds_sum"] == {("root.a",): 4.0}
    # One above the last bound.
    assert found["hopsgpu_starting_seconds_bucket"]["600.0", "root.a"] == 0.0
    assert found["hopsgpu_starting_seconds_bucket"]["+Inf", "root.a"] == 1.0
    assert found["hopsgpu_release_seconds_count"] == {("root.a",): 1.0}
    assert found["hopsgpu_unreadable_records"] == {(): 3.0}
    assert found["hopsgpu_unreadable_roots"] == {(): 2.0}


def test_what_did_not_answer_has_no_numbers_but_that() -> None:
    found = samples(Look(NOW, UP))
    assert found == {
        "hopsgpu_up": {("runs",): 1.0, ("queue",): 0.0},
        "hopsgpu_look_seconds": {("runs",): 0.25, ("queue",): 8.0},
    }


EVIL = 'x\n# TYPE hopsgpu_up gauge\nhopsgpu_up 7\r\x00\x1b[2J"\\{}=,' + "y" * 10_000


def test_names_of_strangers_are_values_of_labels_and_nothing_else() -> None:
    run = dataclasses.replace(
        RUN,
        run_id=EVIL,
        user=EVIL,
        queue=EVIL,
        aside={EVIL: 1},
        readings=(dataclasses.replace(READING, host=EVIL, gpu="\ud800"),),
    )
    waits = dataclasses.replace(run, state="waiting", waits_since=NOW, trains_since=None)
    totals = RunTotals()
    totals.take("a", run, EVIL, is_old=False)
    user = dataclasses.replace(CLUSTER.users[0], user=EVIL, queue=EVIL, hosts={"node1": 1})
    cluster = dataclasses.replace(CLUSTER, users=(user,))
    look = dataclasses.replace(look_at(live(run), live(waits), totals=totals), gpus=cluster)
    found = samples(look)
    assert found["hopsgpu_up"] == {("runs",): 1.0, ("queue",): 0.0}
    names = [name for series in found.values() for labels in series for name in labels]
    assert max(map(len, names)) <= 100
    assert all(name.isprintable() for name in names)


def test_names_that_are_the_same_once_cleaned_are_added_up() -> None:
    def run(name: str) -> LiveRun:
        return live(dataclasses.replace(RUN, run_id=name, user=name, queue=name))

    found = samples(look_at(run("a\n"), run("a\t")))
    assert found["hopsgpu_runs"] == {("root.a?", "running"): 2.0}
    assert found["hopsgpu_run_unsaved_seconds"] == {("root.a?", "a?", "a?"): 600.0}


def test_series_are_of_a_bounded_number() -> None:
    readings = tuple(dataclasses.replace(READING, rank=rank) for rank in range(4096))
    runs = [
        live(
            dataclasses.replace(
                RUN, run_id=f"fit-{n}", user=f"u{n}", queue=f"q{n}", readings=readings[: 4096 // 8]
            )
        )
        for n in range(2500)
    ]
    found = samples(look_at(*runs))
    assert len(found["hopsgpu_run_unsaved_seconds"]) == 2000
    assert len(found["hopsgpu_gpu_utilisation_ratio"]) == 16_384
    assert len(found["hopsgpu_runs"]) == 201 and sum(found["hopsgpu_runs"].values()) == 2500
    assert found["hopsgpu_runs_without_series"] == {(): 500.0}


def whole_look() -> Look:
    """A look in which each metric has a value."""
    totals = RunTotals()
    ended_run(totals)
    waits = dataclasses.replace(RUN, state="waiting", waits_since=NOW, trains_since=None)
    trains = dataclasses.replace(RUN, readings=(READING,))
    score = dataclasses.replace(RUN, run_id="score-1", score=ScoreProgress(300, 600, 1))
    node = dataclasses.replace(CLUSTER.nodes[0], types=(A100, SLICED))
    return dataclasses.replace(
        look_at(live(trains), live(waits), live(score), totals=totals),
        gpus=dataclasses.replace(CLUSTER, nodes=(node, *CLUSTER.nodes[1:])),
        answering={"node1": True},
        queue=WaitingGangs((ticket("root.a", 30.0),), 1),
    )


def test_all_metrics_and_no_others_are_in_the_list() -> None:
    found = {family.name: family for family in families(whole_look())}
    told = {info.name.removesuffix("_total"): info for info in METRICS}
    assert found.keys() == told.keys() and len(told) == len(METRICS)
    for name, family in found.items():
        info = told[name]
        assert (family.type, family.documentation) == (info.kind, info.text)
        assert family.samples, name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(info.labels)
            assert math.isfinite(sample.value)


def test_looks_that_follow_at_once_are_one() -> None:
    given = Given(whole_look())
    collector = LookCollector(given)
    for _ in range(3):
        assert list(collector.collect())
    assert given.asked == 1
