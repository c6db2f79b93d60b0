"""Signatures and docstrings that are derived from a dataclass of options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from hopsgpu.core.signatures import (
    add_arguments_section,
    check_call,
    document_arguments,
    placed_field,
    signature_of,
)


@dataclass(frozen=True, kw_only=True)
class Shown:
    """Options.

    Attributes:
        name: what it is called, in a word
            or two.
    """

    name: str | None = None


@dataclass(frozen=True, kw_only=True)
class Timed(Shown):
    """Options with a time.

    Attributes:
        size: its size.
        timeout: the time.
    """

    size: int
    timeout: float = placed_field(1.0, "name")


@dataclass(frozen=True, kw_only=True)
class Running(Shown):
    """Options of a function.

    Attributes:
        function: the function.
        retries: how often it is tried again.
    """

    function: Callable[[], Any] = field(kw_only=False)
    retries: int = placed_field(0, "timeout", "name")


@dataclass(frozen=True, kw_only=True)
class Both(Running, Timed):
    """Both.

    Attributes:
        name: another name.
    """

    size: int = 2


@dataclass(frozen=True, kw_only=True)
class Moved(Timed):
    name: str | None = placed_field(None, "timeout")


@pytest.mark.parametrize(
    ("options", "signature"),
    [
        (Timed, "(*, size: 'int', name: 'str | None' = None, timeout: 'float' = 1.0)"),
        (
            Running,
            "(function: 'Callable[[], Any]', *, name: 'str | None' = None, retries: 'int' = 0)",
        ),
        (
            Both,
            "(function: 'Callable[[], Any]', *, size: 'int' = 2, name: 'str | None' = None,"
            " timeout: 'float' = 1.0, retries: 'int' = 0)",
        ),
        (Moved, "(*, size: 'int', timeout: 'float' = 1.0, name: 'str | None' = None)"),
    ],
)
def test_options_stand_where_they_are_placed(options: type, signature: str) -> None:
    assert str(signature_of(options)) == signature


def test_a_constructor_takes_what_the_signature_says() -> None:
    for options in (Timed, Running, Both, Moved):
        constructed = inspect.signature(options).parameters
        shown = signature_of(options).parameters
        assert {name: str(p) for name, p in constructed.items()} == {
            name: str(p) for name, p in shown.items()
        }


def test_the_arguments_stand_before_what_comes_back() -> None:
    told = add_arguments_section("Do it.\n\n    More.\n\n    Returns:\n        It.\n    ", Both)
    assert told == (
        "Do it.\n\nMore.\n\nArgs:\n    function: the function.\n    size: its size.\n"
        "    name: another name.\n    timeout: the time.\n"
        "    retries: how often it is tried again.\n\nReturns:\n    It."
    )
    assert add_arguments_section(None, Both) is None


def test_a_function_that_passes_its_arguments_on_is_documented() -> None:
    @document_arguments(Shown)
    def call(*args: Any, **kwargs: Any) -> None:
        """Do it."""

    assert call.__doc__ == (
        "Do it.\n\nArgs:\n    name: what it is called, in a word\n        or two."
    )


def test_a_call_that_does_not_fit_names_what_there_is() -> None:
    with pytest.raises(TypeError, match=r"do\(\) got .* 'x'; it has function, size, name"):
        check_call("do", signature_of(Both), (print,), {"x": 1})
    with pytest.raises(TypeError, match=r"do\(\) missing a required argument: 'function'"):
        check_call("do", signature_of(Both), (), {})
    check_call("do", signature_of(Both), (print,), {"size": 3})
