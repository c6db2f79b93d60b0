"""A program that logs an ended run to MLflow, from its directory on the lake; see `mlflow.log`.

It reads one JSON object from standard input, which `mlflow.log` writes, and writes a list of
problems to standard output.
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
from hopsgpu.core.metrics import record_name
from hopsgpu.core.run_record import LARGEST_RECORD, RunRecord, fields_of, parse
from hopsgpu.errors import StoreError
from hopsgpu.storage.lake import LakePath

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

T = TypeVar("T")

# MLflow's limits. A request is limited to 1 MB, and a value of 6,000 characters can take 36 kB.
_LONGEST_NAME = 250
_LONGEST_VALUE = 6000
_LONGEST_TAG = 5000
_MOST_PARAMS = 20
_MOST_METRICS = 1000
# Values of all metrics together: they take some seconds of requests. MLflow's charts show fewer.
_MOST_VALUES = 50_000
_UNFIT = re.compile(r"[^\w\-. /:]", re.ASCII)
_STATUS = {"succeeded": "FINISHED", "cancelled": "KILLED"}
# Error codes: the experiment or model exists already; the server has no model registry.
_THERE = "RESOURCE_ALREADY_EXISTS"
_NO_REGISTRY = ("ENDPOINT_NOT_FOUND", "FEATURE_DISABLED", "NOT_IMPLEMENTED")


class Value(NamedTuple):
    """One value of a metric.

    Attributes:
        name: name that MLflow accepts.
        value: value, including NaN and the infinities.
        time: milliseconds since the epoch.
        step: step of the report.
    """

    name: str
    value: float
    time: int
    step: int


def main() -> None:
    """Log the run that standard input names."""
    request = json.load(sys.stdin)
    # The driver may be gone by then, and nothing else would end this process.
    signal.alarm(int(request["seconds"]) + 1)
    # MLflow prints the run's address, and standard output is for the problems.
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
    """Log a run; return what could not be logged, and why.

    Args:
        uri: MLflow's tracking URI.
        experiment: name of MLflow's experiment.
        directory: directory of the run.
        parameters: parameters of its function, by name, as plain data.
        code_digest: digest of its function, "" if unknown.
    """
    problems: list[str] = []
    with _recorded(problems, "the run"):
        record = parse((directory / RECORD).read(LARGEST_RECORD))
        if not record.has_ended:
            raise StoreError(f"the record has no final state, but {record.state!r}")
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=uri)
        run = client.create_run(
            _experiment(client, experiment),
            start_time=_milliseconds(record.timeline.requested or record.updated),
            tags=tags_of(record, directory.url, code_digest),
            run_name=record.run_id,
        )
        mlflow_id = run.info.run_id
        with _recorded(problems, "parameters"):
            _log_params(client, mlflow_id, params_of(record, parameters))
        with _recorded(problems, "metrics"):
            _log_values(client, mlflow_id, [*_reports(directory, record), *seconds_of(record)])
        with _recorded(problems, "the model's version"):
            if record.model is not None:
                _register(client, mlflow_id, record, record.model)
        status = _STATUS.get(record.state, "FAILED")
        client.set_terminated(mlflow_id, status, end_time=_milliseconds(record.updated))
    return problems


def tags_of(record: RunRecord, url: str, code_digest: str) -> dict[str, str]:
    """Return tags: the run's owner, its outcome, and where the rest is, without missing values."""
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
    return {name: value[:_LONGEST_TAG] for name, value in tags.items() if value}


def version_of(model: str) -> str:
    """Return the number of the version, the last part of its URL."""
    return model.rstrip("/").rpartition("/")[2]


def params_of(record: RunRecord, parameters: Mapping[str, Any]) -> dict[str, str]:
    """Return the function's parameters by name, and the gang's as "hopsgpu.workers" and so on."""
    spec = fields_of(record)["spec"]
    gang = {name: v for name, v in spec.items() if name != "env_vars" and v is not None}
    gang |= {"queue": record.queue, "executors": record.executors, "attempt": record.attempt}
    named = {**parameters, **{f"hopsgpu.{name}": value for name, value in gang.items()}}
    return {fit_name(name): _text(value)[:_LONGEST_VALUE] for name, value in named.items()}


def seconds_of(record: RunRecord) -> list[Value]:
    """Return where the run's GPU time went, as metrics with one value each.

    Their names are "hopsgpu.gpu_seconds.held" and so on.
    """
    at = _milliseconds(record.updated)
    spent = vars(record.gpu_seconds)
    return [Value(f"hopsgpu.gpu_seconds.{name}", float(s), at, 0) for name, s in spent.items()]


def values_of(attempts: Iterable[Iterable[bytes]]) -> list[Value]:
    """Return what a rank reported in all attempts, without what a later attempt repeats.

    An attempt resumes from a checkpoint, so what earlier attempts reported from its first step on
    is left out.

    Args:
        attempts: lines of the rank's record, for each attempt in order.
    """
    values: list[Value] = []
    for lines in attempts:
        reported = [value for line in lines for value in _reported(line)]
        if reported:
            first = min(value.step for value in reported)
            values = [value for value in values if value.step < first] + reported
    return values


def thinned(values: Sequence[Value], most: int = _MOST_VALUES) -> list[Value]:
    """Return at most so many values: of a long metric every n-th value and the last.

    Each metric keeps at least two values, even if all of them are too many then.

    Args:
        values: values of all metrics.
        most: most values to return.
    """
    by_name: dict[str, list[Value]] = {}
    for value in values:
        by_name.setdefault(value.name, []).append(value)
    each = max(most // max(len(by_name), 1), 2)
    kept: list[Value] = []
    for series in by_name.values():
        stride = -(-len(series) // (each - 1)) if len(series) > each else 1
        kept += series[::stride]
        if (len(series) - 1) % stride:
            kept.append(series[-1])
    return kept


def fit_name(name: str) -> str:
    """Return a name that MLflow accepts, with "_" for other characters."""
    fit = _UNFIT.sub("_", name)[:_LONGEST_NAME]
    # MLflow treats names as paths, and accepts only their normal form.
    if any(part in ("", ".", "..") for part in fit.split("/")):
        fit = fit.replace("/", "_")
    return "_" if fit in ("", ".", "..") else fit


def batches(items: Sequence[T], most: int) -> Iterator[Sequence[T]]:
    """Yield batches of at most so many items."""
    for first in range(0, len(items), most):
        yield items[first : first + most]


def _reported(line: bytes) -> list[Value]:
    """Return the values of a report.

    The result is empty for a sample of a GPU, and for a line that is cut off because its rank was
    killed.
    """
    try:
        report = json.loads(line)
        if "metrics" not in report:
            return []
        step, time = int(report["step"]), _milliseconds(float(report["time"]))
        return [Value(fit_name(n), float(v), time, step) for n, v in report["metrics"].items()]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return []


def _reports(directory: LakePath, record: RunRecord) -> list[Value]:
    """Return what rank 0 reported."""
    places = [directory / "logs"]
    places += [places[0] / f"attempt-{number}" for number in range(1, record.attempt + 1)]
    return thinned(values_of(_lines(place / record_name(0)) for place in places))


def _lines(file: LakePath) -> Iterator[bytes]:
    if file.exists():
        with file.open() as lines:
            yield from lines


def _log_params(client: MlflowClient, mlflow_id: str, params: Mapping[str, str]) -> None:
    from mlflow.entities import Param

    for some in batches([Param(name, value) for name, value in params.items()], _MOST_PARAMS):
        client.log_batch(mlflow_id, params=some)


def _log_values(client: MlflowClient, mlflow_id: str, values: Sequence[Value]) -> None:
    from mlflow.entities import Metric

    for some in batches([Metric(*value) for value in values], _MOST_METRICS):
        client.log_batch(mlflow_id, metrics=some)


def _experiment(client: MlflowClient, name: str) -> str:
    """Return the ID of an experiment; create it if missing."""
    found = client.get_experiment_by_name(name)
    if found is None:
        with _unless_coded(_THERE):  # another run may create it meanwhile
            return str(client.create_experiment(name))
        found = client.get_experiment_by_name(name)
    return str(found.experiment_id)


def _register(client: MlflowClient, mlflow_id: str, record: RunRecord, url: str) -> None:
    """Register the version on the lake in MLflow's model registry, if there is one."""
    name = record.spec.model or ""
    tags = {"hopsgpu.model.version": version_of(url), "hopsgpu.run_id": record.run_id}
    with _unless_coded(*_NO_REGISTRY):
        with _unless_coded(_THERE):
            client.create_registered_model(name)
        # By default the call would wait for the server to copy something.
        client.create_model_version(
            name, source=url, run_id=mlflow_id, tags=tags, await_creation_for=0
        )


@contextlib.contextmanager
def _unless_coded(*codes: str) -> Iterator[None]:
    """Leave the block if MLflow answers with one of these codes."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        if error.error_code not in codes:
            raise


@contextlib.contextmanager
def _recorded(problems: list[str], part: str) -> Iterator[None]:
    """Record the error that ends the block."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - told to the person whose run it is
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        problems.append(f"{part}: {first}")


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


if __name__ == "__main__":
    main()
