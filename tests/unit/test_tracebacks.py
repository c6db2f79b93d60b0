"""What a person is shown of an error: frames of the own code, and the error."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

import hopsgpu
from hopsgpu import tracebacks
from hopsgpu.core.boundary import public
from hopsgpu.core.gang import GangState
from hopsgpu.display.progress import progress_of
from hopsgpu.errors import Cancelled, StoreError
from hopsgpu.launcher.interrupts import interrupts_noted, takes, wait_for
from hopsgpu.launcher.options import LaunchOptions
from hopsgpu.packaging.sources import add_source_lines
from hopsgpu.runs.gang_result import GangResult
from hopsgpu.runs.run import Run
from hopsgpu.runs.status_board import GangBoard
from tests.bounds import HANG_SECONDS

# Code as if it were hopsgpu's: called within a public function.
OWN = Path(tracebacks.__file__).with_name("own_code.py")


def as_own(code: str, **known: object) -> dict[str, Any]:
    """The names of a module of hopsgpu with this code."""
    names: dict[str, Any] = {"__name__": "hopsgpu.own_code", **known}
    exec(compile(textwrap.dedent(code), str(OWN), "exec"), names)  # noqa: S102
    return names


@pytest.fixture(autouse=True)
def not_debug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOPSGPU_LOG", raising=False)


def shown(call: Callable[[], object]) -> str:
    """What Python prints of the exception that a call ends by."""
    try:
        call()
    except BaseException:  # noqa: BLE001 - whatever it is, is looked at
        return traceback.format_exc()
    raise AssertionError("nothing was raised")


def files_in(text: str) -> list[str]:
    return re.findall(r'File "([^"]+)"', text)


def names_in(text: str) -> list[str]:
    return re.findall(r'^  File ".+", line \d+, in (.+)$', text, re.MULTILINE)


FAILS = as_own(
    """
    def refuse(words, cause=None):
        _inner(words, cause)

    def _inner(words, cause):
        if cause is None:
            raise error(words)
        try:
            cause()
        except Exception as problem:
            raise error(words) from problem
    """,
    error=StoreError,
)


def test_an_error_that_leaves_a_public_call_has_the_callers_frames_alone() -> None:
    text = shown(lambda: public(FAILS["refuse"])("no such model"))
    assert set(files_in(text)) == {__file__}
    assert text.endswith("hopsgpu.StoreError: no such model\n")
    # Those too that are nested: the outer one's frame is hopsgpu's.
    outer = as_own("def outer(words): return inner(words)", inner=public(FAILS["refuse"]))["outer"]
    assert set(files_in(shown(lambda: public(outer)("nested")))) == {__file__}


def test_the_cause_stays_and_what_hopsgpu_has_caught_is_a_line() -> None:
    within = as_own("def cause(): int('x')")["cause"]
    with pytest.raises(StoreError) as raised:
        public(FAILS["refuse"])("refused", within)
    assert isinstance(raised.value.__cause__, ValueError)
    text = shown(lambda: public(FAILS["refuse"])("refused", within))
    assert text.startswith("ValueError: invalid literal for int() with base 10: 'x'\n\nThe above")
    assert set(files_in(text)) == {__file__}

    def users() -> None:
        int("x")

    # Of what was raised in the user's own code, called by hopsgpu, the frames stay.
    text = shown(lambda: public(FAILS["refuse"])("refused", users))
    assert names_in(text) == ["users", "shown", "<lambda>"]


def test_a_library_within_hopsgpu_is_left_out_and_a_users_callback_is_not() -> None:
    # json is a library, and calls what it is given.
    code = "import json\ndef call(f): json.dumps(object(), default=lambda _: f())"
    call = public(as_own(code)["call"])
    refuse = as_own("def refuse(): raise error('no')", error=StoreError)["refuse"]

    def callback() -> None:
        public(refuse)()

    assert names_in(shown(lambda: call(refuse))) == ["shown", "<lambda>"]
    assert names_in(shown(lambda: call(callback))) == ["shown", "<lambda>", "callback"]


def test_what_is_no_error_of_hopsgpu_keeps_its_frames() -> None:
    def users() -> None:
        raise KeyError("mine")

    through = as_own("def through(f): f()")["through"]
    text = shown(lambda: public(through)(users))
    assert str(OWN) in text and "in users" in text
    # A fault in its own code, which is to be found.
    assert str(OWN) in shown(lambda: public(as_own("def f(): return {}['x']")["f"])())


def test_a_call_that_does_not_fit_is_pythons_own_type_error() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Options:
        workers: int

    @takes(Options)
    def launch(options: Options, interrupted: threading.Event) -> int:
        return options.workers

    text = shown(lambda: launch(wokers=1))  # type: ignore[call-arg]
    assert set(files_in(text)) == {__file__}
    assert text.endswith(
        "TypeError: launch() got an unexpected keyword argument 'wokers': did you mean 'workers'?\n"
    )


def test_debug_shows_all_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOPSGPU_LOG", "debug")
    assert str(OWN) in shown(lambda: public(FAILS["refuse"])("no such model"))
    assert tracebacks.inherited_variables() == {"HOPSGPU_LOG": "debug"}
    # IPython then shows it as it shows any.
    assert not hasattr(StoreError("x"), "_render_traceback_")


def test_groups_and_frozen_exceptions_are_trimmed_too() -> None:
    @dataclass(frozen=True)
    class FrozenError(Exception):
        words: str

    fail = as_own("def fail(error): raise error")["fail"]

    def raises() -> None:
        errors: list[Exception] = []
        for error in (StoreError("one"), FrozenError("two")):
            try:
                fail(error)
            except (StoreError, FrozenError) as caught:
                errors.append(caught)
        raise ExceptionGroup("all", errors) from errors[0]

    with pytest.raises(ExceptionGroup) as raised:
        raises()
    text = tracebacks.text_of(raised.value)
    assert set(files_in(text)) == {__file__}
    assert "StoreError: one" in text and "FrozenError" in text and "in raises" in text


def test_a_circle_of_contexts_ends() -> None:
    one, other = StoreError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    tracebacks.trim(one)


def test_a_traceback_of_another_process_is_without_them_too() -> None:
    """As those of DataLoader workers and of pools are: texts, in an exception's words."""
    told = textwrap.dedent(
        f"""\
        Caught StoreError in DataLoader worker process 0.
        Original Traceback (most recent call last):
          File "/env/torch/worker.py", line 3, in _worker_loop
            data = fetcher.fetch(index)
          File "hopsgpu/data/torch_batches.py", line 5, in __iter__
            for batch in self._data:
                         ^^^^^^^^^^
          File "{OWN}", line 7, in batches
            raise StoreError("gone")
        hopsgpu.StoreError: gone
        """
    )
    with pytest.raises(RuntimeError) as raised:
        raise RuntimeError(told)
    text = tracebacks.text_of(raised.value)
    assert files_in(text) == [__file__, "/env/torch/worker.py"]
    assert "fetcher.fetch(index)" in text and "for batch in" not in text and "^^^" not in text
    assert "hopsgpu.StoreError: gone" in text
    drawn = textwrap.indent(told, "  | ")
    assert files_in(tracebacks.strip_own_frames(drawn)) == ["/env/torch/worker.py"]


def test_a_fault_of_hopsgpu_in_a_rank_can_be_found() -> None:
    fault = as_own("def outer(): return inner()\ndef inner(): return {}['x']")["outer"]

    def users() -> None:
        fault()

    code = "def rank(f):\n  try: f()\n  except Exception as error: return text_of(error)"
    text = as_own(code, text_of=tracebacks.text_of)["rank"](users)
    # Who called the user's code is no part of it.
    assert names_in(text) == ["users", "outer", "inner"]


def board(gpus: int = 1) -> GangBoard:
    return GangBoard("run-1", wanted=2, gpus=gpus, progress=progress_of("off"))


def run_of(work: Callable[[], GangResult], on: GangBoard, cancelled: threading.Event) -> Run:
    def start(body: Callable[[], None]) -> None:
        threading.Thread(target=body, daemon=True).start()

    return Run(on, cancelled, work, start)


def test_a_runs_error_does_not_show_where_it_was_asked_for_before() -> None:
    def fail() -> GangResult:
        raise Cancelled("enough")

    run = run_of(fail, board(), threading.Event())

    def first() -> None:
        run.result()

    assert "in first" in shown(first)
    again = shown(run.result)
    assert "Cancelled: enough" in again and "in first" not in again


@pytest.mark.parametrize(
    ("passed", "released", "gpus", "words"),
    [
        ("WAITING RELEASING", True, 1, "its GPUs are back"),
        ("WAITING RELEASING", True, 0, "its executors are back"),
        ("WAITING RELEASING", False, 1, "the release of its"),
        ("READY STARTING FINISHING", False, 1, "the gang keeps its"),
        ("", False, 1, "it held no GPUs"),
    ],
)
def test_an_interrupt_tells_in_a_line_what_has_become_of_the_run(
    passed: str, released: bool, gpus: int, words: str
) -> None:
    cancelled, told = threading.Event(), board(gpus)

    def work() -> GangResult:
        signal.raise_signal(signal.SIGINT)
        assert cancelled.wait(HANG_SECONDS)
        for name in passed.split():
            told.state(GangState[name])
        if released:
            told.mark("released")
        raise Cancelled("by hand")

    with pytest.raises(KeyboardInterrupt) as raised, interrupts_noted() as interrupted:
        wait_for(run_of(work, told, cancelled), interrupted)
    assert str(raised.value).startswith(f"run-1 was cancelled, and {words}")
    # Python ends as who is interrupted ends only for this very class.
    assert type(raised.value) is KeyboardInterrupt
    rendered: Any = raised.value
    assert rendered._render_traceback_() == [f"KeyboardInterrupt: {raised.value}"]


def test_a_second_interrupt_says_that_nothing_was_seen_to_be_back() -> None:
    cancelled, over = threading.Event(), threading.Event()

    def work() -> GangResult:
        signal.raise_signal(signal.SIGINT)
        assert cancelled.wait(HANG_SECONDS)
        signal.raise_signal(signal.SIGINT)
        assert over.wait(HANG_SECONDS)
        raise Cancelled("by hand")

    try:
        with (
            pytest.raises(
                KeyboardInterrupt, match="run-1 is being cancelled; a second Ctrl-C ended"
            ),
            interrupts_noted() as interrupted,
        ):
            wait_for(run_of(work, board(), cancelled), interrupted)
    finally:
        over.set()


@dataclass(frozen=True)
class NoOptions: ...


def test_an_interrupted_submit_cancels_its_run_and_waits_for_it() -> None:
    cancelled = threading.Event()

    def work() -> GangResult:
        assert cancelled.wait(HANG_SECONDS)
        raise Cancelled("by hand")

    @takes(NoOptions)
    def submit(options: NoOptions, interrupted: threading.Event) -> Run:
        signal.raise_signal(signal.SIGINT)
        return run_of(work, board(), cancelled)

    with pytest.raises(KeyboardInterrupt, match="run-1 was cancelled, and it held no GPUs"):
        submit()
    assert cancelled.is_set()


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    made = InteractiveShell.instance(colors="nocolor", history_length=0)
    try:
        yield made
    finally:
        InteractiveShell.clear_instance()


def test_a_notebook_shows_the_cells_line_and_the_error(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = 'Traceback (most recent call last):\n  File "{file}", line 2, in train\n    x\nError: x'
    shell.run_cell("import hopsgpu\ndef train():\n    x")
    (cell,) = [c for c in shell.compile._filename_map if c]
    error = hopsgpu.RankFailed(f"rank 0 raised Error: x\n{trace.format(file=cell)}", rank=0)
    error.add_note("a note")
    fail = public(as_own("def fail(): raise error", error=error)["fail"])
    shell.user_ns["launch"] = fail
    shell.run_cell("def helper():\n    return launch()")
    capsys.readouterr()
    shell.run_cell("# a comment\nresult = helper()")
    said = capsys.readouterr()
    assert (said.out + said.err).strip().splitlines() == [
        "Cell In[1], line 2",
        "    result = helper()",
        "Cell In[1], line 2, in helper",
        "    return launch()",
        "",
        "RankFailed: rank 0 raised Error: x",
        "Traceback (most recent call last):",
        "  Cell In[1], line 2, in train",
        "    x",
        "Error: x",
        "a note",
    ]


SCRIPT = """
import hopsgpu

def helper(store):
    return store.get("digits")

helper(hopsgpu.ModelStore("file://{directory}"))
"""


@pytest.mark.parametrize("debug", [False, True])
def test_a_plain_script_ends_with_its_own_frames_and_the_error(tmp_path: Path, debug: bool) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(directory=tmp_path))
    environment = {**os.environ, "HOPSGPU_LOG": "debug"} if debug else dict(os.environ)
    ran = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 1
    lines = ran.stderr.splitlines()
    assert lines[-1] == (
        f"hopsgpu.StoreError: no model 'digits' in file://{tmp_path}; models: none"
    )
    files = files_in(ran.stderr)
    assert (set(files) == {str(script)}) is not debug
    assert [f for f in files if f == str(script)] == [str(script)] * 2


def test_sources_are_shown_of_both_sorts_of_frames() -> None:
    here = f'  File "{__file__}", line 1'
    for frame in (f"{here}, in f", f"{here} in f"):
        assert add_source_lines(frame).splitlines() == [
            frame,
            '    """What a person is shown of an error: frames of the own code, and the error."""',
        ]


def test_a_value_that_cannot_be_made_shows_who_made_it() -> None:
    # A dataclass's own methods are in no file.
    for make in (
        lambda: hopsgpu.Data("hdfs:///x", remainder="all"),
        lambda: hopsgpu.types.GpuRequest(-1),
    ):
        text = shown(make)
        assert names_in(text) == ["shown", "<lambda>"] and "hopsgpu.ConfigError: " in text


def test_all_public_calls_are_such() -> None:
    calls = [
        *(hopsgpu.launch, hopsgpu.submit, hopsgpu.plan, hopsgpu.hold, hopsgpu.search),
        *(hopsgpu.ablate, hopsgpu.session, hopsgpu.inventory),
        *(hopsgpu.Run.result, hopsgpu.Gang.launch, hopsgpu.Gang.__enter__, hopsgpu.Gang.__exit__),
        *(hopsgpu.ModelStore.get, hopsgpu.ModelStore.publish, hopsgpu.ModelVersion.download),
        *(hopsgpu.Context.save_checkpoint, hopsgpu.Context.report),
    ]
    of_options = takes(LaunchOptions)(lambda options, interrupted: None)
    codes = {call.__code__ for call in (public(repr), of_options)}  # type: ignore[attr-defined]
    assert all(call.__code__ in codes for call in calls)  # type: ignore[attr-defined]
