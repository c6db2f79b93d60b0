from __future__ import annotations

import collections
import dataclasses
import functools
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from py4j.java_gateway import JavaObject
from pyspark import RDD, Accumulator, Broadcast, SparkContext
from pyspark.ml.feature import Binarizer
from pyspark.rdd import PipelinedRDD
from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql.types import StructType
from pyspark.sql.udf import UserDefinedFunction

from hopsgpu.errors import ConfigError
from hopsgpu.packaging.pickling import name_of, pickle_call
from hopsgpu.packaging.sources import add_source_lines
from hopsgpu.packaging.unpicklable import article
from tests.unit.script_ranks import printed, run

try:  # what Spark 4 makes; in Spark 3.5 the public classes are the only ones
    from pyspark.sql.classic.column import Column as ClassicColumn
    from pyspark.sql.classic.dataframe import DataFrame as ClassicDataFrame
except ImportError:
    ClassicColumn, ClassicDataFrame = Column, DataFrame


class Holder:
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self) -> None: ...

    def method(self) -> None: ...


def test_a_call_comes_back() -> None:
    bound = 3
    assert run(pickle_call(lambda x, y: x * y + bound, (2,), {"y": 5})) == 13
    # As a trial adds its parameters to what all trials get.
    more = pickle_call(None, (), {"y": 7})
    assert run(pickle_call(lambda x, y: x * y + bound, (2,), {"y": 5}) + more) == 17


def test_equal_calls_are_equal_bytes() -> None:
    assert pickle_call(Holder.method, (1, {"a", "b"}), {}) == pickle_call(
        Holder.method, (1, {"a", "b"}), {}
    )


@dataclasses.dataclass(slots=True)
class Slots:
    name: str
    lock: object


LOCK = threading.Lock()


def closed(value: object) -> Callable[[], object]:
    return lambda: value


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "where"),
    [
        (Holder(), (), {}, "train_fn.lock"),
        (Holder().method, (), {}, "train_fn.__self__.lock"),
        (functools.partial(print, LOCK), (), {}, "train_fn.args[0]"),
        (closed({"deep": [1, {"s": LOCK}]}), (), {}, "closure variable 'value'['deep'][1]['s']"),
        pytest.param(lambda lock=LOCK: lock, (), {}, f"default {LOCK!r}", id="default"),
        (print, (1, LOCK), {}, "args[1]"),
        (print, (), {"key": LOCK}, "kwargs['key']"),
        (print, (Slots("s", LOCK),), {}, "args[0].lock"),
        (print, (collections.deque([1, LOCK]),), {}, "args[0][1]"),
    ],
)
def test_the_place_of_what_cannot_be_pickled_is_named(
    function: object, args: tuple, kwargs: dict, where: str
) -> None:
    assert f"{where} is a _thread.lock" in refused(function, *args, **kwargs)


def test_names() -> None:
    assert name_of(functools.partial(functools.partial(print))) == "print"
    assert name_of(Holder()) == "Holder"


def test_code_that_travels_by_value_knows_its_file() -> None:
    assert run(pickle_call(lambda: sys._getframe().f_code.co_filename, (), {})) == __file__


CODE = """
import enum, functools, typing
from hopsgpu.packaging.pickling import pickle_code
T = typing.TypeVar("T")
class Box(typing.Generic[T]): pass
class Color(enum.Enum):
    RED = 1
def train(): return Box, Color.RED, T
print(hash(pickle_code(train)))
"""


def test_the_same_code_gives_the_same_bytes_in_each_process() -> None:
    assert len({printed("-c", CODE, PYTHONHASHSEED="0") for _ in range(2)}) == 1


def test_lines_of_source_come_from_where_the_sources_are(tmp_path: Path) -> None:
    script = tmp_path / "bad.py"
    script.write_text("def f():\n    return {}['nope']\n")
    before = ["Traceback (most recent call last):", f'  File "{script}", line 2, in f']
    after = [
        *('  File "/node/lib/x.py", line 7, in g', "    there()", "    ^^^^^^^"),
        *('  File "/nowhere/y.py", line 3, in h', "KeyError: 'nope'"),
    ]
    shown = add_source_lines("\n".join([*before, *after])).splitlines()
    assert shown == [*before, "    return {}['nope']", *after]


def refused(function: object, *args: object, **kwargs: object) -> str:
    with pytest.raises(ConfigError) as error:
        pickle_call(function, args, kwargs)  # type: ignore[arg-type]
    return str(error.value)


def of_spark(kind: type, **state: object) -> object:
    """An object of PySpark, for which no JVM is started."""
    made = object.__new__(kind)
    vars(made).update(state)
    return made


class Accumulating(Accumulator):  # type: ignore[type-arg]
    """A user's own."""


@pytest.mark.parametrize(
    ("kind", "name", "remedy"),
    [
        (SparkSession, "SparkSession", "data="),
        (SparkContext, "SparkContext", "data="),
        (DataFrame, "DataFrame", "data="),
        (ClassicDataFrame, "DataFrame", "toPandas()"),
        (RDD, "RDD", "collect()"),
        (PipelinedRDD, "RDD", "collect()"),
        (ClassicColumn, "Column", "data="),
        (Accumulator, "Accumulator", "context().report()"),
        (Accumulating, "Accumulator", "context().report()"),
        (UserDefinedFunction, "UserDefinedFunction", ".func"),
        (JavaObject, "py4j.java_gateway.JavaObject", "JVM"),
        (Binarizer, "pyspark.ml.feature.Binarizer", "JVM"),
    ],
)
def test_objects_of_spark_are_refused_by_name(kind: type, name: str, remedy: str) -> None:
    mine = of_spark(kind, _java_obj=of_spark(JavaObject))

    def helper() -> object:
        return mine

    def train() -> object:
        return helper()

    for function, args, where in (
        (lambda: mine, (), "closure variable 'mine'. "),
        (train, (), "closure variable 'helper': closure variable 'mine'. "),
        (functools.partial(print, mine), (), "train_fn.args[0]. "),
        (print, ([mine],), "args[0][0]. "),
    ):
        said = refused(function, *args)
        assert said.startswith(f"{article(name)} {name} ") and ": train_fn=" in said
        assert f"has one as {where}" in said
        assert remedy in said
    assert "has one as kwargs['x']. " in refused(print, x=mine)


def test_a_broadcast_variables_value_travels() -> None:
    table = of_spark(Broadcast, _value={"a": 1}, _path=None, _jbroadcast=None)
    assert run(pickle_call(lambda key: table.value[key], ("a",), {})) == 1  # type: ignore[attr-defined]
    lost = of_spark(Broadcast, _path="/nowhere", _sc=SimpleNamespace(_encryption_enabled=False))
    kind = f"{Broadcast.__module__}.Broadcast"
    assert f"'lost' is a {kind}" in refused(lambda: lost)


def test_plain_data_of_spark_travels() -> None:
    row = Row(a=1)
    assert run(pickle_call(lambda: (row.a, StructType().fieldNames()), (), {})) == (1, [])


def test_an_open_file_is_refused_by_its_name(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        said = refused(lambda: file)
    assert f"'file' is a _io.BufferedWriter ({str(tmp_path / 'file')!r})" in said
    assert "open it inside" in said


def test_of_what_a_decorator_made_the_decorator_is_named() -> None:
    def decorated(function: Callable[[], object]) -> Callable[[], object]:
        lock = threading.Lock()
        scope = {"__name__": "package", "functools": functools, "function": function, "lock": lock}
        exec("@functools.wraps(function)\ndef wrapped(): return lock, function()", scope)
        return scope["wrapped"]  # type: ignore[return-value]

    @decorated
    def well() -> int:
        return 1

    sock = socket.socket()

    @decorated
    def ill() -> object:
        return sock

    said = refused(lambda: well())
    assert "'well' is a function decorated" in said
    assert said.endswith("inside the function")
    with sock:
        said = refused(lambda: ill())
    assert "'ill': closure variable 'sock' " in said
