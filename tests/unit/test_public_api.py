"""What others write code against: names, signatures and attributes, by a snapshot."""

from __future__ import annotations

import inspect
import json
import pickle
from pathlib import Path

import pytest

import hopsgpu

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
    found = {name: described(getattr(hopsgpu, name)) for name in hopsgpu.__all__}
    assert found == json.loads(SNAPSHOT.read_text())


@pytest.mark.parametrize("name", sorted(hopsgpu.__all__))
def test_public_classes_are_of_hopsgpu_wherever_they_live(name: str) -> None:
    value = getattr(hopsgpu, name)
    if inspect.isclass(value):
        assert value.__module__ == "hopsgpu"
        assert pickle.loads(pickle.dumps(value)) is value
