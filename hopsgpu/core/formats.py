"""Formats of times, durations and sizes, for people."""

from __future__ import annotations

import datetime
import time

_UNITS = ("B", "KiB", "MiB", "GiB")


def duration(seconds: float | None) -> str:
    """Return seconds as "7.5s", "12m03s", "5h20m" or "3d04h"; "-" for None."""
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{seconds:.1f}s"
    total = int(seconds)
    (days, hours), (minutes, rest) = divmod(total // 3600, 24), divmod(total % 3600, 60)
    if days:
        return f"{days}d{hours:02}h"
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s"


def local_time(seconds: float | None) -> str:
    """Return the local date and time of seconds since the epoch; "-" for None."""
    if seconds is None:
        return "-"
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):  # no time that a calendar has
        return f"{seconds:g}"


def local_time_of(text: str) -> str:
    """Return the local date and time of a UTC time in RFC 3339; other texts unchanged."""
    try:
        return local_time(datetime.datetime.fromisoformat(text).timestamp())
    except ValueError:
        return text


def utc_time(seconds: float) -> str:
    """Return seconds since the epoch as UTC time in RFC 3339, with milliseconds."""
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def size(count: float) -> str:
    """Return bytes in the largest unit with a value of at least 1."""
    for unit in _UNITS:
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
