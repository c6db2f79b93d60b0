"""Pickling of the user's function, and errors that name what cannot be pickled.

A call has one or more parts; later parts add keyword arguments. A part has a head (plain data: a
description of `__main__`, and sources), and then pickles that share a memo:

    {name: value} …, None     definitions that `__main__` must have first
    (function, args, kwargs)
    {name: value} …, None     further definitions of `__main__` that these refer to

`main_module` loads the parts.
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
    resolve,
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
        definitions: objects of `__main__` that were pickled by value, by their names in it.
        classes: classes of `__main__` that were pickled by value, also inner ones, by qualified
            name.
        files: files with code that was pickled by value.
    """

    def __init__(
        self,
        file: Any,
        main: Mapping[str, Any],
        import_recorder: ImportRecorder | None = None,
        risks: LoadRisks | None = None,
    ) -> None:
        super().__init__(file)
        self._main = main
        self._recorders = [
            recorder for recorder in (import_recorder, risks) if recorder is not None
        ]
        self.definitions: dict[str, Any] = {}
        self.classes: dict[str, type] = {}
        self.files: dict[str, None] = {}
        self.globals_ref[id(main)] = Namespace()
        self._configs = ConfigReducer()

    def reducer_of(self, kind: type) -> Callable[[Any], Any] | None:
        if kind is CodeType:
            return self._reduce_code
        if is_config(kind):
            return self._configs.reduce
        reduce_method: Any = kind.__reduce__
        if (
            kind.__module__ == MAIN
            and reduce_method is not object.__reduce__
            and kind not in self.dispatch_table
        ):
            return self._reduce_customized
        return super().reducer_of(kind)

    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        for recorder in self._recorders:
            recorder.record(obj, is_by_value=reduced is not NotImplemented)
        return reduced

    def reduce_class(self, cls: type, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
        if cls.__module__ == MAIN:
            self.classes[cls.__qualname__] = cls
            self._add_definition(cls.__qualname__, cls)
            self._add_annotations(cls)
        return reduced

    def on_function_by_value(self, function: FunctionType) -> None:
        if function.__module__ == MAIN:
            self._add_definition(function.__qualname__, function)
        refuse_own_operators(function)

    def _add_definition(self, name: str, value: object) -> None:
        """Add a value that `__main__` has under this name; for a nested value its outer class."""
        if resolve(name, self._main) is value:
            first = name.partition(".")[0]
            self.definitions[first] = self._main[first]

    def _add_annotations(self, cls: type) -> None:
        """Add what a class's string annotations name, for `typing.get_type_hints`."""
        for annotation in vars(cls).get("__annotations__", {}).values():
            if isinstance(annotation, str):
                for name in _NAME.findall(annotation):
                    value = self._main.get(name)
                    if value is not None and _is_for_annotations(value):
                        self.definitions[name] = value

    def _reduce_code(self, code: CodeType) -> Any:
        # Keep the file's name, which cloudpickle drops.
        self.files[code.co_filename] = None
        kind, args = internals._code_reduce(code)
        return kind, tuple(
            code.co_filename if constant == "<dynamic-code>" else constant for constant in args
        )

    def _reduce_customized(self, value: Any) -> Any:
        reduced = value.__reduce_ex__(self.proto)
        if isinstance(reduced, str) and resolve(reduced, self._main) is value:
            self._add_definition(reduced, value)
            return reduce_singleton(value)
        return reduced


def _is_for_annotations(value: Any) -> bool:
    # Classes of `__main__`, and the standard library, which every rank can import.
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    first = str(name).partition(".")[0]
    return first in sys.stdlib_module_names or (first == MAIN and isinstance(value, type))


def pickle_call(
    function: Callable[..., Any] | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    import_recorder: ImportRecorder | None = None,
    risks: LoadRisks | None = None,
) -> bytes:
    """Return a part of a call as bytes.

    Functions and classes of `__main__` are pickled by value; those of modules by name.

    Args:
        function: the user's function; None in later parts of a call.
        import_recorder: records the modules that the pickle and its code import.
        risks: records the objects whose load runs code of their own.

    Raises:
        ConfigError: something cannot be pickled; the message names the attribute.
    """
    main = _namespace_of(function)
    body = io.BytesIO()
    pickler = _CallPickler(body, main, import_recorder, risks)
    try:
        dumped = _dump_definitions(
            pickler, _initial_definitions(function, args, kwargs, main), set()
        )
        begin = body.tell()
        pickler.dump((function, args, dict(kwargs)))
        late = _dump_definitions(pickler, pickler.definitions, dumped) != dumped
    except (MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise _unpicklable_call_error(function, args, kwargs, main, error) from error
    head = {
        "main": describe_main(main),
        "sources": sources_of(pickler.files, pickler.classes, main),
        "late": late,
        "size": body.tell() - begin,
    }
    return pickle.dumps(head, pickle.HIGHEST_PROTOCOL) + body.getvalue()


def pickle_value(value: object, names: Mapping[str, Any]) -> bytes:
    """Return a rank's return value as bytes, given the names that `LoadedCall` has."""
    buffer = io.BytesIO()
    ValuePickler(buffer, names).dump(value)
    return buffer.getvalue()


def pickle_code(function: Callable[..., Any]) -> bytes:
    """Return bytes for a digest, not to be loaded: equal functions give equal bytes.

    Raises:
        ConfigError: the function cannot be pickled; the message names the attribute.
    """
    buffer = io.BytesIO()
    try:
        DigestPickler(buffer).dump(function)
    except (MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise _unpicklable_call_error(function, (), {}, _namespace_of(function), error) from error
    return buffer.getvalue()


def _dump_definitions(
    pickler: _CallPickler, names: Mapping[str, Any], dumped: set[str]
) -> set[str]:
    """Dump definitions, and those that they refer to; return all names that were dumped."""
    dumped = set(dumped)
    while new := {name: value for name, value in names.items() if name not in dumped}:
        pickler.dump(new)
        dumped |= new.keys()
        names = dict(pickler.definitions)
    pickler.dump(None)
    return dumped


def _namespace_of(function: Any) -> Mapping[str, Any]:
    """Return the namespace of `__main__`.

    A notebook or console may run code in another namespace than that in `sys.modules`.
    """
    inner = _innermost_function(function)
    namespace = inner.__globals__ if isinstance(inner, FunctionType) else {}
    return namespace if namespace.get("__name__") == MAIN else vars(sys.modules[MAIN])


def _initial_definitions(
    function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], main: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the definitions of `__main__` that a call refers to directly.

    The definitions come before the arguments, which processes that a rank spawns need not load.
    """
    inner = _innermost_function(function)
    candidates: list[Any] = [inner, *map(type, (inner, *args, *kwargs.values()))]
    if isinstance(inner, FunctionType) and inner.__globals__ is main:
        names = internals._extract_code_globals(inner.__code__)
        candidates += [main[name] for name in names if name in main]
    defined = [
        v for v in candidates if isinstance(v, (FunctionType, type)) and v.__module__ == MAIN
    ]
    return {v.__qualname__: v for v in defined if main.get(v.__qualname__) is v}


def _innermost_function(function: Any) -> Any:
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, MethodType):
            function = function.__func__
        else:
            return function


def name_of(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__qualname__", type(function).__name__))


def _unpicklable_call_error(
    function: Callable[..., Any] | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    main: Mapping[str, Any],
    error: Exception,
) -> ConfigError:

    def can_be_pickled(value: object) -> bool:
        try:
            _CallPickler(io.BytesIO(), main).dump(value)
        except Exception:  # noqa: BLE001 - any error means that the value cannot be pickled
            return False
        return True

    search = Search(can_be_pickled)
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


class _SeekingPickler(_CallPickler):
    """A pickler that raises RefusedObject when it meets one object."""

    def __init__(self, main: Mapping[str, Any], sought: object) -> None:
        super().__init__(io.BytesIO(), main)
        self._sought = sought

    def reducer_override(self, obj: Any) -> Any:
        if obj is self._sought:
            raise RefusedObject("found")
        return super().reducer_override(obj)


def unloadable_call_error(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    failure: LoadFailure,
) -> ConfigError:
    main, sought = _namespace_of(function), failure.sample

    def can_be_pickled(value: object) -> bool:
        try:
            _SeekingPickler(main, sought).dump(value)
        except RefusedObject:
            return False
        return True

    search = Search(can_be_pickled, lambda value: value is sought)
    culprits = () if sought is None else _culprits(search, function, args, kwargs)
    where = next((path for path, value in culprits if value is sought), "an object in it")
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
        if (culprit := search.culprit(value, what)) is not None:
            yield culprit
