"""The replay of a trace: small cases computed by hand, and what holds for every trace."""

from __future__ import annotations

import functools
import random
from collections import defaultdict
from collections.abc import Sequence

import pytest

from benchmarks.replay import (
    Setting,
    allowed_seconds,
    in_queue,
    is_hindered,
    one_by_one,
    setting_for,
    size_free_ratio,
    summary,
)
from benchmarks.simulation.cluster import Cluster, nodes_like_philly
from benchmarks.simulation.gang_queue import containers_for
from benchmarks.simulation.trace import Job, fitted, generate
from benchmarks.simulation.world import Costs, Record, World, unhindered_wait
from hopsgpu.cluster_managers.demand import Demand
from hopsgpu.cluster_managers.shortage import shortage
from hopsgpu.core.queue_policy import MAX_PASSES, Bound

COSTS = Costs(
    start=8.0,
    turn=1.0,
    release=0.5,
    look=0.25,
    shrink=2.0,
    growth=4.0,
    checkpoint=2.0,
    warm=0.25,
)
LOOK, START, RELEASE = COSTS.look, COSTS.start, COSTS.release


def setting(*jobs: Job, nodes: Sequence[int], queue_share: float = 1.0) -> Setting:
    return Setting(jobs, nodes, COSTS, queue_share, (0.0, 1e9))


def job(submitted: float, seconds: float, gpus: int, cluster: str = "a") -> Job:
    return Job(submitted, seconds, gpus, cluster)


def waits(records: Sequence[Record]) -> list[float | None]:
    return [record.waited for record in records]


def test_a_job_holds_its_gpus_while_it_starts_trains_and_is_released() -> None:
    (record,) = in_queue(setting(job(0, 100, 4), nodes=[8]))
    assert (record.granted, record.ended) == (LOOK, LOOK + START + 100)
    assert record.held == 4 * (START + 100 + RELEASE)
    assert record.trained == 400
    lost = {why: seconds for why, seconds in record.lost.items() if seconds}
    assert lost == {"start": 4 * START, "release": 4 * RELEASE}


@pytest.mark.parametrize(("tail", "held"), [(60.0, 168.5), (1800.0, 1908.5)])
def test_executors_that_are_held_longer_keep_others_waiting(tail: float, held: float) -> None:
    first, second = in_queue(setting(job(0, 100, 2), job(1, 100, 2), nodes=[2]), tail=tail)
    assert first.held == 2 * held
    assert second.granted == LOOK + held + LOOK


def test_gangs_are_served_in_the_order_in_which_they_came() -> None:
    jobs = [job(0, 100, 8), job(10, 100, 8), job(15, 1, 1), job(20, 100, 8)]
    records = in_queue(setting(*jobs, nodes=[8]))
    granted = [record.granted for record in records]
    assert None not in granted
    # A job of 1 GPU does not fit beside a gang that needs all GPUs, and so may not pass it.
    assert granted == sorted(granted, key=float)


def test_later_gangs_that_fit_beside_one_pass_it_a_bounded_number_of_times() -> None:
    # Later than the time in which passes are unlimited.
    small = [job(120 + 2 * number, 1, 1) for number in range(MAX_PASSES + 1)]
    records = in_queue(setting(job(100, 200, 8), job(110, 100, 8), *small, nodes=[8, 4]))
    assert waits(records[2:-1]) == [LOOK] * MAX_PASSES
    large, last = records[1], records[-1]
    assert large.granted is not None and last.granted is not None
    assert large.granted >= 300 + START
    # Then nobody passes the large one any more.
    assert last.granted == large.granted + COSTS.turn + LOOK


def test_a_gang_that_does_not_fit_holds_nothing_until_it_does() -> None:
    first, gang = in_queue(setting(job(0, 700, 8), job(0, 100, 16), nodes=[8, 8]))
    assert first.granted == LOOK and first.held == 8 * (START + 700 + RELEASE)
    assert gang.held == 16 * (START + 100 + RELEASE)
    assert gang.granted == LOOK + START + 700 + RELEASE + LOOK


def test_a_queue_at_its_limit_does_not_keep_others_waiting() -> None:
    jobs = [job(0, 80, 2, "a"), job(5, 100, 2, "a"), job(10, 100, 2, "b")]
    records = in_queue(setting(*jobs, nodes=[2, 2], queue_share=0.5))
    assert records[2].waited == LOOK
    assert records[1].granted == LOOK + START + 80 + RELEASE + LOOK


def test_the_size_free_wait_is_that_of_one_gpu_at_the_same_place() -> None:
    jobs = [job(0, 80, 1), job(5, 100, 2), job(200, 80, 2), job(210, 100, 2)]
    records = in_queue(setting(*jobs, nodes=[2]))
    assert records[1].size_free == LOOK
    assert records[1].waited == LOOK + START + 80 + RELEASE + LOOK - 5
    assert size_free_ratio(records[1]) == records[1].waited / 60
    # Of the last, no GPU at all was free.
    assert records[3].size_free == records[3].waited
    assert size_free_ratio(records[3]) == 1
    assert size_free_ratio(Record(jobs[0])) == float("inf")


def test_the_wait_of_a_gang_is_bounded_by_what_runs_when_it_comes() -> None:
    jobs = [job(0, 100, 2), job(0, 3000, 2), job(10, 1, 4), job(20, 1, 2)]
    records = in_queue(setting(*jobs, nodes=[2, 2]))
    # Both nodes are free when the longer of the first two has ended, whatever is served when.
    ends = LOOK + COSTS.turn + LOOK + START + 3000 + RELEASE
    assert records[2].unhindered == ends - 10
    # 1 GPU would not have waited for that one.
    assert size_free_ratio(records[2]) > 10 and not is_hindered(records[2])
    # The last one waits for the gang ahead, and not for what ran when it came.
    assert records[3].unhindered == LOOK + START + 100 + RELEASE - 20
    assert is_hindered(records[3])
    counted = summary(records, setting(*jobs, nodes=[2, 2]))
    assert counted["over ten times unhindered"] == 1


def test_a_part_that_a_gang_holds_is_as_good_as_free() -> None:
    container = containers_for(Cluster([4, 4]).empty(), 4)[0]
    world = World(Cluster([4, 4]), COSTS)
    (whole,) = world.grant(Record(job(0, 1, 4)), container, 1)
    world.grant(Record(job(0, 1, 8)), container, 1)
    whole.until = 50.0
    wait = functools.partial(unhindered_wait, world.cluster.free_on, world.held.values(), 4)
    assert [wait(1, 10.0), wait(2, 10.0), wait(2, 60.0)] == [0.0, 40.0, 0.0]
    assert wait(3, 10.0) == float("inf")


def test_an_elastic_gang_gives_way_at_a_checkpoint_and_both_train_all() -> None:
    first, second = in_queue(setting(job(0, 100, 4), job(50, 100, 4), nodes=[4]), elastic=True)
    # The second one is seen, asks back, and a checkpoint is made; then the ranks stop.
    stops = 50 + LOOK + 2 + COSTS.checkpoint
    freed = stops + COSTS.shrink / 2 + RELEASE
    assert second.granted == pytest.approx(freed, abs=1)
    assert (first.trained, second.trained) == (400, 400)
    began = LOOK + START + COSTS.warm
    left = 400 - 4 * (stops - COSTS.checkpoint - began)
    assert first.ended == pytest.approx(stops + COSTS.shrink + left / 2, abs=2)


def test_an_elastic_gang_starts_with_half_and_grows_into_what_becomes_free() -> None:
    first, second = in_queue(setting(job(0, 60, 1), job(5, 4000, 2), nodes=[2]), elastic=True)
    assert second.granted == 5 + LOOK
    assert second.trained == 8000
    # Alone on 1 GPU it would train for 8,000 s, and on 2 from the start for 4,000.
    assert second.ended is not None and 4000 < second.ended < 4500
    assert first.ended == LOOK + START + 60


def test_without_a_line_two_gangs_wait_for_each_other_for_ever() -> None:
    jobs = job(0, 100, 4, "a"), job(0, 100, 4, "b")
    records = one_by_one(setting(*jobs, nodes=[4]))
    assert waits(records) == [None, None]
    assert summary(records, setting(*jobs, nodes=[4]))["never started"] == 2
    assert None not in waits(in_queue(setting(*jobs, nodes=[4])))


def test_without_a_line_a_gang_alone_has_its_executors_when_all_were_asked_for() -> None:
    (record,) = one_by_one(setting(job(0, 100, 4), nodes=[8]))
    # 1 at once, 2 after a second, 1 after another.
    assert record.granted == 2
    assert record.lost["a part"] == 2 + 2
    assert record.held == 4 * (START + 100 + 60 + RELEASE) + 4


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("policy", ["fixed", "elastic", "tail", "queues", "one by one"])
def test_no_gpu_and_no_job_is_lost(policy: str, seed: int) -> None:
    jobs = generate(fitted(), seed, 0.01)
    base = setting_for(
        [one for one in jobs if one.gpus <= 16], COSTS, gpus=48, queue_share=1.0, seed=seed
    )
    if policy == "one by one":
        records = one_by_one(base, check=True)
    else:
        share = 0.75 if policy == "queues" else 1.0
        base = Setting(base.jobs, base.node_gpus, COSTS, share, base.busy, seed=seed)
        records = in_queue(
            base, tail=60.0 * (policy == "tail"), elastic=policy == "elastic", check=True
        )
        assert None not in waits(records)
    done = [record for record in records if record.ended is not None]
    assert [record.job for record in records] == list(base.jobs)
    for record in done:
        assert record.trained == pytest.approx(record.job.gpus * record.job.seconds)
        assert record.held >= record.trained
        if policy != "elastic":
            assert record.held == pytest.approx(record.trained + sum(record.lost.values()))


def test_gangs_of_one_size_in_one_queue_are_served_in_order() -> None:
    jobs = [one for one in generate(fitted(), 3, 0.01) if one.gpus <= 8]
    by_kind: dict[tuple[int, str], list[float]] = defaultdict(list)
    for record in in_queue(setting_for(jobs, COSTS)):
        assert record.granted is not None
        by_kind[record.job.gpus, record.job.cluster].append(record.granted)
    assert sum(len(times) for times in by_kind.values()) > 300
    for times in by_kind.values():
        assert times == sorted(times)


def test_the_cluster_answers_as_a_whole_snapshot_of_it_would() -> None:
    cluster, chance = Cluster([8] * 4 + [2] * 5, queue_share=0.75), random.Random(1)
    shapes = {gpus: containers_for(cluster.empty(), gpus) for gpus in (1, 2, 4, 8, 12, 16, 32)}
    placed = []
    for _ in range(400):
        container, ranks = shapes[chance.choice(list(shapes))]
        count = chance.randint(1, 5)
        if placed and chance.random() < 0.5:
            cluster.remove(placed.pop(chance.randrange(len(placed))))
        elif cluster.bound(container, count, "a") is Bound.NONE:
            placed += cluster.place(container, count, "a")
        cluster.check()
        for gpus, (container, ranks) in shapes.items():
            whole = shortage(Demand(container, gpus // ranks), cluster.snapshot("a", 100))
            short = cluster.bound(container, gpus // ranks, "a")
            assert (short is Bound.NONE) == (whole.bound is Bound.NONE)


def test_packed_gangs_have_as_many_ranks_in_a_container_as_divide_them_and_fit() -> None:
    empty = Cluster([8] * 16).empty()
    ranks = {gpus: containers_for(empty, gpus)[1] for gpus in (1, 2, 8, 12, 16, 24, 128)}
    assert ranks == {1: 1, 2: 2, 8: 8, 12: 6, 16: 8, 24: 8, 128: 8}
    container, half = containers_for(empty, 8, 4)
    assert (container.gpus, half) == (4, 4)


def test_nodes_are_mixed_as_in_the_philly_cluster() -> None:
    nodes = nodes_like_philly(2490)
    assert (nodes.count(8), nodes.count(2)) == (231, 321)
    assert sum(nodes_like_philly(766)) == 766


def test_the_cluster_suits_the_busiest_weeks() -> None:
    day = 24 * 3600
    jobs = [job(day * number, day, 8) for number in range(40)]
    jobs += [job(day * number, day, 8) for number in range(30, 58)]
    found = setting_for(sorted(jobs, key=lambda one: one.submitted), COSTS, load=0.5)
    assert found.busy == (12 * day, 40 * day) or found.busy[0] >= 12 * day
    assert sum(found.node_gpus) >= 16


def test_what_a_start_may_take_is_the_share_of_the_training() -> None:
    # 5 % of 100 s held: 95 s are training.
    assert allowed_seconds([job(0, 95, 1), job(0, 95, 8)]) == pytest.approx(5.0)
