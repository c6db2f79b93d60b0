"""The provenance of a run and its model: a digest of the code, and the parameters of the call."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import io
import itertools
import math
import numbers
import reprlib
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from hopsgpu.core.redaction import REDACTED, redact, without_secrets
from hopsgpu.core.run_record import CallRecord
from hopsgpu.packaging.modules import PackedModules
from hopsgpu.packaging.pickling import name_of, pickle_code

_MAX_ENTRIES = 200
_MAX_CHARACTERS = 1000
_MAX_DEPTH = 4
# Characters of a name and of a value in a run's record.
_MAX_RECORDED = 200
_ATOMS = (bytes, bytearray, complex, range, slice)
_MAX_RECORDED_ITEMS = 20


@dataclass(frozen=True)
class Provenance:
    """A launch's code and parameters.

    Attributes:
        function: name of the function, with its module unless that is `__main__`.
        code_digest: "sha256:" and the digest of the pickled function, with closure variables but
            without arguments, and of the user's modules. The same code in the same Python has the
            same digest.
        parameters: the arguments by name, as plain data. A value that JSON cannot represent is
            described by its type, long values are cut, and texts under names that look secret are
            redacted.
    """

    function: str = ""
    code_digest: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def as_record(self) -> CallRecord:
        """Return the part of the run's record: at most 200 arguments of 200 characters."""
        first = itertools.islice(_flatten(self.parameters), _MAX_ENTRIES)
        return CallRecord(self.function[:_MAX_RECORDED], self.code_digest, dict(first))


def provenance_of(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    modules: PackedModules,
) -> Provenance:
    """Return a call's provenance; raise ConfigError if the function cannot be pickled.

    Args:
        kwargs: keyword arguments; those that differ between a search's trials are missing.
    """
    return Provenance(
        _full_name(function),
        _code_digest(function, modules),
        _plain_mapping(_arguments_by_name(function, args, kwargs), _MAX_DEPTH),
    )


def provenance_of_script(target: str, args: Sequence[str], digest: str) -> Provenance:
    """Return the provenance of a script.

    Args:
        args: its arguments; options of the form `--name value` and `--name=value` are parameters.
        digest: SHA-256 of its working directory and modules.
    """
    named: dict[str, Any] = {}
    unnamed: list[str] = []
    words = list(args)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if not word.startswith("--") or name == "--":
            unnamed.append(word)
        elif equals:
            named[name[2:]] = value
        else:
            has_value = words and not words[0].startswith("-")
            named[name[2:]] = words.pop(0) if has_value else True
    parameters = {**named, **({"args": unnamed} if unnamed else {})}
    return Provenance(target, f"sha256:{digest}", _plain_mapping(parameters, _MAX_DEPTH))


def _full_name(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    module, name = getattr(function, "__module__", None), name_of(function)
    return name if module in (None, "__main__") else f"{module}.{name}"


def _code_digest(function: Callable[..., Any], modules: PackedModules) -> str:
    digest = hashlib.sha256(pickle_code(function))
    if modules.archive:
        # The archive's bytes also depend on compression and file modes.
        with zipfile.ZipFile(io.BytesIO(modules.archive)) as archive:
            for name in sorted(archive.namelist()):
                digest.update(f"\0{name}\0".encode() + hashlib.sha256(archive.read(name)).digest())
    return f"sha256:{digest.hexdigest()}"


def _arguments_by_name(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have no signature
        return {**({"args": list(args)} if args else {}), **kwargs}
    bound = signature.bind_partial(*args, **kwargs)
    bound.apply_defaults()
    named = dict(bound.arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named |= named.pop(name)
        elif parameter.kind is inspect.Parameter.VAR_POSITIONAL and not named[name]:
            del named[name]
    return named


def _plain_mapping(values: Mapping[Any, Any], depth: int) -> dict[str, Any]:
    first = itertools.islice(values.items(), _MAX_ENTRIES)
    first_values = {str(name): value for name, value in first}
    # Numbers are not secret, even under a name such as max_tokens.
    secret = {
        name: "" for name, value in first_values.items() if not isinstance(value, (int, float))
    }
    hidden = {name for name, value in redact(secret).items() if value}
    return {
        name: REDACTED if name in hidden and value is not None else _plain_value(value, depth - 1)
        for name, value in first_values.items()
    }


def _plain_value(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        # RFC 8259 excludes NaN and infinities.
        return float(value) if math.isfinite(value) else repr(float(value))
    if isinstance(value, (str, PurePath)):
        return without_secrets(str(value))[:_MAX_CHARACTERS]
    if depth > 0 and isinstance(value, (set, frozenset)) and len(value) <= _MAX_ENTRIES:
        return sorted((_plain_value(item, depth - 1) for item in value), key=repr)
    if depth > 0 and isinstance(value, (list, tuple)):
        return [_plain_value(item, depth - 1) for item in value[:_MAX_ENTRIES]]
    if depth > 0 and isinstance(value, dict):
        return _plain_mapping(value, depth)
    if depth > 0 and dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain_mapping(vars(value) if hasattr(value, "__dict__") else {}, depth)
    return _describe_value(value)


def _describe_value(value: Any) -> str:
    # An object's own `__repr__` is not called, because it may take long.
    kind = type(value)
    if kind in _ATOMS:
        return reprlib.repr(value)
    named = value if isinstance(getattr(value, "__qualname__", None), str) else kind
    name = f"{named.__module__}.{named.__qualname__}"
    shape = getattr(value, "shape", None)
    return f"{name} of shape {tuple(shape)}" if isinstance(shape, tuple) else name


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the names and texts of plain values, with those of nested mappings."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"[:_MAX_RECORDED], _short_repr(value)


def _short_repr(value: Any) -> str:
    shortener = reprlib.Repr()
    shortener.maxlist, shortener.maxstring = _MAX_RECORDED_ITEMS, _MAX_RECORDED
    return shortener.repr(value)[:_MAX_RECORDED]
