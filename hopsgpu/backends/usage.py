"""Who used how much GPU time, from the records of runs on the lake."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import date, datetime, timedelta

from hopsgpu.artifacts.run_uses import read_uses
from hopsgpu.core.boundary import public
from hopsgpu.core.usage_report import Grouping, Usage, check_grouping, moment_of, summed_up
from hopsgpu.errors import ConfigError
from hopsgpu.storage.lake_root import given_roots

When = str | float | timedelta | date | datetime | None


@public
def usage(
    by: Grouping = "user",
    since: When = "30d",
    *,
    until: When = None,
    root: str | Sequence[str] | None = None,
) -> Usage:
    """Return the GPU hours that runs held, trained with, left idle and waited for.

    The source is the records of runs, and what `hopsgpu runs prune` kept of removed ones: neither
    Spark nor YARN is asked. Days are those of UTC. A run that began before the period, or ended
    after it, counts with its part within.

    Args:
        by: "user", "queue", "run" or "day".
        since: begin of the period: a duration until now ("30d", "12h", seconds, a timedelta), a
            date or time (in UTC unless it says otherwise: "2026-11-01", "2026-11-01T12:00+01:00",
            a date, a datetime), or None or "all" for all runs.
        until: end of the period, in the same forms; None for now.
        root: URL of a directory of runs and models, or several. By default the one that a session
            here uses, and if that is not set by `spark.hopsgpu.root` or `HOPSGPU_ROOT` but is the
            user's own directory, those of all other users beside it.

    Returns:
        A sequence of rows, which `pandas.DataFrame` takes. Records and users' directories that
        cannot be read are listed in `problems`, and their runs are not in the rows; `notes` says
        what is incomplete.

    Raises:
        ConfigError: an argument has another form, or the root is unknown.
        StoreError: the lake cannot be reached.
    """
    check_grouping(by)
    now = time.time()
    began, ended = moment_of(since, "since", now), moment_of(until, "until", now)
    ended = now if ended is None else min(ended, now)
    if began is not None and began >= ended:
        raise ConfigError(f"since={since!r}, until={until!r}: the period must begin before its end")
    roots, problems = given_roots(root)
    found = read_uses(roots, began, now)
    return summed_up(found.runs, by, began, ended, [*problems, *found.problems])
