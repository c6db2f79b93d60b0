"""Each trial hears what is said of it, and of its executors."""

from __future__ import annotations

import sys

from hopsgpu.control.channel import Message, new_secret
from hopsgpu.control.server import Event, serve
from hopsgpu.tuning.message_router import MessageRouter, quick_switching


def said(peer: int, kind: str, **fields: object) -> Event:
    return Event(peer, Message(kind, fields, b""))


def test_events_come_to_the_trials_that_they_concern() -> None:
    heard: list[str] = []
    with serve(new_secret(), "127.0.0.1") as server:
        switch = MessageRouter(server)
        one = switch.add("s-trial-1", [4], lambda message: heard.append(message.kind))
        two = switch.add("s-trial-2", [4, 5], lambda message: None)
        switch.deal(said(4, "started", run_id="s-trial-1"))
        switch.deal(said(4, "ended", run_id="s-trial-7"))
        switch.deal(said(9, "hello"))
        switch.deal(Event(4, None))
        switch.deal(Event(5, None))
        of_one = [one.next_event(0.0), one.next_event(0.0)]
        assert [e and e.message and e.message.kind for e in of_one] == ["started", None]
        assert one.next_event(0.0) is None
        lost = [two.next_event(0.0), two.next_event(0.0)]
        assert [e and e.peer for e in lost] == [4, 5]
        assert two.next_event(0.0) is None
        assert heard == ["started"]
        # Late words, and those of executors without a trial, are nobody's.
        switch.drop("s-trial-1", one)
        switch.deal(said(4, "ended", run_id="s-trial-1"))
        switch.deal(Event(4, None))
        assert one.next_event(0.0) is None


def test_a_try_that_ends_late_does_not_take_the_next_ones_wire() -> None:
    with serve(new_secret(), "127.0.0.1") as server:
        switch = MessageRouter(server)
        before = switch.add("s-trial-1", [4], lambda message: None)
        after = switch.add("s-trial-1", [5], lambda message: None)
        switch.drop("s-trial-1", before)
        switch.deal(said(5, "started", run_id="s-trial-1"))
        heard = after.next_event(0.0)
        assert heard is not None and heard.peer == 5
        assert before.next_event(0.0) is None
        switch.drop("s-trial-1", after)
        switch.drop("s-trial-1", after)


def test_threads_take_turns_quickly_until_the_last_search_ends() -> None:
    before = sys.getswitchinterval()
    with quick_switching():
        quick = sys.getswitchinterval()
        assert quick < before
        with quick_switching():
            assert sys.getswitchinterval() == quick
        assert sys.getswitchinterval() == quick
    assert sys.getswitchinterval() == before
