"""A driver that asks real ranks, through their agent, to save a checkpoint at the same step."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from pathlib import Path

from hopsgpu.attempts.checkpoint_request import Agreed, CheckpointRequest, NotAgreed, RequestBounds
from hopsgpu.control.channel import Message
from tests.bounds import HANG_SECONDS
from tests.process.agent.test_agent import Gang, gang

__all__ = ["gang"]


def train(directory: str, gap: int, *pauses: float) -> list[int]:
    """Asks about steps until the others have come to the end too; gives those to save at."""
    import hopsgpu

    context, due, step = hopsgpu.context(), [], 0
    pause = pauses[context.rank]
    print("begun")
    while not Path(directory, "over").exists():
        step += gap
        if context.should_checkpoint(step):
            due.append(step)
            Path(directory, f"due-{context.rank}").touch()
        if pause:
            time.sleep(pause)  # a step
    return due


def never_ask(directory: str) -> None:
    print("begun")
    while not Path(directory, "over").exists():
        time.sleep(0.01)  # a step


def save_when_told(directory: str) -> int:
    """Saves once before, and once when all ranks are to save, under numbers of its own."""
    import hopsgpu

    context, step, state = hopsgpu.context(), 0, Path("state")
    state.write_text("weights")
    context.save_checkpoint(state, 1)
    print("begun")
    while not context.should_checkpoint(step):
        step += 1
        time.sleep(0.001)  # a step
    context.save_checkpoint(state, 2)
    return step


def follow(
    gang: Gang, request: CheckpointRequest, hears: Callable[[Message], bool] = lambda _: True
) -> Agreed | NotAgreed:
    """Does what a launch does for a request, until it has an outcome.

    Args:
        gang: the gang.
        request: the request.
        hears: whether a message is not lost.
    """
    deadline = time.monotonic() + HANG_SECONDS
    orders = request.tick(time.monotonic())
    while True:
        for order in orders:
            gang.server.send(0, order.kind, run_id="r", **order.fields)
        if request.outcome is not None:
            return request.outcome
        assert time.monotonic() < deadline
        event = gang._next_event()
        now = time.monotonic()
        orders = request.tick(now)
        if event is None or event.message is None or not hears(event.message):
            continue
        message = event.message
        gang.seen.append(message)
        match message.kind:
            case "steps":
                orders += request.handle_steps(message["number"], dict(message["asked"]), now)
            case "accepted" | "rejected":
                accepted = message.kind == "accepted"
                rank, step = message["rank"], message["step"]
                orders += request.handle_answer(rank, step, now, is_accepted=accepted)
            case "ended":
                orders += request.handle_end(message["rank"])


def begun(gang: Gang, ranks: int) -> None:
    for _ in range(ranks):
        gang.wait_for("output")


def values(gang: Gang, ranks: int) -> dict[int, list[int]]:
    (gang.lake / "over").touch()
    ended = [gang.wait_for("ended") for _ in range(ranks)]
    assert [one["outcome"] for one in ended] == [{"status": "returned"}] * ranks
    return {one["rank"]: pickle.loads(one.payload) for one in ended}


def come_to_it(gang: Gang, ranks: int) -> bool:
    """Whether all ranks come to a step to save at."""
    deadline = time.monotonic() + HANG_SECONDS
    while time.monotonic() < deadline:
        if all((gang.lake / f"due-{rank}").exists() for rank in range(ranks)):
            return True
        time.sleep(0.01)  # nobody tells
    return False


def test_ranks_of_different_speeds_save_at_the_same_step(gang: Gang) -> None:
    gang.run(train, str(gang.lake), 1, 0.001, 0.002, 0.003, ranks=3)
    begun(gang, 3)
    outcome = follow(gang, CheckpointRequest(range(3), time.monotonic()))
    assert isinstance(outcome, Agreed)
    assert come_to_it(gang, 3)
    passed = [gang.wait_for("passed") for _ in range(3)]
    assert sorted((one["rank"], one["step"]) for one in passed) == [
        (rank, outcome.step) for rank in range(3)
    ]
    assert values(gang, 3) == dict.fromkeys(range(3), [outcome.step])


def test_what_was_saved_when_all_ranks_save_is_told_apart(gang: Gang) -> None:
    gang.run(save_when_told, str(gang.lake))
    begun(gang, 1)
    outcome = follow(gang, CheckpointRequest([0], time.monotonic()))
    assert isinstance(outcome, Agreed)
    assert values(gang, 1) == {0: outcome.step}
    saved = [(one["step"], one["agreed"]) for one in gang.seen if one.kind == "saved"]
    assert saved == [(1, None), (2, outcome.step)]


def test_slow_ranks_with_gaps_between_their_steps(gang: Gang) -> None:
    gang.run(train, str(gang.lake), 10, 0.3, 0.3, ranks=2)
    begun(gang, 2)
    outcome = follow(gang, CheckpointRequest(range(2), time.monotonic()))
    assert isinstance(outcome, Agreed)
    assert come_to_it(gang, 2)
    assert values(gang, 2) == dict.fromkeys(range(2), [-(-outcome.step // 10) * 10])


def test_ranks_that_wait_go_on_if_the_request_is_given_up(gang: Gang) -> None:
    gang.run(train, str(gang.lake), 1, 0.001, 0.002, ranks=2)
    begun(gang, 2)

    def hears(message: Message) -> bool:
        return message.kind != "accepted" or message["rank"] != 1

    bounds = RequestBounds(agreement=3.0, blocked=1.0)
    request = CheckpointRequest(range(2), time.monotonic(), bounds=bounds)
    outcome = follow(gang, request, hears)
    assert isinstance(outcome, NotAgreed) and "3 s" in outcome.reason
    # The next one is not hindered by it.
    outcome = follow(gang, CheckpointRequest(range(2), time.monotonic(), request.last))
    assert isinstance(outcome, Agreed)
    assert come_to_it(gang, 2)
    assert values(gang, 2) == dict.fromkeys(range(2), [outcome.step])


def test_a_rank_that_never_asks_is_not_waited_for(gang: Gang) -> None:
    gang.run(never_ask, str(gang.lake))
    begun(gang, 1)
    bounds = RequestBounds(unasked=0.5)
    outcome = follow(gang, CheckpointRequest([0], time.monotonic(), bounds=bounds))
    assert isinstance(outcome, NotAgreed) and "ranks 0 " in outcome.reason
    assert values(gang, 1) == {0: None}


def test_a_rank_that_ends_meanwhile_leaves_no_other_one_waiting(gang: Gang) -> None:
    def train_until_told(directory: str) -> int:
        import hopsgpu

        context, step = hopsgpu.context(), 0
        print("begun")
        context.should_checkpoint(0)
        while not Path(directory, f"over-{context.rank}").exists():
            step += context.rank == 0
            if context.should_checkpoint(step):
                raise AssertionError("nobody agreed")
            time.sleep(0.001)  # a step
        return step

    gang.run(train_until_told, str(gang.lake), ranks=2)
    begun(gang, 2)

    def hears(message: Message) -> bool:
        if message.kind == "accepted":
            (gang.lake / "over-1").touch()
        return True

    # Rank 1 does not come to another step.
    outcome = follow(gang, CheckpointRequest(range(2), time.monotonic()), hears)
    assert outcome == NotAgreed("rank 1 has ended")
    (gang.lake / "over-0").touch()
    assert gang.wait_for("ended")["outcome"] == {"status": "returned"}
