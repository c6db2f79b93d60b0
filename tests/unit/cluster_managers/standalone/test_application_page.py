"""A master's page of an application: executors by the names of columns, whatever its name is."""

from __future__ import annotations

import pytest

from hopsgpu.cluster_managers.resources import Amount
from hopsgpu.cluster_managers.standalone.application_page import ApplicationPage, read_page
from tests.unit.cluster_managers.standalone import masters


def read(name: str) -> ApplicationPage:
    page = read_page(masters.page(name), "gpu")
    assert page is not None
    return page


def test_executors_have_their_workers_sizes_and_profiles() -> None:
    page = read("two_profiles")
    assert [(e.id, e.worker, e.size, e.profile, e.state) for e in page.live] == [
        ("2", masters.FIRST, Amount(2, 1, 512), 2, "RUNNING"),
        ("3", masters.SECOND, Amount(1, 1, 512), 3, "RUNNING"),
    ]
    assert [e.state for e in page.executors] == ["RUNNING", "RUNNING", "KILLED", "KILLED"]
    assert (page.limit, page.granted, page.open_requests) == (2, 2, 0)


def test_executors_that_were_killed_or_lost_do_not_live() -> None:
    assert read("killed").live == ()
    assert [e.id for e in read("dead").live] == ["2"]
    assert read("dead").open_requests == 1


def test_an_application_that_has_ended_requests_nothing() -> None:
    page = read("finished")
    assert (page.live, page.limit, page.granted, page.open_requests) == ((), 2, 1, 0)


def test_a_name_is_no_fact() -> None:
    page = read("two_profiles_mallory")
    assert (page.id, page.limit, page.granted) == (masters.MALLORYS, 3, 1)


def test_an_unknown_application_has_no_page() -> None:
    assert read_page(masters.page("unknown"), "gpu") is None


def test_an_application_without_a_limit_requests_nothing() -> None:
    html = masters.page("two_profiles_mallory").replace("                3\n", "Unlimited\n")
    page = read_page(html, "gpu")
    assert page is not None and (page.limit, page.open_requests) == (None, 0)


def test_states_that_nobody_knows_hold_their_resources() -> None:
    html = masters.page("gang").replace("<td>RUNNING</td>", "<td>DECOMMISSIONED</td>")
    page = read_page(html, "gpu")
    assert page is not None and len(page.live) == 2


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (">Resources</th>", ">GPUs</th>", "no column Resources"),
        (">ExecutorID</th>", ">Executor</th>", "no table with the column ExecutorID"),
        ("<td>gpu: [0]</td>", "", "has 7 cells for 8 columns"),
        ("<td>512</td>", "<td>0.5 GiB</td>", "column Memory has a cell that is no number"),
        ("Executor Limit", "Limit", "no Executor Limit"),
        ("<strong>ID:</strong>", "<strong>Key:</strong>", "no ID of an application"),
    ],
)
def test_another_form_is_refused_by_name(old: str, new: str, reason: str) -> None:
    html = masters.page("gang")
    assert old in html
    with pytest.raises(ValueError, match=reason):
        read_page(html.replace(old, new), "gpu")
