"""hopsgpu's own log: silent by default, else at the configured destination."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from hopsgpu.backends.spark.local_application import LocalApplication
from hopsgpu.core import own_log
from hopsgpu.errors import ConfigError
from tests.bounds import HANG_SECONDS

OURS = logging.getLogger("hopsgpu")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Undo a test's changes of the logger."""
    handlers, level, propagate = list(OURS.handlers), OURS.level, OURS.propagate
    yield
    OURS.handlers[:], OURS.propagate = handlers, propagate
    OURS.setLevel(level)


def told(code: str) -> tuple[str, str]:
    """Return what a fresh interpreter writes to stdout and stderr."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=HANG_SECONDS,
    )
    return done.stdout, done.stderr


def test_an_import_installs_no_handler_but_one_that_does_nothing() -> None:
    code = (
        "import logging, hopsgpu, hopsgpu.core.own_log; ours = logging.getLogger('hopsgpu');"
        "print([type(h).__name__ for h in ours.handlers], ours.level, ours.propagate,"
        " logging.getLogger().handlers)"
    )
    assert told(code) == ("['NullHandler'] 0 True []\n", "")


def test_nothing_is_printed_by_default_and_users_may_configure_it() -> None:
    say = "logging.getLogger('hopsgpu.backends.spark.release').warning('said')"
    assert told(f"import logging, hopsgpu; {say}") == ("", "")
    configured = f"import logging, hopsgpu; logging.basicConfig(); {say}"
    assert told(configured)[1] == "WARNING:hopsgpu.backends.spark.release:said\n"


def test_a_level_shows_the_log_on_stderr_once(capsys: pytest.CaptureFixture[str]) -> None:
    own_log.show_on_stderr(None)
    OURS.getChild("some").info("not shown")
    for _ in range(2):
        own_log.show_on_stderr("info")
        OURS.getChild("some").info("gang granted: %d executors", 4)
        OURS.getChild("some").debug("not shown")
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(" INFO ")[2] for line in said] == [
        "hopsgpu.some: gang granted: 4 executors"
    ] * 2
    own_log.show_on_stderr("debug")
    OURS.getChild("some").debug("shown")
    assert capsys.readouterr().err.endswith(" DEBUG hopsgpu.some: shown\n")


def test_agents_write_more_where_the_driver_was_told_to_show_more() -> None:
    assert own_log.level() == "info"
    # The user's own setting is for the driver.
    OURS.setLevel(logging.DEBUG)
    assert own_log.level() == "info"
    own_log.show_on_stderr("info")
    assert own_log.level() == "info"
    own_log.show_on_stderr("debug")
    assert own_log.level() == "debug"


def test_a_file_takes_the_log_alone_and_is_bounded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "logs" / own_log.AGENT_FILE
    with own_log.log_to_file(file, "info"):
        OURS.getChild("some").info("first")
        OURS.getChild("some").debug("not written")
        assert own_log.level() == "info"
        for _ in range(6):
            OURS.getChild("some").info("x" * 2**19)
    OURS.getChild("some").warning("no longer")
    assert [record.message for record in caplog.records] == ["no longer"]
    assert OURS.propagate and OURS.level == 0
    before = tmp_path / "logs" / f"{own_log.AGENT_FILE}.1"
    assert f" INFO {os.getpid()} hopsgpu.some: first\n" in before.read_text()
    assert all(3 * 2**19 < one.stat().st_size < 2 * 2**20 for one in (before, file))
    with own_log.log_to_file(file, "debug"):
        OURS.getChild("some").debug("at debug")
        assert own_log.level() == "debug"
    assert file.read_text().endswith("hopsgpu.some: at debug\n")
    assert own_log.level() == "info"


def test_a_file_that_cannot_be_made_is_done_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with own_log.log_to_file(tmp_path / "file" / own_log.AGENT_FILE, "debug"):
        OURS.getChild("some").warning("nowhere")
    assert OURS.propagate
    assert capsys.readouterr() == ("", "")


def test_a_process_that_has_nothing_to_say_leaves_no_file(tmp_path: Path) -> None:
    with own_log.log_to_file(tmp_path / "logs" / own_log.AGENT_FILE, "info"):
        OURS.getChild("some").debug("not written")
    assert not list(tmp_path.iterdir())


def test_files_are_where_yarn_collects_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOG_DIRS", raising=False)
    assert own_log.directory(Path("hopsgpu")) == Path("hopsgpu")
    monkeypatch.setenv("LOG_DIRS", f"{tmp_path},/other")
    assert own_log.directory(Path("hopsgpu")) == tmp_path
    monkeypatch.setenv("LOG_DIRS", f"{tmp_path}/not-there")
    assert own_log.directory(Path("hopsgpu")) == Path("hopsgpu")


@pytest.mark.parametrize(
    ("conf", "variable", "level"),
    [
        (None, None, None),
        (None, "", None),
        ("info", None, "info"),
        (None, "DEBUG", "debug"),
        ("info", "debug", "info"),
    ],
)
def test_the_option_is_the_conf_or_its_twin(
    conf: str | None, variable: str | None, level: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert application(conf, variable, monkeypatch).log_level == level


def test_another_level_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"spark.hopsgpu.log='loud'.*'info' or 'debug'"):
        application("loud", None, monkeypatch).check_options()


def application(
    conf: str | None, variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> LocalApplication:
    monkeypatch.delenv("HOPSGPU_LOG", raising=False)
    if variable is not None:
        monkeypatch.setenv("HOPSGPU_LOG", variable)
    settings = {"spark.hopsgpu.log": conf}
    jvm = SimpleNamespace(setting=settings.get)
    return LocalApplication(SimpleNamespace(), jvm)  # type: ignore[arg-type]
