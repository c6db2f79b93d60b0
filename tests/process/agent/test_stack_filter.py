"""What is kept of a log's end where native code has crashed, and of stacks in what is streamed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hopsgpu import tracebacks
from hopsgpu.agent.stack_filter import OwnFrames, context_of_failure, last_lines
from hopsgpu.attempts.native_failures import why_aborted

HOME = Path(tracebacks.__file__).parent

# As faulthandler writes it in a forked rank, with a thread besides.
STACKS = f"""\
Fatal Python error: Aborted

Thread 0x00007f68f0860b80 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f9fd360cb80 (most recent call first):
  File "/home/ann/train.py", line 4 in step
  File "/home/ann/train.py", line 9 in train
  File "hopsgpu/rank/entry.py", line 89 in _run
  File "{HOME}/agent/fork_server.py", line 217 in _child
  File "hopsgpu/agent/fork_server.py", line 285 in <module>
  File "<frozen runpy>", line 88 in _run_code
  File "<frozen runpy>", line 198 in _run_module_as_main

Extension modules: numpy._core._multiarray_umath, torch._C (total: 2)
"""
SHOWN = [
    "Fatal Python error: Aborted",
    "Current thread (most recent call first):",
    '  File "/home/ann/train.py", line 4 in step',
    '  File "/home/ann/train.py", line 9 in train',
]

# What was said before them, as real libraries did, and what is shown of that and told of it.
TORCH = """\
terminate called after throwing an instance of 'c10::Error'
  what():  the tensor has no storage
Exception raised from func at file.cpp:12 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, ...) + 0x9d (0x7f53e935c13d in /lib/libc10.so)
frame #1: <unknown function> + 0x6f7a (0x7f53ea9c0f7a in /lib/x86_64-linux-gnu/libffi.so.8)
<omitting python frames>
frame #17: _start + 0x21 (0x56242c904081 in /env/bin/python)

"""
JAX = """\
F1125 09:50:22.441436   24557 client.h:80] Terminating process because another task died.

RPC: /xla.coordination.CoordinationService/RegisterTask
*** Check failure stack trace: ***
    @     0x7f5426840634  absl::lts_20260107::log_internal::LogMessage::SendToLog()
    @     0x7f542df58ba3  PyObject_Vectorcall
"""
TENSORFLOW = """\
2026-11-25 09:50:35.736781: I tensorflow/core/util/port.cc:153] oneDNN custom operations are on.
F0000 00:00:1795600235.736781   25686 tensor_shape.cc:362] Check failed: d < dims() (7 vs. 1)
*** Check failure stack trace: ***
    @     0x7f74442ce564  absl::lts_20250814::log_internal::LogMessage::SendToLog()
    @     0x7ffc2802c2c0  (unknown)
"""
OLD_TENSORFLOW = """\
2020-01-01 00:00:00.000000: F tensorflow/core/framework/tensor.cc:1] Check failed: 1 == ndims
*** Begin stack trace ***
\ttensorflow::CurrentStackTrace[abi:cxx11]()
\t_start
*** End stack trace ***
"""
ABORTS = {
    "torch": (TORCH, 3, "c10::Error: the tensor has no storage"),
    "jax": (JAX, 3, "client.h:80] Terminating process because another task died."),
    "tensorflow": (TENSORFLOW, 2, "tensor_shape.cc:362] Check failed: d < dims() (7 vs. 1)"),
    "old tensorflow": (
        OLD_TENSORFLOW,
        1,
        "2020-01-01 00:00:00.000000: F tensorflow/core/framework/tensor.cc:1]"
        " Check failed: 1 == ndims",
    ),
}


@pytest.mark.parametrize("library", ABORTS)
def test_the_reason_of_an_abort_is_kept_and_the_stacks_are_not(library: str) -> None:
    said, lines, why = ABORTS[library]
    before = "".join(f"step {number}\n" for number in range(100))
    kept = last_lines(before + said + STACKS)
    # So many lines as ever, besides where it was.
    steps = [f"step {number}" for number in range(80 + lines, 100)]
    assert list(kept) == [*steps, *said.splitlines()[:lines], *SHOWN]
    assert why_aborted(kept) == why


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("terminate called without an active exception", ...),
        ("pure virtual method called\nterminate called without an active exception", ...),
        ("free(): double free detected in tcache 2", ...),
        ("double free or corruption (!prev)", ...),
        ("malloc(): corrupted top size", ...),
        ("munmap_chunk(): invalid pointer", ...),
        ("corrupted size vs. prev_size", ...),
        ("*** stack smashing detected ***: terminated", ...),
        ("python: loss.c:12: step: Assertion `n > 0' failed.", ...),
        ("[libprotobuf FATAL google/protobuf/x.cc:1] CHECK failed: (a) == (b): ", ...),
        ("OMP: Error #15: Initializing libomp.so, but found libiomp5.so", ...),
        ("INTEL MKL ERROR: libmkl_def.so: cannot open shared object file", ...),
        ("LLVM ERROR: out of memory", ...),
        ("libc++abi: terminating due to uncaught exception of type std::bad_alloc", ...),
        ("fatal runtime error: stack overflow", ...),
        ("terminate called after throwing an instance of 'Bad'\n  what():  no", "Bad: no"),
        ("terminate called after throwing an instance of 'int'", "int"),
        ("step 1\nloss nan", ""),
    ],
)  # fmt: skip
def test_last_message_of_native_code_is_the_cause(said: str, why: str) -> None:
    expected = said.splitlines()[-1].strip() if why is ... else why
    for stacks in (STACKS, ""):
        assert why_aborted(last_lines(f"step 1\n{said}\n{stacks}")) == expected


def test_pythons_own_fatal_errors_say_why_and_signals_do_not() -> None:
    own = "Fatal Python error: _PyThreadState_Attach: non-NULL old thread state"
    assert why_aborted([own]) == own.removeprefix("Fatal Python error: ")
    assert why_aborted(["Fatal Python error: Segmentation fault"]) == ""
    assert why_aborted(["x" * 10_000]) == ""
    long = why_aborted([f"LLVM ERROR: {'x' * 10_000}"])
    assert long.endswith("x…") and len(long) < 600


def test_a_stack_that_was_asked_for_is_that_of_the_main_thread() -> None:
    asked = STACKS.replace("Fatal Python error: Aborted\n\n", "").replace("Extension", "")
    kept = last_lines(f"epoch 1\n{asked.partition('Extension')[0]}Terminated by us\n")
    assert list(kept[:4]) == ["epoch 1", *SHOWN[1:]]
    assert kept[-1] == "Terminated by us"


def test_a_deep_stack_is_cut_and_one_of_hopsgpu_alone_is_left_out() -> None:
    deep = "".join(f'  File "/home/ann/deep.py", line {n} in f\n' for n in range(99)) + "  ...\n"
    kept = last_lines(f"one\n\nCurrent thread 0x1 [main] (most recent call first):\n{deep}")
    assert len(kept) == 1 + 1 + 12 + 1 and kept[-1] == "  ... (88 more)"
    ours = '  File "hopsgpu/rank/entry.py", line 1 in run\n'
    assert last_lines(f"one\n\nCurrent thread 0x1 (most recent call first):\n{ours}\ntwo") == (
        "one",
        "two",
    )


def test_lines_are_those_that_a_terminal_shows() -> None:
    bar = "".join(f"\r{done:3}%|###" for done in range(101))
    assert last_lines(f"epoch 1\n{bar}\nloss 1\n") == ("epoch 1", "100%|###", "loss 1")
    assert last_lines("") == ()
    assert last_lines("a\n\n\nb") == ("a", "", "", "b")
    assert sum(map(len, last_lines("\n".join("x" * 100_000 for _ in range(30))))) == 64 * 1024


def test_hopsgpus_frames_can_be_kept() -> None:
    assert sum("hopsgpu/" in line for line in last_lines(STACKS, should_keep_own=True)) == 3
    assert "fork_server" in (context_of_failure(STACKS, should_keep_own=True) or "")
    assert OwnFrames(should_keep=True).without(STACKS.encode()) == STACKS.encode()


def streamed(data: bytes, *cuts: int) -> bytes:
    shown = OwnFrames()
    parts = [data[begin:end] for begin, end in zip((0, *cuts), (*cuts, len(data)), strict=True)]
    return b"".join([*(shown.without(part) for part in parts), shown.rest()])


def test_own_frames_are_left_out_of_a_stream_wherever_it_is_cut() -> None:
    data = b"step 1\n" + STACKS.encode() + b'no end:   File "hopsgpu/rank/entry.py", line 1 in x'
    lines = data.splitlines(keepends=True)
    expected = b"".join(
        line for line in lines if not line.startswith((b'  File "hopsgpu', b'  File "<frozen'))
        and str(HOME).encode() not in line
    )  # fmt: skip
    assert b"fork_server" not in expected and b"train.py" in expected
    for cut in range(len(data) + 1):
        assert streamed(data, cut) == expected, cut
    assert streamed(data, *range(1, len(data))) == expected


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"  ",
        b'  File "',
        b'  File "hopsgpu/rank/entry.py", line 1, in run\n    of a traceback\n',
        b'  File "/home/ann/hopsgpu/rank/entry.py", line 1 in run\n',
        b'  File "<frozen runpy>", line 88 in _run_code\n',
        b"\xff\xfe\n\r 10%\r 20%\n",
    ],
)
def test_all_else_passes(data: bytes) -> None:
    for cut in range(len(data) + 1):
        assert streamed(data, cut) == data


CRASHING_CHILD = """
import ctypes, faulthandler, os
faulthandler.enable()
if os.fork() == 0:
    print("loading batch 3", flush=True)
    ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev()
os.wait()
raise RuntimeError("a worker has died")
"""


def test_the_crash_of_a_child_is_found_before_what_its_parent_says_of_it() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", CRASHING_CHILD], capture_output=True, text=True, check=False
    )
    what, *found = (context_of_failure(ran.stdout + ran.stderr) or "").splitlines()
    assert what == "a process that it had started crashed:"
    assert found[:2] == ["loading batch 3", "terminate called without an active exception"]
    assert found[2:4] == ["Fatal Python error: Aborted", "Current thread (most recent call first):"]
    assert "RuntimeError" not in "".join(found)
    assert context_of_failure(STACKS.partition("\n")[2]) is None


def test_an_assertion_that_failed_on_a_gpu_is_found_once() -> None:
    said = "".join(
        f"/pytorch/aten/src/ATen/native/cuda/Indexing.cu:1290: indexSelect: block: [9,0,0]"
        f", thread: [{thread},0,0] Assertion `srcIndex < srcSelectDimSize` failed.\n"
        for thread in range(64)
    )
    told = context_of_failure(f"step 1\n{said}Traceback (most recent call last):\n") or ""
    assert told.splitlines()[0] == "an assertion failed on its GPU:"
    assert told.count("Assertion") == 1 and "`srcIndex < srcSelectDimSize`" in told
