"""What others write code against: names, signatures and attributes, by a snapshot."""

from __future__ import annotations

import importlib
import inspect
import json
import pickle
from pathlib import Path

import pytest

import hopsgpu
import hopsgpu.types

MODULES = (hopsgpu, hopsgpu.types)
SNAPSHOT = Path(__file__).parent / "public_api.json"
Described = str | dict[str, "Described"]


def described(value: object) -> Described:
    if inspect.isclass(value):
        inherited = dir(BaseException) if issubclass(value, BaseException) else []
        members = {
            name: described(member)
            for name, member in inspect.getmembers(value)
            if not name.startswith("_") and name not in inherited
        }
        return {"": signature_of(value), **members}
    if isinstance(value, property):
        return "property"
    return signature_of(value) if callable(value) else "attribute"


def signature_of(value: object) -> str:
    try:
        return str(inspect.signature(value))  # type: ignore[arg-type]
    except (TypeError, ValueError):  # of some classes Python knows none
        return ""


def test_the_public_interface_is_what_the_snapshot_has() -> None:
    """A change of it is meant, or a mistake; where it is meant, the snapshot changes too."""
    assert found() == json.loads(SNAPSHOT.read_text())


def found() -> dict[str, Described]:
    return {
        f"{module.__name__}.{name}": described(getattr(module, name))
        for module in MODULES
        for name in module.__all__
    }


@pytest.mark.parametrize("name", [f"{m.__name__}.{n}" for m in MODULES for n in m.__all__])
def test_public_classes_have_their_public_name_wherever_they_are_defined(name: str) -> None:
    module, _, own = name.rpartition(".")
    value = getattr(importlib.import_module(module), own)
    if inspect.isclass(value):
        assert value.__module__ == module
        assert pickle.loads(pickle.dumps(value)) is value


def test_a_name_is_in_one_public_module() -> None:
    assert not set(hopsgpu.__all__) & set(hopsgpu.types.__all__)
    with pytest.raises(AttributeError, match="module 'hopsgpu' has no attribute 'RunStatus'"):
        hopsgpu.RunStatus  # type: ignore[attr-defined]  # noqa: B018
