"""A script as people write it: what it defines must be in a rank as it is under `python`.

Run as `python ordinary.py`; where a rank runs it again, or a process that a rank spawns, it fails.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import enum
import functools
import inspect
import json
import multiprocessing
import os
import pickle
import sys
import traceback
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, NewType, Optional, ParamSpec, TypedDict, TypeVar

import typing_extensions

if "HOPSGPU_CALL" in os.environ:
    raise RuntimeError("a rank runs the driver's script")

SECONDS = 900
OFFSET = 3
UserId = NewType("UserId", int)
T = TypeVar("T")
P = ParamSpec("P")
Point = collections.namedtuple("Point", "x y")


class Pair(NamedTuple):
    a: int
    b: int = 2


class Movie(TypedDict):
    name: str


class Series(Movie, total=False):
    seasons: int


class Extended(typing_extensions.TypedDict):
    seasons: typing_extensions.NotRequired[int]


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Right(enum.Flag):
    READ = 1
    WRITE = 2


@dataclass
class Config:
    rate: float = 0.1
    user: Optional[UserId] = None  # noqa: UP045 - a name that only the annotation has
    names: list[str] = field(default_factory=list)
    place: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    value: int = 1


class Box(Generic[T]):
    def __init__(self, item: T) -> None:
        self.item = item


class Shape(abc.ABC):
    @abc.abstractmethod
    def area(self) -> int: ...

    class Unit:
        def __init__(self) -> None:
            self.length = 1


class Square(Shape):
    def __init__(self, side: int) -> None:
        self.side = side

    def area(self) -> int:
        return self.side**2

    @functools.cached_property
    def more(self) -> int:
        return self.side + OFFSET

    @functools.singledispatchmethod
    def kind(self, value: object) -> str:
        return "object"

    @kind.register
    def _(self, value: int) -> str:
        return "int"


class Tagging(type):
    def __new__(mcs, name: str, bases: tuple[type, ...], members: dict[str, Any]) -> Tagging:
        made = super().__new__(mcs, name, bases, members)
        made.tag = name  # type: ignore[attr-defined]
        return made


class Tagged(metaclass=Tagging):
    tag: str


class Plugin(abc.ABC):  # noqa: B024 - what it is registered by is a keyword of the class statement
    registry: typing.ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, /, key: str, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        Plugin.registry[key] = cls


class Adder(Plugin, key="add"):
    pass


class Missing:
    def __reduce__(self) -> str:
        return "MISSING"


MISSING = Missing()


LOADED: list[int] = []


class Argument:
    """Knows where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return loaded, ()


def loaded() -> Argument:
    LOADED.append(os.getpid())
    return Argument()


def number_loaded() -> int:
    return len(LOADED)


class Deep:
    """Its instances are where nobody sees them but a pickler."""


class Counted:
    count = 0


@functools.lru_cache(maxsize=100)
def fibonacci(n: int) -> int:
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)


@functools.singledispatch
def shown(value: object) -> Any:
    return "object"


@shown.register
def _(value: int) -> Any:
    return "int"


@shown.register(list)
def _(value: list[Any]) -> Any:
    return [shown(one) for one in value]


def user(number: UserId) -> UserId:
    return UserId(number)


def square(value: int) -> int:
    return value * value + OFFSET


def pair(value: int) -> Pair:
    return Pair(value, OFFSET)


def typed(call: Callable[P, int], *args: P.args, **kwargs: P.kwargs) -> int:
    return call(*args, **kwargs)


def of_functools() -> None:
    assert fibonacci(30) == 832040
    assert fibonacci.cache_info().hits == 28
    assert shown([1, "a", [2]]) == ["int", "object", ["int"]]
    assert (Square(2).kind(1), Square(2).kind("a")) == ("int", "object")
    measured = Square(2)
    assert measured.more == 5
    assert vars(measured)["more"] == 5


def of_typing() -> None:
    assert user(UserId(3)) == 3
    assert UserId.__supertype__ is int
    assert typed(square, 1) == 4
    assert P.__name__ == "P"
    assert typing.get_type_hints(Config)["user"] == UserId | None
    assert typing.get_type_hints(Config)["place"] == Path | None


def classes_by_name() -> None:
    values = [Pair(1), Point(1, 2), Color.RED, Right.READ | Right.WRITE, Config(), Slots()]
    values += [Box(2), Square(2), Shape.Unit(), Tagged(), Adder(), MISSING]
    for value in values:
        again = pickle.loads(pickle.dumps(value))
        assert type(again) is type(value), value
    assert pickle.loads(pickle.dumps(Color.RED)) is Color.RED
    assert pickle.loads(pickle.dumps(MISSING)) is MISSING
    assert pickle.loads(pickle.dumps(square)) is square
    for kind in (Series, Extended):
        assert pickle.loads(pickle.dumps(kind)) is kind
    assert (Series.__required_keys__, Series.__optional_keys__) == ({"name"}, {"seasons"})
    assert Tagged.tag == "Tagged"
    assert Plugin.registry == {"add": Adder}


def dataclasses_have_their_fields() -> None:
    assert dataclasses.fields(Config)[0].default_factory is dataclasses.MISSING

    @dataclass
    class Child(Config):
        more: int = 1

    assert Child(names=["a"]).names == ["a"]
    assert Config().names == []


def main_is_the_script() -> None:
    main = sys.modules["__main__"]
    assert main is sys.modules["__mp_main__"]
    assert main.__spec__ is None
    assert main.__file__ == square.__code__.co_filename
    assert main.__doc__.startswith("A script as people write it")


def globals_are_of_main() -> None:
    global OFFSET
    OFFSET += 1
    try:
        assert sys.modules["__main__"].OFFSET == OFFSET == square(0)
    finally:
        OFFSET -= 1


def sources_are_known() -> None:
    assert "value * value" in inspect.getsource(square)
    assert "self.side**2" in inspect.getsource(Square)
    assert "rate: float" in inspect.getsource(Config)
    assert "self.length = 1" in inspect.getsource(Shape.Unit)
    assert "fibonacci(n - 1)" in inspect.getsource(fibonacci)


def _pool(method: str) -> None:
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.map_async(square, [1, 2]).get(SECONDS) == [4, 7]
        assert pool.map_async(pair, [1]).get(SECONDS) == [Pair(1, 3)]
        assert pool.apply_async(inspect.getsource, [Square]).get(SECONDS).startswith("class Square")
        # As in a process that is spawned from a script.
        assert pool.apply_async(_spawn_again, [method]).get(SECONDS) == [4]


def _spawn_again(method: str) -> list[int]:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    with multiprocessing.get_context(method).Pool(1) as pool:
        return pool.map_async(square, [1]).get(SECONDS)


def fork_pool() -> None:
    _pool("fork")


def spawn_pool() -> None:
    _pool("spawn")


def forkserver_pool() -> None:
    _pool("forkserver")


def spawned_processes_load_no_arguments() -> None:
    assert number_loaded() == 1
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply_async(number_loaded).get(SECONDS) == 0


CASES = (
    of_functools,
    of_typing,
    classes_by_name,
    dataclasses_have_their_fields,
    main_is_the_script,
    globals_are_of_main,
    sources_are_known,
    fork_pool,
    spawn_pool,
    forkserver_pool,
    spawned_processes_load_no_arguments,
)
NAMES = tuple(case.__name__ for case in CASES)


def failures() -> dict[str, str]:
    """The cases that fail, and how."""
    return dict(_failed(CASES))


def _failed(cases: typing.Iterable[Callable[[], None]]) -> Iterator[tuple[str, str]]:
    for case in cases:
        try:
            case()
        except BaseException:  # noqa: BLE001 - told, whatever it is
            yield case.__name__, traceback.format_exc()


def dig(values: list[Any]) -> str:
    """What a spawned process makes of what is deep in the arguments."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply_async(type, [values[0]["deep"]]).get(SECONDS)
    assert found is type(values[0]["deep"])
    return found.__name__


def train(config: Config, argument: Argument) -> tuple[dict[str, str], list[Any]]:
    """What of the cases fails in a rank, and values of the script's classes."""
    Counted.count += 1
    return failures(), [
        dataclasses.replace(config, rate=7.0),
        Color.BLUE,
        Pair(1),
        Square(3),
        Shape.Unit(),
        MISSING,
        Counted(),
    ]


def not_of_the_driver(values: list[Any]) -> list[str]:
    """What of the values is not of this process's own classes."""
    own = (Config, Color, Pair, Square, Shape.Unit, Missing, Counted)
    wrong = [str(kind) for kind, value in zip(own, values, strict=True) if type(value) is not kind]
    wrong += [] if values[1] is Color.BLUE and values[5] is MISSING else ["singletons"]
    return wrong + ([] if Counted.count == 0 else ["a class that the rank has changed"])


if __name__ == "__main__":
    from tests.unit.script_ranks import drive

    deep = drive(dig, [{"deep": Deep()}], hidden=False)
    failed, returned = drive(train, Config(), Argument())
    told = {"failed": failed, "not of the driver": not_of_the_driver(returned), "deep": deep}
    print(json.dumps(told))
