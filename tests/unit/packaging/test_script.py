"""The command of a script, and the directories that it keeps."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hopsgpu.errors import ConfigError
from hopsgpu.packaging.script import (
    FILE,
    MODULE,
    PROGRAM,
    KeptDirectories,
    ScriptCall,
    StoredScript,
)


@pytest.mark.parametrize(
    ("call", "command"),
    [
        (ScriptCall(FILE, "train.py", ("--epochs", "3")), ("train.py", "--epochs", "3")),
        (ScriptCall(FILE, "../script/train.py"), ("../script/train.py",)),
        (ScriptCall(MODULE, "mypkg.train", ("-m",)), ("-m", "mypkg.train", "-m")),
        (ScriptCall(PROGRAM, "./train.sh", ("a b",)), ("./train.sh", "a b")),
    ],
)
def test_words_of_the_command_line(call: ScriptCall, command: tuple[str, ...]) -> None:
    assert call.command == command


@pytest.mark.parametrize(
    ("written", "path"),
    [
        ("out", "out"),
        ("./out/", "out"),
        ("out/", "out"),
        ("runs//exp/./1", "runs/exp/1"),
        (".cache", ".cache"),
        ("e\N{COMBINING ACUTE ACCENT}", "é"),
    ],
)
@pytest.mark.parametrize("name", ["model", "checkpoints", "tensorboard", "outputs"])
def test_paths_are_normalised(name: str, written: str, path: str) -> None:
    kept = KeptDirectories(**{name: (written,) if name == "outputs" else written})
    assert kept.all == (path,)
    assert getattr(kept, name) == ((path,) if name == "outputs" else path)


@pytest.mark.parametrize(
    "path",
    ["", ".", "./", "..", "../out", "out/..", "a/../b", "/out", "//out", "a:b", "a\nb", 7, b"out"],
)
@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("model", "model_dir"),
        ("checkpoints", "checkpoint_dir"),
        ("tensorboard", "tensorboard_dir"),
        ("outputs", "output_dirs"),
    ],
)
def test_what_is_not_below_the_working_directory_is_refused(
    name: str, option: str, path: Any
) -> None:
    with pytest.raises(ConfigError) as raised:
        KeptDirectories(**{name: (path,) if name == "outputs" else path})
    assert str(raised.value).startswith(f"{option}={path!r}: must be a directory below")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"checkpoints": "out/ckpt", "outputs": ("out",)},
            "checkpoint_dir='out/ckpt' is inside output_dirs='out'",
        ),
        ({"model": "out", "tensorboard": "out/tb"}, "tensorboard_dir='out/tb' is inside model_dir"),
        ({"outputs": ("a/b/c", "./a/")}, "output_dirs='a/b/c' is inside output_dirs='a'"),
        ({"model": "out", "checkpoints": "./out/"}, "'out' is inside "),
    ],
)
def test_directories_do_not_contain_each_other(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match="none contains another") as raised:
        KeptDirectories(**fields)
    assert words in str(raised.value)


def test_names_that_only_begin_alike_are_apart() -> None:
    kept = KeptDirectories("out", "out-2", "outer", ("ou", "a/out"))
    assert kept.all == ("out", "out-2", "outer", "ou", "a/out")


def test_each_directory_keeps_its_role() -> None:
    kept = KeptDirectories("./model", "ckpt/", None, ("a/", "./b"))
    assert (kept.model, kept.checkpoints, kept.tensorboard) == ("model", "ckpt", None)
    assert kept.outputs == ("a", "b")
    assert kept.mirrored_paths == ("ckpt", "a", "b")
    # Local checkpoints travel: they may be what the script begins with.
    assert kept.not_sent == {"model", "a", "b"}
    assert KeptDirectories(tensorboard="tb").not_sent == {"tb"}


def test_nothing_is_kept_by_default() -> None:
    kept = KeptDirectories()
    assert kept.all == kept.mirrored_paths == () and kept.not_sent == frozenset()


@pytest.mark.parametrize(
    "kept",
    [
        KeptDirectories(),
        KeptDirectories("m", "c", "t", ("a", "b")),
        KeptDirectories(outputs=("a",)),
    ],
)
def test_kept_directories_travel_in_messages(kept: KeptDirectories) -> None:
    assert KeptDirectories.from_fields(json.loads(json.dumps(kept.as_fields()))) == kept


def test_stored_scripts_travel_in_messages() -> None:
    stored = StoredScript(
        "hdfs://lake/hopsgpu/environments/k/archive.tar.gz", "0f", 2, ("src", ".")
    )
    fields = json.loads(json.dumps(stored.as_fields()))
    assert StoredScript.from_fields(fields) == stored
    # A later version may know more.
    assert StoredScript.from_fields({**fields, "more": 1}) == stored
