"""A number of seconds on the command line."""

from __future__ import annotations

import math
from typing import Any

import click

_DAY = 86_400.0


class Seconds(click.FloatRange):
    """Seconds from a minimum to a day; unlike FloatRange, it rejects "nan"."""

    def __init__(self, least: float) -> None:
        super().__init__(min=least, max=_DAY)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        seconds = float(super().convert(value, param, ctx))
        if math.isnan(seconds):
            self.fail(f"{value!r} is not a number of seconds", param, ctx)
        return seconds
