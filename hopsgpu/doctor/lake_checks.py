"""The check of the lake. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from hopsgpu.doctor.report import Check, ok, unknown, wrong


@dataclass(frozen=True)
class LakeFacts:
    """The result of writing to the root of runs and models.

    Attributes:
        root: its URL.
        problem: why it failed, or "".
        seconds: duration; None if the lake did not answer in time.
    """

    root: str
    problem: str
    seconds: float | None


def check_lake(facts: LakeFacts, name: str = "hdfs") -> Check:
    """Check whether models can be published, which writes and renames files."""
    elsewhere = "set HOPSGPU_ROOT or spark.hopsgpu.root to a directory of your own"
    if facts.seconds is None:
        return unknown(name, f"{facts.root} did not answer: {facts.problem}", elsewhere)
    if facts.problem:
        return wrong(name, facts.problem, elsewhere)
    return ok(name, f"{facts.root}: written, renamed and read back in {facts.seconds:.1f} s")
