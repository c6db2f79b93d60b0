"""`hopsgpu models`, on a local directory that stands for the lake."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hopsgpu.artifacts.models import ModelStore
from hopsgpu.cli.main import main
from tests.bounds import HANG_SECONDS


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelStore:
    for name in ("SPARK_CONF_DIR", "SPARK_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOPSGPU_ROOT", f"file://{tmp_path}/lake")
    return ModelStore(f"file://{tmp_path}/lake/models")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    source = tmp_path / "model"
    (source / "layers").mkdir(parents=True)
    (source / "weights.pt").write_bytes(b"x" * 2048)
    (source / "layers" / "0.txt").write_text("zero")
    return source


def call(*words: str) -> Result:
    return CliRunner().invoke(main, words)


def refused(*words: str) -> str:
    result = call(*words)
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
    return result.stderr


def test_models_and_their_versions_are_listed(store: ModelStore, model: Path) -> None:
    assert call("models").output.startswith("no models in file://")
    assert json.loads(call("models", "--json").output) == []
    store.publish(model, "digits", metrics={"loss": 0.123456, "step": 7}, run_id="fit-1")
    store.publish(model, "digits", tags=["production"])
    store.publish(model, "words")
    lines = [line.split() for line in call("models").output.splitlines()]
    assert lines == [
        ["MODEL", "LATEST", "VERSIONS", "TAGS"],
        ["digits", "2", "2", "production=2"],
        ["words", "1", "1", "-"],
    ]
    assert json.loads(call("models", "--json").output)[0] == {
        "name": "digits",
        "versions": [1, 2],
        "tags": {"production": 2},
    }
    lines = [line.split() for line in call("models", "versions", "digits").output.splitlines()]
    assert [line[0] for line in lines] == ["VERSION", "2", "1"]
    assert lines[1][3:] == ["2", "2.0", "KiB", "production", "-", "-"]
    assert lines[2][3:] == ["2", "2.0", "KiB", "-", "fit-1", "loss=0.1235,", "step=7"]
    found = json.loads(call("models", "versions", "digits", "--json").output)
    assert [(v["version"], v["tags"], v["bytes"]) for v in found] == [
        (2, ["production"], 2052),
        (1, [], 2052),
    ]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "{",
        lambda text: "[" * 200_000,
        lambda text: text.replace('"bytes": 4', '"bytes": 1e999'),
        lambda text: text.replace('"bytes": 4', '"bytes": -4'),
        lambda text: text.replace('"bytes": 4', f'"bytes": 4{"0" * 4000}'),
        lambda text: text.replace('"version": 1', '"version": 2'),
        lambda text: text.replace("layers/0.txt", "../0.txt"),
        lambda text: json.dumps({n: json.loads(text)[n] for n in ("schema", "digest", "files")}),
    ],
)
def test_a_damaged_version_hides_no_other(
    store: ModelStore, model: Path, tmp_path: Path, damage: Callable[[str], str]
) -> None:
    store.publish(model, "digits")
    store.publish(model, "digits")
    file = tmp_path / "lake" / "models" / "digits" / "1" / "manifest.json"
    file.write_text(damage(file.read_text()))
    output = call("models", "versions", "digits").output
    assert [line.split()[:2] for line in output.splitlines()][2] == ["1", "damaged"]
    assert "digits/1/manifest.json is damaged: it is not a manifest" in output
    first, second = json.loads(call("models", "versions", "digits", "--json").output)
    assert ("problem" in first, "problem" in second) == (False, True)
    assert call("models").output.splitlines()[1].split() == ["digits", "2", "2", "-"]
    assert call("models", "verify", "digits").exit_code == 0
    for command in ("verify", "show"):
        assert "digits/1/manifest.json is damaged" in refused("models", command, "digits", "1")
    assert "digits/1/manifest.json is damaged" in refused("models", "download", "digits", "1", "x")


def test_a_version_without_its_manifest_can_be_deleted(
    store: ModelStore, model: Path, tmp_path: Path
) -> None:
    store.publish(model, "digits", tags=["best"])
    store.publish(model, "digits")
    directory = tmp_path / "lake" / "models" / "digits" / "2"
    (directory / "manifest.json").unlink()
    for command in ("verify", "show"):
        said = refused("models", command, "digits", "2")
        assert "digits/2 is damaged: its manifest.json is missing" in said
    assert f"{directory} would be removed permanently" in refused("models", "delete", "digits", "2")
    assert call("models", "delete", "digits", "2", "--yes").exit_code == 0
    assert not directory.exists()
    (tmp_path / "lake" / "models" / "digits" / "_tags" / "best").write_text("{")
    assert "best is damaged: it is not a tag" in refused(
        "models", "delete", "digits", "best", "--yes"
    )


@pytest.mark.parametrize(
    "content",
    ["{", "[" * 200_000, "[]", '{"version": 1e999}', '{"version": 1.9}', '{"version": true}']
    + ['{"version": "1"}', '{"version": 0}', '{"version": -1}', f'{{"version": 1{"0" * 18}}}'],
)
def test_a_damaged_tag_hides_no_version(
    store: ModelStore, model: Path, tmp_path: Path, content: str
) -> None:
    store.publish(model, "digits", tags="best")
    (tmp_path / "lake" / "models" / "digits" / "_tags" / "best").write_text(content)
    said = "digits/_tags/best is damaged: it is not a tag; set the tag again"
    result = call("models", "versions", "digits")
    assert (result.exit_code, result.output.splitlines()[1].split()[0]) == (0, "1")
    assert said in result.output.replace("\n", " ")
    result = call("models", "versions", "digits", "--json")
    assert (json.loads(result.stdout)[0]["version"], result.exit_code) == (1, 0)
    assert said in result.stderr
    assert json.loads(call("models", "--json").stdout)[0]["versions"] == [1]
    result = call("models", "show", "digits")
    assert (result.exit_code, "weights.pt" in result.output) == (0, True)
    assert said in result.output.replace("\n", " ")
    result = call("models", "show", "digits", "--json")
    assert (json.loads(result.stdout)["version"], result.exit_code) == (1, 0)
    assert said in result.stderr
    assert said in refused("models", "show", "digits", "best")
    assert said in refused("models", "delete", "digits", "1", "--yes")
    assert call("models", "tag", "digits", "1", "best").exit_code == 0
    assert store.tags("digits") == {"best": 1}


def test_a_version_is_shown(store: ModelStore, model: Path) -> None:
    version = store.publish(model, "digits", metrics={"loss": 0.5}, run_id="fit-1", tags="best")
    output = call("models", "show", "digits").output
    for text in ("framework    torch\n", "run_id       fit-1\n", "metrics      loss=0.5\n"):
        assert text in output
    assert f"url          {version.url}\n" in output and "tags         best\n" in output
    assert output.splitlines()[-1].split()[:3] == ["2.0", "KiB", "weights.pt"]
    assert json.loads(call("models", "show", "digits", "best", "--json").output) == {
        **version.manifest,
        "url": version.url,
    }
    store.tag("digits", 1, "stable")
    store.untag("digits", "best")
    assert json.loads(call("models", "show", "digits", "--json").output)["tags"] == ["stable"]


def test_people_are_told_local_time_and_programs_utc(
    store: ModelStore, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = store.publish(model, "digits").manifest["time"]
    assert published.endswith("Z")
    monkeypatch.setenv("TZ", "XYZ-9:30")
    time.tzset()
    try:
        here = datetime.datetime.fromisoformat(published) + datetime.timedelta(hours=9.5)
        told = here.strftime("%Y-%m-%d %H:%M:%S")
        assert f" {told} " in call("models", "versions", "digits").output
        assert f"time         {told}\n" in call("models", "show", "digits").output
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_version_is_shown_on_a_narrow_terminal(store: ModelStore, model: Path) -> None:
    signature = {"layers": list(range(60)), "digest": "0" * 128}
    version = store.publish(model, "digits", signature=signature)
    wide = call("models", "show", "digits").output
    lines = shown_at(64, "models", "show", "digits")
    assert max(map(len, lines)) <= 64
    facts = lines[: lines.index("")]
    # A name stands beside the first line of its text, and the others are below that.
    assert all(line[12] == " " and line[13] != " " for line in facts), facts
    names = [line[:12].strip() for line in facts if line[:12].strip()]
    assert names == [line[:12].strip() for line in wide.splitlines()[: len(names)]]
    joined = "".join(line[13:] for line in facts)
    assert version.url in joined and "0" * 128 in joined


def shown_at(width: int, *words: str) -> list[str]:
    """What a command shows on a terminal so wide."""
    master, slave = os.openpty()
    termios.tcsetwinsize(slave, (40, width))
    environment = {name: v for name, v in os.environ.items() if name not in ("COLUMNS", "LINES")}
    command = [sys.executable, "-m", "hopsgpu.cli.main", *words]
    process = subprocess.Popen(command, stdout=slave, env={**environment, "TERM": "xterm"})
    os.close(slave)
    shown = b""
    # Of a terminal whose last writer is gone nothing can be read (EIO).
    with contextlib.suppress(OSError):
        while chunk := os.read(master, 65536):
            shown += chunk
    os.close(master)
    assert process.wait(HANG_SECONDS) == 0
    return re.sub(r"\x1b\[[0-9;]*m", "", shown.decode()).replace("\r\n", "\n").splitlines()


@pytest.mark.parametrize("word", ["1", "9", "best", "latest"])
def test_a_version_alone_is_not_taken_for_the_directory_of_a_download(
    store: ModelStore, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    monkeypatch.chdir(tmp_path)
    store.publish(model, "digits", tags="best")
    said = refused("models", "download", "digits", word)
    assert f"`hopsgpu models download digits {word} DIR`" in said
    assert not (tmp_path / word).exists()
    assert call("models", "download", "digits", f"./{word}").exit_code == 0
    assert (tmp_path / word / "weights.pt").exists()


def test_a_version_is_downloaded_verified_and_damage_told(
    store: ModelStore, model: Path, tmp_path: Path
) -> None:
    store.publish(model, "digits")
    target = tmp_path / "copy"
    result = call("models", "download", "digits", str(target))
    assert result.output == f"digits 1 is in {target}\n"
    assert (target / "layers" / "0.txt").read_text() == "zero"
    assert call("models", "download", "digits", "1", str(tmp_path / "b")).exit_code == 0
    assert call("models", "verify", "digits").output == "digits 1 is intact: 2 files, 2.0 KiB\n"
    assert json.loads(call("models", "verify", "digits", "--json").output) == {
        "name": "digits",
        "version": 1,
        "url": store.get("digits").url,
        "files": 2,
        "bytes": 2052,
    }
    (tmp_path / "lake" / "models" / "digits" / "1" / "layers" / "0.txt").write_text("hero")
    assert "layers/0.txt" in refused("models", "verify", "digits", "1")
    assert "layers/0.txt" in refused("models", "download", "digits", str(tmp_path / "c"))
    assert call("models", "download", "digits").exit_code == 2
    assert call("models", "download", "digits", "1", "a", "b").exit_code == 2


def test_versions_are_tagged_and_deleted(store: ModelStore, model: Path) -> None:
    for _ in range(2):
        store.publish(model, "digits")
    assert call("models", "tag", "digits", "1", "best").output == "best is version 1 of digits\n"
    assert "confirm with --yes" in refused("models", "delete", "digits", "1")
    assert "is tagged 'best'" in refused("models", "delete", "digits", "1", "--yes")
    assert call("models", "untag", "digits", "best").output == "best is removed from digits\n"
    assert "no version 'best' of 'digits'" in refused("models", "untag", "digits", "best")
    output = call("models", "delete", "digits", "1", "--yes").output
    assert output == "version 1 of digits is removed\n"
    assert [version.version for version in store.versions("digits")] == [2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("versions", "nothing"), "no model 'nothing' in file://"),
        (("show", "nothing"), "models: digits"),
        (("untag", "nothing", "best"), "no model 'nothing' in file://"),
        (("show", "digits", "9"), "no version '9' of 'digits'"),
        (("show", "../runs"), "hopsgpu: "),
        (("tag", "digits", "1", "latest"), "tag='latest'"),
        (("verify", "digits", "9"), "versions: 1"),
    ],
)
def test_errors_have_no_traceback(
    store: ModelStore, model: Path, words: tuple[str, ...], said: str
) -> None:
    store.publish(model, "digits")
    assert said in refused("models", *words)


def test_a_tag_is_rolled_back_and_its_history_is_shown(store: ModelStore, model: Path) -> None:
    for _ in range(3):
        store.publish(model, "digits")
    for number in ("1", "2"):
        assert call("models", "tag", "digits", number, "production").exit_code == 0
    said = call("models", "rollback", "digits", "production").output
    assert said == "production is version 1 of digits again\n"
    assert "has no earlier version" in refused("models", "rollback", "digits", "production")
    call("models", "tag", "digits", "3", "production")
    outcome = json.loads(call("models", "rollback", "digits", "production", "--json").output)
    assert outcome == {"name": "digits", "tag": "production", "version": 1}
    lines = [
        line.split()
        for line in call("models", "history", "digits", "production").output.splitlines()
    ]
    assert lines[0] == ["TIME", "USER", "ACTION", "FROM", "TO"]
    assert [line[3:] for line in lines[1:]] == [
        ["rollback", "3", "1"],
        ["tag", "1", "3"],
        ["rollback", "2", "1"],
        ["tag", "1", "2"],
        ["tag", "-", "1"],
    ]
    newest = json.loads(call("models", "history", "digits", "production", "--json").output)[0]
    assert (newest["version"], newest["previous"], newest["action"]) == (1, 3, "rollback")
    assert "no version 'canary'" in refused("models", "history", "digits", "canary")
