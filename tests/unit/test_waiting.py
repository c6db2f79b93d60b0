"""What executors are waited for by."""

from __future__ import annotations

from hopsgpu.spark.waiting import EndedAgain


def test_containers_that_are_gone_without_having_come_have_ended_again() -> None:
    ended = EndedAgain()
    assert ended.beside() == "" and ended.beside("one", "two") == "one, two"
    ended.look(["c1", "c2"])
    ended.look(["c2", "c3"], came=["c2"])
    assert ended.count == 1
    told = ended.beside("granted and starting")
    assert told.startswith("granted and starting, 1 ended again, see the node's log of c1 (a GPU")
    # Whoever came and is gone did not end again: it was let go, say.
    ended.look([], came=["c2"])
    assert ended.count == 2 and "see the node's log of c3" in ended.beside()
    ended.look(["c1"], came=["c2", "c3"])
    assert ended.count == 0, "a look that missed it"


def test_once_one_has_come_the_earlier_do_not_count() -> None:
    ended = EndedAgain()
    ended.look(["c1"])
    ended.look([])
    ended.forget()
    assert ended.count == 0 and ended.beside("x") == "x"
    ended.look([])
    assert ended.count == 0


def test_what_hopsgpu_lets_go_has_not_ended_again() -> None:
    ended = EndedAgain()
    ended.look(["c1", "c2"])
    ended.look(["c2"])
    ended.excuse()
    ended.look([])
    assert ended.count == 1 and "see the node's log of c1" in ended.beside()
