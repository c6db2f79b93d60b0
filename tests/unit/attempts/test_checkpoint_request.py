"""A request for a checkpoint of all ranks: what it orders as answers arrive and time passes."""

from __future__ import annotations

from collections.abc import Sequence

from hopsgpu.attempts.checkpoint_request import (
    AgentMessage,
    Agreed,
    CheckpointRequest,
    NotAgreed,
    RequestBounds,
)

BOUNDS = RequestBounds(agreement=60, unasked=10, blocked=8, lost=5, pause=1)


def steps(number: int) -> AgentMessage:
    return AgentMessage("steps", {"number": number})


def propose(step: int) -> AgentMessage:
    return AgentMessage("propose", {"step": step})


def commit(step: int) -> AgentMessage:
    return AgentMessage("commit", {"step": step})


def abort(step: int) -> AgentMessage:
    return AgentMessage("abort", {"step": step})


def looked(
    request: CheckpointRequest, at: float, *asked: Sequence[int | None]
) -> list[AgentMessage]:
    """What follows when it has asked for the steps of all ranks a few times, one second each."""
    orders: list[AgentMessage] = []
    for number, row in enumerate(asked):
        (question,) = request.tick(at + number)
        assert question.kind == "steps"
        orders = request.handle_steps(question.fields["number"], dict(enumerate(row)), at + number)
    return orders


def requested(ranks: int = 2, above: int = -1) -> CheckpointRequest:
    return CheckpointRequest(range(ranks), 0.0, above, BOUNDS)


def test_ranks_that_accept_a_step_ahead_of_all_agree() -> None:
    request = requested()
    assert request.tick(0.0) == [steps(1)] and request.tick(0.1) == []
    # Each agent answers for its own ranks.
    assert request.handle_steps(1, {0: 7}, 0.1) == request.handle_steps(1, {1: 9}, 0.2) == []
    assert request.tick(1.0) == [] and request.tick(1.2) == [steps(2)]
    assert request.handle_steps(2, {1: 9, 0: 9}, 1.2) == [propose(10)]
    assert request.handle_answer(1, 10, 1.3, is_accepted=True) == []
    assert request.handle_answer(1, 10, 1.4, is_accepted=True) == []
    assert request.outcome is None
    assert request.handle_answer(0, 10, 1.5, is_accepted=True) == [commit(10)]
    assert request.outcome == Agreed(10) and request.last == 10
    assert request.tick(99.0) == request.handle_end(0) == []
    assert request.handle_answer(0, 10, 2.0, is_accepted=False) == []


def test_the_faster_the_ranks_the_farther_ahead_is_the_step() -> None:
    # A thousand steps per second, and a question takes 20 ms or more.
    assert looked(requested(), 0.0, (0, 0), (1000, 900)) == [propose(1060)]
    slow = requested()
    slow.tick(0.0)
    slow.handle_steps(1, {0: 0, 1: 0}, 0.0)
    slow.tick(1.0)
    # The answer has taken half a second.
    assert slow.handle_steps(2, {0: 1000, 1: 1500}, 1.5) == [propose(1500 + 1500)]


def test_a_rank_that_has_passed_the_step_has_another_one_proposed_farther_ahead() -> None:
    request = requested()
    assert looked(request, 0.0, (0, 0), (1000, 1000)) == [propose(1060)]
    assert request.handle_answer(0, 1060, 1.1, is_accepted=True) == []
    assert request.handle_answer(1, 1060, 1.2, is_accepted=False) == [abort(1060), steps(3)]
    # Late, or of a proposal that is given up.
    assert request.handle_answer(0, 1060, 1.2, is_accepted=True) == []
    assert request.handle_steps(2, {0: 0, 1: 0}, 1.2) == []
    assert request.handle_steps(3, {0: 1060, 1: 1200}, 1.2) == []
    assert request.tick(2.2) == [steps(4)]
    assert request.handle_steps(4, {0: 2060, 1: 2200}, 2.2) == [propose(2320)]
    assert request.handle_answer(0, 2320, 2.3, is_accepted=True) == []
    assert request.handle_answer(1, 2320, 2.3, is_accepted=True) == [commit(2320)]


def test_steps_of_proposals_increase() -> None:
    request = requested(1, above=50)
    assert looked(request, 0.0, (7,), (7,)) == [propose(51)]
    assert request.handle_answer(0, 51, 2.0, is_accepted=False) == [abort(51), steps(3)]
    request.handle_steps(3, {0: 7}, 2.0)
    assert request.tick(3.0) == [steps(4)]
    assert request.handle_steps(4, {0: 7}, 3.0) == [propose(52)]
    at_the_end = requested(1)
    assert looked(at_the_end, 0.0, (2**63 - 1,), (2**63 - 1,)) == []
    assert isinstance(at_the_end.outcome, NotAgreed)


def test_an_answer_that_is_lost_is_asked_for_again() -> None:
    request = requested()
    assert request.tick(0.0) == [steps(1)]
    request.handle_steps(1, {0: 1}, 0.1)
    assert request.tick(4.9) == [] and request.tick(5.0) == [steps(2)]
    # The late one does not count.
    assert request.handle_steps(1, {1: 1}, 5.1) == []
    assert request.handle_steps(2, {0: 2}, 5.1) == [] and request.tick(9.0) == []
    assert request.handle_steps(2, {1: 2}, 9.1) == [] and request.tick(10.1) == [steps(3)]


def test_ranks_that_never_ask_are_not_waited_for() -> None:
    request = requested(3)
    for now in range(11):
        (question,) = request.tick(float(now))
        asked = {0: 5, 1: None, 2: None}
        assert request.handle_steps(question.fields["number"], asked, float(now)) == []
    assert isinstance(request.outcome, NotAgreed) and "ranks 1, 2 " in request.outcome.reason


def test_ranks_that_ask_late_are_waited_for() -> None:
    assert looked(requested(), 0.0, (5, None), (5, None), (5, 0), (5, 1)) == [propose(6)]


def test_no_rank_waits_for_long_for_one_that_does_not_answer() -> None:
    request = requested()
    assert looked(request, 0.0, (5, 5), (5, 5)) == [propose(6)]
    # Nobody waits as long as nobody has accepted: a step may take long.
    assert request.tick(30.0) == []
    assert request.handle_answer(0, 6, 30.0, is_accepted=True) == []
    assert request.tick(37.9) == []
    assert request.tick(38.0) == [abort(6), steps(3)]
    assert request.handle_answer(1, 6, 38.1, is_accepted=True) == []


def test_it_is_given_up_in_the_end() -> None:
    request = requested()
    assert looked(request, 0.0, (5, 5), (5, 5)) == [propose(6)]
    assert request.tick(59.9) == []
    assert request.tick(60.0) == [abort(6)]
    assert isinstance(request.outcome, NotAgreed) and "60 s" in request.outcome.reason
    assert request.tick(61.0) == request.handle_answer(0, 6, 61.0, is_accepted=True) == []


def test_a_rank_that_ends_ends_it() -> None:
    request = requested()
    # A parameter server, which is not asked.
    assert request.handle_end(2) == [] and request.outcome is None
    assert looked(request, 0.0, (5, 5), (5, 5)) == [propose(6)]
    assert request.handle_answer(2, 6, 1.0, is_accepted=False) == []
    assert request.handle_answer(0, 6, 1.0, is_accepted=True) == []
    assert request.handle_end(1) == [abort(6)]
    assert request.outcome == NotAgreed("rank 1 has ended")


def test_many_tries_go_no_farther_ahead_than_some() -> None:
    request = CheckpointRequest([0], 0.0, bounds=RequestBounds(agreement=1e9, pause=1))
    now, last = 0.0, 0
    for _ in range(100):
        (order,) = looked(request, now, (last,), (last + 1,))
        ahead, last = order.fields["step"] - last, order.fields["step"]
        now += 1
        (aborted, _) = request.handle_answer(0, last, now, is_accepted=False)
        assert aborted == abort(last)
        # As if it had not been answered, to ask as the first time.
        now += 5
    assert ahead < 100
