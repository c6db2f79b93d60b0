"""Signatures of public functions, each declared once, as a frozen dataclass of options.

A field is an argument, documented under "Attributes:". Functions share arguments by inheritance.
mypy and editors read the dataclass's constructor; `inspect.signature` and `help` read the results
of `signature_of` and `add_arguments_section`.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from hopsgpu.core.boundary import CallError

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_AFTER = "after"
_ATTRIBUTES_SECTION = "Attributes:"
# The arguments precede these sections of a docstring.
_LATER_SECTIONS = ("Returns:", "Raises:")


def placed_field(default: T, *after: str) -> T:
    """Return a dataclass field whose argument comes after the first of these that the class has.

    An inherited option that is declared again with a position moves there.
    """
    field: Any = dataclasses.field(default=default, metadata={_AFTER: after})
    return cast(T, field)


def signature_of(options: type) -> inspect.Signature:
    """Return the signature of a function that takes these options.

    Positional arguments have the dataclass's order. The keyword-only options of a class come before
    those of its bases, in the order of their declaration, except for each `placed_field`.
    """
    fields = {field.name: field for field in dataclasses.fields(options)}
    positional = [name for name, field in fields.items() if not field.kw_only]
    names = [*positional, *(name for name in _ordered_names(options) if name not in positional)]
    return inspect.Signature([_parameter(fields[name]) for name in names])


def _ordered_names(options: type) -> list[str]:
    names: list[str] = []
    for cls in reversed(options.__mro__):
        if not dataclasses.is_dataclass(cls):
            continue
        fields = {field.name: field for field in dataclasses.fields(cls)}
        index = 0
        for name in inspect.get_annotations(cls):
            predecessors = fields[name].metadata.get(_AFTER, ())
            after = next((p for p in predecessors if p in names), None)
            if name in names:
                if after is None:
                    index = names.index(name) + 1
                    continue
                names.remove(name)
            if after is not None:
                index = names.index(after) + 1
            names.insert(index, name)
            index += 1
    return names


def _parameter(field: dataclasses.Field[Any]) -> inspect.Parameter:
    is_optional = field.default is not dataclasses.MISSING
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY
        if field.kw_only
        else inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=field.default if is_optional else inspect.Parameter.empty,
        annotation=field.type,
    )


def add_arguments_section(doc: str | None, options: type) -> str | None:
    """Return a function's docstring with a section about its options."""
    if doc is None:  # Python drops docstrings (-OO)
        return None
    entries: dict[str, list[str]] = {}
    for cls in reversed(options.__mro__):
        entries |= _entries(cls.__doc__ or "")
    arguments = [
        line for name in signature_of(options).parameters for line in entries.get(name, ())
    ]
    lines = inspect.cleandoc(doc).splitlines()
    index = next((n for n, line in enumerate(lines) if line in _LATER_SECTIONS), None)
    before, after = (lines, []) if index is None else (lines[:index], ["", *lines[index:]])
    return "\n".join([*"\n".join(before).rstrip().splitlines(), "", "Args:", *arguments, *after])


def document_arguments(options: type) -> Callable[[F], F]:
    """Add the section about these options to the docstring of a function that forwards them."""

    def decorate(function: F) -> F:
        function.__doc__ = add_arguments_section(function.__doc__, options)
        return function

    return decorate


def _entries(doc: str) -> dict[str, list[str]]:
    """Return the lines about each attribute in a class's docstring, by name."""
    _, _, section = f"{inspect.cleandoc(doc)}\n".partition(f"\n{_ATTRIBUTES_SECTION}\n")
    entries: dict[str, list[str]] = {}
    name = ""
    for line in section.splitlines():
        indent = len(line) - len(line.lstrip())
        if not indent:
            break
        if indent == 4:
            name = line.strip().partition(":")[0]
        entries.setdefault(name, []).append(line)
    return entries


def check_call(
    name: str, signature: inspect.Signature, args: Sequence[object], kwargs: Mapping[str, object]
) -> None:
    """Raise CallError, with the function's name, if an argument is unknown, missing or repeated."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        parameters = [
            p.name for p in signature.parameters.values() if p.kind is not p.POSITIONAL_ONLY
        ]
        for keyword in kwargs:
            if keyword not in parameters:
                like = difflib.get_close_matches(keyword, parameters, n=1)
                named = f"; it has {', '.join(parameters)}"
                hint = f": did you mean {like[0]!r}?" if like else named
                raise CallError(
                    f"{name}() got an unexpected keyword argument {keyword!r}{hint}"
                ) from None
        raise CallError(f"{name}() {error}") from None
