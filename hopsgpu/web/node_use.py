"""GPU use of nodes over the last hour, from the samples in the files of runs' ranks. Pure."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from hopsgpu.display.picture import Point
from hopsgpu.storage.error_messages import JSON_ERRORS

HOUR = 3600.0
# An hour of samples, one a second; also of a rank with several GPUs, then of a shorter time.
TAIL_BYTES = 2**20
_BIN_SECONDS = 60.0


def samples_in(content: bytes, since: float) -> Iterator[Point]:
    """Yield the times and the utilisations, in [0, 1], of the samples in the end of a file."""
    for line in content.split(b"\n"):
        # Most lines of some files are metrics, which need not be parsed.
        if b'"gpu"' not in line:
            continue
        try:
            sample = json.loads(line)
            at, use = float(sample["time"]), float(sample["gpu"]["utilisation"])
        except JSON_ERRORS:  # also the first line, if the content begins within it
            continue
        if at >= since and 0.0 <= use <= 1.0:
            yield at, use


def means_by_host(
    samples: Iterable[tuple[str, Point]], now: float
) -> Mapping[str, tuple[Point, ...]]:
    """Return the mean utilisation in each minute of the last hour, by host.

    Args:
        samples: pairs of a host and a sample of one of its GPUs.
    """
    begin = now - HOUR
    bins: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for host, (at, use) in samples:
        if begin <= at <= now:
            bins[host][int((at - begin) / _BIN_SECONDS)].append(use)
    return {
        host: tuple(
            (begin + (number + 0.5) * _BIN_SECONDS, sum(uses) / len(uses))
            for number, uses in sorted(bins_of_host.items())
        )
        for host, bins_of_host in bins.items()
    }
