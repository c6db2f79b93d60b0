"""The phrases about a run's record that the command line and the pages share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from hopsgpu.artifacts.runs import LOST, RunRecord
from hopsgpu.core.formats import size
from hopsgpu.core.run_values import GpuSeconds, Timeline, WorldReport
from hopsgpu.display import phrases
from hopsgpu.units import count_of


def world_sizes(spec: Any) -> str:
    """Return the world size, of an elastic gang the smallest and the largest."""
    least = spec.get("least_workers")
    return str(spec["workers"]) if least is None else f"{least}-{spec['workers']}"


def gang(record: RunRecord) -> str:
    """Return the ranks and the GPUs of a gang."""
    spec = record.content["spec"]
    gpus = count_of(record.gpus, "GPU")
    if spec.get("least_workers") is None:
        return f"{count_of(spec['workers'], 'rank')}, {gpus}"
    return f"{phrases.sizes((spec['least_workers'], spec['workers']))}, at most {gpus}"


def waiting_for(record: RunRecord, now: float) -> str:
    """Return what a run waits for; "" if it does not, or if nobody knows."""
    return str(record.content.get("waiting_for") or "") if record.is_running(now) else ""


def worlds(content: Mapping[str, Any]) -> Sequence[WorldReport]:
    """Return the worlds of an elastic gang; none for other runs."""
    known = {field.name for field in fields(WorldReport)}
    listed = content.get("worlds")
    return [
        WorldReport(**{name: value for name, value in world.items() if name in known})
        for world in (listed if isinstance(listed, list) else [])
        if isinstance(world, dict)
    ]


def timeline(record: RunRecord) -> Timeline:
    """Return the points that a run has passed, as far as this version knows them."""
    known = {field.name for field in fields(Timeline)}
    return Timeline(**{name: at for name, at in record.timeline.items() if name in known})


def model(url: str | None) -> str:
    """Return the name and number of a version from its URL; "-" for None."""
    return "-" if url is None else " ".join(url.rsplit("/", 2)[-2:])


def rank_end(rank: Mapping[str, Any], record: RunRecord, now: float) -> str:
    """Return how a rank ended: exit code or signal, "runs", "lost", or "-" if nobody knows."""
    if rank["ended"]:
        return str(rank.get("signal") or rank.get("exit_code"))
    if record.has_ended:
        return LOST
    return "runs" if record.is_running(now) else "-"


def last_reported(record: RunRecord, rank: int) -> Mapping[str, Any]:
    """Return the values that a rank reported last, by name, with samples of its GPUs."""
    metrics = record.content.get("metrics")
    last = metrics[rank] if isinstance(metrics, list) and rank < len(metrics) else {}
    return last if isinstance(last, dict) else {}


def reported(last: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what a rank reported last as text, without samples of its GPUs."""
    for name, value in last.items():
        if not name.startswith("gpu."):
            yield name, f"{value:.4g}" if isinstance(value, float) else str(value)


def data(described: Any) -> Iterator[tuple[str, str]]:
    """Yield the data that the ranks read, one line each."""
    for name, facts in described.items() if isinstance(described, dict) else ():
        if isinstance(facts, dict) and isinstance(facts.get("bytes"), int):
            rows = count_of(facts.get("rows", 0), "row")
            many = f"{rows}, {size(facts['bytes'])}"
            gone = "" if facts.get("kept") else ", removed at the end of the run"
            yield (
                (name if name == "data" else f"data {name}"),
                f"{many} of {facts.get('url')}{gone}",
            )


def environment(described: Any) -> str:
    """Return the versions with which a run was started, and the driver's host; "-" for none."""
    if not isinstance(described, dict):
        return "-"
    driver = described.get("driver")
    host = f" on {driver['host']}" if isinstance(driver, dict) and "host" in driver else ""
    names = ("hopsgpu", "python", "spark", "hadoop")
    return ", ".join(f"{name} {described.get(name, '-')}" for name in names) + host


def texts(listed: Any) -> list[str]:
    """Return a list of texts; none if it is something else."""
    return [str(text) for text in listed] if isinstance(listed, list) else []


def gpu_seconds(content: Mapping[str, Any]) -> GpuSeconds | None:
    """Return what the GPUs did while they were held, as far as the record says so; else None."""
    seconds = content.get("gpu_seconds")
    if not isinstance(seconds, dict):
        return None
    named = {field.name: seconds.get(field.name) for field in fields(GpuSeconds)}
    known = {n: float(v) for n, v in named.items() if isinstance(v, (int, float))}
    return GpuSeconds(**known)
