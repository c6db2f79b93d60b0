"""Signatures of public functions, each written once: as a frozen dataclass of its options.

A field of the dataclass is an argument: its type, its default, and its entry under "Attributes:"
are the argument's. Functions share arguments by inheritance. mypy and editors read the signature
from the dataclass's constructor. `signature_of` and `add_arguments_section` make
`inspect.signature` and `help` show the same.
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
_ENTRIES = "Attributes:"
# The sections of a docstring before which the arguments stand.
_LATER = ("Returns:", "Raises:")


def placed_field(default: T, *after: str) -> T:
    """Return a dataclass field with a default, and with a place in the signature.

    An inherited option that is declared again with a place moves there.

    Args:
        default: the default.
        after: the option that it follows; of several, the first that the class has.
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
    names = [*positional, *(name for name in _placed_names(options) if name not in positional)]
    return inspect.Signature([_parameter(fields[name]) for name in names])


def _placed_names(options: type) -> list[str]:
    names: list[str] = []
    for cls in reversed(options.__mro__):
        if not dataclasses.is_dataclass(cls):
            continue
        fields = {field.name: field for field in dataclasses.fields(cls)}
        at = 0
        for name in inspect.get_annotations(cls):
            wanted = fields[name].metadata.get(_AFTER, ())
            after = next((one for one in wanted if one in names), None)
            if name in names:
                if after is None:
                    at = names.index(name) + 1
                    continue
                names.remove(name)
            if after is not None:
                at = names.index(after) + 1
            names.insert(at, name)
            at += 1
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
    """Return a function's docstring with a section about its arguments, the options.

    Args:
        doc: the docstring without the section; None if Python leaves docstrings out (-OO).
        options: the dataclass of the options.
    """
    if doc is None:
        return None
    entries: dict[str, list[str]] = {}
    for cls in reversed(options.__mro__):
        entries |= _entries(cls.__doc__ or "")
    told = [line for name in signature_of(options).parameters for line in entries.get(name, ())]
    lines = inspect.cleandoc(doc).splitlines()
    at = next((n for n, line in enumerate(lines) if line in _LATER), None)
    before, after = (lines, []) if at is None else (lines[:at], ["", *lines[at:]])
    return "\n".join([*"\n".join(before).rstrip().splitlines(), "", "Args:", *told, *after])


def document_arguments(options: type) -> Callable[[F], F]:
    """Give a function that passes its arguments on the section about these options."""

    def decorate(function: F) -> F:
        function.__doc__ = add_arguments_section(function.__doc__, options)
        return function

    return decorate


def _entries(doc: str) -> dict[str, list[str]]:
    """Return the lines about each attribute in a class's docstring, by the attribute's name."""
    lines = inspect.cleandoc(doc).splitlines()
    entries: dict[str, list[str]] = {}
    name = ""
    for line in lines[lines.index(_ENTRIES) + 1 :] if _ENTRIES in lines else ():
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
    """Check that arguments fit a signature; errors name the public function, not an inner one.

    Args:
        name: name of the function that was called.
        signature: signature of the function that receives its arguments.
        args: the positional arguments of the call.
        kwargs: the keyword arguments of the call.

    Raises:
        TypeError: an argument is unknown, missing, or given twice.
    """
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        known = [p.name for p in signature.parameters.values() if p.kind is not p.POSITIONAL_ONLY]
        for given in kwargs:
            if given not in known:
                like = difflib.get_close_matches(given, known, n=1)
                meant = f": did you mean {like[0]!r}?" if like else f"; it has {', '.join(known)}"
                raise CallError(
                    f"{name}() got an unexpected keyword argument {given!r}{meant}"
                ) from None
        raise CallError(f"{name}() {error}") from None
