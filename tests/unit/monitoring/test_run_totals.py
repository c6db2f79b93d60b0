"""What is added up of runs: what is new, once, and never less."""

from __future__ import annotations

from dataclasses import replace

from hopsgpu.core.end_reason import EndReason
from hopsgpu.core.gpu_use import GpuUse
from hopsgpu.monitoring.labels import OTHER, BoundedNames, clean
from hopsgpu.monitoring.run_digest import RunDigest
from hopsgpu.monitoring.run_totals import Histogram, RunTotals

NOW = 1_795_300_000.0
RUN = RunDigest("fit-1", "alice", "default", "running", None, NOW, 2, GpuUse(held=10, training=6))
ENDED = replace(
    RUN,
    state="succeeded",
    reason=EndReason.SUCCEEDED,
    use=GpuUse(held=30, training=20, publishing=5, waited=8),
    waited=4.0,
    started=1.0,
    released=0.3,
)


def seconds(totals: RunTotals, *names: str) -> dict[str, float]:
    """GPU seconds of a user in a queue, by kind, those that are not 0."""
    found = totals.snapshot().gpu_seconds.items()
    return {key[2]: value for key, value in found if key[:2] == names and value}


def ends(totals: RunTotals) -> dict[tuple[str, ...], float]:
    return {key: value for key, value in totals.snapshot().ends.items() if value}


def test_what_is_new_counts_once() -> None:
    totals = RunTotals()
    totals.take("a", RUN, "root.a", is_old=False)
    totals.take("a", RUN, "root.a", is_old=False)
    assert seconds(totals, "alice", "root.a") == {"training": 6.0, "idle": 4.0}
    for _ in range(2):
        totals.take("a", ENDED, "root.a", is_old=False)
    assert seconds(totals, "alice", "root.a") == {"training": 20, "publishing": 5, "idle": 5}
    found = totals.snapshot()
    assert found.waited == {("alice", "root.a"): 8.0}
    assert ends(totals) == {("root.a", "succeeded"): 1.0}
    assert {key[2:]: n for key, n in found.ended_gpu_seconds.items() if n} == {
        ("succeeded", "training"): 20.0,
        ("succeeded", "publishing"): 5.0,
        ("succeeded", "idle"): 5.0,
    }
    assert found.waiting["root.a",].total == 4.0 and sum(found.waiting["root.a",].counts) == 1
    assert found.starting["root.a",].total == 1.0 and found.release["root.a",].total == 0.3


def test_what_was_before_the_first_look_does_not_count() -> None:
    totals = RunTotals()
    totals.take("a", RUN, "root.a", is_old=True)
    totals.take("b", ENDED, "root.a", is_old=True)
    totals.take("b", ENDED, "root.a", is_old=False)
    assert seconds(totals, "alice", "root.a") == {} and ends(totals) == {}
    assert totals.snapshot().waiting == {}
    # The counters are there, so that their first increase shows.
    assert totals.snapshot().gpu_seconds["alice", "root.a", "training"] == 0.0
    assert totals.snapshot().ends["root.a", "user_error"] == 0.0
    totals.take("a", ENDED, "root.a", is_old=False)
    assert seconds(totals, "alice", "root.a") == {"training": 14.0, "publishing": 5, "idle": 1.0}
    assert ends(totals) == {("root.a", "succeeded"): 1.0}


def test_a_run_that_changes_its_user_and_queue_counts_where_it_is() -> None:
    totals = RunTotals()
    totals.take("a", RUN, "root.a", is_old=False)
    totals.take("a", replace(ENDED, user="mallory"), "root.b", is_old=False)
    assert seconds(totals, "alice", "root.a") == {"training": 6.0, "idle": 4.0}
    assert seconds(totals, "mallory", "root.b") == {"training": 14.0, "publishing": 5, "idle": 1.0}
    assert ends(totals) == {("root.b", "succeeded"): 1.0}


def test_seconds_that_fall_take_nothing_back() -> None:
    totals = RunTotals()
    totals.take("a", ENDED, "root.a", is_old=False)
    totals.take("a", RUN, "root.a", is_old=False)
    totals.take("a", ENDED, "root.a", is_old=False)
    assert seconds(totals, "alice", "root.a") == {"training": 20, "publishing": 5, "idle": 5}
    assert ends(totals) == {("root.a", "succeeded"): 1.0}


def test_the_time_of_an_upload_is_not_idle() -> None:
    """While it goes on, records have it so."""
    totals = RunTotals()
    totals.take("a", RUN, "root.a", is_old=False)
    during = replace(RUN, state="publishing", use=GpuUse(held=25, training=20))
    totals.take("a", during, "root.a", is_old=False)
    assert seconds(totals, "alice", "root.a") == {"training": 20.0, "idle": 4.0}
    totals.take("a", ENDED, "root.a", is_old=False)
    assert sum(seconds(totals, "alice", "root.a").values()) == ENDED.use.held


def test_a_run_that_gave_up_waiting_is_in_no_histogram() -> None:
    totals = RunTotals()
    late = replace(
        RUN, state="failed", reason=EndReason.NOT_GRANTED, use=GpuUse(waited=1200.0), waited=None
    )
    totals.take("a", late, "root.a", is_old=False)
    assert ends(totals) == {("root.a", "not_granted"): 1.0}
    assert totals.snapshot().waiting == {}


def test_a_lost_run_counts_once_even_if_it_comes_back() -> None:
    totals = RunTotals()
    totals.take("a", RUN, "root.a", is_old=False)
    totals.take("a", RUN, "root.a", is_old=False, is_gone=True)
    assert ends(totals) == {("root.a", "lost"): 1.0}
    ended = totals.snapshot().ended_gpu_seconds
    assert ended["alice", "root.a", "lost", "training"] == 6.0
    totals.take("a", ENDED, "root.a", is_old=False)
    assert ends(totals) == {("root.a", "lost"): 1.0}
    assert sum(seconds(totals, "alice", "root.a").values()) == ENDED.use.held
    totals.take("b", RUN, "root.a", is_old=True, is_gone=True)
    totals.take("b", RUN, "root.a", is_old=False, is_gone=True)
    assert ends(totals) == {("root.a", "lost"): 1.0}


def test_a_search_that_is_resumed_counts_again() -> None:
    totals = RunTotals()
    for _ in range(2):
        totals.take("a", replace(ENDED, requested=NOW - 90.0), "root.a", is_old=False)
    # Its record begins anew, with less than was counted of the run before.
    again = replace(RUN, requested=NOW)
    totals.take("a", again, "root.a", is_old=False)
    assert seconds(totals, "alice", "root.a") == {"training": 26, "publishing": 5, "idle": 9}
    assert ends(totals) == {("root.a", "succeeded"): 1.0}
    for _ in range(2):
        totals.take("a", replace(ENDED, requested=NOW), "root.a", is_old=False)
    assert seconds(totals, "alice", "root.a") == {"training": 40, "publishing": 10, "idle": 10}
    found = totals.snapshot()
    assert found.waited == {("alice", "root.a"): 16.0}
    assert ends(totals) == {("root.a", "succeeded"): 2.0}
    assert found.ended_gpu_seconds["alice", "root.a", "succeeded", "training"] == 40.0
    assert sum(found.waiting["root.a",].counts) == 2


def test_a_lost_search_that_is_resumed_counts_as_lost_and_as_what_it_became() -> None:
    totals = RunTotals()
    totals.take("a", replace(RUN, requested=NOW - 90.0), "root.a", is_old=True, is_gone=True)
    totals.take("a", replace(ENDED, requested=NOW), "root.a", is_old=False)
    assert ends(totals) == {("root.a", "succeeded"): 1.0}
    assert sum(seconds(totals, "alice", "root.a").values()) == ENDED.use.held
    totals.take("b", replace(RUN, requested=NOW - 90.0), "root.b", is_old=False, is_gone=True)
    totals.take("b", replace(ENDED, requested=NOW), "root.b", is_old=False)
    assert ends(totals)["root.b", "lost"] == ends(totals)["root.b", "succeeded"] == 1.0


def test_a_removed_run_is_forgotten_and_what_it_counted_stays() -> None:
    totals = RunTotals()
    totals.take("a", ENDED, "root.a", is_old=False)
    totals.forget("a")
    totals.forget("never seen")
    assert seconds(totals, "alice", "root.a") == {"training": 20, "publishing": 5, "idle": 5}


def test_a_held_gang_adds_idle_seconds() -> None:
    totals = RunTotals()
    totals.take_held("gang", "alice", "root.a", GpuUse(held=100.0), is_old=True)
    totals.take_held("gang", "alice", "root.a", GpuUse(held=140.0, waited=3.0), is_old=False)
    assert seconds(totals, "alice", "root.a") == {"idle": 40.0}
    assert totals.snapshot().waited["alice", "root.a"] == 3.0
    assert ends(totals) == {}


def test_users_and_queues_are_of_a_bounded_number() -> None:
    totals = RunTotals()
    for number in range(3000):
        run = replace(ENDED, user=f"user{number}")
        totals.take(number, run, f"root.q{number % 500}", is_old=False)
    found = totals.snapshot()
    assert len({key[:2] for key in found.gpu_seconds}) == 1001
    assert len({key[0] for key in found.ends}) <= 201
    assert sum(found.gpu_seconds.values()) == 3000 * 30
    assert found.gpu_seconds[OTHER, OTHER, "training"] > 0
    assert sum(found.ends.values()) == 3000


def test_a_histogram_has_each_value_in_one_bucket() -> None:
    found = Histogram.empty((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 99.0):
        found = found.after(value)
    assert (found.counts, found.total) == ((2, 2, 1), 104.0)


def test_names_of_strangers_are_cleaned() -> None:
    assert clean("alice") == "alice"
    assert clean('a\nb\x1b[31m"\\') == 'a?b?[31m"\\'
    assert clean("ü" * 10_000) == "ü" * 99 + "…"
    assert clean("\ud800").encode() == b"?"
    names = BoundedNames(2)
    assert [names.name(text) for text in "abcab"] == ["a", "b", OTHER, "a", "b"]
