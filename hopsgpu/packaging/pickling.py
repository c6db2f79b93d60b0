"""Pickling of the user's function, and errors that name what cannot be pickled.

A call is one or more parts; later parts add keyword arguments. A part is a head (plain data: what
`__main__` is, and sources), and then pickles that share a memo:

    {name: value} …, None     what must be in `__main__` first
    (function, args, kwargs)
    {name: value} …, None     what else of `__main__` the pickler met in these

`main_module` loads them.
"""

from __future__ import annotations

import functools
import io
import pickle
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from cloudpickle import cloudpickle as internals

from hopsgpu.errors import ConfigError
from hopsgpu.packaging.config_pickling import ConfigReducer, is_config
from hopsgpu.packaging.import_scan import ImportRecorder
from hopsgpu.packaging.load_check import LoadFailure
from hopsgpu.packaging.load_risks import LoadRisks
from hopsgpu.packaging.main_module import Namespace, describe_main
from hopsgpu.packaging.reducers import (
    MAIN,
    DigestPickler,
    ReducingPickler,
    ValuePickler,
    reduce_singleton,
    resolved,
)
from hopsgpu.packaging.sources import sources_of
from hopsgpu.packaging.unpicklable import (
    RefusedObject,
    Search,
    advice_on,
    advice_on_load,
    article,
    describe_value,
    refusal_of,
    refuse_own_operators,
)

_NAME = re.compile(r"[^\W\d]\w*")


class _CallPickler(ReducingPickler):
    """A pickler for ranks: functions of `__main__` share the namespace of `__main__` there too.

    Attributes:
        met: what was pickled by value from `__main__`, by the names that it has there.
        classes: the classes of `__main__` among them, and classes inside these, by qualified name.
        files: files with code that was pickled by value.

    Args:
        file: the file to write.
        main: the namespace of `__main__`.
        noted: notes the modules that the pickle and its code import.
        risks: notes the objects whose load runs code of their own.
    """

    def __init__(
        self,
        file: Any,
        main: Mapping[str, Any],
        noted: ImportRecorder | None = None,
        risks: LoadRisks | None = None,
    ) -> None:
        super().__init__(file)
        self._main = main
        self._recorders = [recorder for recorder in (noted, risks) if recorder is not None]
        self.met: dict[str, Any] = {}
        self.classes: dict[str, type] = {}
        self.files: dict[str, None] = {}
        self.globals_ref[id(main)] = Namespace()
        self._configs = ConfigReducer()

    def reducer_of(self, kind: type) -> Callable[[Any], Any] | None:
        if kind is CodeType:
            return self._reduce_code
        if is_config(kind):
            return self._configs.reduce
        own: Any = kind.__reduce__
        if (
            kind.__module__ == MAIN
            and own is not object.__reduce__
            and kind not in self.dispatch_table
        ):
            return self._reduce_customized
        return super().reducer_of(kind)

    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        for recorder in self._recorders:
            recorder.see(obj, by_value=reduced is not NotImplemented)
        return reduced

    def class_by_value(self, cls: type, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
        if cls.__module__ == MAIN:
            self.classes[cls.__qualname__] = cls
            self._meet(cls.__qualname__, cls)
            self._meet_annotations(cls)
        return reduced

    def function_by_value(self, function: FunctionType) -> None:
        if function.__module__ == MAIN:
            self._meet(function.__qualname__, function)
        refuse_own_operators(function)

    def _meet(self, name: str, value: object) -> None:
        """Note what `__main__` has under a name; for something inside a class, note the class."""
        if resolved(name, self._main) is value:
            first = name.partition(".")[0]
            self.met[first] = self._main[first]

    def _meet_annotations(self, cls: type) -> None:
        """Note what the texts among a class's annotations name, for `typing.get_type_hints`.

        Only modules and objects of the standard library, which every rank can import anyway, and
        classes of `__main__` are noted.
        """
        for annotation in vars(cls).get("__annotations__", {}).values():
            if isinstance(annotation, str):
                for name in _NAME.findall(annotation):
                    value = self._main.get(name)
                    if value is not None and _is_for_annotations(value):
                        self.met[name] = value

    def _reduce_code(self, code: CodeType) -> Any:
        """Reduce code as cloudpickle does, but keep the file's name, which cloudpickle omits."""
        self.files[code.co_filename] = None
        kind, args = internals._code_reduce(code)
        return kind, tuple(code.co_filename if one == "<dynamic-code>" else one for one in args)

    def _reduce_customized(self, value: Any) -> Any:
        reduced = value.__reduce_ex__(self.proto)
        if isinstance(reduced, str) and resolved(reduced, self._main) is value:
            self._meet(reduced, value)
            return reduce_singleton(value)
        return reduced


def _is_for_annotations(value: Any) -> bool:
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    first = str(name).partition(".")[0]
    return first in sys.stdlib_module_names or (first == MAIN and isinstance(value, type))


def pickle_call(
    function: Callable[..., Any] | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    noted: ImportRecorder | None = None,
    risks: LoadRisks | None = None,
) -> bytes:
    """Return a call as bytes: a function, its arguments, and what it needs of `__main__`.

    Functions and classes of `__main__` are pickled by value; those of modules by name.

    Args:
        function: the user's function; None if this call is added to another one that comes first.
        args: its positional arguments.
        kwargs: its keyword arguments.
        noted: notes the modules that the pickle and its code import.
        risks: notes the objects whose load runs code of their own.

    Raises:
        ConfigError: something cannot be pickled; the message names the attribute.
    """
    main = _namespace_of(function)
    body = io.BytesIO()
    pickler = _CallPickler(body, main, noted, risks)
    try:
        dumped = _dump_definitions(pickler, _definitions(function, args, kwargs, main), set())
        begin = body.tell()
        pickler.dump((function, args, dict(kwargs)))
        late = _dump_definitions(pickler, pickler.met, dumped) != dumped
    except (MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise _refused(function, args, kwargs, main, error) from error
    head = {
        "main": describe_main(main),
        "sources": sources_of(pickler.files, pickler.classes, main),
        "late": late,
        "size": body.tell() - begin,
    }
    return pickle.dumps(head, pickle.HIGHEST_PROTOCOL) + body.getvalue()


def pickle_value(value: object, names: Mapping[str, Any]) -> bytes:
    """Return what a rank returns as bytes, for the driver.

    Args:
        value: the value that the rank returns.
        names: what came from the driver's `__main__`, by name.
    """
    buffer = io.BytesIO()
    ValuePickler(buffer, names).dump(value)
    return buffer.getvalue()


def pickle_code(function: Callable[..., Any]) -> bytes:
    """Return bytes that are the same in each session for the same function; never load them.

    Raises:
        ConfigError: the function cannot be pickled; the message names the attribute.
    """
    buffer = io.BytesIO()
    try:
        DigestPickler(buffer).dump(function)
    except (MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise _refused(function, (), {}, _namespace_of(function), error) from error
    return buffer.getvalue()


def _dump_definitions(
    pickler: _CallPickler, names: Mapping[str, Any], dumped: set[str]
) -> set[str]:
    """Dump names of `__main__`, and those met meanwhile; return all names that were dumped."""
    dumped = set(dumped)
    while new := {name: value for name, value in names.items() if name not in dumped}:
        pickler.dump(new)
        dumped |= new.keys()
        names = dict(pickler.met)
    pickler.dump(None)
    return dumped


def _namespace_of(function: Any) -> Mapping[str, Any]:
    """Return the namespace of `__main__`: the function's, if the function belongs to `__main__`.

    If a notebook or console runs code in a namespace of its own, `sys.modules` may have another
    one.
    """
    inner = _unwrapped(function)
    own = inner.__globals__ if isinstance(inner, FunctionType) else {}
    return own if own.get("__name__") == MAIN else vars(sys.modules[MAIN])


def _definitions(
    function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], main: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what a call refers to in `__main__`, as far as that is visible at once.

    It comes before the arguments, so that processes that a rank spawns need not load the arguments.
    """
    inner = _unwrapped(function)
    found: list[Any] = [inner, *map(type, (inner, *args, *kwargs.values()))]
    if isinstance(inner, FunctionType) and inner.__globals__ is main:
        names = internals._extract_code_globals(inner.__code__)
        found += [main[name] for name in names if name in main]
    defined = [v for v in found if isinstance(v, (FunctionType, type)) and v.__module__ == MAIN]
    return {v.__qualname__: v for v in defined if main.get(v.__qualname__) is v}


def _unwrapped(function: Any) -> Any:
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, MethodType):
            function = function.__func__
        else:
            return function


def name_of(function: Callable[..., Any]) -> str:
    """Return a readable name of any callable."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__qualname__", type(function).__name__))


def _refused(
    function: Callable[..., Any] | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    main: Mapping[str, Any],
    error: Exception,
) -> ConfigError:
    """Return the error for a call that cannot be pickled; it names the culprit."""

    def travels(value: object) -> bool:
        try:
            _CallPickler(io.BytesIO(), main).dump(value)
        except Exception:  # noqa: BLE001 - any refusal means the same: it does not travel
            return False
        return True

    search = Search(travels)
    where, culprit = next(_culprits(search, function, args, kwargs), ("train_fn", function))
    of = "" if function is None else f"train_fn={name_of(function)}"
    refusal = refusal_of(culprit)
    if refusal is not None:
        what, advice = refusal
        return ConfigError(
            f"{article(what)} {what} cannot be sent to the ranks: {of or 'the call'} has one as"
            f" {where}. {advice}"
        )
    reason = "" if isinstance(error, RefusedObject) else f" ({error})"
    return ConfigError(
        f"{of or 'the call'} cannot be sent to the ranks: {where} is {describe_value(culprit)},"
        f" which cannot be pickled{reason}. {advice_on(culprit)}"
    )


class _Finder(_CallPickler):
    """A pickler that refuses one object."""

    def __init__(self, main: Mapping[str, Any], sought: object) -> None:
        super().__init__(io.BytesIO(), main)
        self._sought = sought

    def reducer_override(self, obj: Any) -> Any:
        if obj is self._sought:
            raise RefusedObject("this object is sought")
        return super().reducer_override(obj)


def unloadable_call_error(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    failure: LoadFailure,
) -> ConfigError:
    """Return the error for a call that was pickled, but cannot be loaded."""
    main, sought = _namespace_of(function), failure.sample

    def travels(value: object) -> bool:
        try:
            _Finder(main, sought).dump(value)
        except RefusedObject:
            return False
        return True

    search = Search(travels, lambda value: value is sought)
    culprits = () if sought is None else _culprits(search, function, args, kwargs)
    where = next((path for path, found in culprits if found is sought), "an object in it")
    what = f"{where} is {describe_value(sought)}"
    if sought is None:
        what = "it has an object"
    elif isinstance(sought, type):
        what = f"{where} is the class {name_of(sought)}"
    return ConfigError(
        f"train_fn={name_of(function)} cannot be sent to the ranks: {what}, which can be pickled,"
        f" but not loaded in another process ({failure.error}). {advice_on_load(sought)}"
    )


def _culprits(
    search: Search,
    function: Callable[..., Any] | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Iterator[tuple[str, object]]:
    for what, value in (("train_fn", function), ("args", args), ("kwargs", kwargs)):
        if (found := search.culprit(value, what)) is not None:
            yield found
