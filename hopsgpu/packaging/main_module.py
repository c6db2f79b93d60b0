"""The `__main__` of a rank: it has what came by value from the driver's, under the same names.

Otherwise a rank's `__main__` would be hopsgpu's. With it, code that pickles by name (torch.save, a
Pool, the workers of a DataLoader) finds the functions and classes of the user's script or notebook
as in the driver.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from hopsgpu.packaging.sources import ScriptLoader, add_sources

_MAIN = "__main__"
# The name of `__main__` in processes that multiprocessing spawns.
_OF_SPAWNED = "__mp_main__"
_DESCRIBED = ("__file__", "__package__", "__doc__")
# The environment variable that names a rank's call for processes that multiprocessing spawns.
VARIABLE = "HOPSGPU_CALL"
# The module that multiprocessing runs in these processes.
_SPAWNED = "hopsgpu.packaging.spawned_main"


class Namespace:
    """The namespace of `__main__` in a pickle; it loads as that of the process that loads it."""

    def __reduce__(self) -> tuple[Callable[[], dict[str, Any]], tuple[()]]:
        return _namespace, ()


def _namespace() -> dict[str, Any]:
    return vars(sys.modules[_MAIN])


def describe_main(main: Mapping[str, Any]) -> dict[str, str | None]:
    """Return a description of a `__main__`, without what is defined in it.

    Args:
        main: its namespace. A notebook's has no file, a script's no specification.
    """
    description = {name: main[name] for name in _DESCRIBED if isinstance(main.get(name), str)}
    if (spec := main.get("__spec__")) is not None:
        description["__spec__"] = spec.name
    return description


@dataclass(frozen=True)
class LoadedCall:
    """A call as a rank loads it.

    Attributes:
        function: the user's function.
        args, kwargs: its arguments.
        names: what came from the driver's `__main__`, by its names there.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    names: Mapping[str, Any]


def load(call: Path) -> LoadedCall:
    """Load a call, and make `__main__` the driver's, here and in processes spawned from here.

    Args:
        call: a file with the bytes of `pickling.pickle_call`; it must stay, because spawned
            processes read it again.
    """
    main = ModuleType(_MAIN)
    sys.modules[_MAIN] = main
    names: dict[str, Any] = {}
    function: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    for part in _call_parts(call, vars(main)):
        names |= part.bind()
        called, positional, named = part.load()
        names |= part.bind()
        function, args, kwargs = called or function, (*args, *positional), {**kwargs, **named}
    assert function is not None, "the first part has the function"
    os.environ[VARIABLE] = str(call)
    _have_spawned_restore()
    # In a fork server this name refers to another module.
    sys.modules[_OF_SPAWNED] = main
    return LoadedCall(function, args, kwargs, names)


def restore(namespace: dict[str, Any]) -> None:
    """Give a process that multiprocessing spawned from a rank the rank's `__main__`.

    When `python` runs a script, multiprocessing runs the script again in such a process. A rank has
    no script, and a script that launches a gang must not run again.

    Args:
        namespace: that of the module that multiprocessing runs as `__mp_main__`; it is emptied
            first.
    """
    running = sys.modules[namespace["__name__"]]
    kept = {name: namespace[name] for name in ("__name__", "__builtins__")}
    namespace.clear()
    namespace.update(kept)
    before, sys.modules[_MAIN] = sys.modules[_MAIN], running
    try:
        for part in _call_parts(Path(os.environ[VARIABLE]), namespace):
            part.bind()
            if part.has_late_names:
                part.load()
                part.bind()
            else:
                part.skip()
    finally:
        sys.modules[_MAIN] = before
    namespace.update(kept)
    _have_spawned_restore()


class _CallPart:
    """A part of a call, which is loaded step by step."""

    def __init__(self, head: Mapping[str, Any], stream: Any, main: dict[str, Any]) -> None:
        self.has_late_names = bool(head["late"])
        self._size = int(head["size"])
        self._stream = stream
        self._unpickler = pickle.Unpickler(stream)
        self._main = main

    def load(self) -> Any:
        """Load the next pickle."""
        return self._unpickler.load()

    def skip(self) -> None:
        """Skip the call itself, once the names before it are bound."""
        self._stream.seek(self._size, os.SEEK_CUR)

    def bind(self) -> dict[str, Any]:
        """Bind the names that come next in the stream, and return them."""
        bound: dict[str, Any] = {}
        while (names := self.load()) is not None:
            self._main.update(names)
            bound |= names
        return bound


def _call_parts(call: Path, main: dict[str, Any]) -> Iterator[_CallPart]:
    """Yield the parts of a call; each must be loaded before the next one is requested."""
    described = False
    with call.open("rb") as stream:
        while stream.peek(1):
            head = pickle.load(stream)
            if not described:
                _describe(main, head["main"])
                described = True
            sources, script = head["sources"], main.get("__file__")
            add_sources(sources, script is not None)
            if script in sources:
                main["__loader__"] = ScriptLoader(sources[script])
            yield _CallPart(head, stream, main)


def _describe(main: dict[str, Any], driver: Mapping[str, str]) -> None:
    main.update({"__doc__": None, "__package__": None, "__spec__": None, "__loader__": None})
    main.update({name: driver[name] for name in _DESCRIBED if name in driver})
    if (name := driver.get("__spec__")) is not None:
        main["__spec__"] = ModuleSpec(name, None, origin=driver.get("__file__"))


def _have_spawned_restore() -> None:
    """Make the processes that multiprocessing spawns from now on call `restore`."""
    spawn: Any = importlib.import_module("multiprocessing.spawn")
    prepare = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        preparation: dict[str, Any] = prepare(name)
        preparation.pop("init_main_from_path", None)
        return {**preparation, "init_main_from_name": _SPAWNED}

    spawn.get_preparation_data = get_preparation_data
