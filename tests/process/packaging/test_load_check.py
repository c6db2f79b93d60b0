"""A call that ranks could not load is refused at the driver, before anything is requested."""

from __future__ import annotations

import functools
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from hopsgpu.errors import ConfigError
from hopsgpu.launcher import function_shipping
from hopsgpu.launcher.function_shipping import pack_function, pickle_function
from hopsgpu.packaging import load_check
from hopsgpu.packaging.load_check import LoadChecks
from hopsgpu.packaging.modules import Packer
from tests.bounds import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[3]


class Application:
    def __init__(self, seconds: float = load_check.SECONDS) -> None:
        self.packer = Packer()
        self.load_checks = LoadChecks(seconds)
        self.py_files_dir = Path("/nonexistent")


def check(
    function: Callable[..., Any],
    *args: object,
    application: Application | None = None,
    env_vars: Mapping[str, str] | None = None,
    interrupted: threading.Event | None = None,
) -> None:
    given: Any = Application() if application is None else application
    call = pickle_function(function, args, {})
    pack_function(function, call, given, {} if env_vars is None else env_vars, interrupted)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of the processes that were started."""
    commands: list[list[str]] = []
    popen = subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        commands.append(command)
        return popen(command, **options)

    monkeypatch.setattr(load_check.subprocess, "Popen", start)
    return commands


class Delegating:
    def __init__(self, inner: object) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Working:
    def __setstate__(self, state: Mapping[str, object]) -> None:
        vars(self).update(state)


class Failure(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)


def reduced_to(function: Callable[..., Any], *args: object) -> object:
    return Reducing(function, args)


class Reducing:
    def __init__(self, function: Callable[..., Any], args: tuple[object, ...]) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def test_value_that_cannot_be_loaded_is_refused_and_named() -> None:
    wrapped = {"env": [Working(), Delegating(1)]}
    with pytest.raises(ConfigError) as raised:
        check(lambda: wrapped)
    text = str(raised.value)
    for part in (
        "'wrapped'['env'][1]",
        "test_load_check.Delegating",
        "RecursionError",
        "__reduce__",
    ):
        assert part in text


def test_an_exception_with_arguments_of_its_own_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"args\[0\] .*Failure, .*missing 1"):
        check(print, Failure(1, "text"))


SCRIPT = """
import os, sys
from tests.process.packaging.test_load_check import check

class Meta(type):
    def __new__(meta, name, bases, members):
        made = super().__new__(meta, name, bases, members)
        made.size = members["SIZE"] + 1
        return made

class Sized(metaclass=Meta):
    SIZE = 3

def train():
    return Sized.size

if __name__ == "__main__":
    before = dict(os.environ), list(sys.path)
    check(train)
"""


def test_a_class_that_cannot_be_created_again_is_refused(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    ran = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    last = ran.stderr.splitlines()[-1]
    assert "train_fn=train " in last and "global 'Sized' " in last
    assert "(KeyError: 'SIZE'). " in last and "in a module" in last
    assert not ran.stdout


def test_only_calls_that_need_it_are_checked(started: list[list[str]]) -> None:
    check(print, {"lr": 0.1, "path": Path("a")})
    assert started == []
    application = Application()
    for _ in range(2):
        check(print, Working(), application=application)
    assert len(started) == 1
    check(print, Working(), Reducing(int, ()), application=application)
    assert len(started) == 2


@pytest.mark.parametrize(
    ("function", "args", "logged"),
    [
        (open, ("/nonexistent/of/a/node",), "may be in a rank: FileNotFoundError"),
        (os.getenv, ("A",), ""),
        (os.kill, (0, signal.SIGKILL), "exited with code -9"),
        (time.sleep, (HANG_SECONDS,), "took too long"),
    ],
)
def test_unknown_result_of_the_check_is_no_error(
    function: Callable[..., Any],
    args: tuple[object, ...],
    logged: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    began = time.monotonic()
    seconds = 3 if function is time.sleep else HANG_SECONDS
    check(print, Reducing(function, args), application=Application(seconds=seconds))
    assert time.monotonic() - began < HANG_SECONDS
    assert logged in caplog.text
    assert bool(logged) == bool(caplog.text)


def test_the_process_is_like_a_rank_without_gpu(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "seen"
    names = ["RANK", "OWN", "CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS", "PYTHONHOME"]
    line = f"echo printed; echo {' '.join(f'${name}' for name in names)} > {file}"
    before = dict(os.environ), [signal.getsignal(number) for number in signal.Signals]
    check(
        print,
        Reducing(os.system, (line,)),
        env_vars={"OWN": "mine", "PYTHONHOME": "/of/the/nodes"},
    )
    assert file.read_text().split() == ["0", "mine", "-1", "cpu"]
    assert (dict(os.environ), [signal.getsignal(number) for number in signal.Signals]) == before
    assert capfd.readouterr() == ("", "")


def test_ctrl_c_ends_it_and_its_processes(tmp_path: Path) -> None:
    interrupted, file = threading.Event(), tmp_path / "pid"
    line = f"sleep 100 & echo $! > {file}.new; mv {file}.new {file}; wait"

    def interrupt() -> None:
        while not file.exists():
            time.sleep(0.01)
        interrupted.set()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt, match="requested"):
        check(print, Reducing(os.system, (line,)), interrupted=interrupted)
    thread.join()
    deadline = time.monotonic() + HANG_SECONDS
    stat = Path(f"/proc/{file.read_text().strip()}/stat")
    while stat.exists() and ") Z " not in stat.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert time.monotonic() < deadline


def test_an_error_meanwhile_ends_it(
    monkeypatch: pytest.MonkeyPatch, started: list[list[str]]
) -> None:
    def fail(*args: object) -> None:
        raise ConfigError("too large")

    monkeypatch.setattr(function_shipping, "scan_function", fail)
    began = time.monotonic()
    with pytest.raises(ConfigError, match="too large"):
        check(print, Reducing(time.sleep, (HANG_SECONDS,)))
    assert len(started) == 1
    assert time.monotonic() - began < HANG_SECONDS


def test_a_python_that_cannot_be_started_is_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    check(functools.partial(print, Working()))
    assert "it was not checked" in caplog.text
