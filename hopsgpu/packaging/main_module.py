"""The `__main__` of a rank: it has the definitions that came by value from the driver's `__main__`.

Code that pickles by name (torch.save, the workers of a DataLoader) thus finds the functions and
classes of the user's script or notebook.
"""

from __future__ import annotations

import builtins
import functools
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
# multiprocessing's name of `__main__` in processes that it spawns.
_SPAWNED_MAIN = "__mp_main__"
_DESCRIBED_NAMES = ("__file__", "__package__", "__doc__")
# Names the file of a rank's call, for processes that multiprocessing spawns.
VARIABLE = "HOPSGPU_CALL"
# The module that multiprocessing runs in these processes.
_SPAWNED_MODULE = "hopsgpu.packaging.spawned_main"


class Namespace:
    """A placeholder that is loaded as the namespace of the loading process's `__main__`."""

    def __reduce__(self) -> tuple[Callable[[], dict[str, Any]], tuple[()]]:
        return _namespace, ()


def _namespace() -> dict[str, Any]:
    return vars(sys.modules[_MAIN])


def describe_main(main: Mapping[str, Any]) -> dict[str, str | None]:
    """Return `_DESCRIBED_NAMES` and the spec's name of a `__main__`, as far as they are set.

    A notebook has no file, a script has no spec.
    """
    description = {name: main[name] for name in _DESCRIBED_NAMES if isinstance(main.get(name), str)}
    if (spec := main.get("__spec__")) is not None:
        description["__spec__"] = spec.name
    return description


@dataclass(frozen=True)
class LoadedCall:
    """A call as a rank loads it; `names` has the definitions of the driver's `__main__`."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    names: Mapping[str, Any]


def load(call: Path) -> LoadedCall:
    """Load a call, and give `__main__` of this and of spawned processes the driver's definitions.

    Args:
        call: a file with the bytes of `pickling.pickle_call`. Spawned processes read the file
            again, so it must not be removed.
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
    _restore_in_spawned()
    # A fork server's name refers to another module.
    sys.modules[_SPAWNED_MAIN] = main
    return LoadedCall(function, args, kwargs, names)


def start_main() -> dict[str, Any]:
    """Replace this process's `__main__` by an empty one, as Python starts a script with.

    Processes that multiprocessing spawns from now on run the script's file or module themselves.

    Returns:
        The namespace of the new `__main__`.
    """
    main = ModuleType(_MAIN)
    vars(main).update({"__builtins__": builtins, "__spec__": None, "__package__": None})
    sys.modules[_MAIN] = main
    # Values of spawned processes come back under this name, as multiprocessing itself arranges.
    sys.modules[_SPAWNED_MAIN] = main
    os.environ.pop(VARIABLE, None)
    spawn: Any = importlib.import_module("multiprocessing.spawn")
    spawn.get_preparation_data = getattr(
        spawn.get_preparation_data, "__wrapped__", spawn.get_preparation_data
    )
    return vars(main)


def restore(namespace: dict[str, Any]) -> None:
    """Give a process that multiprocessing spawned from a rank the rank's `__main__`.

    Otherwise multiprocessing would run the script in such a process. A rank has no script, and a
    script that launches a gang must not run again. The content of `namespace`, which is that of
    the module `__mp_main__`, is replaced.
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
    _restore_in_spawned()


class _CallPart:
    def __init__(self, head: Mapping[str, Any], stream: Any, main: dict[str, Any]) -> None:
        self.has_late_names = bool(head["late"])
        self._size = int(head["size"])
        self._stream = stream
        self._unpickler = pickle.Unpickler(stream)
        self._main = main

    def load(self) -> Any:
        return self._unpickler.load()

    def skip(self) -> None:
        """Skip the call itself, after `bind` has read the names before it."""
        self._stream.seek(self._size, os.SEEK_CUR)

    def bind(self) -> dict[str, Any]:
        """Bind the names that follow in the stream, and return them."""
        bound: dict[str, Any] = {}
        while (names := self.load()) is not None:
            self._main.update(names)
            bound |= names
        return bound


def _call_parts(call: Path, main: dict[str, Any]) -> Iterator[_CallPart]:
    """Yield the parts of a call; each must be loaded before the next one is requested."""
    is_described = False
    with call.open("rb") as stream:
        while stream.peek(1):
            head = pickle.load(stream)
            if not is_described:
                _set_description(main, head["main"])
                is_described = True
            sources, script = head["sources"], main.get("__file__")
            add_sources(sources, script is not None)
            if script in sources:
                main["__loader__"] = ScriptLoader(sources[script])
            yield _CallPart(head, stream, main)


def _set_description(main: dict[str, Any], driver: Mapping[str, str]) -> None:
    main.update({"__doc__": None, "__package__": None, "__spec__": None, "__loader__": None})
    main.update({name: driver[name] for name in _DESCRIBED_NAMES if name in driver})
    if (name := driver.get("__spec__")) is not None:
        main["__spec__"] = ModuleSpec(name, None, origin=driver.get("__file__"))


def _restore_in_spawned() -> None:
    """Let processes that multiprocessing spawns from now on call `restore`."""
    spawn: Any = importlib.import_module("multiprocessing.spawn")
    prepare = spawn.get_preparation_data

    @functools.wraps(prepare)
    def get_preparation_data(name: str) -> dict[str, Any]:
        preparation: dict[str, Any] = prepare(name)
        preparation.pop("init_main_from_path", None)
        return {**preparation, "init_main_from_name": _SPAWNED_MODULE}

    spawn.get_preparation_data = get_preparation_data
