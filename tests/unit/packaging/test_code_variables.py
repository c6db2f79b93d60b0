"""Which environment variables a function sets, by its code, and what becomes of it."""

from __future__ import annotations

import ast
import inspect
import os
import re
import textwrap
from collections.abc import Callable
from os import environ
from typing import Any

import pytest

from hopsgpu.packaging.code_variables import (
    Setting,
    carried_variables,
    settings_of_code,
    settings_of_nodes,
)
from hopsgpu.packaging.preload import StaticFindings


def sets(port: int) -> None:
    os.environ["A"] = "1"
    environ["B"] = str(port)
    os.environ["C"] = os.environ["READ"]
    os.putenv("D", "1")


def updates(port: int) -> None:
    os.environ.update({"A": "1", "B": str(port)})
    os.environ.update(C="1", D=str(port))


def offers(port: int) -> None:
    os.environ.setdefault("A", "1")
    if "B" not in os.environ:
        os.environ["B"] = "1"
    os.environ["C"] = os.environ.get("C", "1")
    if os.getenv("D") is None:
        os.environ["D"] = "1"


def sets_nothing(port: int) -> dict[str, Any]:
    found = {"RANK": os.environ["RANK"], "port": port}
    found["WORLD_SIZE"] = os.environ.get("WORLD_SIZE", "1")
    found.update({"LOCAL_RANK": os.environ["LOCAL_RANK"]})
    found.update(NODE_RANK=os.environ["NODE_RANK"])
    for name in ("A", "B"):
        os.environ[name] = "1"  # it does, but not by a name that is spelt out
    del os.environ["C"]
    return found


def from_code(function: Callable[..., Any]) -> set[Setting]:
    return set(settings_of_code(function.__code__))


def from_source(function: Callable[..., Any]) -> set[Setting]:
    return set(settings_of_nodes(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function))))))


@pytest.mark.parametrize("found", [from_code, from_source])
def test_what_a_function_sets(found: Callable[..., set[Setting]]) -> None:
    every = {Setting(name, False) for name in "ABCD"}
    assert found(sets) == every
    # Values that are spelt out there are taken for names too, which does no harm.
    assert {setting for setting in found(updates) if setting.name != "1"} == every
    assert found(offers) == {Setting(name, True) for name in "ABCD"}
    assert found(sets_nothing) == set()


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["MASTER_ADDR", "MASTER_PORT"], ["MASTER_ADDR and MASTER_PORT.*do not find each other"]),
        (["CUDA_VISIBLE_DEVICES"], ["CUDA_VISIBLE_DEVICES.*GPUs of others"]),
        (["RANK", "MASTER_PORT"], ["MASTER_PORT.*do not find each other", "RANK.*the same place"]),
        (["OMP_NUM_THREADS", "MINE"], []),
    ],
)
def test_reserved_variables_are_warned_of(names: list[str], words: list[str]) -> None:
    imposed = StaticFindings((), frozenset(Setting(name, False) for name in names))
    assert len(imposed.warnings) == len(words)
    for warning, said in zip(imposed.warnings, words, strict=True):
        assert re.search(f"train_fn sets {said}", warning)
    assert imposed.has_own_master == ("MASTER_PORT" in names)
    offered = StaticFindings((), frozenset(Setting(name, True) for name in names))
    assert offered.warnings == () and not offered.has_own_master


def test_variables_that_select_code_come_from_the_driver() -> None:
    driver = {"KERAS_BACKEND": "jax", "OMP_NUM_THREADS": "7", "PATH": "/bin"}
    assert (
        carried_variables(driver)
        == {"KERAS_BACKEND": "jax"}
        == StaticFindings().environment(driver)
    )
