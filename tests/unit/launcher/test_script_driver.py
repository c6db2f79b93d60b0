"""The driver of `hopsgpu run`: what it launches, and the exit code with which it ends."""

from __future__ import annotations

import ast
import signal
from pathlib import Path
from typing import Any

import pytest

from hopsgpu.errors import (
    Cancelled,
    CapacityError,
    ConfigError,
    GpusIdle,
    HopsGpuError,
    RankFailed,
    RunTimeout,
    StoreError,
)
from hopsgpu.launcher.script_driver import (
    PER_DEVICE,
    PER_GPU,
    ScriptJob,
    driver_source,
    exit_code_of,
    sizes_of,
)
from hopsgpu.launcher.scripts import ReadyScript, ScriptRequest
from hopsgpu.packaging.preload import StaticFindings
from hopsgpu.packaging.script import FILE, MODULE, ScriptCall, StoredScript

READY = ReadyScript(
    ScriptCall(FILE, "train.py", ("--lr", "0.1")),
    StoredScript("hdfs://lake/a.tar.gz", "0f", 1),
    StaticFindings(("torch",)),
    (),
    "0e",
)


def job_of(**fields: Any) -> ScriptJob:
    described: dict[str, Any] = {
        **{"kind": FILE, "target": "dir/train.py", "args": ("--lr", "0.1"), "working_dir": "/work"},
    }
    return ScriptJob(**{**described, **fields})


@pytest.mark.parametrize(
    "job",
    [
        job_of(),
        job_of(args=(), working_dir=None, name="fit", nodes=(1, 4), per_node=PER_GPU),
        job_of(workers=(2,), options={"env_vars": {"A": "é'\"\n"}, "output_dirs": ["out"]}),
        job_of(kind=MODULE, target="mypkg.train", workers=(2, 8), per_node=3),
    ],
)
def test_jobs_survive_as_text(job: ScriptJob) -> None:
    assert ScriptJob.parse(job.dump()) == job


def test_a_ready_script_travels_with_its_job() -> None:
    job = ScriptJob.parse(job_of(ready=READY.as_fields()).dump())
    assert job.launch_options(0)["train_fn"] == READY


def test_a_job_asks_for_its_script() -> None:
    assert job_of().request == ScriptRequest(FILE, "dir/train.py", Path("/work"))
    assert job_of(working_dir=None).request == ScriptRequest(FILE, "dir/train.py")
    options = job_of().launch_options(0)
    assert options["train_fn"] == job_of().request and options["args"] == ("--lr", "0.1")


def test_the_application_has_the_name_of_the_job_or_the_script() -> None:
    assert job_of().title == "train.py" and "name" not in job_of().launch_options(0)
    named = job_of(name="fit")
    assert named.title == "fit" and named.launch_options(0)["name"] == "fit"


@pytest.mark.parametrize(
    ("fields", "workers"),
    [
        ({}, 1),
        ({"per_node": 4}, 4),
        ({"nodes": (2, 2)}, 2),
        ({"nodes": (2, 2), "per_node": 4}, 8),
        ({"nodes": (1, 4), "per_node": 2}, (2, 8)),
        ({"nodes": (1, 4)}, (1, 4)),
        ({"per_node": PER_GPU}, 8),
        ({"nodes": (2, 3), "per_node": PER_DEVICE}, (16, 24)),
        ({"workers": (3,)}, 3),
        ({"workers": (3, 6)}, (3, 6)),
    ],
)
def test_sizes_of_the_gang(fields: dict[str, Any], workers: int | tuple[int, int]) -> None:
    assert job_of(**fields).launch_options(devices=8)["workers"] == workers


def test_options_are_those_of_the_launch() -> None:
    options = {"retries": 3, "data": "hdfs://lake/x", "placement": "pack"}
    launched = job_of(options=options).launch_options(0)
    assert launched.items() >= options.items()


def failed(**attributes: Any) -> RankFailed:
    return RankFailed("rank 0 failed", **attributes)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (failed(rank=0, exit_code=3), 3),
        (failed(rank=0, exit_code=255), 255),
        (failed(rank=0, exit_code=1, traceback="Traceback"), 1),
        (failed(rank=0, signal="SIGKILL"), 128 + 9),
        (failed(rank=0, signal="SIGSEGV"), 128 + signal.SIGSEGV),
        (failed(rank=0, signal="SIGTERM"), 143),
        (failed(rank=0, signal="SIGRTMIN+3"), 1),
        (failed(rank=None), 1),
        (failed(rank=0, exit_code=0), 1),
        (RunTimeout("too long", rank=0), 124),
        (RunTimeout("too long", rank=0, signal="SIGKILL"), 124),
        (GpusIdle("idle", seconds=60.0, rank=0), 1),
        (ConfigError("wrong"), 1),
        (CapacityError("too large"), 1),
        (StoreError("no lake", "unreachable"), 1),
        (Cancelled("cancelled"), 1),
        (HopsGpuError("any"), 1),
    ],
)
def test_exit_codes(error: HopsGpuError, code: int) -> None:
    assert exit_code_of(error) == code


@pytest.mark.parametrize(("text", "sizes"), [("1", [1]), ("16", [16]), ("2:8", [2, 8])])
def test_texts_of_sizes(text: str, sizes: list[int]) -> None:
    assert list(sizes_of(text)) == sizes


@pytest.mark.parametrize("text", ["", "0", "-1", "x", "1.5", "1:", ":2", "0:2", "1:2:3", "gpu"])
def test_other_texts_are_no_sizes(text: str) -> None:
    with pytest.raises(ValueError):
        sizes_of(text)


def test_the_source_of_a_driver_has_its_job() -> None:
    job = job_of(args=('"""', "'", "\\", "{}", "é\n"), ready=READY.as_fields())
    source = driver_source(job)
    texts = [n.value for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant)]
    (dumped,) = [text for text in texts if isinstance(text, str) and text.startswith("{")]
    assert ScriptJob.parse(dumped).args == job.args
    assert ScriptJob.parse(dumped).launch_options(0)["train_fn"] == READY
