from __future__ import annotations

import collections
import dataclasses
import functools
import pickle
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hopsgpu.errors import ConfigError
from hopsgpu.pickling import name_of, pickle_call
from hopsgpu.sources import with_sources


class Holder:
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self) -> None: ...

    def method(self) -> None: ...


def test_a_call_comes_back() -> None:
    bound = 3
    function, args, kwargs = pickle.loads(pickle_call(lambda x, y: x * y + bound, (2,), {"y": 5}))
    assert function(*args, **kwargs) == 13


def test_the_attribute_that_cannot_be_pickled_is_named() -> None:
    with socket.socket() as sock:
        parts = {"deep": [1, {"s": sock}]}
        with pytest.raises(ConfigError) as error:
            pickle_call(lambda: parts, (), {})
    assert "closure variable 'parts'['deep'][1]['s'] is a socket.socket" in str(error.value)


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "where"),
    [
        (Holder(), (), {}, "train_fn.lock is a _thread.lock"),
        (Holder().method, (), {}, "train_fn.__self__.lock is a _thread.lock"),
        (functools.partial(print, threading.Lock()), (), {}, "train_fn.args[0]"),
        (print, (1, threading.Lock()), {}, "args[1] is a _thread.lock"),
        (print, (), {"key": threading.Lock()}, "kwargs['key'] is a _thread.lock"),
    ],
)
def test_wherever_it_is(function: object, args: tuple, kwargs: dict, where: str) -> None:
    with pytest.raises(ConfigError) as error:
        pickle_call(function, args, kwargs)  # type: ignore[arg-type]
    assert where in str(error.value)


@dataclasses.dataclass(slots=True)
class Slots:
    name: str
    lock: object


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (Slots("s", threading.Lock()), "args[0].lock is a _thread.lock"),
        (collections.deque([1, threading.Lock()]), "args[0][1] is a _thread.lock"),
        ((n for n in range(3)), "args[0] is a generator"),
    ],
)
def test_what_has_no_dict_is_looked_into(value: object, where: str) -> None:
    with pytest.raises(ConfigError) as error:
        pickle_call(print, (value,), {})
    assert where in str(error.value)


def test_defaults_are_looked_into() -> None:
    def function(lock=threading.Lock()):  # noqa: B008
        return lock

    with pytest.raises(ConfigError, match="default .*lock.* is a _thread.lock"):
        pickle_call(function, (), {})


def test_names() -> None:
    assert name_of(functools.partial(functools.partial(print))) == "print"
    assert name_of(Holder()) == "Holder"


def test_code_that_travels_by_value_knows_its_file() -> None:
    code = (
        "import pickle, traceback\n"
        "from hopsgpu.pickling import pickle_call\n"
        "def broken():\n"
        "    return [{}['nope'] for _ in range(2)]\n"
        "for files in (True, False):\n"
        "    function, _, _ = pickle.loads(pickle_call(broken, (), {}, files=files))\n"
        "    print(function.__code__.co_filename)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ran.stdout.split() == ["<string>", "<dynamic-code>"]


def test_lines_of_source_come_from_where_the_sources_are(tmp_path: Path) -> None:
    script = tmp_path / "bad.py"
    script.write_text("def f():\n    return {}['nope']\n")
    told = (
        "Traceback (most recent call last):\n"
        f'  File "{script}", line 2, in f\n'
        '  File "/node/lib/x.py", line 7, in g\n'
        "    there()\n"
        "    ^^^^^^^\n"
        '  File "/nowhere/y.py", line 3, in h\n'
        "KeyError: 'nope'\n"
    )
    assert with_sources(told).splitlines() == [
        "Traceback (most recent call last):",
        f'  File "{script}", line 2, in f',
        "    return {}['nope']",
        '  File "/node/lib/x.py", line 7, in g',
        "    there()",
        "    ^^^^^^^",
        '  File "/nowhere/y.py", line 3, in h',
        "KeyError: 'nope'",
    ]
