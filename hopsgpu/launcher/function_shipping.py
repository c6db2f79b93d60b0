"""The user's function: its checks, and what travels to the ranks with it."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hopsgpu.attempts.rank_call import PackedFunction
from hopsgpu.backends.gang_application import GangApplication
from hopsgpu.control.channel import MAX_PAYLOAD
from hopsgpu.data.rank_shards import MAX_SHARD_BYTES
from hopsgpu.errors import ConfigError
from hopsgpu.launcher.interrupts import interruption
from hopsgpu.packaging.import_scan import ImportedModules, ImportRecorder
from hopsgpu.packaging.load_risks import LoadRisks
from hopsgpu.packaging.module_finder import MAIN_MODULES, PROVIDED_MODULES
from hopsgpu.packaging.modules import PackedModules, import_roots
from hopsgpu.packaging.pickling import name_of, pickle_call, unloadable_call_error
from hopsgpu.packaging.preload import scan_function

# The rest of the payload is for the data's shards, which travel in the same message.
_MAX_CALL_BYTES = MAX_PAYLOAD - MAX_SHARD_BYTES


def check_callable(function: object, label: str = "train_fn") -> None:
    """Raise ConfigError if this is not callable, or if a call would not run its body."""
    if not callable(function):
        raise ConfigError(f"{label}={function!r}: must be a function or another callable")
    for called in (function, type(function).__call__):
        if inspect.iscoroutinefunction(called):
            problem = "is an async function: pass a function that calls asyncio.run() on it"
        elif inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
            problem = "is a generator function (it has a yield), which a call does not run"
        else:
            continue
        raise ConfigError(f"{label}={name_of(function)} {problem}")


def default_name(train_fn: Callable[..., Any]) -> str:
    """Return the default name of a run of this function."""
    letters = "".join(c if c.isalnum() else "-" for c in name_of(train_fn).rpartition(".")[2])
    return letters.strip("-")[:40] or "run"


def positional(args: object) -> tuple[Any, ...]:
    """Return positional arguments; raise ConfigError if this is no tuple or list."""
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        raise ConfigError(f"args={args!r}: must be a tuple or list of the function's arguments")
    return tuple(args)


def keywords(kwargs: object) -> Mapping[str, Any]:
    """Return keyword arguments by name; raise ConfigError if this is no mapping of names."""
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
        raise ConfigError(f"kwargs={kwargs!r}: must be a mapping of argument names to values")
    return kwargs


def check_accepts(
    train_fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    are_all_known: bool = True,
) -> None:
    """Check that a function accepts arguments.

    Args:
        are_all_known: whether these are all arguments; if not, others may be added later.

    Raises:
        ConfigError: the function does not accept them.
    """
    try:
        signature = inspect.signature(train_fn)
    except (TypeError, ValueError):  # some built-in functions have none
        return
    try:
        (signature.bind if are_all_known else signature.bind_partial)(*args, **kwargs)
    except TypeError as error:
        raise ConfigError(
            f"train_fn={name_of(train_fn)}{signature} does not accept these args and kwargs:"
            f" {error}"
        ) from error


@dataclass(frozen=True)
class PickledFunction:
    """A function with its arguments, pickled, before the user's modules are packed.

    Attributes:
        risks: the objects in it whose load runs code of their own, by their types.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    call: bytes
    imported: ImportedModules
    risks: Mapping[type, object]


def pickle_function(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    later: Iterable[object] = (),
) -> PickledFunction:
    """Pickle a function with its arguments.

    Args:
        later: functions and types of arguments that are added later.

    Raises:
        ConfigError: something cannot be pickled, or is too large to travel.
    """
    noted, risks = ImportRecorder(), LoadRisks()
    call = pickle_call(function, args, kwargs, import_recorder=noted, risks=risks)
    _check_size(len(call), 0)
    for value in later:
        noted.record(value, is_by_value=True)
    return PickledFunction(function, args, kwargs, call, noted.modules(), risks.samples)


def pack_function(
    train_fn: Callable[..., Any],
    pickled: PickledFunction,
    application: GangApplication,
    env_vars: Mapping[str, str],
    interrupted: threading.Event | None = None,
) -> PackedFunction:
    """Pack a function with the user's modules that it needs, which travel with it.

    Args:
        pickled: what was pickled, the function or one that calls it.

    Raises:
        ConfigError: the modules and the pickled call are too large to travel, or ranks could not
            load the call.
        KeyboardInterrupt: Ctrl-C was pressed.
    """

    def end_if_interrupted() -> None:
        if interrupted is not None and interrupted.is_set():
            raise interruption("interrupted before anything was requested")

    packer, call, imported = application.packer, pickled.call, pickled.imported
    pickle_one = functools.partial(_call_with, repr)
    with application.load_checks.run_during(
        call, pickled.risks, env_vars, pickle_one, end_if_interrupted
    ) as failures:
        modules = packer.pack(
            import_roots(train_fn, imported, application.py_files_dir, packer.import_reader)
        )
        _check_size(len(call), len(modules.archive))
        foreseen = scan_function(train_fn, modules)
    for failure in failures:
        raise unloadable_call_error(pickled.function, pickled.args, pickled.kwargs, failure)
    return PackedFunction(call, modules, foreseen, needs_of(imported, modules))


def _call_with(function: Callable[[Any], Any], value: object) -> bytes:
    return pickle_call(function, (value,), {})


def needs_of(imported: ImportedModules, modules: PackedModules) -> tuple[str, ...]:
    """Return the top-level modules that unpickling the call needs, and that do not travel.

    Optional imports of the function are not among them.
    """
    tops = {name.partition(".")[0] for name in imported.needed}
    return tuple(
        sorted(tops - PROVIDED_MODULES - MAIN_MODULES - modules.names - sys.stdlib_module_names)
    )


def _check_size(call: int, modules: int) -> None:
    """Raise ConfigError if a pickled call and modules of these sizes (bytes) are too large."""
    if call + modules > _MAX_CALL_BYTES:
        raise ConfigError(
            f"train_fn and its arguments are {call} bytes pickled, and its modules {modules} bytes;"
            f" at most {_MAX_CALL_BYTES} bytes together are accepted. Pass data with data=, or"
            " read it in the ranks"
        )
