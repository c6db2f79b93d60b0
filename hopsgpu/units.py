"""Parsers of durations and memory sizes, and texts of counts."""

from __future__ import annotations

import math
import re
from datetime import timedelta

from hopsgpu.errors import ConfigError

_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)\s*")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_MEMORY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt])i?b?\s*", re.IGNORECASE)
_BYTES = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}

MIB = 2**20
# 30,000 years. Larger ints may not fit into a float.
_MAX_SECONDS = 1e12


def parse_duration(value: object, name: str) -> float | None:
    """Return a duration in seconds.

    Args:
        value: "90s", "10m", "2h", a number of seconds, a timedelta, or None for no bound.

    Returns:
        Seconds above 0, or None for no bound.

    Raises:
        ConfigError: the value has another form, or is zero, negative or not finite.
    """
    seconds: float | None = None
    if value is None:
        return None
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = float(min(value, _MAX_SECONDS)) if value == value else math.nan
    elif isinstance(value, str) and (match := _DURATION.fullmatch(value)):
        seconds = float(match[1]) * _SECONDS[match[2]]
    if seconds is None or not 0 < seconds < _MAX_SECONDS:
        raise ConfigError(
            f"{name}={value!r}: must be a duration above zero, such as '90s', '10m', '2h', "
            "a number of seconds, a timedelta, or None for no bound"
        )
    return seconds


OFF = "off"


def parse_duration_or_off(value: object, name: str) -> float | None:
    """Return a duration in seconds, as `parse_duration` does; None also for "off".

    "off" overrides an application's default.

    Raises:
        ConfigError: the value has another form, or is zero, negative or not finite.
    """
    if value == OFF:
        return None
    try:
        return parse_duration(value, name)
    except ConfigError as error:
        raise ConfigError(f"{error}, or {OFF!r} for never") from error


def parse_memory(value: object, name: str) -> int:
    """Return a memory size in bytes, at least 1 MiB.

    Args:
        value: "4g", "512m" (powers of 1024), or bytes as an int.

    Raises:
        ConfigError: the value has another form, or is below 1 MiB.
    """
    size: int | None = None
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str) and (match := _MEMORY.fullmatch(value)):
        size = int(float(match[1]) * _BYTES[match[2].lower()])
    if size is None or size < MIB:
        raise ConfigError(
            f"{name}={value!r}: must be a memory size of at least 1 MiB, such as '4g', '512m', "
            "or bytes as an int"
        )
    return size


def count_of(number: int, noun: str, plural: str = "") -> str:
    """Return a number with a noun: "1 file" or "2 files".

    Args:
        plural: the plural, unless it is `noun` with an "s".
    """
    return f"{number} {noun}" if number == 1 else f"{number} {plural or noun + 's'}"
