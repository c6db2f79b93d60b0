"""What a script defines, on the nodes of a real cluster, where it is not; and what cannot go."""

from __future__ import annotations

import linecache
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import optuna
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import hopsgpu

SPACE = {"x": optuna.distributions.IntDistribution(0, 1)}
SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


def as_main(name: str, directory: Path, patch: pytest.MonkeyPatch) -> Any:
    """A script as `__main__`, as far as it goes where it is not run; its file is removed then."""
    copy = Path(shutil.copy(SCRIPTS / f"{name}.py", directory))
    main = ModuleType("__main__")
    main.__file__ = str(copy)
    patch.setitem(sys.modules, "__main__", main)
    source = copy.read_text().partition('if __name__ == "__main__":')[0]
    exec(compile(source, copy, "exec"), vars(main))
    linecache.getlines(str(copy))
    copy.unlink()
    return main


def test_what_a_script_defines_is_on_the_nodes(
    spark: SparkSession,
    gpus_back: Callable[[], int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = spark.sparkContext.broadcast({"a": 1})
    with hopsgpu.hold(workers=1, progress="off") as gang:
        with monkeypatch.context() as patch:
            script = as_main("ordinary", tmp_path, patch)
            given = (script.Config(), script.Argument())
            failed, values = gang.launch(script.train, args=given).value
            assert (failed, script.not_of_the_driver(values)) == ({}, [])
        with monkeypatch.context() as patch:
            script = as_main("torch_script", tmp_path, patch)
            failed, net = gang.launch(script.train).value
            assert (failed, type(net)) == ({}, script.Net)
        assert gang.launch(lambda key: table.value[key], args=("a",)).value == 1


def test_what_is_sparks_is_refused_before_gpus_are_asked_for(
    spark: SparkSession, gpus_back: Callable[[], int]
) -> None:
    frame = spark.range(3)
    counter = spark.sparkContext.accumulator(0)
    destroyed = spark.sparkContext.broadcast(1)
    destroyed.destroy()

    @F.udf("int")
    def shifted(x: int) -> int:
        return x + 1

    frame.select(shifted("id"))
    for function, told in (
        (lambda: spark, "a SparkSession cannot be sent to the ranks: train_fn="),
        (lambda: spark.sparkContext, "closure variable 'spark'. Ranks have no Spark."),
        (lambda: frame.count(), "a DataFrame cannot be sent to the ranks"),
        (lambda: frame.id, "closure variable 'frame'"),
        (lambda: counter.add(1), "an Accumulator cannot be sent to the ranks"),
        (lambda: shifted(1), "a UserDefinedFunction cannot be sent to the ranks"),
        (lambda: destroyed.value, "closure variable 'destroyed'"),
    ):
        for call in (
            lambda train: hopsgpu.launch(train, workers=1, progress="off"),
            lambda train: hopsgpu.submit(train, workers=1, progress="off"),
            lambda train: hopsgpu.search(
                lambda x: train(), SPACE, trials=1, max_concurrent=1, progress="off"
            ),
        ):
            with pytest.raises(hopsgpu.ConfigError) as error:
                call(function)
            assert told in str(error.value)
    for argument, told in ((frame.rdd, "an RDD"), (frame.id, "a Column")):
        with pytest.raises(
            hopsgpu.ConfigError, match=f"{told} cannot be sent to the ranks: .*args.0."
        ):
            hopsgpu.launch(print, args=(argument,), workers=1, progress="off")
    assert gpus_back() == 0
