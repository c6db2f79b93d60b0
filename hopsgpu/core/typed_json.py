"""Conversion between frozen dataclasses and JSON, driven by their type hints.

JSON that does not fit raises a `MisfitError` with the path of the field: such files are written by
other users, who may write anything.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from hopsgpu.core.metrics import for_json
from hopsgpu.errors import ConfigError

T = TypeVar("T")
Decoder = Callable[[Any], Any]

_LONGEST_FOUND = 99
_MAX_DIGITS = 400
_MAX_LEVELS = 8
_NON_FINITE = ("NaN", "Infinity", "-Infinity")
_WORDS = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}
# Metadata of a field that JSON lacks while the field has its default.
OMITTED_DEFAULT = {"omitted": True}


class MisfitError(ValueError):
    """JSON that does not have the expected form.

    Args:
        path: the field, such as "ranks[3].host"; "" for the whole.
    """

    def __init__(self, path: str, value: object, expected: str) -> None:
        self.path = path
        self._rest = f"is {_describe(value)}, expected {expected}"
        super().__init__(path, value, expected)

    def __str__(self) -> str:
        return f"{self.path or 'the content'} {self._rest}"

    def within(self, place: str) -> MisfitError:
        """Return this error for the object or list that has the field at a place."""
        self.path = f"{place}{'.' if self.path and self.path[0] != '[' else ''}{self.path}"
        return self


def _describe(value: object) -> str:
    """Return JSON in short; `repr` of nested lists may exceed the recursion limit."""
    if value is dataclasses.MISSING:
        return "missing"
    if isinstance(value, (dict, list, tuple)):
        return "an object" if isinstance(value, dict) else f"a list of {len(value)}"
    return f"{value!r:.{_LONGEST_FOUND}}"


@dataclass(frozen=True)
class Range:
    """The numbers that a field accepts.

    Attributes:
        has_non_finite: whether "NaN", "Infinity" and "-Infinity" are accepted too.
    """

    least: float
    most: float
    has_non_finite: bool = False


_ANY_NUMBER = Range(-1e18, 1e18)


class Codec:
    """The conversion of some dataclasses.

    Args:
        hint_names: values of names in the classes' type hints that their modules do not define.
        ranges: accepted numbers, by class or by class and field; they apply within the field too.
        json_names: names of fields in JSON, by class and field, if they differ.
        bare_fields: classes that JSON replaces by the value of one field, with that field.
    """

    def __init__(
        self,
        hint_names: Mapping[str, Any],
        ranges: Mapping[Any, Range],
        json_names: Mapping[tuple[type, str], str] | None = None,
        bare_fields: Mapping[type, str] | None = None,
    ) -> None:
        self._hint_names = dict(hint_names)
        self._ranges = ranges
        self._json_names = json_names or {}
        self._bare_fields = bare_fields or {}
        # Made at the first use of a class, because type hints are slow to evaluate.
        self._decoders: dict[tuple[Any, Range], Decoder] = {}
        self._encoded_fields: dict[type, list[tuple[str, str, bool]]] = {}

    def encode(self, value: Any) -> Any:
        """Return a value as JSON values; numbers that JSON lacks become strings."""
        kind = type(value)
        if kind is str or kind is int or value is None:
            return value
        if isinstance(value, float):
            return for_json(value)
        if isinstance(value, Mapping):
            return {str(name): self.encode(content) for name, content in value.items()}
        if isinstance(value, (tuple, list)):
            return [self.encode(content) for content in value]
        if isinstance(value, Enum):
            return value.value
        if kind in self._bare_fields:
            return getattr(value, self._bare_fields[kind])
        if not dataclasses.is_dataclass(kind):
            return value
        if kind not in self._encoded_fields:
            self._encoded_fields[kind] = [
                (item.name, self._json_name(kind, item.name), bool(item.metadata.get("omitted")))
                for item in dataclasses.fields(kind)
            ]
        return {
            json_name: self.encode(content)
            for name, json_name, is_omitted in self._encoded_fields[kind]
            if (content := getattr(value, name)) or not is_omitted
        }

    def decode(self, kind: type[T], value: Any) -> T:
        """Return the value of a class that `encode` made `value` of.

        Raises:
            MisfitError: `value` has another form.
        """
        decoded: T = self._decoder(kind, _ANY_NUMBER)(value)
        return decoded

    def _json_name(self, kind: type, name: str) -> str:
        return self._json_names.get((kind, name), name)

    def _decoder(self, kind: Any, numbers: Range) -> Decoder:
        key = (kind, numbers)
        if key not in self._decoders:
            self._decoders[key] = self._make_decoder(kind, numbers)
        return self._decoders[key]

    def _make_decoder(self, kind: Any, numbers: Range) -> Decoder:
        origin = get_origin(kind)
        if kind is Any:
            return _check_depth
        if origin in (Union, UnionType):
            return self._union_decoder(get_args(kind), numbers)
        if origin is tuple:
            return _list_decoder(self._decoder(get_args(kind)[0], numbers))
        if origin is not None and issubclass(origin, Mapping):
            return _mapping_decoder(self._decoder(get_args(kind)[1], numbers))
        if kind in self._bare_fields:
            name = self._bare_fields[kind]
            return lambda value: _construct(kind, {name: value})
        if dataclasses.is_dataclass(kind):
            return self._class_decoder(kind)
        if issubclass(kind, Enum):
            return _enum_decoder(kind)
        return _scalar_decoder(kind, numbers)

    def _union_decoder(self, kinds: tuple[Any, ...], numbers: Range) -> Decoder:
        decoders = [self._decoder(kind, numbers) for kind in kinds if kind is not NoneType]

        def decode(value: Any) -> Any:
            if value is None and NoneType in kinds:
                return None
            for decoder in decoders[1:]:
                try:
                    return decoder(value)
                except MisfitError:
                    continue
            return decoders[0](value)

        return decode

    def _class_decoder(self, kind: Any) -> Decoder:
        hints = get_type_hints(kind, localns=self._hint_names)
        default = self._ranges.get(kind, _ANY_NUMBER)
        fields = [
            (
                item.name,
                self._json_name(kind, item.name),
                self._decoder(hints[item.name], self._ranges.get((kind, item.name), default)),
                item.default is item.default_factory is dataclasses.MISSING,
            )
            for item in dataclasses.fields(kind)
        ]

        def decode(value: Any) -> Any:
            _check_object(value)
            values = {}
            for name, json_name, decoder, is_required in fields:
                if json_name in value:
                    try:
                        values[name] = decoder(value[json_name])
                    except MisfitError as error:
                        raise error.within(json_name) from None
                elif is_required:
                    raise MisfitError(json_name, dataclasses.MISSING, "a value")
            return _construct(kind, values)

        return decode


def _construct(kind: Any, values: Mapping[str, Any]) -> Any:
    try:
        return kind(**values)
    except ConfigError as error:
        raise MisfitError("", values, f"other values: {error}") from error


def _check_object(value: Any) -> None:
    if not isinstance(value, dict):
        raise MisfitError("", value, "an object")


def _list_decoder(item: Decoder) -> Decoder:
    def decode(value: Any) -> Any:
        if not isinstance(value, list):
            raise MisfitError("", value, "a list")
        items = []
        for number, content in enumerate(value):
            try:
                items.append(item(content))
            except MisfitError as error:
                raise error.within(f"[{number}]") from None
        return tuple(items)

    return decode


def _mapping_decoder(item: Decoder) -> Decoder:
    def decode(value: Any) -> Any:
        _check_object(value)
        items = {}
        for name, content in value.items():
            try:
                items[name] = item(content)
            except MisfitError as error:
                raise error.within(f"[{name!r:.60}]") from None
        return items

    return decode


def _enum_decoder(kind: type[Enum]) -> Decoder:
    by_value = {member.value: member for member in kind}

    def decode(value: Any) -> Any:
        if not isinstance(value, str) or value not in by_value:
            raise MisfitError("", value, f"one of {', '.join(by_value)}")
        return by_value[value]

    return decode


def _scalar_decoder(kind: Any, numbers: Range) -> Decoder:
    accepted = (int, float) if kind is float else (kind,)
    has_non_finite = kind is float and numbers.has_non_finite
    has_range = kind in (int, float)

    def decode(value: Any) -> Any:
        if type(value) not in accepted:
            if has_non_finite and value in _NON_FINITE:
                return float(value)
            raise MisfitError("", value, _WORDS[kind])
        if has_range and not numbers.least <= value <= numbers.most:
            raise MisfitError("", value, f"a number from {numbers.least:g} to {numbers.most:g}")
        return value

    return decode


def _check_depth(value: Any, levels: int = _MAX_LEVELS) -> Any:
    """Return JSON of any form that recursive functions can walk."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if not levels:
        raise MisfitError("", value, f"at most {_MAX_LEVELS} levels of lists and objects")
    for content in inner:
        _check_depth(content, levels - 1)
    return value


def loads(content: bytes) -> Any:
    """Parse JSON; refuse what RFC 8259 lacks, and numbers that are too large to calculate with.

    Raises:
        ValueError: the content is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(
            content, parse_constant=_refuse, parse_float=_parse_float, parse_int=_parse_int
        )
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _parse_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text:.99} is not a finite number")
    return number


def _parse_int(text: str) -> int:
    if len(text) > _MAX_DIGITS or not math.isfinite(float(text)):
        raise ValueError(f"{text:.99} is not a finite number")
    return int(text)
