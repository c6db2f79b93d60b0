"""The comparison of runs by their records, for the command line and pages. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hopsgpu.artifacts.runs import StoredRun
from hopsgpu.core.formats import local_time
from hopsgpu.core.run_record import RunRecord
from hopsgpu.display import phrases
from hopsgpu.display.run_view import summary_of

# More columns fit neither a page nor a terminal.
MAX_RUNS = 6
MAX_ROWS = 200
# Names of the groups.
OUTCOME, PARAMETERS, METRICS, REQUEST, CODE, ENVIRONMENT = (
    *("outcome", "parameters", "last metrics", "request", "code", "environment"),
)
_DIGEST = len("sha256:") + 12
_COMMIT = 12
_SAMPLES = "gpu."
_MAX_TEXT = 200
_UNKNOWN = "-"

Facts = Mapping[str, str]


@dataclass(frozen=True)
class ComparisonRow:
    """A fact about each run.

    Attributes:
        texts: the fact, with its unit, in the order of the runs; "-" where a run does not have it.
    """

    name: str
    texts: tuple[str, ...]

    @property
    def is_different(self) -> bool:
        return len(set(self.texts)) > 1


@dataclass(frozen=True)
class ComparisonGroup:
    """Facts of one kind; a group without facts is left out.

    Attributes:
        name: `OUTCOME`, `PARAMETERS`, `METRICS`, `REQUEST`, `CODE` or `ENVIRONMENT`.
        equal: number of facts that are equal in all runs and are left out.
        left_out: number of different facts beyond the first ones.
    """

    name: str
    rows: tuple[ComparisonRow, ...]
    equal: int = 0
    left_out: int = 0


@dataclass(frozen=True)
class RunComparison:
    """Runs side by side.

    Attributes:
        run_ids: at most `MAX_RUNS`, in the order in which they were given.
    """

    run_ids: tuple[str, ...]
    groups: tuple[ComparisonGroup, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as JSON values: by group and name, a text for each run."""
        return {
            "runs": list(self.run_ids),
            **{
                group.name.replace(" ", "_"): {row.name: list(row.texts) for row in group.rows}
                for group in self.groups
            },
        }


def compare_runs(records: Sequence[RunRecord], now: float) -> RunComparison:
    """Return the comparison of the first `MAX_RUNS` records.

    The arguments of a search are those of its best trial.
    """
    shown = records[:MAX_RUNS]
    kinds: tuple[tuple[str, Callable[[RunRecord], Facts], bool], ...] = (
        (OUTCOME, lambda record: _outcome(record, now), False),
        (PARAMETERS, _parameters, False),
        (METRICS, _last_metrics, False),
        (REQUEST, _request, True),
        (CODE, _code, False),
        (ENVIRONMENT, _environment, True),
    )
    groups = (
        _group(name, [find_facts(record) for record in shown], has_only_differences=only)
        for name, find_facts, only in kinds
    )
    return RunComparison(
        tuple(record.run_id for record in shown),
        tuple(group for group in groups if group.rows or group.equal),
    )


def _group(
    name: str, facts_by_run: Sequence[Facts], *, has_only_differences: bool
) -> ComparisonGroup:
    names = dict.fromkeys(fact for facts in facts_by_run for fact in facts)
    rows = [
        ComparisonRow(fact, tuple(facts.get(fact, "") or _UNKNOWN for facts in facts_by_run))
        for fact in names
    ]
    rows = [row for row in rows if set(row.texts) != {_UNKNOWN}]
    shown = [row for row in rows if row.is_different] if has_only_differences else rows
    return ComparisonGroup(
        name, tuple(shown[:MAX_ROWS]), len(rows) - len(shown), max(len(shown) - MAX_ROWS, 0)
    )


def _outcome(record: RunRecord, now: float) -> Facts:
    summary, seconds = summary_of(StoredRun(record.run_id, record), now), record.gpu_seconds
    trained = f" ({seconds.training / seconds.held:.0%})" if seconds.held > 0 else ""
    phases = {name: phrases.seconds(took) for name, took in record.timeline.phases()}
    return {
        "state": summary.state,
        "error": summary.error,
        "user": record.user,
        "requested": local_time(summary.requested),
        "took": "" if summary.took is None else phrases.seconds(summary.took),
        **phases,
        "GPUs": str(record.gpus),
        "GPU seconds held": f"{seconds.held:,.0f}",
        "GPU seconds training": f"{seconds.training:,.0f}{trained}",
        "model": summary.model,
        "warnings": str(len(record.warnings) or ""),
    }


def _parameters(record: RunRecord) -> Facts:
    arguments = {} if record.call is None else record.call.arguments
    best = None if record.search is None else record.search.best
    params = {} if best is None else best.params
    # The record of a call has texts, as `repr` makes them; that of a trial has the values.
    return {**arguments, **{name: repr(value)[:_MAX_TEXT] for name, value in params.items()}}


def _last_metrics(record: RunRecord) -> Facts:
    """Return what the first rank reported last, or the metric of a search's best trial."""
    search = record.search
    if search is not None:
        if search.best is None:
            return {}
        return {
            search.metric or "value": f"{search.best.value:.6g}",
            "best trial": str(search.best.number),
        }
    reported = record.metrics[0] if record.metrics else {}
    return {n: f"{v:.6g}" for n, v in reported.items() if not n.startswith(_SAMPLES)}


def _request(record: RunRecord) -> Facts:
    spec, shape = record.spec, record.executor
    return {
        "kind": record.kind,
        "gang": summary_of(StoredRun(record.run_id, record), record.updated).gang,
        "executors": str(record.executors),
        "GPUs of an executor": str(shape.gpus),
        "cores of an executor": str(shape.cores),
        "memory of an executor": f"{shape.heap_mib + shape.overhead_mib:,} MiB",
        "GPU type": spec.gpu_type or "",
        "placement": spec.placement or "",
        "queue": record.queue,
        "resumed from": spec.resume or "",
        "image": spec.image or "",
        "Python environment": spec.python_env or "",
        **{f"{name} (variable)": value for name, value in spec.env_vars.items()},
        **{name: data.url for name, data in (record.data or {}).items()},
    }


def _code(record: RunRecord) -> Facts:
    environment, call = record.environment, record.call
    changes = " with changes" if environment.has_changes else ""
    return {
        "function": "" if call is None else call.function,
        "digest": "" if call is None else call.code_digest[:_DIGEST],
        "commit": f"{environment.commit[:_COMMIT]}{changes}" if environment.commit else "",
    }


def _environment(record: RunRecord) -> Facts:
    environment = record.environment
    return {
        **environment.packages,
        "hopsgpu": environment.hopsgpu,
        "Python": environment.python,
        "Python's path": environment.executable,
        "Spark": environment.spark,
        "Hadoop": environment.hadoop,
        **{f"driver's {name}": value for name, value in environment.driver.items()},
    }
