"""What a manifest says of the code and the parameters of a training."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hopsgpu.packaging.modules import PackedModules, pack_modules
from hopsgpu.packaging.provenance import provenance_of

NONE = PackedModules(b"", 0, ())


def train(learning_rate: float, *layers: int, epochs: int = 3, **others: Any) -> None: ...


@dataclass
class Config:
    width: int
    password: str


class Dear:
    def __repr__(self) -> str:
        raise AssertionError("a repr may start a Spark job")


def parameters(*args: Any, **kwargs: Any) -> dict[str, Any]:
    shown = provenance_of(train, args, kwargs, NONE).parameters
    json.dumps(shown, allow_nan=False)
    return dict(shown)


def test_parameters_have_the_functions_names_and_defaults() -> None:
    assert parameters(0.1) == {"learning_rate": 0.1, "epochs": 3}
    given = {"learning_rate": 0.1, "layers": [8, 4], "epochs": 1, "seed": 7}
    assert parameters(0.1, 8, 4, epochs=1, seed=7) == given
    partial = functools.partial(train, 0.5)
    assert provenance_of(partial, (), {}, NONE).parameters["epochs"] == 3


def test_a_function_without_a_signature_has_its_arguments_in_order() -> None:
    assert provenance_of(max, (1, 2), {}, NONE).parameters == {"args": [1, 2]}


def test_secrets_are_not_shown_and_numbers_are() -> None:
    shown = parameters(0.1, api_key="s3cret", max_tokens=512, nested={"password": "s3cret"})
    assert "s3cret" not in json.dumps(shown)
    assert shown["api_key"] == "(redacted)"
    assert shown["max_tokens"] == 512
    config = parameters(0.1, config=Config(8, "s3cret"))["config"]
    assert config == {"width": 8, "password": "(redacted)"}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (float("nan"), "nan"),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (None, None),
        (True, True),
        (Path("/data"), "/data"),
        ("x" * 5000, "x" * 1000),
        (np.zeros((2, 3)), "numpy.ndarray of shape (2, 3)"),
        (Dear(), f"{__name__}.Dear"),
        (train, f"{__name__}.train"),
        ({"b", "a"}, ["a", "b"]),
        (b"\0", "b'\\x00'"),
        ([[[[[1]]]]], [[["builtins.list"]]]),
    ],
)
def test_values_without_json_become_texts(value: object, shown: object) -> None:
    assert parameters(0.1, other=value)["other"] == shown


def test_the_digest_is_of_the_code_and_not_of_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("x = 1")
    before = provenance_of(train, (0.1,), {}, pack_modules([tmp_path])).code_digest
    assert before.startswith("sha256:") and len(before) == 7 + 64
    (tmp_path / "own.py").touch()
    assert provenance_of(train, (0.2,), {}, pack_modules([tmp_path])).code_digest == before
    (tmp_path / "own.py").write_text("x = 2")
    assert provenance_of(train, (0.1,), {}, pack_modules([tmp_path])).code_digest != before

    def other() -> None: ...

    assert provenance_of(other, (), {}, pack_modules([tmp_path])).code_digest != before


def test_a_record_has_short_texts_of_all_arguments() -> None:
    arguments = {"config": Config(8, "s3cret"), "tags": list(range(50)), "note": "x" * 900}
    recorded = provenance_of(train, (0.1,), arguments, NONE).as_record()
    assert recorded.function == f"{__name__}.train"
    assert recorded.arguments["learning_rate"] == "0.1" and recorded.arguments["epochs"] == "3"
    assert recorded.arguments["config.width"] == "8"
    assert recorded.arguments["config.password"] == "'(redacted)'"
    assert recorded.arguments["tags"].startswith("[0, 1, 2, ") and len(recorded.arguments) == 6
    assert all(len(text) <= 200 for text in recorded.arguments.values())
    many = provenance_of(train, (0.1,), {f"a{n}": {"b": n} for n in range(900)}, NONE)
    assert len(many.as_record().arguments) == 200


def test_a_search_s_function_lacks_the_arguments_of_its_trials() -> None:
    recorded = provenance_of(functools.partial(train), (), {"epochs": 1}, NONE).as_record()
    assert dict(recorded.arguments) == {"epochs": "1"}
    assert recorded.function == f"{__name__}.train"
