"""The use of GPU time, from the run records on the lake."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import date, datetime, timedelta

from hopsgpu.artifacts.run_uses import read_uses
from hopsgpu.core.boundary import public
from hopsgpu.core.usage_report import Grouping, Usage, check_grouping, moment_of, sum_usage
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

    The source is the run records, and the entries that `hopsgpu runs prune` kept of removed runs;
    Spark and YARN are not used. Days are in UTC. The part of a run within the period counts.

    Args:
        by: "user", "queue", "run" or "day".
        since: begin of the period: a duration until now ("30d", "12h", seconds, a timedelta), or a
            date or time ("2026-11-01", "2026-11-01T12:00+01:00", a date, a datetime; by default in
            UTC), or None or "all" for all runs.
        until: end of the period, in the same forms; None for now.
        root: URL of a root of runs and models, or several. The default is the root that a session
            uses. If neither `spark.hopsgpu.root` nor `HOPSGPU_ROOT` sets it, the default is the
            roots of all users.

    Returns:
        A sequence of rows, which `pandas.DataFrame` accepts. `problems` lists unreadable records
        and directories, whose runs are missing in the rows. `notes` says what is incomplete.

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
    uses = read_uses(roots, began, now)
    return sum_usage(uses.runs, by, began, ended, [*problems, *uses.problems])
