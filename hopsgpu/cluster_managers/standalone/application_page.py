"""A standalone master's page of an application, read as values. Pure.

No JSON of a master lists the executors of an application. Names of columns and facts are those of
Spark 3.5 to 4.3 (ApplicationPage).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from html.parser import HTMLParser

from hopsgpu.cluster_managers.resources import Amount

_COLUMNS = (
    "ExecutorID",
    "Worker",
    "Cores",
    "Memory",
    "Resource Profile Id",
    "Resources",
    "State",
)
# Source: Spark's ExecutorState. An executor that is DECOMMISSIONED still has its resources.
_ENDED = frozenset({"KILLED", "FAILED", "LOST", "EXITED"})
# The master's page of an application that has ended still shows its last limit.
_ACTIVE = frozenset({"WAITING", "RUNNING"})
_UNKNOWN = "No running application with ID"
_LIMIT = re.compile(r"(Unlimited|\d{1,10})\s*\((\d{1,10}) granted\)")
_RESOURCE = re.compile(r"([^\s,:\[\]]+): \[([^\[\]]*)\]")
_NUMBER = re.compile(r"\d{1,15}")


@dataclass(frozen=True)
class ListedExecutor:
    """An executor in the master's page of its application.

    Attributes:
        worker: ID of its worker.
        profile: ID of its resource profile.
        state: Spark's state, such as "LAUNCHING" or "RUNNING".
    """

    id: str
    worker: str
    size: Amount
    profile: int
    state: str

    @property
    def has_ended(self) -> bool:
        return self.state in _ENDED


@dataclass(frozen=True)
class ApplicationPage:
    """The page of an application.

    Attributes:
        state: state of the application, such as "WAITING", "RUNNING" or "FINISHED".
        executors: all that the page lists, also those that have ended.
        limit: number of executors that the application wants, of all resource profiles; None for no
            limit, as without dynamic allocation.
        granted: number of executors that it has.
    """

    id: str
    state: str
    executors: tuple[ListedExecutor, ...]
    limit: int | None
    granted: int

    @property
    def live(self) -> tuple[ListedExecutor, ...]:
        """Return the executors whose resources the master counts as used."""
        return tuple(executor for executor in self.executors if not executor.has_ended)

    @property
    def open_requests(self) -> int:
        """Return how many executors, of all profiles, the application wants and does not have."""
        if self.limit is None or self.state not in _ACTIVE:
            return 0
        return max(self.limit - self.granted, 0)


def read_page(html: str, gpu_resource: str) -> ApplicationPage | None:
    """Return what a page shows; None if the master does not know the application.

    Raises:
        ValueError: the page has an unknown form; the message says what is missing.
    """
    page = _PageParser()
    page.feed(html)
    page.close()
    # The name of an application may be any text, so only the fact itself counts.
    if "ID" not in page.facts:
        if _UNKNOWN in page.text:
            return None
        raise ValueError("it shows no ID of an application")
    tables = [table for table in page.tables if "ExecutorID" in table.headers]
    if not tables:
        raise ValueError("it has no table with the column ExecutorID")
    for table in tables:
        if missing := [column for column in _COLUMNS if column not in table.headers]:
            raise ValueError(f"its table of executors has no column {missing[0]}")
    limit = _LIMIT.fullmatch(page.facts.get("Executor Limit", ""))
    if limit is None:
        raise ValueError("it shows no Executor Limit")
    return ApplicationPage(
        id=page.facts["ID"],
        state=page.facts.get("State", ""),
        executors=tuple(
            _executor(_cells(table, row), gpu_resource) for table in tables for row in table.rows
        ),
        limit=None if limit[1] == "Unlimited" else int(limit[1]),
        granted=int(limit[2]),
    )


def _cells(table: _Table, row: list[str]) -> dict[str, str]:
    if len(row) != len(table.headers):
        raise ValueError(
            f"a row of its table of executors has {len(row)} cells for {len(table.headers)} columns"
        )
    return dict(zip(table.headers, row, strict=True))


def _executor(cells: Mapping[str, str], gpu_resource: str) -> ListedExecutor:
    addresses = dict(_RESOURCE.findall(cells["Resources"])).get(gpu_resource, "")
    return ListedExecutor(
        id=str(_number(cells, "ExecutorID")),
        worker=cells["Worker"],
        size=Amount(
            len([address for address in addresses.split(",") if address.strip()]),
            _number(cells, "Cores"),
            _number(cells, "Memory"),
        ),
        profile=_number(cells, "Resource Profile Id"),
        state=cells["State"],
    )


def _number(cells: Mapping[str, str], column: str) -> int:
    if not _NUMBER.fullmatch(cells[column]):
        raise ValueError(f"its column {column} has a cell that is no number")
    return int(cells[column])


class _Table:
    def __init__(self) -> None:
        self.headers: list[str] = []
        self.rows: list[list[str]] = []


class _PageParser(HTMLParser):
    """Collects tables, and facts of the form `<li><strong>NAME:</strong> TEXT</li>`.

    Attributes:
        facts: texts by name.
        text: the beginning of the page's text outside tables and facts.
    """

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tables: list[_Table] = []
        self.facts: dict[str, str] = {}
        self.text = ""
        self._fact: str | None = None
        # Where text goes: "th", "td", "strong", "fact" or "" for elsewhere.
        self._place = ""
        self._parts: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag == "table":
            self.tables.append(_Table())
        elif tag == "tr" and self.tables:
            self.tables[-1].rows.append([])
        elif tag in ("th", "td", "strong"):
            self._place, self._parts = tag, []
        elif tag == "li":
            self._fact, self._place = None, ""

    def handle_endtag(self, tag: str) -> None:
        content = " ".join("".join(self._parts).split())
        if tag == self._place == "strong":
            self._fact, self._place = content.removesuffix(":"), "fact"
        elif tag == "li" and self._place == "fact" and self._fact is not None:
            self.facts.setdefault(self._fact, content)
            self._place = ""
        elif tag == self._place == "th" and self.tables:
            self.tables[-1].headers.append(content)
            self._place = ""
        elif tag == self._place == "td" and self.tables and self.tables[-1].rows:
            self.tables[-1].rows[-1].append(content)
            self._place = ""
        else:
            return
        self._parts = []

    def handle_data(self, data: str) -> None:
        if self._place:
            self._parts.append(data)
        elif len(self.text) < 100_000:
            self.text += data
