"""The options of `score`, each written once, and the arguments that they check to."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hopsgpu.artifacts.models import ModelStore
from hopsgpu.artifacts.versions import ModelVersion
from hopsgpu.backends.gang_application import GangApplication
from hopsgpu.backends.spark.attachment import application_of
from hopsgpu.backends.spark.dataframe_writer import check_data, is_frame
from hopsgpu.core.signatures import placed_field
from hopsgpu.core.spec import GpuRequest, check_count
from hopsgpu.data.argument import Data, Datasets, datasets_of, url_of
from hopsgpu.display.progress import ShieldedScore, score_progress_of
from hopsgpu.errors import ConfigError
from hopsgpu.executors.item_placement import PlacementTerms
from hopsgpu.launcher.arguments import ItemArguments, gang_in, item_arguments, refuse_nested
from hopsgpu.launcher.function_shipping import check_callable, default_name, pickle_function
from hopsgpu.launcher.options import Duration, ExecutorOptions
from hopsgpu.packaging.pickling import name_of
from hopsgpu.scoring.part_scorer import score_parts
from hopsgpu.storage.names import file_name
from hopsgpu.storage.root import join_url
from hopsgpu.units import parse_duration

# How often a part may fail.
TRIES = 3
# Parts that a process reads ahead while it computes another part.
_AHEAD = 2
_ON_ERROR = ("raise", "skip")


@dataclass(frozen=True, kw_only=True)
class ScoreOptions(ExecutorOptions):
    """The options of `score`.

    Attributes:
        predict: a function of a batch, which is a dict of NumPy arrays by column (read-only, the
            first dimension is the batch); it returns a dict of arrays with as many rows, or a
            pyarrow.RecordBatch. Or a class with a method `__call__(batch)` that does so: each
            process makes one object, `predict(model_dir)` with `model=`, else `predict()`. With
            `model=` a function is called as `predict(batch, model_dir=...)`.
        data: a Spark DataFrame, or the URL or absolute path of Parquet on the lake. The executors
            that run ETL write a DataFrame to the run's directory, before any GPU is requested.
        model: name of a published model, with "@" and a version or tag, as "digits@production"; by
            default the latest version. Or a ModelVersion. Each node downloads it once.
        output: URL or absolute path of the directory that the output will be; it must not exist. By
            default `output` in the run's directory.
        columns: names of the columns that `predict` gets; None for all.
        keep: names of the columns of the data that the output has, before the predictions.
        shapes: shape of a row by column, for columns of lists: (28, 28) for lists of 784 numbers.
        batch_size: number of rows of a batch; the last batch of a part of the data may be smaller.
        max_concurrent: the most executors that score at a time; GPUs are requested for so many.
        gpus_per_worker: number of whole GPUs of each process; 0 to score on CPU executors.
        on_error: "raise" ends the call when the same part of the data has failed three times;
            "skip" leaves out its rows, and lists them in the result's `failed_parts`.
        score_timeout: how long the score may take from its first wait for executors on; it can be
            resumed.
        env_vars: environment variables of every process.
        resume: id of a score that ended early: what it has scored is kept. Its data, columns and
            model must be the same.
        acquire_timeout: how long the score may wait for the first executor; None for no limit.
        progress: as for `launch`; a callable receives a ScoreStatus.
    """

    predict: Any = field(kw_only=False)
    data: Any = field(kw_only=False)
    model: Any = None
    output: str | None = None
    columns: Sequence[str] | None = None
    keep: Sequence[str] = ()
    shapes: Mapping[str, Any] | None = None
    batch_size: int = 1024
    max_concurrent: int = 8
    gpus_per_worker: int = 1
    on_error: Literal["raise", "skip"] = "raise"
    score_timeout: Duration = None
    env_vars: Mapping[str, str] | None = placed_field(None, "python_env")
    resume: str | None = placed_field(None, "name")


@dataclass(frozen=True, kw_only=True)
class ScoreArguments(ItemArguments):
    """The checked arguments of a score; `terms` has no number of parts yet.

    Attributes:
        output: URL of the output; None for the default.
    """

    options: ScoreOptions
    datasets: Datasets
    model: ModelVersion | None
    output: str | None
    progress: ShieldedScore


def score_arguments(
    options: ScoreOptions, interrupted: threading.Event | None = None
) -> ScoreArguments:
    """Check the options of a score.

    Raises:
        ConfigError: an option is invalid; the message names the option, the given value and the
            accepted values.
        StoreError: there is no such model or version, or the lake refused.
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    refuse_nested()
    predict = options.predict
    _check_predict(predict, has_model=options.model is not None)
    check_count(options.batch_size, "batch_size", 1)
    check_count(options.max_concurrent, "max_concurrent", 1)
    _check_gpus(options.gpus_per_worker)
    if options.columns is not None:
        _check_names(options.columns, "columns")
    _check_names(options.keep, "keep")
    if options.on_error not in _ON_ERROR:
        raise ConfigError(f"on_error={options.on_error!r}: must be 'raise' or 'skip'")
    datasets = _datasets(options.data)
    python_env = options.recipe()
    spec = options.gang_of(
        name=options.name if options.name is not None else default_name(predict),
        workers=1,
        gpus=GpuRequest(options.gpus_per_worker),
        env_vars={} if options.env_vars is None else options.env_vars,
    )
    timeout = parse_duration(options.score_timeout, "score_timeout")
    resume = None if options.resume is None else file_name(options.resume, "resume")
    progress = score_progress_of(options.progress)
    call = pickle_function(score_parts, (predict,), {})
    application = application_of(options.spark)
    gang = gang_in(application, spec, python_env)
    terms = PlacementTerms(0, options.max_concurrent, max_tries=TRIES, ahead=_AHEAD)
    common = item_arguments(predict, {}, call, gang, terms, timeout, interrupted)
    check_data(datasets, application)
    return ScoreArguments(
        **vars(common),
        options=replace(options, resume=resume),
        datasets=datasets,
        model=_model(options.model, application),
        output=_output(options.output, datasets, application),
        progress=progress,
    )


def _check_predict(predict: Any, *, has_model: bool) -> None:
    check_callable(predict, "predict")
    name = name_of(predict)
    if inspect.isclass(predict):
        if "__call__" not in dir(predict) or predict.__call__ is type.__call__:
            raise ConfigError(f"predict={name}: the class must have a method __call__(batch)")
        check_callable(predict.__call__, f"predict={name}: __call__")
        wanted = "predict(model_dir)" if has_model else "predict()"
        _check_binds(predict, (None,) if has_model else (), {}, f"{name} as {wanted}")
        return
    kwargs = {"model_dir": None} if has_model else {}
    example = "predict(batch, model_dir=...)" if has_model else "predict(batch)"
    _check_binds(predict, (None,), kwargs, f"{name} as {example}")


def _check_binds(
    predict: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], how: str
) -> None:
    try:
        signature = inspect.signature(predict)
    except (TypeError, ValueError):  # some built-in functions have none
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ConfigError(
            f"predict: a score calls {how}, which {signature} does not accept ({error}); with"
            " model= pass a class whose __init__ takes the model's directory, or a function with a"
            " model_dir argument"
        ) from error


def _check_gpus(gpus: object) -> None:
    if not isinstance(gpus, int) or isinstance(gpus, bool):
        raise ConfigError(
            f"gpus_per_worker={gpus!r}: must be an integer ≥ 0 in a score: one process keeps a GPU"
            " busy, because it reads and writes other parts while it computes one. If predict uses"
            " little of a GPU, use a larger batch_size"
        )


def _check_names(names: object, label: str) -> None:
    is_list = isinstance(names, Sequence) and not isinstance(names, (str, bytes))
    if not is_list or not all(isinstance(name, str) for name in names):  # type: ignore[attr-defined]
        raise ConfigError(f"{label}={names!r}: must be a list of column names")


def _datasets(data: Any) -> Datasets:
    if isinstance(data, (Data, Mapping)) or data is None:
        shown = type(data).__name__
        raise ConfigError(
            f"data: a score reads every row of one table once: pass a DataFrame or a path, not a"
            f" {shown}"
        )
    datasets = datasets_of(data, is_frame)
    assert datasets is not None, "data is not None"
    return datasets


def _model(model: Any, application: GangApplication) -> ModelVersion | None:
    if model is None or isinstance(model, ModelVersion):
        return model
    if not isinstance(model, str) or not model:
        raise ConfigError(
            f"model={model!r}: must be a name, a name with a version or tag (as"
            " 'digits@production'), a ModelVersion or None"
        )
    name, _, version = model.rpartition("@") if "@" in model else (model, "", "latest")
    return ModelStore(join_url(application.root, "models")).get(name, version)


def _output(output: object, datasets: Datasets, application: GangApplication) -> str | None:
    if output is None:
        return None
    if not isinstance(output, str) or not output:
        raise ConfigError(f"output={output!r}: must be the URL or absolute path of a directory")
    try:
        url = url_of(output, application.default_fs)
    except ConfigError as error:
        raise ConfigError(str(error).replace("data=", "output=", 1)) from None
    for _, path in datasets.paths:
        if f"{url}/".startswith(f"{url_of(path, application.default_fs)}/"):
            raise ConfigError(
                f"output={output!r} is within data={path!r}, whose readers would find both tables:"
                " name a directory elsewhere"
            )
    return url
