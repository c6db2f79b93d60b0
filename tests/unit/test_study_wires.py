"""Each trial hears what is said of it, and of its executors."""

from __future__ import annotations

from hopsgpu.study.wires import Switch
from hopsgpu.worker.channel import Message, new_secret
from hopsgpu.worker.server import Event, serve


def said(peer: int, kind: str, **fields: object) -> Event:
    return Event(peer, Message(kind, fields, b""))


def test_events_come_to_the_trials_that_they_concern() -> None:
    heard: list[str] = []
    with serve(new_secret(), "127.0.0.1") as server:
        switch = Switch(server)
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
        switch.drop("s-trial-1")
        switch.deal(said(4, "ended", run_id="s-trial-1"))
        switch.deal(Event(4, None))
        assert one.next_event(0.0) is None
