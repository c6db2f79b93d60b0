"""Which objects run code of their own when they are loaded, and which are known to load."""

from __future__ import annotations

import abc
import argparse
import collections
import dataclasses
import decimal
import enum
import functools
import io
import pathlib
import typing
from typing import Any, Generic, NamedTuple, TypeVar

import cloudpickle
import numpy as np
import pandas as pd
import pytest

from hopsgpu.packaging.load_check_process import may_depend_on_node
from hopsgpu.packaging.load_risks import LoadRisks, can_fail_to_create, can_fail_to_load
from hopsgpu.packaging.pickling import pickle_call
from tests.unit.packaging import foreign_classes
from tests.unit.packaging.foreign_classes import Plugin, Registered, Tagged

T = TypeVar("T")


class Plain:
    def __init__(self, value: int) -> None:
        self.value = value

    def __hash__(self) -> int:
        return self.value

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    value: int


@dataclasses.dataclass(frozen=True)
class Typed(Generic[T]):
    value: T


class Pair(NamedTuple):
    a: int


class Planet(enum.Enum):
    EARTH = 1.0, 2.0

    def __init__(self, mass: float, radius: float) -> None:
        self.mass = mass


class Shape(abc.ABC):
    @abc.abstractmethod
    def area(self) -> int: ...


class Words(list[str]):
    pass


class Table(pd.DataFrame):
    pass


class Movie(typing.TypedDict):
    name: str


@pytest.mark.parametrize(
    "kind",
    [
        *(Plain, Frozen, Typed, Pair, Planet, Words, Table),
        collections.namedtuple("Point", "x y"),  # noqa: PYI024
        *(argparse.Namespace, decimal.Decimal, pathlib.PosixPath, collections.OrderedDict),
        *(functools.partial, io.BytesIO, np.ndarray, pd.DataFrame),
    ],
)
def test_data_loads(kind: type) -> None:
    assert not can_fail_to_load(kind)


@pytest.mark.parametrize("cls", [Plain, Frozen, Typed, Pair, Planet, Shape, Words, Table, Movie])
def test_ordinary_classes_are_created(cls: type) -> None:
    assert not can_fail_to_create(cls)


class Delegating:
    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Made:
    def __new__(cls, value: int) -> Made:
        return super().__new__(cls)


class Reduced:
    def __reduce__(self) -> Any:
        return Reduced, ()


class Restored:
    def __setstate__(self, state: Any) -> None:
        raise ValueError


class Checked(dict[str, int]):
    def __setitem__(self, key: str, value: int) -> None:
        raise KeyError(key)


class Failure(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)


class Slotted:
    __slots__ = ("a",)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)


class Child(Made):
    pass


@pytest.mark.parametrize(
    "kind", [Delegating, Made, Reduced, Restored, Checked, Failure, Slotted, Child]
)
def test_own_ways_are_risks(kind: type) -> None:
    # The bases that are named here, and not list or Exception, decide.
    assert can_fail_to_load(kind)


@pytest.mark.parametrize("cls", [Tagged, Registered])
def test_code_that_runs_while_a_class_is_created_is_a_risk(cls: type) -> None:
    assert can_fail_to_create(cls)
    assert not can_fail_to_create(Plugin)


def risks_of(*args: object) -> set[type]:
    risks = LoadRisks()
    pickle_call(print, args, {}, risks=risks)
    return set(risks.samples)


def test_a_pickle_has_the_risks_in_it() -> None:
    assert risks_of(Plain(1), [Frozen(1), np.ones(2)], {"a": Planet.EARTH}) == set()
    assert risks_of(Plain(Made(1)), [Made(2), Reduced()]) == {Made, Reduced}  # type: ignore[arg-type]
    # A class that ranks import is created by its module.
    assert risks_of(Tagged, Registered) == set()
    cloudpickle.register_pickle_by_value(foreign_classes)
    try:
        assert risks_of(Tagged, Registered()) == {Tagged, Registered}
    finally:
        cloudpickle.unregister_pickle_by_value(foreign_classes)


@pytest.mark.parametrize(
    ("error", "depends"),
    [
        (TypeError("__new__() missing 1 argument"), False),
        (AttributeError("inner"), False),
        (RecursionError("maximum recursion depth exceeded"), False),
        (KeyError("inner"), False),
        (RuntimeError("no such table"), False),
        (RuntimeError("No CUDA GPUs are available"), True),
        (AssertionError("Torch not compiled with CUDA enabled"), True),
        (FileNotFoundError("/data/of/the/node"), True),
        (ModuleNotFoundError("on_nodes_only"), True),
    ],
)
def test_errors_of_this_machine_say_nothing_about_ranks(error: Exception, depends: bool) -> None:
    assert may_depend_on_node(error) is depends


def test_a_missing_variable_says_nothing_about_ranks() -> None:
    import os

    with pytest.raises(KeyError) as raised:
        os.environ["NO_SUCH_VARIABLE"]
    assert may_depend_on_node(raised.value)
