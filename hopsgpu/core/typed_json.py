"""Conversion between frozen dataclasses and JSON, driven by their type hints.

JSON that does not fit raises a `MisfitError` with the path of the field: such files are written by
other users, who may write anything.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from hopsgpu.core.metrics import for_json
from hopsgpu.errors import ConfigError

T = TypeVar("T")

_LONGEST_FOUND = 99
_MOST_DIGITS = 400
_MOST_LEVELS = 8
_NON_FINITE = ("NaN", "Infinity", "-Infinity")
_WORDS = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}
# Metadata of a field that JSON lacks while the field has its default.
OMITTED_DEFAULT = {"omitted": True}


class MisfitError(ValueError):
    """JSON that does not have the expected form.

    Args:
        path: the field, such as "ranks[3].host"; "" for the whole.
        found: what it has.
        expected: what is expected, in words.
    """

    def __init__(self, path: str, found: object, expected: str) -> None:
        super().__init__(f"{path or 'the content'} is {_describe(found)}, expected {expected}")
        self.path = path


def _describe(found: object) -> str:
    """Return JSON in short; `repr` of nested lists may exceed the recursion limit."""
    if found is dataclasses.MISSING:
        return "missing"
    if isinstance(found, (dict, list, tuple)):
        return "an object" if isinstance(found, dict) else f"a list of {len(found)}"
    return f"{found!r:.{_LONGEST_FOUND}}"


@dataclass(frozen=True)
class Range:
    """The numbers that a field accepts.

    Attributes:
        least: the smallest.
        most: the largest.
        has_non_finite: whether "NaN", "Infinity" and "-Infinity" are accepted too.
    """

    least: float
    most: float
    has_non_finite: bool = False


_ANY_NUMBER = Range(-1e18, 1e18)


@dataclass(frozen=True)
class Codec:
    """The conversion of some dataclasses.

    Attributes:
        hint_names: values of names in the classes' type hints that their modules do not define.
        ranges: accepted numbers, by class or by class and field; they apply within the field too.
        json_names: names of fields in JSON, by class and field, if they differ.
        bare_fields: classes that JSON replaces by the value of one field, with that field.
    """

    hint_names: Mapping[str, Any] = field(default_factory=dict)
    ranges: Mapping[Any, Range] = field(default_factory=dict)
    json_names: Mapping[tuple[type, str], str] = field(default_factory=dict)
    bare_fields: Mapping[type, str] = field(default_factory=dict)

    def encode(self, value: Any) -> Any:
        """Return a value as JSON values; numbers that JSON lacks become strings."""
        kind = type(value)
        if kind in self.bare_fields:
            return getattr(value, self.bare_fields[kind])
        if dataclasses.is_dataclass(value):
            return {
                self.json_names.get((kind, one.name), one.name): self.encode(content)
                for one in dataclasses.fields(value)
                if (content := getattr(value, one.name)) or not one.metadata.get("omitted")
            }
        if isinstance(value, Mapping):
            return {str(name): self.encode(content) for name, content in value.items()}
        if isinstance(value, (tuple, list)):
            return [self.encode(content) for content in value]
        if isinstance(value, Enum):
            return value.value
        return for_json(value) if isinstance(value, float) else value

    def decode(self, kind: type[T], found: Any) -> T:
        """Return the value of a class that `encode` made `found` of.

        Raises:
            MisfitError: `found` has another form.
        """
        decoded: T = self._decode(kind, found, "", _ANY_NUMBER)
        return decoded

    def _decode(self, kind: Any, found: Any, path: str, numbers: Range) -> Any:
        origin = get_origin(kind)
        if kind is Any:
            return _shallow(found, path)
        if origin in (Union, UnionType):
            return self._decode_union(get_args(kind), found, path, numbers)
        if origin is tuple:
            if not isinstance(found, list):
                raise MisfitError(path, found, "a list")
            item = get_args(kind)[0]
            return tuple(
                self._decode(item, one, f"{path}[{number}]", numbers)
                for number, one in enumerate(found)
            )
        if origin is not None and issubclass(origin, Mapping):
            item = get_args(kind)[1]
            return {
                name: self._decode(item, one, f"{path}[{name!r:.60}]", numbers)
                for name, one in _object(found, path).items()
            }
        if kind in self.bare_fields:
            return self._checked(kind, {self.bare_fields[kind]: found}, path)
        if dataclasses.is_dataclass(kind):
            return self._decode_class(kind, _object(found, path), path)
        if issubclass(kind, Enum):
            by_value = {one.value: one for one in kind}
            if not isinstance(found, str) or found not in by_value:
                raise MisfitError(path, found, f"one of {', '.join(by_value)}")
            return by_value[found]
        return _scalar(kind, found, path, numbers)

    def _decode_union(self, kinds: tuple[Any, ...], found: Any, path: str, numbers: Range) -> Any:
        if found is None and NoneType in kinds:
            return None
        error: MisfitError | None = None
        for kind in kinds:
            if kind is not NoneType:
                try:
                    return self._decode(kind, found, path, numbers)
                except MisfitError as misfit:
                    error = error or misfit
        assert error is not None
        raise error

    def _decode_class(self, kind: Any, found: Mapping[str, Any], path: str) -> Any:
        hints = _hints(kind, tuple(self.hint_names.items()))
        values = {}
        for one in dataclasses.fields(kind):
            name = self.json_names.get((kind, one.name), one.name)
            place = f"{path}.{name}" if path else name
            if name in found:
                default = self.ranges.get(kind, _ANY_NUMBER)
                numbers = self.ranges.get((kind, one.name), default)
                values[one.name] = self._decode(hints[one.name], found[name], place, numbers)
            elif one.default is one.default_factory is dataclasses.MISSING:
                raise MisfitError(place, dataclasses.MISSING, "a value")
        return self._checked(kind, values, path)

    @staticmethod
    def _checked(kind: Any, values: Mapping[str, Any], path: str) -> Any:
        try:
            return kind(**values)
        except ConfigError as error:
            raise MisfitError(path, dict(values), f"other values: {error}") from error


@functools.cache
def _hints(kind: type, names: tuple[tuple[str, Any], ...]) -> Mapping[str, Any]:
    return get_type_hints(kind, localns=dict(names))


def _object(found: Any, path: str) -> Mapping[str, Any]:
    if not isinstance(found, dict):
        raise MisfitError(path, found, "an object")
    return found


def _shallow(found: Any, path: str, levels: int = _MOST_LEVELS) -> Any:
    """Return JSON of any form that recursive functions can walk."""
    inner = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
    if not levels:
        raise MisfitError(path, found, f"at most {_MOST_LEVELS} levels of lists and objects")
    for one in inner:
        _shallow(one, path, levels - 1)
    return found


def _scalar(kind: Any, found: Any, path: str, numbers: Range) -> Any:
    if kind is float and numbers.has_non_finite and found in _NON_FINITE:
        return float(found)
    accepted = (int, float) if kind is float else kind
    if not isinstance(found, accepted) or (isinstance(found, bool) and kind is not bool):
        raise MisfitError(path, found, _WORDS[kind])
    if kind in (int, float) and not numbers.least <= found <= numbers.most:
        raise MisfitError(path, found, f"a number from {numbers.least:g} to {numbers.most:g}")
    return found


def loads(content: bytes) -> Any:
    """Parse JSON; refuse what RFC 8259 lacks, and numbers that are too large to calculate with.

    Raises:
        ValueError: the content is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(
            content, parse_constant=_refuse, parse_float=_finite, parse_int=_bounded_int
        )
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text:.99} is not a finite number")
    return number


def _bounded_int(text: str) -> int:
    if len(text) > _MOST_DIGITS or not math.isfinite(float(text)):
        raise ValueError(f"{text:.99} is not a finite number")
    return int(text)
