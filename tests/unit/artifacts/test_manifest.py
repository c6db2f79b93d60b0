"""The manifest of a version, and the merge of ranks' parts."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from hopsgpu.artifacts.manifest import (
    VersionDescription,
    compose,
    framework_of,
    parse,
    tag_name,
)
from hopsgpu.artifacts.publication import merge
from hopsgpu.errors import ConfigError, StoreError
from hopsgpu.storage.digests import FileFacts

FIELDS = (
    *("name", "version", "time", "framework", "metrics", "signature", "tags", "run_id", "user"),
    *("application", "code_digest", "parameters", "data", "hopsgpu", "publication", "files"),
)
URL = "file:///m/net/3/manifest.json"


class Number:
    """Like NumPy's and torch's: `float()` accepts it."""

    def __float__(self) -> float:
        return 0.5


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def facts(**sizes: int) -> dict[str, FileFacts]:
    return {name: FileFacts(size, f"{size:032x}") for name, size in sizes.items()}


def written(files: dict[str, FileFacts], about: VersionDescription) -> bytes:
    return compose(
        name="net",
        version=3,
        files=files,
        about=about,
        user="ann",
        publication="p",
        time=1_700_000_000.0625,
        hopsgpu="9.9",
    ).to_bytes()


def test_a_manifest_is_read_as_it_was_written() -> None:
    about = VersionDescription(
        metrics={"loss": math.nan, "up": math.inf, "down": -math.inf, "n": 3, "other": Number()},
        signature=[1.5, {"a": (None, True)}],
        tags=["b", "a", "b"],
        run_id="run",
        application="application_1_1",
        framework="jax",
        code_digest="c0de",
        parameters={"rate": math.inf},
        data="hdfs://lake/digits",
    )
    files = facts(weights=12, empty=0)
    manifest = parse(written(files, about), URL)
    assert manifest.files == files
    assert manifest.content == {
        "schema": 1,
        "name": "net",
        "version": 3,
        "time": "2023-11-14T22:13:20.062Z",
        "framework": "jax",
        "metrics": {"loss": "NaN", "up": "Infinity", "down": "-Infinity", "n": 3, "other": 0.5},
        "signature": [1.5, {"a": [None, True]}],
        "tags": ["b", "a"],
        "run_id": "run",
        "application": "application_1_1",
        "user": "ann",
        "code_digest": "c0de",
        "parameters": {"rate": "Infinity"},
        "data": "hdfs://lake/digits",
        "hopsgpu": "9.9",
        "publication": "p",
        "digest": "xxh3_128",
        "files": {
            "empty": {"bytes": 0, "digest": f"{0:032x}"},
            "weights": {"bytes": 12, "digest": f"{12:032x}"},
        },
    }


def test_checked_description_can_be_passed_again() -> None:
    about = VersionDescription(metrics={"loss": math.nan, "up": -math.inf}, data=math.inf, tags="a")
    assert dataclasses.replace(about, framework=None) == about


def test_description_may_be_empty() -> None:
    content = parse(written(facts(weights=1), VersionDescription()), URL).content
    absent = ("framework", "signature", "run_id", "application", "code_digest", "parameters")
    assert [content[name] for name in absent] == [None] * 6
    assert (content["metrics"], content["tags"]) == ({}, [])


def itself() -> list[object]:
    around: list[object] = []
    around.append(around)
    return around


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"metrics": {"loss": "low"}}, r"'loss' is 'low'"),
        ({"metrics": {"loss": True}}, "metrics: 'loss' is True"),
        ({"metrics": {"loss": [1]}}, "metrics: 'loss' is"),
        ({"metrics": {1: 1.0}}, "metrics: .* 1"),
        ({"metrics": [1.0]}, r"metrics=\[1.0\]"),
        ({"signature": {"a": [0, {1, 2}]}}, r"signature\.a\[1\]=\{1, 2\}"),
        ({"signature": {3: 1}}, "signature: .* 3"),
        ({"signature": b"bytes"}, "signature=b'bytes'"),
        ({"data": Unprintable()}, "data=<Unprintable"),
        ({"parameters": itself()}, "parameters: .*JSON"),
        ({"parameters": 10**5000}, "parameters: .*JSON"),
        ({"metrics": {"a": 10**5000}}, r"metrics\.a: .*JSON"),
        ({"run_id": 7}, "run_id=7"),
        ({"tags": 3}, "tags=3"),
        ({"tags": ["a/b"]}, "tag='a/b'"),
        ({"tags": ["1"]}, "tag='1'"),
    ],
)
def test_value_that_json_lacks_is_refused(given: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        VersionDescription(**given)


def test_tags_are_normalised_and_are_no_versions() -> None:
    assert tag_name("e\u0301t\u00e9-2.0") == "\u00e9t\u00e9-2.0"
    assert VersionDescription(tags="one").tags == ("one",)
    for tag in ("latest", "12", "٣", "_draft", ".a", "", "a b", None):
        with pytest.raises(ConfigError, match="tag="):
            tag_name(tag)


@pytest.mark.parametrize(
    ("sizes", "framework"),
    [
        ({"saved_model.pb": 1, "variables/variables.data-00000-of-00001": 9}, "tensorflow"),
        ({"export/saved_model.pb": 1}, "tensorflow"),
        ({"ckpt-3.index": 1, "ckpt-3.data-00000-of-00002": 9}, "tensorflow"),
        ({"m.keras": 1}, "tensorflow"),
        ({"model.safetensors": 9, "config.json": 99}, "torch"),
        ({"a/pytorch_model-00001-of-00002.bin": 9}, "torch"),
        ({"__0_0.distcp": 1, ".metadata": 9}, "torch"),
        ({"model.onnx": 9, "small.pt": 1}, "onnx"),
        ({"model.onnx": 1, "large.pt": 9}, "torch"),
        ({"model.pkl": 9, "notes.pt.txt": 1, "unsaved_model.pb": 1}, None),
    ],
)
def test_framework_is_that_of_the_largest_known_file(
    sizes: dict[str, int], framework: str | None
) -> None:
    assert framework_of(facts(**sizes)) == framework


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"files"', '"file"'),
        lambda text: text.replace('"bytes": 12', '"bytes": null'),
        lambda text: text.replace('"weights"', '"../weights"'),
        lambda text: text.replace('"weights"', '"a:b"'),
        lambda text: text.replace('"weights"', '"u\\u0308ber"'),
        lambda text: text.replace('"bytes": 12', '"bytes": 1e999'),
        lambda text: text.replace('"bytes": 12', '"bytes": 12.0'),
        lambda text: text.replace('"bytes": 12', '"bytes": true'),
        lambda text: text.replace('"bytes": 12', '"bytes": -2'),
        lambda text: text.replace('"bytes": 12', f'"bytes": 1{"0" * 4000}'),
        lambda text: text.replace('"bytes": 12', f'"bytes": 1{"0" * 5000}'),
        lambda text: text.replace('"bytes": 12', '"bytes": ' + "[" * 200_000),
        lambda text: text.replace(f'"{12:032x}"', "12"),
        lambda text: text.replace('"signature": null', '"signature": ' + "[" * 200_000),
        lambda text: "[" * 200_000,
        lambda text: text.replace('"schema": 1', '"schema": true'),
        lambda text: text.replace('"schema": 1', '"schema": 1.0'),
        lambda text: text.replace('"digest": "xxh3_128"', '"digest": null'),
        lambda text: text.replace('"name": "net"', '"name": "other"'),
        lambda text: text.replace('"version": 3', '"version": 4'),
        lambda text: text.replace('"version": 3', '"version": "3"'),
        lambda text: text.replace('"metrics": {}', '"metrics": {"loss": [1]}'),
        lambda text: text.replace('"user": "ann"', '"user": null'),
        lambda text: json.dumps({n: json.loads(text)[n] for n in ("schema", "digest", "files")}),
        *(lambda text, name=name: text.replace(f'"{name}":', '"x":') for name in FIELDS),
    ],
)
def test_damaged_manifest_is_an_error(damage: Callable[[str], str]) -> None:
    text = written(facts(weights=12), VersionDescription()).decode()
    damaged = damage(text)
    assert damaged != text
    with pytest.raises(StoreError, match=URL) as raised:
        parse(damaged.encode(), URL)
    assert raised.value.kind == "damaged"


@pytest.mark.parametrize(("field", "other"), [("schema", "2"), ("digest", '"md5"')])
def test_manifest_of_another_version_is_unsupported(field: str, other: str) -> None:
    content = json.loads(written(facts(weights=12), VersionDescription()))
    content[field] = json.loads(other)
    with pytest.raises(StoreError, match="schema 1 and xxh3_128") as raised:
        parse(json.dumps(content).encode(), URL)
    assert raised.value.kind == "unsupported"


def test_parts_are_merged_into_the_one_with_most_files() -> None:
    shared = facts(config=2)
    parts = {
        4: shared | facts(four=4),
        1: shared | facts(one=1, more=1),
        0: shared | facts(zero=0),
        9: {},
    }
    merged = merge(parts)
    assert merged.base == 1
    assert merged.moves == {"zero": 0, "four": 4}
    assert merged.files == facts(config=2, zero=0, one=1, more=1, four=4)
    alike = merge({3: shared, 2: shared})
    assert (alike.base, alike.moves, alike.files) == (2, {}, shared)


def test_files_about_a_process_do_not_contradict_each_other() -> None:
    """Hugging Face's Trainer writes them on each node with save_on_each_node=True."""
    names = ("training_args.bin", "checkpoint-5/trainer_state.json")
    first, second = ({"w": 1} | dict.fromkeys(names, size) for size in (7, 8))
    merged = merge({0: facts(**first), 1: facts(**second)})
    assert (merged.base, merged.moves, merged.files) == (0, {}, facts(**first))
    # The files of the part that stays in place are the version's.
    merged = merge({0: facts(**first), 1: facts(**second, more=1)})
    assert (merged.base, merged.moves, merged.files) == (1, {}, facts(**second, more=1))


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({"a": 1}, {"a": 2}, "2 and 5 .*'a'"),
        ({"a": 1}, {"a/b": 2}, "rank 2 .*'a'.* rank 5"),
        ({"a/b/c": 1}, {"a": 2}, "rank 5 .*'a'.* rank 2"),
        ({}, {}, "no rank"),
    ],
)
def test_contradicting_parts_are_refused(
    one: dict[str, int], other: dict[str, int], expected: str
) -> None:
    with pytest.raises(StoreError, match=expected):
        merge({2: facts(**one), 5: facts(**other)})
