"""Which runs a list shows."""

from __future__ import annotations

import pytest

from hopsgpu.display.run_view import RunSummary
from hopsgpu.errors import ConfigError
from hopsgpu.web.run_filter import RunFilter, filter_of

RUN = RunSummary(
    "fit-20261122-120000-bbbbbb",
    "running",
    is_running=True,
    name="fit",
    user="Alice",
    model="digits 3",
)
NOON = 1_795_348_800.0


@pytest.mark.parametrize(
    ("query", "is_accepted"),
    [
        ({}, True),
        ({"state": "active"}, True),
        ({"state": "failed"}, False),
        ({"user": "alice"}, True),
        ({"user": "bob"}, False),
        ({"name": "FIT"}, True),
        ({"name": "bbbb"}, True),
        ({"name": "tune"}, False),
        ({"model": "digits"}, True),
        ({"model": "digits", "user": "bob"}, False),
        ({"other": "x"}, True),
    ],
)
def test_runs_are_accepted_by_what_their_rows_show(
    query: dict[str, str], is_accepted: bool
) -> None:
    wanted = filter_of(query)
    assert wanted.is_accepted(RUN) is is_accepted
    assert filter_of(wanted.query()) == wanted


@pytest.mark.parametrize(
    ("hours", "since", "is_possible"), [(1, "24h", True), (25, "24h", False), (25, "", True)]
)
def test_the_time_in_an_id_decides_before_a_record_is_read(
    hours: float, since: str, is_possible: bool
) -> None:
    wanted = filter_of({"since": since})
    assert wanted.can_accept(RUN.run_id, NOON + 3600 * hours) is is_possible
    assert wanted.can_accept("without-a-time", NOON)


def test_queries_are_bounded() -> None:
    for query in ({"state": "odd"}, {"since": "1s"}, {"name": "x" * 101}):
        with pytest.raises(ConfigError):
            filter_of(query)
    assert not RunFilter().is_restricted and filter_of({"name": " x "}) == RunFilter(name="x")
