"""The page of a run of benchmarks: what they printed, and what changed since the committed run."""

from __future__ import annotations

import io
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

# Of these benchmarks, larger figures are better; their names are the first part of a figure's name.
RATES = frozenset({"data", "images"})
# The same for figures with such words in their names, of any benchmark.
_RATE = re.compile(r"\brate\b|\ba second\b")
# A figure that was measured once is worse if it differs by more than this part.
_NOISE_OF_ONE = 0.1


@dataclass(frozen=True)
class Change:
    """A figure of two runs.

    Attributes:
        ratio: the present median divided by the earlier one.
        is_worse: whether the figure is worse by more than the noise of its repetitions.
    """

    name: str
    before: float
    now: float
    ratio: float
    is_worse: bool


def figures_of(results: object, name: str = "") -> Iterator[tuple[str, tuple[float, ...]]]:
    """Yield each figure in nested results, with its repetitions; skip texts and truth values."""
    if isinstance(results, Mapping):
        for key, value in results.items():
            yield from figures_of(value, f"{name}/{key}" if name else str(key))
    elif _is_number(results):
        yield name, (float(results),)  # type: ignore[arg-type]
    elif isinstance(results, Sequence) and not isinstance(results, str) and results:
        if all(map(_is_number, results)):
            yield name, tuple(map(float, results))
        else:
            for number, value in enumerate(results):
                yield from figures_of(value, f"{name}/{number}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def compare(now: Mapping[str, object], before: Mapping[str, object]) -> list[Change]:
    """Return the change of each figure that both runs have, the worse ones first.

    Ratios are left out: some are better if they are larger, and all are made of other figures.

    A figure is worse if its median is worse than all repetitions of the earlier run, and the
    earlier median is better than all repetitions of this run. Then noise does not explain it.
    """
    earlier = dict(figures_of(before))
    changes = [
        _change(name, values, earlier[name])
        for name, values in figures_of(now)
        if name in earlier and statistics.median(earlier[name]) and not name.endswith("ratio")
    ]
    return sorted(changes, key=lambda change: (not change.is_worse, change.name))


def _change(name: str, now: Sequence[float], before: Sequence[float]) -> Change:
    is_rate = name.partition("/")[0] in RATES or _RATE.search(name) is not None
    sign = -1 if is_rate else 1
    # From here, larger is worse.
    ours, theirs = sorted(sign * v for v in now), sorted(sign * v for v in before)
    middle, old_middle = statistics.median(ours), statistics.median(theirs)
    if len(ours) == 1 or len(theirs) == 1:
        is_worse = middle - old_middle > _NOISE_OF_ONE * abs(old_middle)
    else:
        is_worse = middle > theirs[-1] and old_middle < ours[0]
    return Change(name, sign * old_middle, sign * middle, middle / old_middle, is_worse)


def make_page(printed: str, changes: Sequence[Change] | None, seconds: float) -> str:
    """Return the page, in Markdown.

    Args:
        printed: what the benchmarks printed, with their ratios.
        changes: the changes since the committed run; None if no run is committed.
        seconds: how long the benchmarks took.
    """
    lines = ["# Benchmarks", "", f"All of them took {seconds / 60:.1f} minutes.", ""]
    if changes is None:
        lines += ["No earlier run is committed, so nothing is compared.", ""]
    else:
        worse = sum(change.is_worse for change in changes)
        lines += [
            f"{worse} of {len(changes)} figures became worse by more than the noise of their own"
            " repetitions.",
            "",
            "| figure | before | now | ratio | |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| {change.name} | {change.before:.4g} | {change.now:.4g} | {change.ratio:.2f} |"
            f" {'**worse**' if change.is_worse else ''} |"
            for change in changes
        ]
        lines.append("")
    return "\n".join([*lines, "```text", printed.strip("\n"), "```", ""])


class Recorder(io.TextIOBase):
    """A text stream that writes what it gets to another stream, and keeps it.

    Args:
        screen: the other stream.
    """

    def __init__(self, screen: TextIO) -> None:
        self._screen = screen
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._parts.append(text)
        return self._screen.write(text)

    def flush(self) -> None:
        self._screen.flush()
