"""`__main__` of a rank: what came by value of the driver's, under its names.

A rank's own `__main__` would be hopsgpu's. So what pickles by name (torch.save, a Pool, the workers
of a DataLoader) finds the functions and classes of the user's script or notebook as at the driver.
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
# Under which multiprocessing knows `__main__` in processes that it spawns.
_OF_SPAWNED = "__mp_main__"
_DESCRIBED = ("__file__", "__package__", "__doc__")
# Names a rank's call for processes that multiprocessing spawns from it.
VARIABLE = "HOPSGPU_CALL"
# What multiprocessing runs in these.
_SPAWNED = "hopsgpu.packaging.spawned_main"


class Namespace:
    """The namespace of `__main__`, in a pickle: that of the process which loads it."""

    def __reduce__(self) -> tuple[Callable[[], dict[str, Any]], tuple[()]]:
        return _namespace, ()


def _namespace() -> dict[str, Any]:
    return vars(sys.modules[_MAIN])


def described_main(main: Mapping[str, Any]) -> dict[str, str | None]:
    """What is to be known of a `__main__`, beside what is defined in it.

    Args:
        main: its namespace. A notebook's has no file, a script's no specification.
    """
    told = {name: main[name] for name in _DESCRIBED if isinstance(main.get(name), str)}
    if (spec := main.get("__spec__")) is not None:
        told["__spec__"] = spec.name
    return told


@dataclass(frozen=True)
class Loaded:
    """A call as a rank has it.

    Attributes:
        function: the user's.
        args, kwargs: for it.
        names: what came of the driver's `__main__`, by its names.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    names: Mapping[str, Any]


def load(call: Path) -> Loaded:
    """Makes `__main__` what the driver's is, in processes spawned from this one too; loads a call.

    Args:
        call: a file with what `pickling.pickle_call` gives, which is to stay.
    """
    main = ModuleType(_MAIN)
    sys.modules[_MAIN] = main
    names: dict[str, Any] = {}
    function: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    for part in _parts(call, vars(main)):
        names |= part.bind()
        called, positional, named = part.load()
        names |= part.bind()
        function, args, kwargs = called or function, (*args, *positional), {**kwargs, **named}
    assert function is not None, "the first part has one"
    os.environ[VARIABLE] = str(call)
    _have_spawned_restore()
    # In a fork server it stands for another one.
    sys.modules[_OF_SPAWNED] = main
    return Loaded(function, args, kwargs, names)


def restore(namespace: dict[str, Any]) -> None:
    """Makes the namespace of a process that multiprocessing spawned from a rank what `__main__` is.

    Where `python` runs a script, such a process runs it again. A rank's has no script, and one
    that launches a gang must not run again.

    Args:
        namespace: of the module that multiprocessing runs as `__mp_main__`; it is emptied.
    """
    running = sys.modules[namespace["__name__"]]
    kept = {name: namespace[name] for name in ("__name__", "__builtins__")}
    namespace.clear()
    namespace.update(kept)
    before, sys.modules[_MAIN] = sys.modules[_MAIN], running
    try:
        for part in _parts(Path(os.environ[VARIABLE]), namespace):
            part.bind()
            if part.late:
                part.load()
                part.bind()
            else:
                part.skip()
    finally:
        sys.modules[_MAIN] = before
    namespace.update(kept)
    _have_spawned_restore()


class _Part:
    """A part of a call, which is loaded step by step."""

    def __init__(self, head: Mapping[str, Any], stream: Any, main: dict[str, Any]) -> None:
        self.late = bool(head["late"])
        self._size = int(head["size"])
        self._stream = stream
        self._unpickler = pickle.Unpickler(stream)
        self._main = main

    def load(self) -> Any:
        """Loads what comes next."""
        return self._unpickler.load()

    def skip(self) -> None:
        """Leaves out the call itself, once the names before it are bound."""
        self._stream.seek(self._size, os.SEEK_CUR)

    def bind(self) -> dict[str, Any]:
        """Binds the names that come next, and gives them."""
        bound: dict[str, Any] = {}
        while (names := self.load()) is not None:
            self._main.update(names)
            bound |= names
        return bound


def _parts(call: Path, main: dict[str, Any]) -> Iterator[_Part]:
    """The parts of a call; each must be loaded before the next."""
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
            yield _Part(head, stream, main)


def _describe(main: dict[str, Any], told: Mapping[str, str]) -> None:
    main.update({"__doc__": None, "__package__": None, "__spec__": None, "__loader__": None})
    main.update({name: told[name] for name in _DESCRIBED if name in told})
    if (name := told.get("__spec__")) is not None:
        main["__spec__"] = ModuleSpec(name, None, origin=told.get("__file__"))


def _have_spawned_restore() -> None:
    """Has the processes that multiprocessing spawns from now on call `restore`."""
    spawn: Any = importlib.import_module("multiprocessing.spawn")
    prepare = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        told: dict[str, Any] = prepare(name)
        told.pop("init_main_from_path", None)
        return {**told, "init_main_from_name": _SPAWNED}

    spawn.get_preparation_data = get_preparation_data
