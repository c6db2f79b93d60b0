"""Common code of the callbacks for libraries' training loops."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, SupportsFloat

from hopsgpu.core.metrics import split_recordable
from hopsgpu.core.rank_warnings import warn_run


class CallbackContext(Protocol):
    """The part of `hopsgpu.context()` that callbacks use."""

    def report(self, step: int, /, **metrics: SupportsFloat) -> None:
        """Report metrics at a step to the driver."""

    def save_checkpoint(self, path: str | Path, step: int) -> None:
        """Save a file or directory to the lake, as the checkpoint at a step."""


class MetricReporter:
    """A reporter of metrics whose names and values a library chooses.

    A metric that cannot be recorded must not end the training. The first problem of each kind
    becomes a warning of the run.
    """

    def __init__(self, context: CallbackContext, library: str) -> None:
        self._context = context
        self._library = library
        self._warned: set[str] = set()

    def report(self, step: int, values: Mapping[str, Any] | None) -> None:
        metrics, problems = split_recordable(values or {})
        self._context.report(step, **metrics)
        for kind, problem in problems.items():
            if kind not in self._warned:
                self._warned.add(kind)
                warn_run(f"{self._library} logs a metric that is not recorded: {problem}")
