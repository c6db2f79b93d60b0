"""What a pickled call imports."""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import math
import pathlib
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import pytest
import yaml

from hopsgpu.packaging.import_scan import ImportedModules, ImportRecorder
from hopsgpu.packaging.pickling import pickle_call
from tests import in_ranks


def imported(function: Callable[..., Any], *args: object) -> ImportedModules:
    noted = ImportRecorder()
    pickle_call(function, args, {}, import_recorder=noted)
    return noted.modules()


def by_value(body: str, **variables: object) -> Callable[..., Any]:
    """A function of a script that is named `function`."""
    space: dict[str, Any] = {"__name__": "__main__", **variables}
    exec(body, space)
    function: Callable[..., Any] = space["function"]
    return function


def test_modules_of_objects_pickled_by_name_are_needed() -> None:
    assert "tests.in_ranks" in imported(in_ranks.where).needed
    assert "tests.in_ranks" in imported(functools.partial(in_ranks.where)).needed
    assert {"pathlib"} <= imported(abs, {"a": pathlib.Path()}).needed
    assert {"collections"} <= imported(abs, [{"a": collections.OrderedDict}]).needed
    assert {"math"} <= imported(abs, math.sqrt).needed
    assert "builtins" in imported(abs).needed


@pytest.mark.parametrize(
    ("function", "needed"),
    [
        (by_value("def function(): return yaml.safe_load", yaml=yaml), "yaml"),
        (by_value("def function(): return np.zeros", np=np), "numpy"),
        (
            by_value("def function(): return concurrent.futures.wait", concurrent=concurrent),
            "concurrent.futures",
        ),
        (by_value("def function(x=load): ...", load=yaml.safe_load), "yaml"),
    ],
)
def test_modules_that_a_function_of_the_script_uses_are_needed(
    function: Callable[..., Any], needed: str
) -> None:
    assert needed in imported(function).needed


def test_imports_of_the_code_are_likely_and_may_be_missing() -> None:
    function = by_value(
        "def helper():\n    from away import part\n"
        "class Model:\n    def fit(self):\n        import elsewhere.deep\n"
        "def function():\n    helper(); Model()\n"
        "    try:\n        import optional\n    except ImportError: ...\n"
        "    return lambda: __import__('hidden')\n"
    )
    found = imported(function)
    assert {"away", "away.part", "elsewhere.deep", "optional"} <= found.likely
    assert not {"away", "elsewhere", "optional"} & found.needed
    assert "hidden" not in found.needed | found.likely


def test_relative_imports_of_a_script_that_was_run_as_a_module() -> None:
    body = "def function():\n    from .near import thing\n    from ..far import other\n"
    function = by_value(body, __package__="top.pkg")
    assert {"top.pkg.near", "top.pkg.near.thing", "top.far"} <= imported(function).likely


def test_a_module_that_is_pickled_by_value_is_not_needed() -> None:
    function = by_value("def function(): return in_ranks.where()", in_ranks=in_ranks)
    assert "tests.in_ranks" in imported(function).needed
    cloudpickle.register_pickle_by_value(in_ranks)
    try:
        assert "tests.in_ranks" not in imported(in_ranks.where).needed
    finally:
        cloudpickle.unregister_pickle_by_value(in_ranks)


def test_a_class_with_a_property_of_that_name() -> None:
    class Odd:
        @property
        def __module__(self) -> str:  # type: ignore[override]
            return "nowhere"

    assert "nowhere" not in imported(abs, Odd()).needed
