"""When the worlds of an elastic gang start, grow, shrink and end: decisions, with our clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hopsgpu.core.wait_reasons import (
    NO_WAIT,
    WaitReason,
    gave_all_back,
    growing,
    loading_frameworks,
    missing_executors,
    resizing,
)
from hopsgpu.launcher.elastic_policy import (
    SETTLE_SECONDS,
    DurableCheckpoints,
    ElasticPolicy,
    ElasticTerms,
    WorldEnd,
    outlook,
)

TERMS = ElasticTerms(min_executors=2, max_executors=4)


def policy(terms: ElasticTerms = TERMS, hosts: str = "", now: float = 0.0) -> ElasticPolicy:
    """Return a policy with warm executors, one on each of the hosts."""
    made = ElasticPolicy(terms, now)
    for key, host in enumerate(hosts, 1):
        arrive(made, key, host, now)
    return made


def arrive(gang: ElasticPolicy, key: int, host: str, now: float) -> None:
    gang.add_executor(key, host, now)
    gang.record_warm(key, now)


def running(terms: ElasticTerms = TERMS, hosts: str = "ab", now: float = 10.0) -> ElasticPolicy:
    """Return a policy whose world runs on these hosts since `now`."""
    gang = policy(terms, hosts)
    assert gang.decide(now).start == tuple(range(1, len(hosts) + 1))
    gang.record_entry(now)
    return gang


def test_it_asks_for_the_smallest_world_at_once_and_for_all_in_the_end() -> None:
    decision = policy().decide(0.0)
    assert (decision.wanted, decision.at_once, decision.start) == (4, 2, ())
    decision = policy(hosts="a").decide(0.0)
    assert (decision.wanted, decision.at_once, decision.start) == (4, 1, ())


def test_the_first_world_waits_some_seconds_for_more() -> None:
    gang = policy(hosts="ab")
    assert gang.decide(SETTLE_SECONDS - 0.1).start == ()
    decision = gang.decide(SETTLE_SECONDS)
    assert decision.start == (1, 2)
    assert decision.wanted == 4, "the rest is still asked for"


def test_the_first_world_waits_for_executors_that_start() -> None:
    gang = policy(hosts="ab")
    gang.starting_count = 1
    assert gang.decide(29.9).start == ()
    arrive(gang, 3, "c", 29.9)
    gang.starting_count = 0
    assert gang.decide(29.9 + SETTLE_SECONDS).start == (1, 2, 3)
    gang = policy(hosts="ab")
    gang.starting_count = 1
    assert gang.decide(30.0).start == (1, 2), "one that does not come keeps nobody waiting"


def test_a_whole_gang_starts_at_once() -> None:
    assert policy(hosts="abcd").decide(0.0).start == (1, 2, 3, 4)


def test_it_starts_once_executors_are_warm() -> None:
    gang = ElasticPolicy(TERMS, 0.0)
    for key in (1, 2):
        gang.add_executor(key, "a", 0.0)
    assert gang.decide(5.0).start == ()
    gang.record_warm(1, 5.0)
    gang.record_warm(2, 6.0)
    gang.record_warm(9, 6.0)  # one that is gone meanwhile
    assert gang.decide(6.0).start == (1, 2)


def test_it_never_has_more_than_the_largest_world() -> None:
    gang = policy(hosts="abcde")
    decision = gang.decide(0.0)
    assert (len(decision.start), len(decision.release)) == (4, 1)
    assert not decision.release & set(decision.start)


def test_a_part_that_is_too_small_is_given_back_and_asked_for_again() -> None:
    gang = policy(hosts="a")
    assert gang.decide(59.9).release == frozenset()
    decision = gang.decide(60.0, chance=0.5)
    assert (decision.wanted, decision.release) == (0, {1})
    assert gang.decide(60.1).wanted == 0, "others go first"
    assert gang.decide(75.0).wanted == 4


def test_it_grows_at_a_checkpoint_that_is_completed_after_more_have_arrived() -> None:
    gang = running()
    gang.record_checkpoint(20.0)
    arrive(gang, 3, "c", 30.0)
    decision = gang.decide(30.0)
    assert (decision.needs_checkpoint, decision.stop_reason) == (True, None)
    assert gang.decide(31.0).needs_checkpoint is False, "it asks once"
    gang.record_checkpoint(32.0)
    assert gang.decide(32.0).stop_reason is WorldEnd.GREW
    assert gang.decide(32.5).stop_reason is None, "it stops once"
    gang.record_end(WorldEnd.GREW, 33.0)
    assert gang.decide(33.0).start == (1, 2, 3), "at once"
    gang.record_entry(35.0)
    assert gang.resize_seconds == 3.0


def test_it_gives_what_it_stopped_for_although_nobody_stands_in_line_just_then() -> None:
    gang = running(hosts="abcd")
    gang.reclaimed_count = 2
    gang.decide(20.0)
    gang.record_checkpoint(21.0)
    assert gang.decide(21.0).stop_reason is WorldEnd.GAVE_WAY
    # The gang that waits has the turn, and asks YARN.
    gang.reclaimed_count = 0
    gang.record_end(WorldEnd.GAVE_WAY, 22.0)
    decision = gang.decide(22.0)
    assert (len(decision.start), len(decision.release), decision.wanted) == (2, 2, 2)


def test_a_world_follows_a_loss_at_once_also_after_a_growth_that_came_to_nothing() -> None:
    gang = running(hosts="ab")
    arrive(gang, 3, "c", 400.0)
    gang.decide(400.0)
    assert gang.decide(460.0).release == {3}, "no checkpoint came"
    gang.remove_executor(2)
    arrive(gang, 4, "b", 461.0)
    gang.record_end(WorldEnd.LOST, 461.0)
    assert gang.decide(461.0).start == (1, 4)


def test_it_does_not_take_back_at_once_what_it_gave() -> None:
    terms = replace(TERMS, interval=10.0)
    gang = running(terms, hosts="abcd")
    gang.reclaimed_count = 2
    gang.decide(20.0)
    gang.record_checkpoint(21.0)
    gang.decide(21.0)
    gang.record_end(WorldEnd.GAVE_WAY, 22.0)
    gang.decide(22.0)
    gang.reclaimed_count = 0
    assert gang.decide(40.0).wanted == 2
    assert gang.decide(62.0).wanted == 4


def test_it_does_not_ask_at_once_for_what_yarn_has_preempted() -> None:
    gang = running(hosts="abcd")
    gang.remove_executor(4)
    gang.record_end(WorldEnd.LOST, 50.0, was_preempted=True)
    decision = gang.decide(50.0)
    assert decision.start == (1, 2, 3), "with what is left, at once"
    assert decision.wanted == 3
    gang.record_entry(51.0)
    assert gang.decide(200.0).wanted == 3
    assert gang.decide(349.0).wanted == 4


def test_it_asks_at_once_for_what_was_lost_otherwise() -> None:
    gang = running(hosts="abcd")
    gang.remove_executor(4)
    gang.record_end(WorldEnd.LOST, 50.0)
    assert gang.decide(50.0).wanted == 4


def test_it_asks_at_once_for_the_smallest_world_also_after_preemption() -> None:
    gang = running(hosts="abcd")
    for key in (2, 3, 4):
        gang.remove_executor(key)
    gang.record_end(WorldEnd.LOST, 50.0, was_preempted=True)
    decision = gang.decide(50.0)
    assert (decision.wanted, decision.at_once, decision.start) == (4, 1, ())


def test_preemption_never_ends_a_run() -> None:
    gang = running(hosts="abcd")
    gang.record_end(WorldEnd.LOST, 50.0, was_preempted=True)
    assert gang.losses == 0
    gang.decide(51.0)
    gang.record_end(WorldEnd.LOST, 60.0)
    assert gang.losses == 1


def test_it_does_not_grow_more_often_than_the_interval() -> None:
    gang = running()
    arrive(gang, 3, "c", 30.0)
    gang.decide(30.0)
    gang.record_checkpoint(32.0)
    gang.decide(32.0)
    gang.record_end(WorldEnd.GREW, 33.0)
    gang.decide(33.0)
    gang.record_entry(35.0)
    assert gang.decide(36.0).wanted == 3, "none waits idle for the next growth"
    near = 33.0 + TERMS.interval - 15.0
    assert gang.decide(near).wanted == 4
    arrive(gang, 4, "d", near)
    gang.decide(near)
    gang.record_checkpoint(near + 1)
    assert gang.decide(near + 1).stop_reason is None
    late = 33.0 + TERMS.interval
    assert gang.decide(late).needs_checkpoint
    gang.record_checkpoint(late + 1)
    assert gang.decide(late + 1).stop_reason is WorldEnd.GREW


def test_executors_for_which_no_checkpoint_comes_are_given_back() -> None:
    gang = running()
    arrive(gang, 3, "c", 30.0)
    assert gang.decide(89.0).release == frozenset()
    decision = gang.decide(90.0)
    assert decision.release == {3}
    assert decision.wanted == 2
    assert gang.decide(100.0).wanted == 2, "not at once again"
    gang.record_checkpoint(900.0)
    assert gang.decide(900.0).stop_reason is None
    assert gang.decide(900.0).wanted == 4


def test_a_growth_that_costs_more_than_it_brings_is_not_made() -> None:
    gang = running(replace(TERMS, run_timeout=60.0))
    arrive(gang, 3, "c", 50.0)
    gang.decide(50.0)
    gang.record_checkpoint(51.0)
    assert gang.decide(51.0).stop_reason is None, "20 s are left, of which a third would be saved"
    gang = running(replace(TERMS, run_timeout=600.0))
    arrive(gang, 3, "c", 50.0)
    assert gang.decide(50.0).needs_checkpoint


def test_a_loss_is_followed_at_once_by_a_smaller_world() -> None:
    gang = running(hosts="abc")
    gang.remove_executor(2)
    gang.record_end(WorldEnd.LOST, 40.0)
    decision = gang.decide(40.0)
    assert (decision.start, decision.wanted) == ((1, 3), 4)
    gang.record_entry(42.0)
    arrive(gang, 4, "d", 50.0)
    assert gang.decide(50.0).needs_checkpoint, (
        "a loss is no growth: it need not wait for the interval"
    )


def test_a_loss_that_leaves_too_few_waits_for_the_missing() -> None:
    gang = running()
    gang.remove_executor(2)
    gang.record_end(WorldEnd.LOST, 40.0)
    decision = gang.decide(40.0)
    assert (decision.start, decision.wanted, decision.at_once) == ((), 4, 1)
    arrive(gang, 3, "c", 48.0)
    assert gang.decide(48.0).start == (1, 3)


def test_losses_in_a_row_are_counted_until_a_checkpoint() -> None:
    gang = running()
    for count in (1, 2):
        gang.record_end(WorldEnd.LOST, 40.0 + count)
        assert gang.losses == count
        assert gang.decide(40.0 + count).start
    gang.record_checkpoint(50.0)
    gang.record_end(WorldEnd.LOST, 51.0)
    assert gang.losses == 1


def test_it_gives_way_at_a_checkpoint_and_grows_again_later() -> None:
    gang = running(hosts="abcd")
    gang.reclaimed_count = 1
    assert gang.giving_count == 1
    decision = gang.decide(20.0)
    assert (decision.needs_checkpoint, decision.stop_reason, decision.wanted) == (
        True,
        None,
        4,
    )
    gang.record_checkpoint(21.0)
    assert gang.decide(21.0).stop_reason is WorldEnd.GAVE_WAY
    gang.record_end(WorldEnd.GAVE_WAY, 22.0)
    decision = gang.decide(22.0)
    assert (len(decision.start), len(decision.release), decision.wanted) == (3, 1, 3)
    gang.reclaimed_count = 0
    gang.record_entry(24.0)
    assert gang.decide(25.0).wanted == 3
    assert gang.decide(22.0 + TERMS.interval).wanted == 4


def test_it_gives_no_more_than_it_has_above_its_minimum() -> None:
    gang = running(hosts="abc")
    gang.reclaimed_count = 8
    assert gang.giving_count == 1
    gang.decide(20.0)
    gang.record_checkpoint(21.0)
    gang.decide(21.0)
    gang.record_end(WorldEnd.GAVE_WAY, 22.0)
    assert len(gang.decide(22.0).start) == 2
    gang.record_entry(23.0)
    assert gang.decide(24.0).needs_checkpoint is False
    assert gang.giving_count == 0


def test_idle_executors_are_given_back_first_while_others_wait() -> None:
    gang = running()
    arrive(gang, 3, "c", 30.0)
    gang.reclaimed_count = 1
    decision = gang.decide(30.0)
    assert (decision.release, decision.wanted, decision.needs_checkpoint) == (
        {3},
        2,
        False,
    )


def test_it_gives_way_only_if_that_is_on() -> None:
    gang = running(replace(TERMS, should_give_way=False), hosts="abcd")
    gang.reclaimed_count = 1
    assert gang.giving_count == 0
    assert gang.decide(20.0).needs_checkpoint is False


def test_a_spread_gang_has_one_executor_on_a_node() -> None:
    gang = policy(replace(TERMS, is_spread=True), hosts="aab")
    decision = gang.decide(SETTLE_SECONDS)
    assert (decision.start, decision.release) == ((1, 3), {2})


def test_what_a_smaller_world_gives_back_comes_from_few_nodes() -> None:
    gang = policy(hosts="abb")
    assert gang.decide(SETTLE_SECONDS).start == (2, 3, 1)
    gang.record_entry(10.0)
    gang.reclaimed_count = 1
    gang.decide(20.0)
    gang.record_checkpoint(21.0)
    gang.decide(21.0)
    gang.record_end(WorldEnd.GAVE_WAY, 22.0)
    assert gang.decide(22.0).release == {1}, "the only one on a"


@pytest.mark.parametrize("how", [WorldEnd.RETURNED, WorldEnd.FAILED, WorldEnd.CANCELLED])
def test_other_ends_are_no_losses(how: WorldEnd) -> None:
    gang = running()
    gang.record_end(how, 40.0)
    assert gang.losses == 0


def test_the_first_checkpoint_counts_some_seconds_later_and_the_next_at_once() -> None:
    durable = DurableCheckpoints()
    assert durable.take_due(10.0) is None
    assert not durable.record_save(None, 10.0), "a rank that is late may save for the first time"
    assert durable.take_due(12.9) is None
    assert durable.take_due(13.0) == 10.0, (
        "a resize that is wanted since then waits for another one"
    )
    assert durable.take_due(14.0) is None, "once"
    assert durable.record_save(None, 20.0)


def test_an_agreed_checkpoint_counts_once_all_ranks_have_passed_its_step() -> None:
    durable = DurableCheckpoints()
    durable.record_agreement(7)
    assert not durable.record_save(7, 10.0)
    assert durable.record_passed()
    assert durable.record_save(7, 20.0), "it was the first"
    durable.record_agreement(17)
    assert not durable.record_passed(), "it is not on the lake yet"
    assert not durable.record_save(7, 30.0), "it was handed over before"
    assert not durable.record_save(7, 30.0), "and each rank may say that it is complete"
    assert durable.record_save(18, 31.0), "no rank asked about the agreed step itself"
    assert durable.record_save(18, 32.0), "the agreement is over"


def test_no_first_checkpoint_counts_while_the_ranks_come_to_the_agreed_step() -> None:
    durable = DurableCheckpoints()
    assert not durable.record_save(None, 10.0)
    durable.record_agreement(7)
    assert durable.take_due(20.0) is None
    assert not durable.record_passed()
    assert durable.record_save(7, 21.0)


def test_checkpoints_count_again_if_the_ranks_never_come_to_the_agreed_step() -> None:
    durable = DurableCheckpoints()
    durable.record_agreement(102)
    assert not durable.record_save(None, 10.0)
    assert durable.take_due(20.0) is None, "the agreed one may still come"
    durable.record_refusal()
    assert not durable.record_save(None, 30.0)
    assert durable.take_due(33.0) == 30.0
    assert durable.record_save(None, 40.0)


# --- what is said of it ----------------------------------------------------------------------


FULL = WaitReason("Queue q is full", (), "queue q")


def test_what_a_gang_waits_for_is_said() -> None:
    gang = running()
    assert outlook(gang, wanted=2, gpus=1, why=NO_WAIT) == NO_WAIT
    assert outlook(gang, wanted=3, gpus=1, why=NO_WAIT) == missing_executors(1, NO_WAIT)
    assert outlook(gang, wanted=4, gpus=1, why=FULL) == missing_executors(2, FULL)


def test_a_growth_that_waits_for_a_checkpoint_is_said() -> None:
    gang = running()
    arrive(gang, 3, "c", 400.0)
    assert gang.decide(400.0).needs_checkpoint
    expected = growing(1).before(missing_executors(1, FULL))
    assert outlook(gang, wanted=4, gpus=1, why=FULL) == expected
    gang.record_checkpoint(401.0)
    assert gang.decide(401.0).stop_reason is WorldEnd.GREW
    assert outlook(gang, wanted=3, gpus=1, why=NO_WAIT) == resizing(is_growth=True)


@pytest.mark.parametrize(("gpus", "given"), [(1, "2 GPUs"), (2, "4 GPUs"), (0, "2 executors")])
def test_what_a_gang_is_about_to_give_is_said(gpus: int, given: str) -> None:
    gang = running(hosts="abcd")
    gang.reclaimed_count = 3  # one more than it has above its minimum
    gang.decide(20.0)
    outlook_before = outlook(gang, wanted=4, gpus=gpus, why=NO_WAIT)
    assert outlook_before.sentence == f"Gives {given} to waiting gangs at its next checkpoint"
    gang.record_checkpoint(21.0)
    assert gang.decide(21.0).stop_reason is WorldEnd.GAVE_WAY
    assert outlook(gang, wanted=4, gpus=gpus, why=NO_WAIT) == resizing(is_growth=False)


def test_without_a_world_the_reason_alone_is_said() -> None:
    assert outlook(policy(), wanted=4, gpus=1, why=FULL) == FULL
    cold = policy()
    cold.add_executor(1, "a", 0.0)
    assert outlook(cold, wanted=4, gpus=1, why=NO_WAIT) == loading_frameworks(1)
    assert outlook(cold, wanted=4, gpus=1, why=FULL) == FULL
    assert outlook(policy(), wanted=0, gpus=1, why=NO_WAIT) == gave_all_back()


def test_ranks_are_asked_only_once_they_run_and_again_if_they_did_not_agree() -> None:
    gang = policy(hosts="abc")
    gang.decide(SETTLE_SECONDS)
    gang.reclaimed_count = 1
    assert not gang.decide(10.0).needs_checkpoint, "they import"
    gang.record_entry(30.0)
    assert gang.decide(30.0).needs_checkpoint
    gang.record_refusal(40.0)
    assert not gang.decide(49.9).needs_checkpoint
    assert gang.decide(50.0).needs_checkpoint
    assert not gang.decide(199.0).needs_checkpoint
    assert gang.decide(200.0).needs_checkpoint, "they agreed, and nothing was saved"


def test_an_executor_that_does_not_get_warm_is_not_waited_for_without_bound() -> None:
    gang = policy(hosts="ab")
    gang.add_executor(3, "c", 1.0)
    assert gang.decide(30.9).start == ()
    assert gang.decide(31.0).start == (1, 2)


def test_a_part_that_a_loss_leaves_is_kept_as_long_as_one_that_has_arrived() -> None:
    gang = running()
    gang.remove_executor(1)
    gang.record_end(WorldEnd.LOST, 1000.0)
    assert gang.decide(1000.0).release == frozenset()
    assert gang.decide(1060.0).release == {2}


def test_executors_that_cannot_be_used_soon_are_given_back() -> None:
    gang = running()
    arrive(gang, 3, "c", 30.0)
    gang.decide(30.0)
    gang.record_checkpoint(32.0)
    gang.decide(32.0)
    gang.add_executor(4, "d", 32.5)
    gang.record_end(WorldEnd.GREW, 33.0)
    assert gang.decide(33.0).start == (1, 2, 3)
    gang.record_entry(35.0)
    decision = gang.decide(35.0)
    assert (decision.release, decision.wanted) == ({4}, 3)


def test_a_world_whose_ranks_have_returned_keeps_what_it_has_and_no_more() -> None:
    gang = running()
    arrive(gang, 3, "c", 30.0)
    gang.record_return()
    decision = gang.decide(30.0)
    assert (decision.wanted, decision.release, decision.needs_checkpoint) == (
        2,
        {3},
        False,
    )


def test_a_checkpoint_that_was_under_way_before_the_agreement_does_not_count() -> None:
    durable = DurableCheckpoints()
    durable.record_agreement(1010)
    assert not durable.record_save(None, 10.0)
    assert not durable.record_passed()
    durable.record_agreement(1020)
    assert not durable.record_save(1020, 11.0)
    assert durable.record_passed()
