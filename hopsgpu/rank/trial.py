"""A trial of a search in its ranks, and the request to end it early.

The agent creates a file in the rank's directory. A rank that polls renames the file, which needs no
free disk space and records that the rank received the request.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

_ASKED = "prune"
_SEEN = "pruned"
_OPTUNA = "optuna"


@dataclass(frozen=True)
class Trial:
    """A trial of a search.

    Attributes:
        number: Optuna's trial number, from 0.
        params: parameters by name, sent as JSON: a tuple arrives as a list, and a value that JSON
            cannot express as its repr().
    """

    __module__ = "hopsgpu"

    number: int
    params: Mapping[str, Any] = field(hash=False)

    def as_fields(self) -> dict[str, Any]:
        """Return JSON fields, which `from_fields` reads."""
        params = {name: _plain(value) for name, value in self.params.items()}
        return {"number": self.number, "params": params}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Trial:
        return cls(fields["number"], fields["params"])


def _plain(value: object) -> Any:
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        return repr(value)


def ask_to_end(directory: Path) -> None:
    """Make `is_to_end` return True in a rank.

    Raises:
        OSError: the node's disk is full.
    """
    (directory / _ASKED).touch(mode=0o600)


def is_to_end(directory: str) -> bool:
    """Return whether a rank should end its trial; record that the rank has seen the request.

    Args:
        directory: the rank's; a str, because creating a Path would take longer than the check.
    """
    seen = f"{directory}/{_SEEN}"
    try:
        os.rename(f"{directory}/{_ASKED}", seen)  # noqa: PTH104
    except FileNotFoundError:
        return os.path.exists(seen)  # noqa: PTH110
    log.info("the search ends this trial early")
    return True


def has_seen_end(directory: Path) -> bool:
    """Return whether `is_to_end` has returned True."""
    return (directory / _SEEN).exists()


def is_pruning(error: BaseException) -> bool:
    """Return whether an exception is Optuna's TrialPruned."""
    return any(
        kind.__name__ == "TrialPruned" and kind.__module__.partition(".")[0] == _OPTUNA
        for kind in type(error).__mro__
    )
