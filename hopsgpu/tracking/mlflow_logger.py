"""A program that logs an ended run to MLflow, from its directory on the lake; see `mlflow.log`.

The program reads the JSON object of `mlflow.log` from standard input, and writes a list of problems
to standard output.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from hopsgpu.artifacts.runs import RECORD
from hopsgpu.core.bounded_reads import MAX_RECORD_BYTES
from hopsgpu.core.metrics import record_name
from hopsgpu.core.run_record import LARGEST_RECORD, RunRecord, fields_of, parse
from hopsgpu.errors import StoreError
from hopsgpu.storage.lake import LakePath

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

T = TypeVar("T")

# MLflow's limits. A request is limited to 1 MB, and a value of 6,000 characters can take 36 kB.
_MAX_NAME = 250
_MAX_VALUE = 6000
_MAX_TAG = 5000
_MAX_PARAMS = 20
_MAX_METRICS = 1000
# For all metrics together: the requests take some seconds. MLflow's charts show fewer values.
_MAX_VALUES = 50_000
_FORBIDDEN = re.compile(r"[^\w\-. /:]", re.ASCII)
_STATUS = {"succeeded": "FINISHED", "cancelled": "KILLED"}
# Error codes: the experiment or model exists already; the server has no model registry.
_EXISTS = "RESOURCE_ALREADY_EXISTS"
_NO_REGISTRY = ("ENDPOINT_NOT_FOUND", "FEATURE_DISABLED", "NOT_IMPLEMENTED")


class MetricValue(NamedTuple):
    """A metric's value, which may be NaN or infinite, at milliseconds since the epoch."""

    name: str
    value: float
    time: int
    step: int


def main() -> None:
    request = json.load(sys.stdin)
    # Exit even if the driver, which kills this process at a timeout, has died.
    signal.alarm(int(request["seconds"]) + 1)
    # MLflow prints the run's address, but standard output is for the problems.
    with contextlib.redirect_stdout(sys.stderr):
        problems = log_run(
            request["uri"],
            request["experiment"],
            LakePath(request["run_url"]),
            request["parameters"],
            request["code_digest"],
        )
    print(json.dumps(problems))


def log_run(
    uri: str,
    experiment: str,
    directory: LakePath,
    parameters: Mapping[str, Any],
    code_digest: str = "",
) -> list[str]:
    """Log a run with the `Provenance` of its function; return the problems as texts."""
    problems: list[str] = []
    with _collect_problem(problems, "the run"):
        record = parse((directory / RECORD).read(LARGEST_RECORD))
        if not record.has_ended:
            raise StoreError(f"the record has no final state, but {record.state!r}")
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=uri)
        run = client.create_run(
            _experiment(client, experiment),
            start_time=_milliseconds(record.timeline.requested or record.updated),
            tags=tags_of(record, directory.url, code_digest),
            run_name=record.run_id,
        )
        mlflow_id = run.info.run_id
        with _collect_problem(problems, "parameters"):
            params = [Param(*item) for item in params_of(record, parameters).items()]
            _log(client, mlflow_id, "params", params, _MAX_PARAMS)
        with _collect_problem(problems, "metrics"):
            metrics = [
                Metric(*value) for value in [*_reports(directory, record), *seconds_of(record)]
            ]
            _log(client, mlflow_id, "metrics", metrics, _MAX_METRICS)
        with _collect_problem(problems, "the model's version"):
            if record.model is not None:
                _register(client, mlflow_id, record, record.model)
        status = _STATUS.get(record.state, "FAILED")
        client.set_terminated(mlflow_id, status, end_time=_milliseconds(record.updated))
    return problems


def tags_of(record: RunRecord, url: str, code_digest: str) -> dict[str, str]:
    model = record.model
    tags = {
        "mlflow.user": record.user,
        "hopsgpu.run_id": record.run_id,
        "hopsgpu.application": record.application,
        "hopsgpu.user": record.user,
        "hopsgpu.state": record.state,
        "hopsgpu.error": record.error,
        "hopsgpu.record": url,
        "hopsgpu.code_digest": code_digest,
        "hopsgpu.model": model,
        "hopsgpu.model.name": None if model is None else record.spec.model,
        "hopsgpu.model.version": None if model is None else version_of(model),
    }
    return {name: value[:_MAX_TAG] for name, value in tags.items() if value}


def version_of(model: str) -> str:
    """Return the number of a version, given its URL."""
    return model.rstrip("/").rpartition("/")[2]


def params_of(record: RunRecord, parameters: Mapping[str, Any]) -> dict[str, str]:
    """Return the function's parameters, and those of the gang as "hopsgpu.workers" and so on."""
    spec = fields_of(record)["spec"]
    gang = {name: v for name, v in spec.items() if name != "env_vars" and v is not None}
    gang |= {"queue": record.queue, "executors": record.executors, "attempt": record.attempt}
    named = {**parameters, **{f"hopsgpu.{name}": value for name, value in gang.items()}}
    return {fit_name(name): _text(value)[:_MAX_VALUE] for name, value in named.items()}


def seconds_of(record: RunRecord) -> list[MetricValue]:
    """Return the run's GPU seconds as metrics "hopsgpu.gpu_seconds.held" and so on."""
    at = _milliseconds(record.updated)
    spent = vars(record.gpu_seconds)
    return [
        MetricValue(f"hopsgpu.gpu_seconds.{name}", float(s), at, 0) for name, s in spent.items()
    ]


def values_of(attempts: Iterable[Iterable[bytes]]) -> list[MetricValue]:
    """Return a rank's reported values, given the lines of its record in each attempt in order.

    An attempt resumes from a checkpoint: values of earlier attempts from its first step on are left
    out.
    """
    values: list[MetricValue] = []
    for lines in attempts:
        reported = [value for line in lines for value in _values_of_report(line)]
        if reported:
            first = min(value.step for value in reported)
            values = [value for value in values if value.step < first] + reported
    return values


def thin_out(values: Sequence[MetricValue], limit: int = _MAX_VALUES) -> list[MetricValue]:
    """Return at most `limit` values, but at least two of each metric.

    A long metric keeps every n-th value and the last.
    """
    by_name: dict[str, list[MetricValue]] = {}
    for value in values:
        by_name.setdefault(value.name, []).append(value)
    per_metric = max(limit // max(len(by_name), 1), 2)
    kept: list[MetricValue] = []
    for series in by_name.values():
        stride = -(-len(series) // (per_metric - 1)) if len(series) > per_metric else 1
        kept += series[::stride]
        if (len(series) - 1) % stride:
            kept.append(series[-1])
    return kept


def fit_name(name: str) -> str:
    """Return a name that MLflow accepts, with "_" for forbidden characters."""
    fit = _FORBIDDEN.sub("_", name)[:_MAX_NAME]
    # MLflow treats names as paths, and accepts only their normal form.
    if any(part in ("", ".", "..") for part in fit.split("/")):
        fit = fit.replace("/", "_")
    return "_" if fit in ("", ".", "..") else fit


def batches(items: Sequence[T], limit: int) -> Iterator[Sequence[T]]:
    for first in range(0, len(items), limit):
        yield items[first : first + limit]


def _values_of_report(line: bytes) -> list[MetricValue]:
    """Return the values in a line; empty for a GPU sample and for an incomplete line."""
    try:
        report = json.loads(line)
        if "metrics" not in report:
            return []
        step, time = int(report["step"]), _milliseconds(float(report["time"]))
        return [
            MetricValue(fit_name(n), float(v), time, step) for n, v in report["metrics"].items()
        ]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return []


def _reports(directory: LakePath, record: RunRecord) -> list[MetricValue]:
    places = [directory / "logs"]
    places += [places[0] / f"attempt-{number}" for number in range(1, record.attempt + 1)]
    return thin_out(values_of(_lines(place / record_name(0)) for place in places))


def _lines(file: LakePath) -> Iterator[bytes]:
    if file.exists():
        with file.open() as lines:
            yield from iter(lambda: lines.readline(MAX_RECORD_BYTES), b"")


def _log(client: MlflowClient, mlflow_id: str, kind: str, items: Sequence[Any], limit: int) -> None:
    for batch in batches(items, limit):
        client.log_batch(mlflow_id, **{kind: batch})


def _experiment(client: MlflowClient, name: str) -> str:
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        with _ignore_codes(_EXISTS):  # another run may create it now
            return str(client.create_experiment(name))
        experiment = client.get_experiment_by_name(name)
    return str(experiment.experiment_id)


def _register(client: MlflowClient, mlflow_id: str, record: RunRecord, url: str) -> None:
    """Register a version on the lake in MLflow's model registry, if the server has one."""
    name = record.spec.model or ""
    tags = {"hopsgpu.model.version": version_of(url), "hopsgpu.run_id": record.run_id}
    with _ignore_codes(*_NO_REGISTRY):
        with _ignore_codes(_EXISTS):
            client.create_registered_model(name)
        # By default, the call waits for the server to copy files.
        client.create_model_version(
            name, source=url, run_id=mlflow_id, tags=tags, await_creation_for=0
        )


@contextlib.contextmanager
def _ignore_codes(*codes: str) -> Iterator[None]:
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        if error.error_code not in codes:
            raise


@contextlib.contextmanager
def _collect_problem(problems: list[str], part: str) -> Iterator[None]:
    """Suppress an error of the block, and add it to the problems."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the problem becomes a warning of the run
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        problems.append(f"{part}: {first}")


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


if __name__ == "__main__":
    main()
