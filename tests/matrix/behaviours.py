"""What is tried on each pair of PySpark and Hadoop, and what was seen, by pair."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

RESULTS = Path(__file__).parent / "results.json"
# By the name of its test, in the order of their run.
BEHAVIOURS = {
    "cluster": "`hopsgpu cluster up --hadoop VERSION` starts the daemons, with their GPUs",
    "session": "`hopsgpu.session` starts, and Spark's own jobs run",
    "launch": "`hopsgpu.launch`: each rank returns its value and has a GPU of its own",
    "release": "the ResourceManager counts the GPUs while ranks run, and none after the return",
    "hold": "`hopsgpu.hold`: several launches in the same containers, one of them failing",
    "failure": "a rank that raises: `RankFailed` with its traceback, GPUs back",
    "cancel": "a run that waits and one that trains are cancelled, GPUs back",
    "data": "`launch(data=...)`: the ranks read each row of a DataFrame once",
    "search": "`hopsgpu.search`: all trials complete",
    "gpus": "`hopsgpu gpus` shows the GPUs in use",
    "doctor": "`hopsgpu doctor` finds nothing wrong",
    "rivals": "two applications that together want more GPUs than there are both finish",
    "submit_client": "`hopsgpu submit --deploy-mode client job.py`",
    "submit_cluster": "`hopsgpu submit --deploy-mode cluster job.py`: success and exit status 3",
}
WORKS = "works"
_LONGEST = 120
_PATH = re.compile(r"(?<![\w:/])/[\w.@+-]+(/[\w.@+-]*)+")


@dataclass(frozen=True)
class Seen:
    """What one test has shown.

    Attributes:
        outcome: "works", or the first line of what failed.
        seconds: of the test, with what it waited for.
    """

    outcome: str
    seconds: float


@dataclass(frozen=True)
class Corner:
    """A client and a cluster, and what was seen there.

    Attributes:
        spark: version of PySpark, as python and java are those of the client.
        hadoop: version of the daemons.
        date: of the run, as 2026-01-31.
        seen: behaviour → what was seen; without those that were not run.
    """

    spark: str
    hadoop: str
    python: str
    java: str
    date: str
    seen: Mapping[str, Seen]

    @property
    def series(self) -> tuple[str, str]:
        """Both versions without their last number, which a later run replaces."""
        spark, hadoop = (version.rpartition(".")[0] for version in (self.spark, self.hadoop))
        return spark, hadoop


def first_line(error: str) -> str:
    """Return what a cell says of a failure: no paths of the machine, and no whole page."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    line = _PATH.sub("…", lines[0] if lines else "failed")
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"


def load(file: Path = RESULTS) -> list[Corner]:
    """Return the corners of a file of results, sorted; none if there is no such file."""
    if not file.is_file():
        return []
    rows = json.loads(file.read_text(encoding="utf-8"))
    return [
        Corner(**{**row, "seen": {name: Seen(**seen) for name, seen in row["seen"].items()}})
        for row in rows
    ]


def record(corner: Corner, file: Path = RESULTS) -> None:
    """Store a corner, in place of an earlier one of the same series."""
    others = [other for other in load(file) if other.series != corner.series]
    corners = sorted([*others, corner], key=_by_version)
    text = json.dumps([asdict(each) for each in corners], indent=1, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")


def _by_version(corner: Corner) -> tuple[list[int], list[int]]:
    spark, hadoop = (
        [int(number) for number in re.findall(r"\d+", version)]
        for version in (corner.spark, corner.hadoop)
    )
    return spark, hadoop
